"""SavedModels of Keras's preprocessing layers, and of tables that files fill
(``models/tf_ops/make_keras.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.frontends.tensorflow.proto.graphdef_pb2 import SavedModel
from tests.support.recorded import Recorded

MODELS = Recorded([Path(__file__).parents[2] / "models" / "tf_saved" / "keras.npz.xz"])


@pytest.mark.parametrize("name", MODELS.names)
@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "frames"])
def test_layer_matches_tensorflow(name: str, executor: str, tmp_path: Path) -> None:
    MODELS.check(name, ps.compile(MODELS.saved(name, tmp_path), executor=executor))


@pytest.mark.parametrize("name", ["StringLookup_int", "TextVectorization_tf_idf", "Vocabulary"])
def test_layer_that_is_saved_as_an_artifact_matches_tensorflow(name: str, tmp_path: Path) -> None:
    session = ps.compile(MODELS.saved(name, tmp_path / "model"))
    session.save(tmp_path / "saved.penstock")
    MODELS.check(name, ps.open(tmp_path / "saved.penstock"))


def test_lookup_reads_no_table_during_runs(tmp_path: Path) -> None:
    """Its keys and values are constants."""
    model = ps.load(MODELS.saved("StringLookup_int", tmp_path))
    ops = {node.op.name for node in model.graph.walk()}
    assert "HashtableFind" in ops
    assert not ops & {"LookupTableFindV2", "LookupTableImportV2", "HashTableV2"}


# What is refused.


def damaged(name: str, folder: Path) -> tuple[Path, SavedModel]:
    MODELS.saved(name, folder)
    return folder / "saved_model.pb", SavedModel.FromString(
        (folder / "saved_model.pb").read_bytes()
    )


def test_table_that_nothing_fills_is_unsupported(tmp_path: Path) -> None:
    file, proto = damaged("StringLookup_int", tmp_path)
    for function in proto.meta_graphs[0].graph_def.library.function:
        for node in function.node_def:
            if node.op == "LookupTableImportV2":
                node.op = "NoOp"
                del node.input[:]
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(
        ps.Unsupported, match=r"LookupTableFindV2: the contents of its table are not known"
    ):
        ps.compile(tmp_path)


@pytest.mark.parametrize(
    ("name", "place"), [("missing", "words.tsv of"), ("../saved_model.pb", "leads out of")]
)
def test_asset_that_is_missing_or_outside_is_refused(name: str, place: str, tmp_path: Path) -> None:
    file, proto = damaged("Vocabulary", tmp_path)
    if name == "missing":
        (tmp_path / "assets" / "words.tsv").unlink()
    else:
        for asset in proto.meta_graphs[0].asset_file_def:
            asset.filename = name
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(ps.InvalidModel, match=place):
        ps.compile(tmp_path)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("red\t7\nblue\t1\ngr\t2\n", "has no part 2"),
        ("red\tx\ty\nblue\t1\tz\n", "invalid literal"),
        ("red\t1\ty\n", "fewer than vocab_size = 2"),
        ("red\t7\ta\nred\t8\tb\n", "gives the key 'red' two values, "),
    ],
)
def test_asset_whose_lines_do_not_fit_is_refused(content: str, match: str, tmp_path: Path) -> None:
    MODELS.saved("Vocabulary", tmp_path)
    (tmp_path / "assets" / "words.tsv").write_text(content)
    with pytest.raises(ps.InvalidModel, match=match):
        ps.compile(tmp_path)


@pytest.mark.parametrize("fault", ["values", "keys", "type"])
def test_table_whose_contents_do_not_fit_is_refused(fault: str, tmp_path: Path) -> None:
    file, proto = damaged("StringLookup_int", tmp_path)
    graph = proto.meta_graphs[0].graph_def
    for node in graph.node:
        tensor = node.attr["value"].tensor
        if node.op == "Const" and len(tensor.string_val) == 3:
            if fault == "keys":
                tensor.string_val[1] = tensor.string_val[0]
            elif fault == "values":
                del tensor.string_val[2:]
                tensor.tensor_shape.dim[0].size = 2
    for function in graph.library.function:
        for node in function.node_def:
            if fault == "type" and node.op == "LookupTableFindV2":
                node.attr["Tout"].type = 3
    file.write_bytes(proto.SerializeToString())
    match = {
        "values": "gives 2 keys and 3 values",
        "keys": "gives the key 'a' two values",
        "type": "has Tout int32, but its table has int64|must be int",
    }[fault]
    with pytest.raises(ps.InvalidModel, match=match):
        ps.compile(tmp_path)
