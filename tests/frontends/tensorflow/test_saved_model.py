"""SavedModels, and the checkpoints in them."""

from __future__ import annotations

import shutil
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidModel, Unsupported
from penstock.core.limits import DEFAULT_LIMITS
from penstock.frontends.common.weight_file import WeightFile
from penstock.frontends.tensorflow import checkpoint
from penstock.frontends.tensorflow.checkpoint import Bundle
from penstock.frontends.tensorflow.proto.graphdef_pb2 import SavedModel
from tests.support.processes import load_in_child
from tests.support.tf_graphs import Builder, Func, Type

FOLDER = Path(__file__).parents[2] / "models" / "tf_saved"


X = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


# TensorFlow's results.
Y = [[0.0, 0.0, 3.378599166870117, 5.123040199279785], [0.0, 0.0, 7.342043876647949, 8.402962]]


@pytest.mark.parametrize("name", ["frozen", "stateful"])
@pytest.mark.parametrize("backends", [["numpy"], None])
def test_signature_names_inputs_and_outputs(name: str, backends: list[str] | None) -> None:
    model = ps.load(FOLDER / name)
    assert model.entry == "serving_default"
    session = ps.compile(model, backends=backends)
    assert [port.name for port in session.inputs] == ["x"]
    assert [port.name for port in session.outputs] == ["sum", "y"]
    out = session.run({"x": X})
    np.testing.assert_allclose(out["y"], Y, rtol=1e-5, atol=1e-6)
    assert out["sum"] == 21
    # TensorFlow's own names do as well.
    for fed in ("serving_default_x", "serving_default_x:0"):
        assert session.run({fed: X}, ["sum"]) == {"sum": 21}


def test_every_signature_is_a_graph() -> None:
    model = ps.load(FOLDER / "frozen")
    assert set(model.graphs) == {"serving_default", "conv"}
    model.entry = "conv"
    image = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)
    out = ps.compile(model).run({"image": image})["output_0"]
    np.testing.assert_allclose(out[0, 0, 0], [-1.3647942543, 3.2150988579], rtol=1e-5)
    np.testing.assert_allclose(out[0, 3, 3], [-34.87546157837, -3.281874895095], rtol=1e-5)


def test_variables_without_assignments_are_constants() -> None:
    ops = [node.op.name for node in ps.load(FOLDER / "frozen").graph.nodes]
    assert "ReadVariableOp" not in ops
    ops = [node.op.name for node in ps.load(FOLDER / "stateful").graph.nodes]
    assert "ReadVariableOp" in ops


def test_constants_of_called_functions_are_folded() -> None:
    """Of arguments and the nodes that wait for them nothing is left but what computes."""
    session = ps.compile(FOLDER / "frozen", backends=["numpy"])
    session.run({"x": X})
    ops = sorted(step.node.op.name for step in session.inspect.plan.steps)
    assert ops == ["Add", "MatMul", "ReduceSum", "Relu"]


def test_variables_start_with_saved_values() -> None:
    model = ps.load(FOLDER / "stateful" / "saved_model.pb")
    model.entry = "count"
    session = ps.compile(model)
    assert [int(session.run({"by": np.int64(3)})["n"]) for _ in range(3)] == [3, 6, 9]
    assert int(ps.compile(model).run({"by": np.int64(1)})["n"]) == 1


def test_saved_model_of_version_1_loads() -> None:
    session = ps.compile(FOLDER / "v1")
    np.testing.assert_array_equal(session.run({"x": X})["y"], [[16, 22], [34, 49]])


@pytest.mark.parametrize("size", [0, 10, 500])
def test_shard_that_changes_in_place_changes_no_answer(copy: Path, size: int) -> None:
    with ps.compile(copy) as session:
        (copy / "variables" / "variables.data-00000-of-00001").write_bytes(b"\x7f" * size)
        np.testing.assert_allclose(session.run({"x": X})["y"], Y, rtol=1e-5, atol=1e-6)


def test_session_with_map_weights_maps_shards(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = []
    monkeypatch.setattr(
        checkpoint,
        "WeightFile",
        lambda open_file, map: mapped.append(map) or WeightFile(open_file, map),
    )
    for wanted in (False, True):
        out = ps.compile(copy, map_weights=wanted).run({"x": X})
        np.testing.assert_allclose(out["y"], Y, rtol=1e-5, atol=1e-6)
    assert mapped == [False, True]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER / "frozen", tmp_path / "model")
    return tmp_path / "model"


