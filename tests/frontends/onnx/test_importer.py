"""ONNX models become graphs, or are refused with all of their faults."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import GraphProto, NodeProto, TensorProto, helper

from penstock.analysis import schemas
from penstock.analysis.verify import verify
from penstock.core.errors import MAX_PROBLEMS, InvalidModel, Unsupported
from penstock.core.limits import Limits
from penstock.core.types import ANY, INT64, STRING, MapType, OptionalType, SequenceType, TensorType
from penstock.frontends.onnx import file
from penstock.frontends.onnx.importer import load_onnx
from tests.support.onnx_models import (
    FLOAT,
    graph_of,
    interpret_model,
    model_of,
    node,
    problems,
    tensor,
)

RELU = model_of(node("Relu", "x", "y", "relu"))


X = np.array([-1, 2], np.float32)


def test_load_accepts_path_bytes_and_proto(tmp_path: Path) -> None:
    path = tmp_path / "relu.onnx"
    onnx.save(RELU, path)
    for source in (path, str(path), path.read_bytes(), RELU):
        model = load_onnx(source)
        assert model.path == (str(path) if isinstance(source, str | Path) else None)
        assert np.array_equal(interpret_model(model, X)[0], [0, 2])
    assert load_onnx(path).graph.nodes[0].origin == "relu in relu.onnx"


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"nothing\.onnx' cannot be read: No such file"):
        load_onnx(tmp_path / "nothing.onnx")
    with pytest.raises(InvalidModel, match="cannot be read: that is not a regular file"):
        load_onnx(tmp_path)


def test_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cut.onnx"
    data = model_of(node("Add", "x w", "y"), initializers=[tensor("w", X)]).SerializeToString()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(InvalidModel, match=r"cut\.onnx"):
            load_onnx(path)


@pytest.mark.parametrize("seed", range(300))
def test_damaged_bytes_are_refused_or_verified(seed: int) -> None:
    random = np.random.default_rng(seed)
    data = bytearray(
        model_of(
            node("Conv", "x w", "h", kernel_shape=[1, 1]),
            node("If", "c", "y", then_branch=graph_of([node("Relu", "h", "t")], (), ("t",))),
            initializers=[tensor("w", np.ones((1, 1, 1, 1), np.float32)), tensor("c", True)],
        ).SerializeToString()
    )
    for _ in range(1 + seed % 4):
        at = int(random.integers(len(data)))
        data[at : at + seed % 3] = random.bytes(int(random.integers(4)))
    for source in (bytes(data), random.bytes(50 + seed)):
        try:
            verify(load_onnx(source))
        except (InvalidModel, Unsupported) as error:
            assert str(error)


def test_wrong_wire_types_are_refused() -> None:
    # Field 7, the graph, as a number; and a tensor where the model should be.
    for data in (b"\x38\x05", tensor("w", X).SerializeToString(), b""):
        with pytest.raises(InvalidModel, match=r"the model has no graph|cannot read this"):
            load_onnx(data)


def test_names_that_are_not_utf8_are_refused() -> None:
    data = RELU.SerializeToString().replace(b"\x01y", b"\x01\xff")
    with pytest.raises(InvalidModel, match=r"name b'\\xff' is not UTF-8"):
        load_onnx(data)
    data = RELU.SerializeToString().replace(b"Relu", b"Re\xffu")
    with pytest.raises(Unsupported, match="not UTF-8"):
        load_onnx(data)


def large_model(tmp_path: Path) -> Path:
    weights = [tensor(f"w{i}", np.full(20_000 * (i % 2) + 3, i, np.float32)) for i in range(5)]
    nodes = [node("Add", f"v{i} w{i}", f"v{i + 1}") for i in range(5)]
    proto = model_of(*nodes, inputs=("v0",), outputs=("v5",), initializers=weights)
    helper.set_model_props(proto, {"who": "me"})
    path = tmp_path / "large.onnx"
    onnx.save(proto, path)
    return path


def test_large_file_read_in_pieces_equals_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "LARGE_FILE", 0)
    path = large_model(tmp_path)
    whole = onnx.load(path)
    with file.opened(path) as (proto, weights):
        apart = list(weights)
        assert [w.name for w in apart] == ["w1", "w3"]
        assert len(proto.SerializeToString()) < 1000
        for weight in apart:
            assert isinstance(weight, file.Apart)
            assert not weight.proto.HasField("raw_data")
            weight.proto.raw_data = weight.data.tobytes()
            proto.graph.initializer.append(weight.proto)
    proto.graph.initializer.sort(key=lambda t: t.name)
    assert onnx.ModelProto.FromString(proto.SerializeToString()) == whole


def test_large_file_read_in_pieces_gives_the_same_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = large_model(tmp_path)
    wanted = load_onnx(path)
    monkeypatch.setattr(file, "LARGE_FILE", 0)
    model = load_onnx(path)
    constants = [n.inputs[1].const for n in model.graph.nodes if n.inputs[1] is not None]
    for got, node_ in zip(constants, wanted.graph.nodes, strict=True):
        assert node_.inputs[1] is not None
        assert np.array_equal(got, node_.inputs[1].const)
    data = path.read_bytes()
    for size in (*range(1, 400), *range(400, len(data), 997)):
        path.write_bytes(data[:size])
        with pytest.raises(InvalidModel, match=r"large\.onnx"):
            load_onnx(path)


def test_split_merges_a_graph_written_twice() -> None:
    # Protobuf merges messages that are written twice: a piecewise reader must, too.
    proto = model_of(node("Add", "x w", "y"))
    rest = onnx.ModelProto()
    rest.graph.initializer.append(tensor("w", np.ones(20_000, np.float32)))
    data = proto.SerializeToString() + rest.SerializeToString()
    wanted = onnx.ModelProto.FromString(data)
    kept, spans = file._split(io.BytesIO(data), len(data))
    joined = onnx.ModelProto.FromString(b"".join(kept))
    joined.graph.initializer.extend(TensorProto.FromString(data[a:b]) for a, b in spans)
    assert len(spans) == 1
    assert joined == wanted


@pytest.mark.parametrize("depth", [3, 12, 30])
def test_nesting_beyond_max_depth_is_refused_without_recursion(depth: int) -> None:
    branch = graph_of([node("Relu", "x", "t")], (), ("t",))
    for _ in range(depth):
        branch = graph_of([node("If", "c", "t", then_branch=branch)], (), ("t",))
    proto = model_of(node("If", "c", "y", then_branch=branch), initializers=[tensor("c", True)])
    proto.graph.node[0].attribute.append(
        helper.make_attribute("else_branch", graph_of([], (), ("x",)))
    )
    for if_node in _ifs(proto.graph):
        if len(if_node.attribute) == 1:
            if_node.attribute.append(helper.make_attribute("else_branch", graph_of([], (), ("x",))))
    load_onnx(proto, Limits(max_depth=depth + 2))
    (problem,) = problems(proto, Limits(max_depth=depth + 1))
    assert f"nests deeper than Limits.max_depth = {depth + 1}" in problem


def _ifs(graph: GraphProto) -> list[NodeProto]:
    nodes = [n for n in graph.node if n.op_type == "If"]
    for n in nodes:
        for attribute in n.attribute:
            if attribute.name == "then_branch":
                nodes.extend(m for m in attribute.g.node if m.op_type == "If")
    return nodes


def test_more_nodes_than_max_nodes_are_refused() -> None:
    proto = model_of(*(node("Relu", "x", f"y{i}") for i in range(5)), outputs=("y0",))
    load_onnx(proto, Limits(max_nodes=5))
    (problem,) = problems(proto, Limits(max_nodes=4))
    assert "more nodes than Limits.max_nodes = 4" in problem


def test_importer_reports_all_faults_at_once() -> None:
    proto = model_of(
        node("Conv", "x", "a", "one_input"),
        node("LeakyRelu", "x", "b", "text", alpha="0.1"),
        node("Cast", "x", "c", "aimless"),
        node("Relu", "x", "d", "extra", beta=1.0),
        node("Flatten", "x", "e", "wide", axis=1.5),
        helper.make_node("Gather", ["x", ""], ["f"], name="hole"),
        node("Dropout", "x", "y g h", "many"),
        helper.make_node("Other", ["x"], ["o"], domain="somewhere.else", name="undeclared"),
    )
    assert problems(proto) == (
        "one_input in the model has 1 inputs, but Conv-11 has 2 to 3",
        "text in the model has an attribute 'alpha' that is of kind STRING, not FLOAT",
        "aimless in the model lacks attribute 'to', which Cast-21 requires",
        "extra in the model has an attribute 'beta', which Relu-14 does not have",
        "wide in the model has an attribute 'axis' that is of kind FLOAT, not INT",
        "hole in the model leaves out input 1 (indices), which Gather-13 requires",
        "many in the model has 3 outputs, but Dropout-13 has 1 to 2",
        "operator domain 'somewhere.else' is undeclared: add it to the opset imports (used by "
        "undeclared in the model)",
    )


def test_carried_value_that_a_loop_leaves_out_is_refused() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 21]>
        g (int64 n, bool c) => (float y) {
            y = Loop (n, c, ) <body = b (int64 i, bool t, float v) => (bool u, float w) {
                u = Identity(t) w = Add(v, v) }>
        }""")
    proto.graph.node[0].input[:] = ["n", "c", ""]
    assert problems(proto)[0].endswith("leaves out input 2 (v_initial), which Loop-21 requires")


