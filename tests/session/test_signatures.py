"""The signature of a SavedModel or a TFLite file as the entry of a session."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from tests.models import test_zoo
from tests.support.tflite_models import model, subgraph

STATEFUL = Path(test_zoo.__file__).parent / "tf_saved" / "stateful"
X = {"x": ("float32", [2]), "y": ("float32", [2])}
ONE = np.array([1, -2], np.float32)
ADD = ("AddOptions", {})


def two_signatures(*, outputs: tuple[tuple[str, int], ...] = (("sum", 2),)) -> bytes:
    """The first subgraph subtracts; the other adds, with its own names for its inputs."""
    graphs = [
        subgraph(X, [(op, ["x", "y"], ["z"], (f"{op.capitalize()}Options", {}))], ["z"])
        for op in ("SUB", "ADD")
    ]
    inputs = [{"name": "b", "tensor_index": 1}, {"name": "x", "tensor_index": 0}]
    add = {
        "inputs": inputs,
        "outputs": [{"name": name, "tensor_index": index} for name, index in outputs],
        "signature_key": "add",
        "subgraph_index": 1,
    }
    return model(graphs, signature_defs=[add])


def test_signature_of_a_tflite_file_runs_its_subgraph_with_its_names() -> None:
    session = ps.compile(two_signatures(), signature="add")
    assert [port.name for port in session.inputs] == ["x", "b"]
    outputs = session.run({"x": ONE, "b": 2 * ONE})
    assert list(outputs) == ["sum"]
    np.testing.assert_array_equal(outputs["sum"], 3 * ONE)
    np.testing.assert_array_equal(ps.compile(two_signatures())(ONE, 2 * ONE), -ONE)


def test_signature_may_name_a_tensor_twice_and_an_input() -> None:
    outputs = (("one", 2), ("two", 2), ("same", 0))
    got = ps.compile(two_signatures(outputs=outputs), signature="add").run({"x": ONE, "b": ONE})
    assert list(got) == ["one", "two", "same"]
    for name, want in (("one", 2 * ONE), ("two", 2 * ONE), ("same", ONE)):
        np.testing.assert_array_equal(got[name], want)


def test_signature_of_a_missing_subgraph_is_refused() -> None:
    file = model(
        [subgraph(X, [("ADD", ["x", "y"], ["z"], ADD)], ["z"])],
        signature_defs=[{"signature_key": "other", "subgraph_index": 7}],
    )
    assert ps.load(file).signatures == ["other"]
    with pytest.raises(ps.InvalidModel, match="signature 'other' of the model is subgraph 7"):
        ps.load(file, signature="other")


def test_signature_of_a_saved_model_is_chosen_when_it_is_loaded_or_compiled() -> None:
    names = ps.load(STATEFUL).signatures
    assert len(names) > 1
    for name in names:
        by_compile = ps.compile(STATEFUL, signature=name)
        of_model = ps.compile(ps.load(STATEFUL), signature=name)
        of_loaded = ps.compile(ps.load(STATEFUL, signature=name))
        for session in (by_compile, of_model, of_loaded):
            assert session.model.entry == name
            assert pickle.loads(pickle.dumps(session)).model.entry == name


def test_signature_of_a_pickled_tflite_session_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.tflite"
    path.write_bytes(two_signatures())
    for session in (ps.compile(path, signature="add"), ps.compile(ps.load(path, signature="add"))):
        again = pickle.loads(pickle.dumps(session))
        np.testing.assert_array_equal(again(ONE, ONE), 2 * ONE)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(ps.compile(path)))(ONE, ONE), 0 * ONE)


def test_unknown_signature_is_answered_by_those_that_there_are() -> None:
    with pytest.raises(ps.InvalidInput, match="no signature 'ad'; it has 'add'"):
        ps.compile(two_signatures(), signature="ad")
    with pytest.raises(ps.InvalidInput, match="it was loaded without: give signature="):
        ps.compile(ps.load(two_signatures()), signature="add")
    file = model([subgraph(X, [("ADD", ["x", "y"], ["z"], ADD)], ["z"])])
    with pytest.raises(ps.InvalidInput, match="it has none"):
        ps.compile(file, signature="add")