def damaged(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def test_damaged_tensor_is_refused_by_its_checksum(copy: Path) -> None:
    files = copy / "variables"
    damaged(files / "variables.data-00000-of-00001", 5)
    with pytest.raises(InvalidModel, match="is damaged: its checksum"):
        ps.load(copy)


@pytest.mark.parametrize("place", [3, 60, -45, -3])
def test_damaged_index_is_refused(copy: Path, place: int) -> None:
    damaged(copy / "variables" / "variables.index", place)
    with pytest.raises(InvalidModel, match=r"variables\.index"):
        ps.load(copy)


@pytest.mark.parametrize("name", ["variables.index", "variables.data-00000-of-00001"])
@pytest.mark.parametrize("size", [0, 10, 47, 60])
def test_truncated_checkpoint_is_refused(copy: Path, name: str, size: int) -> None:
    path = copy / "variables" / name
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InvalidModel):
        ps.load(copy)


def test_missing_files_are_refused(copy: Path) -> None:
    (copy / "variables" / "variables.data-00000-of-00001").unlink()
    with pytest.raises(InvalidModel, match="cannot be read"):
        ps.load(copy)
    (copy / "saved_model.pb").unlink()
    with pytest.raises(InvalidModel, match=r"no saved_model\.pb"):
        ps.load(copy)


def test_compressed_blocks_are_refused(tmp_path: Path) -> None:
    block = b"\0\0\0\0\1"  # no entries, no restart points; compressed
    checksum = _masked(google_crc32c.value(block)).to_bytes(4, "little")
    handles = b"\0\0\0\4".ljust(40, b"\0")  # of the metadata, and of the index of blocks
    magic = checkpoint._MAGIC.to_bytes(8, "little")
    (tmp_path / "variables.index").write_bytes(block + checksum + handles + magic)
    with pytest.raises(InvalidModel, match=r"compressed blocks \(type 1\)"):
        Bundle(tmp_path, "variables", DEFAULT_LIMITS)


def test_damaged_graph_never_crashes(copy: Path) -> None:
    path = copy / "saved_model.pb"
    data = path.read_bytes()
    rng, refused = np.random.default_rng(3), 0
    for _ in range(60):
        broken = bytearray(data)
        for place in rng.integers(0, len(data), 4):
            broken[place] = rng.integers(0, 256)
        path.write_bytes(broken)
        try:
            ps.load(copy)
        except ps.PenstockError:
            refused += 1
    assert 0 < refused < 60


def saved(folder: Path, g: Builder, **outputs: str) -> Path:
    """A SavedModel of one graph, with a signature for each output."""
    model = SavedModel(saved_model_schema_version=1)
    meta = model.meta_graphs.add()
    meta.meta_info_def.tags.append("serve")
    meta.graph_def.CopyFrom(g.proto)
    for name, tensor in outputs.items():
        signature = meta.signature_def[name]
        signature.outputs["y"].name = f"{tensor}:0"
        signature.outputs["y"].dtype = 1
        signature.inputs["x"].name = "in:0"
        signature.inputs["x"].dtype = 1
    (folder / "saved_model.pb").write_bytes(model.SerializeToString())
    return folder


@pytest.mark.parametrize("opened", [False, True])
def test_output_with_the_name_of_an_input_keeps_it(tmp_path: Path, opened: bool) -> None:
    g = Builder()
    for name in ("x", "y"):
        g.placeholder(name, "float32")
    g.node("Neg", "x", name="negative", T=Type("float32"))
    folder = saved(tmp_path, g)
    proto = SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    signature = proto.meta_graphs[0].signature_def["serving_default"]
    for name in ("x", "y"):
        signature.inputs[name].name = f"{name}:0"
    for name, tensor in {"x": "negative", "y": "x", "z": "y"}.items():
        signature.outputs[name].name = f"{tensor}:0"
    for info in (*signature.inputs.values(), *signature.outputs.values()):
        info.dtype = 1
    (folder / "saved_model.pb").write_bytes(proto.SerializeToString())
    session = ps.compile(folder)
    if opened:
        session.save(tmp_path / "saved.penstock")
        session = ps.open(tmp_path / "saved.penstock")
    feeds = {"x": np.float32(3), "y": np.float32(5)}
    expected = {"x": -3, "y": 3, "z": 5}
    assert [port.name for port in session.inputs] == ["x", "y"]
    assert [port.name for port in session.outputs] == ["x", "y", "z"]
    assert session.run(feeds) == expected
    assert session.run(feeds, ["z", "x"]) == {"z": 5, "x": -3}
    assert session.run({"x": np.float32(3)}, ["x"]) == {"x": -3}
    assert session.run({"negative:0": np.float32(7)}, ["x"]) == {"x": 7}