def test_faults_beyond_the_maximum_are_counted() -> None:
    proto = model_of(*(node("Relu", "x x", f"y{i}") for i in range(70)), outputs=("y0",))
    reported = problems(proto)
    assert len(reported) == MAX_PROBLEMS + 1
    assert reported[-1] == "and 50 more"


def test_importer_reports_all_unsupported_operations_at_once() -> None:
    proto = model_of(
        node("Relu", "x", "y"),
        node("Gelu", "x", "a", "too_early"),
        helper.make_node("Magic", ["x"], ["b"], domain="own", name="first"),
        helper.make_node("Magic", ["x"], ["c"], domain="own", name="second"),
        opset=17,
    )
    proto.opset_import.append(helper.make_opsetid("own", 1))
    with pytest.raises(Unsupported) as caught:
        load_onnx(proto)
    assert [(o.operation, o.reason, o.nodes) for o in caught.value.operations] == [
        (
            "Gelu",
            "opset 17 of ai.onnx has no such operation: it is in opsets from 20 on; export the model "
            "with such a one",
            ("too_early in the model",),
        ),
        (
            "own.Magic",
            "no kernel is available for it; register it with penstock.extend.operator "
            "(docs/how-to/custom-operation.md)",
            ("first in the model", "second in the model"),
        ),
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Matmul", "did you mean 'MatMul'"),
        ("Softmx", "did you mean 'Softmax'"),
        ("Frobnicate", "register it with penstock.extend.operator"),
        ("X" * 100_000, "register it"),
    ],
)
def test_operation_that_onnx_lacks_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(Unsupported, match=rf"opset 20 of ai\.onnx has no such operation; .*{hint}"):
        load_onnx(model_of(node(name, "x", "y"), opset=20))


