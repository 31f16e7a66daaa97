"""What becomes of the parts of a TFLite file: subgraphs, variables, weights, custom operators."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.support.tflite_cases import FOLDER
from tests.support.tflite_models import model, subgraph

X = {"x": ("float32", [2])}


ONE = np.array([1, 2], np.float32)


ADD = ("AddOptions", {})


def run(file: bytes, x: np.ndarray = ONE, **options: Any) -> np.ndarray:
    return ps.compile(file, **options)(x)


def calling(*indices: int) -> bytes:
    """A file whose first subgraph calls another, and so on."""
    graphs = [
        subgraph(X, [("CALL", ["x"], ["y"], ("CallOptions", {"subgraph": i}))], ["y"])
        for i in indices
    ]
    return model([*graphs, subgraph(X, [("ABS", ["x"], ["y"], None)], ["y"])])


def test_subgraph_that_is_called_is_part_of_the_graph() -> None:
    np.testing.assert_array_equal(run(calling(1, 2), -ONE), ONE)


@pytest.mark.parametrize(
    ("indices", "reason"),
    [
        ((0,), "uses subgraph 0"),
        ((1, 1), "which it is itself part of"),
        ((1, 2, 1), "which it is itself part of"),
        ((9,), "uses subgraph 9, of 2"),
    ],
)
def test_subgraph_that_is_missing_or_uses_itself_is_refused(indices: tuple, reason: str) -> None:
    with pytest.raises(ps.InvalidModel, match=reason):
        ps.load(calling(*indices))


def test_subgraphs_that_call_the_next_one_twice_are_counted_before_they_are_expanded() -> None:
    graphs = []
    for i in range(60):
        options = ("CallOptions", {"subgraph": i + 1})
        calls = [("CALL", ["x"], ["a"], options), ("CALL", ["a"], ["y"], options)]
        graphs.append(subgraph(X, calls, ["y"]))
    graphs.append(subgraph(X, [("ABS", ["x"], ["y"], None)], ["y"]))
    with pytest.raises(ps.InvalidModel, match="nodes"):
        ps.load(model(graphs))


def test_tensor_that_is_written_twice_is_refused() -> None:
    twice = [("ABS", ["x"], ["y"], None), ("NEG", ["x"], ["y"], None)]
    with pytest.raises(ps.InvalidModel, match=r"NEG_1 in the model writes tensor 1 .*already"):
        ps.load(model([subgraph(X, twice, ["y"])]))
    with pytest.raises(ps.InvalidModel, match="writes tensor 0"):
        ps.load(model([subgraph(X, [("ABS", ["x"], ["x"], None)], ["x"])]))


def test_tensor_that_is_read_before_it_is_written_is_refused() -> None:
    with pytest.raises(
        ps.InvalidModel, match="reads tensor 1 as input 0, which nothing has written"
    ):
        ps.load(model([subgraph(X, [("ABS", ["y"], ["z"], None)], ["z"])]))
    with pytest.raises(ps.InvalidModel, match="output 0 of the model is tensor 0"):
        ps.load(model([subgraph({}, [], ["y"])]))


def test_input_that_must_not_be_left_out_is_refused() -> None:
    with pytest.raises(ps.InvalidModel, match="ADD_0 in the model leaves out input 1"):
        ps.load(model([subgraph(X, [("ADD", ["x", None], ["y"], ADD)], ["y"])]))
    with pytest.raises(ps.InvalidModel, match="has 1 inputs, but ADD takes 2"):
        ps.load(model([subgraph(X, [("ADD", ["x"], ["y"], ADD)], ["y"])]))


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("ADD_N", None),
        ("CONCATENATION", ("ConcatenationOptions", {})),
        ("PACK", ("PackOptions", {"values_count": 2})),
    ],
)
def test_no_input_of_any_number_may_be_left_out(operator: str, options: Any) -> None:
    for inputs in (["x", None], ["x", None, "x"], ["x", "x", None], [None, "x"], [None]):
        with pytest.raises(ps.InvalidModel, match="leaves out input"):
            ps.compile(model([subgraph(X, [(operator, inputs, ["y"], options)], ["y"])]))


def test_all_faults_are_reported_at_once() -> None:
    operators = [("ADD", ["x"], ["y"], ADD), ("SUB", ["x"], ["z"], ADD)]
    with pytest.raises(ps.InvalidModel, match=r"(?s)ADD_0.*SUB_1"):
        ps.load(model([subgraph(X, operators, ["y"])]))


def test_names_of_signatures_stand_for_those_of_tensors() -> None:
    signature = {
        "inputs": [{"name": "image", "tensor_index": 0}],
        "outputs": [{"name": "answer", "tensor_index": 1}],
        "signature_key": "serving_default",
    }
    file = model([subgraph(X, [("NEG", ["x"], ["y"], None)], ["y"])], signature_defs=[signature])
    session = ps.compile(file)
    assert list(session.run({"image": ONE})) == ["y"]
    np.testing.assert_array_equal(session.run({"x": ONE}, ["answer"])["answer"], -ONE)
    assert session.model.signatures == ["serving_default"]


def test_output_with_the_name_of_an_input_keeps_it() -> None:
    signature = {
        "inputs": [{"name": "image", "tensor_index": 0}],
        "outputs": [{"name": "image", "tensor_index": 1}],
        "signature_key": "flip",
    }
    file = model([subgraph(X, [("NEG", ["x"], ["y"], None)], ["y"])], signature_defs=[signature])
    session = ps.compile(file, signature="flip")
    assert [port.name for port in session.outputs] == ["image"]
    for fetches in (None, ["image"]):
        out = session.run({"image": ONE}, fetches)
        assert list(out) == ["image"]
        np.testing.assert_array_equal(out["image"], -ONE)


def test_output_that_is_listed_twice_or_is_an_input_or_a_constant_has_a_name() -> None:
    graph = subgraph(X, [("NEG", ["x"], ["y"], None)], ["y", "y", "x", "c"], {"c": ONE})
    out = ps.compile(model([graph])).run({"x": ONE})
    assert list(out) == ["y", "y#1", "x", "c#1"]
    for value, want in zip(out.values(), (-ONE, -ONE, ONE, ONE), strict=True):
        np.testing.assert_array_equal(value, want)


def test_input_may_be_fed_in_other_shapes_than_the_declared_one() -> None:
    session = ps.compile(model([subgraph(X, [("NEG", ["x"], ["y"], None)], ["y"])]))
    for shape in ((2,), (5,), (2, 3), (2,)):
        assert session(np.ones(shape, np.float32)).shape == shape


HANDLE = ("VarHandleOptions", {"container": "", "shared_name": "sum"})


RESOURCE = {"type": 13}


def accumulating() -> bytes:
    """y = the sum of all x so far, and 10."""
    main = [
        ("CALL_ONCE", [], [], ("CallOnceOptions", {"init_subgraph_index": 1})),
        ("VAR_HANDLE", [], ["h"], HANDLE),
        ("READ_VARIABLE", ["h"], ["old"], None),
        ("ADD", ["old", "x"], ["new"], ADD),
        ("ASSIGN_VARIABLE", ["h", "new"], [], None),
        ("READ_VARIABLE", ["h"], ["y"], None),
    ]
    first = [("VAR_HANDLE", [], ["h"], HANDLE), ("ASSIGN_VARIABLE", ["h", "c"], [], None)]
    ten = {"c": np.array([10, 10], np.float32)}
    return model([subgraph(X, main, ["y"], h=RESOURCE), subgraph({}, first, [], ten, h=RESOURCE)])


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "frames", "streams", "interpret"]
)
def test_variable_carries_over_from_run_to_run_in_its_session(executor: str) -> None:
    loaded = ps.load(accumulating())
    for session in (ps.compile(loaded, executor=executor), ps.compile(loaded, executor=executor)):
        for times in (1, 2, 3):
            np.testing.assert_array_equal(session(ONE), 10 + times * ONE)


def test_variable_that_is_assigned_after_the_outputs_were_computed_is_assigned() -> None:
    main = [
        ("VAR_HANDLE", [], ["h"], HANDLE),
        ("CALL_ONCE", [], [], ("CallOnceOptions", {"init_subgraph_index": 1})),
        ("READ_VARIABLE", ["h"], ["y"], None),
        ("ASSIGN_VARIABLE", ["h", "x"], [], None),
    ]
    first = [("VAR_HANDLE", [], ["h"], HANDLE), ("ASSIGN_VARIABLE", ["h", "c"], [], None)]
    graphs = [subgraph(X, main, ["y"], h=RESOURCE), subgraph({}, first, [], {"c": ONE}, h=RESOURCE)]
    session = ps.compile(model(graphs))
    np.testing.assert_array_equal(session(3 * ONE), ONE)
    np.testing.assert_array_equal(session(ONE), 3 * ONE)


def doubled(**tensor: Any) -> dict[str, Any]:
    """Subgraphs of a file that adds a constant ``c``, whose tensor has these fields."""
    return subgraph(X, [("ADD", ["x", "c"], ["y"], ADD)], ["y"], c={"shape": [2], **tensor})


@pytest.mark.parametrize("name", ["mini_mobilenet_v2", "mini_resnet"])
def test_no_transpose_remains_between_the_layers_of_a_network(name: str) -> None:
    """But for the image's, which comes with channels last, and one behind a first convolution of
    few channels, which reads rows; other convolutions take this order."""
    path = FOLDER / "net" / f"{name}.tflite"
    session = ps.compile(path, executor="linear", backends=["native", "numpy"])
    session(np.zeros((1, 32, 32, 3), np.float32))
    ops = [step.node.op.name for step in session.inspect.executor.table.steps]
    assert ops.index("Transpose") == 0 and ops.count("Transpose") == 1
    between = ops[ops.index("Conv") + 4 :] if name == "mini_resnet" else ops
    assert ops.count("Reorder") <= 2 and between.count("Reorder") <= 1


def test_metadata_has_the_quantization_of_inputs_and_outputs():
    ports = {"quantization": {"scale": [0.1], "zero_point": [-3]}, "type": 9}
    result = {"quantization": {"scale": [0.25]}, "type": 9}
    add = [("ADD", ["x", "r"], ["y"], ("AddOptions", {}))]
    inputs = {"x": ("int8", [2]), "r": ("int8", [2])}
    loaded = ps.load(model([subgraph(inputs, add, ["y"], x=ports, r=ports, y=result)]))
    told = {name: json.loads(text) for name, text in loaded.metadata.items()}
    scale = float(np.float32(0.1))
    assert told["quantization of x"] == {"scale": scale, "zero_point": -3}
    assert told["quantization of y"] == {"scale": 0.25, "zero_point": 0}