def test_signature_without_kernels_is_left_out(tmp_path: Path) -> None:
    g = Builder()
    g.placeholder("in", "float32")
    g.node("Neg", "in", name="a", T=Type("float32"))
    g.node("Frobnicate", "in", name="b")
    model = ps.load(saved(tmp_path, g, serving_default="a", other="b"))
    assert set(model.graphs) == {"serving_default"}
    assert "Frobnicate" in model.metadata["left out: other"]
    assert ps.compile(model).run({"x": 3.0})["y"] == -3
    with pytest.raises(Unsupported, match="Frobnicate"):
        ps.load(saved(tmp_path, g, serving_default="b"))


@pytest.mark.parametrize("fault", ["dtype", "count", "dims", "bytes"])
def test_invalid_names_of_restored_tensors_are_refused(copy: Path, fault: str) -> None:
    proto = SavedModel.FromString((copy / "saved_model.pb").read_bytes())
    functions = proto.meta_graphs[0].graph_def.library.function
    nodes = [node for function in functions for node in function.node_def]
    constants = [n.attr["value"].tensor for n in nodes if "tensor_names" in n.name]
    assert constants
    for constant in constants:
        if fault == "dtype":
            constant.dtype = 0
        elif fault == "count":
            constant.string_val.extend([b"x"] * 5)
        elif fault == "dims":
            constant.tensor_shape.dim[0].size = -7
        else:
            constant.tensor_content = b"xxx"
    (copy / "saved_model.pb").write_bytes(proto.SerializeToString())
    with pytest.raises(InvalidModel, match="tensor_names"):
        ps.load(copy)


def many_signatures(folder: Path, g: Builder, count: int) -> Path:
    return saved(folder, g, serving_default="out", **{f"s{i}": "out" for i in range(count - 1)})


def test_signatures_share_the_library_and_constants(tmp_path: Path) -> None:
    g = Builder()
    g.placeholder("in", "float32")
    g.const(np.ones(2**20, np.float32), "weights")
    g.node("Sum", "weights", g.const(np.int32(0), "axes"), name="sum", T=Type("float32"))
    g.node("Mul", "in", "sum", name="out", T=Type("float32"))
    function = g.proto.library.function.add()
    function.signature.name = "unused"
    function.node_def.add(name="c", op="Const").attr["value"].tensor.tensor_content = bytes(2**22)
    peak, text = load_in_child(many_signatures(tmp_path, g, 50), FOLDER / "frozen")
    assert text == "loaded"
    assert peak < 5 * (tmp_path / "saved_model.pb").stat().st_size


def test_signatures_that_multiply_the_nodes_are_refused(tmp_path: Path) -> None:
    g = Builder()
    g.placeholder("in", "float32")
    last = "in"
    for i in range(2000):
        last = g.node("Neg", last, name=f"n{i}", T=Type("float32"))
    g.node("Neg", last, name="out", T=Type("float32"))
    with pytest.raises(InvalidModel, match="has 100 signatures, which share nodes more than 16"):
        ps.load(many_signatures(tmp_path, g, 100))
    assert len(ps.load(many_signatures(tmp_path, g, 5)).graphs) == 5


def test_nodes_of_functions_count_over_all_signatures(tmp_path: Path) -> None:
    g = Builder()
    g.placeholder("in", "float32")
    body = g.function("f", {"x": "float32"}, {"y": "float32"}, {"y": "n9:y:0"})
    for i in range(10):
        g.into = body.node_def
        g.node("Neg", f"n{i - 1}:y:0" if i else "x", name=f"n{i}", T=Type("float32"))
    g.into = g.proto.node
    types = [Type("float32")]
    g.node("PartitionedCall", "in", name="out", Tin=types, Tout=types, f=Func("f"))
    folder = many_signatures(tmp_path, g, 5)
    assert len(ps.load(folder, limits=ps.Limits(max_nodes=100)).graphs) == 5
    with pytest.raises(InvalidModel, match="more nodes than"):
        ps.load(folder, limits=ps.Limits(max_nodes=50))


def test_signature_of_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    g = Builder()
    g.placeholder("in", "float32")
    with pytest.raises(InvalidModel, match="which is no node"):
        ps.load(saved(tmp_path, g, serving_default="missing"))
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(InvalidModel, match="no graphs"):
        ps.load(tmp_path)


def _masked(value: int) -> int:
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def test_unmasked_checksum_inverts_masking() -> None:
    assert checkpoint._unmasked(_masked(0x12345678)) == 0x12345678


def test_checkpoint_tensor_is_read_by_key() -> None:
    bundle = Bundle(FOLDER / "v1", "variables/variables", DEFAULT_LIMITS)
    assert list(bundle.entries) == ["s/v"]
    np.testing.assert_array_equal(bundle.read("s/v"), np.arange(6, dtype=np.float32).reshape(3, 2))
    with pytest.raises(InvalidModel, match="there is no tensor 'w'"):
        bundle.read("w")