def test_opset_newer_than_the_newest_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"opset 99 is newer than \d+, .* older opset"):
        load_onnx(model_of(node("Relu", "x", "y"), opset=99))


@pytest.mark.parametrize("domain", ["", "own"])
@pytest.mark.parametrize("opset", [0, -1, 2**31, 2**32, -(2**31) - 1, -(2**32), 2**63 - 1])
def test_opset_that_is_no_version_is_refused(domain: str, opset: int) -> None:
    proto = model_of(helper.make_node("Relu", ["x"], ["y"], domain=domain))
    del proto.opset_import[:]
    proto.opset_import.append(helper.make_opsetid(domain, opset))
    with pytest.raises(Unsupported):
        load_onnx(proto)


def test_model_without_opsets_is_refused_from_ir_version_3() -> None:
    proto = helper.make_model(graph_of([node("Relu", "x", "y")]))
    del proto.opset_import[:]
    assert "'ai.onnx' is undeclared" in problems(proto)[0]
    proto.ir_version = 2  # such files have no opsets, and mean the first
    assert np.array_equal(interpret_model(load_onnx(proto), X)[0], [0, 2])


def test_two_opsets_of_one_domain_are_refused() -> None:
    proto = model_of(node("Relu", "x", "y"))
    proto.opset_import.append(helper.make_opsetid("ai.onnx", 7))
    assert problems(proto) == ("the model imports two opsets of 'ai.onnx'; remove one",)


@pytest.mark.parametrize(
    "op, attrs", [("com.microsoft.Gelu", {}), ("ai.onnx.ml.Normalizer", {"norm": "L2"})]
)
def test_domain_that_onnx_runtime_knows_need_not_be_imported(op: str, attrs: Any) -> None:
    domain, name = op.rsplit(".", 1)
    proto = model_of(helper.make_node(name, ["x"], ["y"], domain=domain, **attrs))
    want = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": X})
    np.testing.assert_allclose(interpret_model(load_onnx(proto), X)[0], want[0], rtol=1e-6)


def test_both_names_of_the_onnx_domain_mean_the_same() -> None:
    proto = model_of(helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx"))
    load_onnx(proto)
    proto.opset_import[0].domain = "ai.onnx"
    proto.graph.node[0].domain = ""
    assert load_onnx(proto).graph.nodes[0].op.full_name == "Relu"


def typed_input(proto: onnx.TypeProto) -> Any:
    graph = GraphProto(name="g", input=[onnx.ValueInfoProto(name="x", type=proto)])
    graph.output.append(onnx.ValueInfoProto(name="x"))
    return load_onnx(helper.make_model(graph)).graph.inputs[0].type


def test_input_types_are_read() -> None:
    dense = helper.make_tensor_type_proto
    assert typed_input(dense(FLOAT, [2, "n", None, 0, -1, "?"])) == TensorType(
        np.dtype(np.float32), (2, "n", None, None, None, None)
    )
    assert typed_input(dense(TensorProto.BFLOAT16, None)).shape is None
    assert typed_input(onnx.TypeProto()) is ANY
    inner = dense(TensorProto.INT64, [])
    listed = helper.make_sequence_type_proto(inner)
    assert typed_input(listed) == SequenceType(TensorType(INT64, ()))
    optional = helper.make_optional_type_proto(listed)
    assert typed_input(optional) == OptionalType(SequenceType(TensorType(INT64, ())))
    mapped = helper.make_map_type_proto(TensorProto.STRING, inner)
    assert typed_input(mapped) == MapType(STRING, TensorType(INT64, ()))
    holes = helper.make_sparse_tensor_type_proto(FLOAT, [3])
    assert typed_input(holes) == TensorType(np.dtype(np.float32), (3,))


def test_input_types_with_faults_are_refused() -> None:
    with pytest.raises(InvalidModel, match="input 'x' of the model: element type 77"):
        typed_input(onnx.TypeProto(tensor_type=onnx.TypeProto.Tensor(elem_type=77)))
    deep = helper.make_tensor_type_proto(FLOAT, [])
    for _ in range(40):
        deep = helper.make_sequence_type_proto(deep)
    with pytest.raises(InvalidModel, match="input 'x' of the model: its type nests"):
        typed_input(deep)


def test_schemas_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    original = schemas._read

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return original(*arguments)

    monkeypatch.setattr(schemas, "_read", counted)
    nodes = [node("Mul", f"v{i} w", f"v{i + 1}") for i in range(500)]
    load_onnx(model_of(*nodes, inputs=("v0", "w"), outputs=("v500",)))
    assert count < 10
