"""Errors that say what to write instead, for users of other runtimes."""

from __future__ import annotations

import io
import pickle
import re

import numpy as np
import pytest

import penstock as ps
from tests.support.onnx_text import compile_text, model_from_text

TEXT = "g (float[N, 3] x) => (float[N, 3] y) { [minus] y = Neg(x) }"
X = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, {"x": X}), r"feeds first .*: write run\(\{'x': ...\}\)\. "),
        ((["y"], {"x": X}), r"write run\(\{'x': ...\}, \['y'\]\)"),
        ((X,), r"not be a ndarray; write run\(\{'x': ...\}\), or call"),
        (({"x": X}, ["minus"]), "that is a node, and its outputs are 'y'"),
    ],
)
def test_run_in_the_manner_of_other_runtimes_says_what_to_write(arguments, message):
    with pytest.raises(ps.InvalidInput, match=message):
        compile_text(TEXT).run(*arguments)


@pytest.mark.parametrize(("name", "hint"), [("get_inputs", "session.inputs"), ("run_x", "")])
def test_methods_of_other_runtimes_are_named_here(name, hint):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'.*{hint}"):
        getattr(compile_text(TEXT), name)


def test_inference_session_is_said_to_be_elsewhere():
    with pytest.raises(AttributeError, match=r"penstock\.compat\.onnxruntime"):
        ps.InferenceSession  # noqa: B018


def test_ports_have_shape_and_dtype():
    (port,) = compile_text(TEXT).inputs
    assert port.shape == ("N", 3) and port.dtype == np.float32
    (port,) = compile_text("g (seq(float) x) => (int64 y) { y = SequenceLength(x) }").inputs
    assert port.shape is None and port.dtype is None


@pytest.mark.parametrize(
    ("place", "message"), [({"minus": "numpy"}, "write 'node:minus'"), ({"neg": "numpy"}, "'Neg'")]
)
def test_place_hints_at_nodes_and_operations(place, message):
    with pytest.raises(ps.InvalidInput, match=message):
        compile_text(TEXT, place=place)


def test_timeout_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="timeout=nan"):
        compile_text(TEXT).run({"x": X}, timeout=float("nan"))


NAMED = "g (float[batch, 3] x, float[batch, n] z) => (float[batch, 3] y) { a = Exp(x) y = Neg(a) }"


def test_shapes_may_name_single_dims() -> None:
    session = compile_text(NAMED, shapes=[{"batch": 4, "n": 1}, {"batch": 2, "z": (2, 5)}])
    assert session.stats.plans_made == 2
    for batch, n in ((4, 1), (2, 5)):
        session.run({"x": np.ones((batch, 3), np.float32), "z": np.ones((batch, n), np.float32)})
    assert session.stats.plans_made == 2


@pytest.mark.parametrize("shapes", [{"x": 4}, {"batch": -1}, {"height": 4}])
def test_size_without_a_dim_of_its_name_is_refused(shapes: dict[str, int]) -> None:
    message = "numbers from 0 are for dims with a name, of which the model has 'batch', 'n'"
    with pytest.raises(ps.InvalidInput, match=message):
        compile_text(NAMED, shapes=shapes)


def test_values_are_all_that_can_be_fetched() -> None:
    session = compile_text(NAMED)
    values = {port.name: str(port.type) for port in session.values}
    assert list(values) == ["x", "z", "a", "y"]
    assert values["x"] == values["y"] == "float32[batch, 3]"
    feeds = {"x": np.ones((1, 3), np.float32), "z": np.ones((1, 1), np.float32)}
    assert session.run(feeds, list(values)).keys() == values.keys()


@pytest.mark.parametrize("form", [bytearray, memoryview])
def test_model_may_be_given_as_anything_like_bytes(form: type) -> None:
    content = model_from_text(NAMED).SerializeToString()
    assert ps.compile(form(content)).inputs[0].name == "x"


def test_open_file_is_refused_with_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"a path, bytes \(of an open file its read\(\)\) or"):
        ps.compile(io.BytesIO(b""))


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
def test_error_of_a_run_has_the_node_as_attributes(executor: str) -> None:
    text = "g (float[3] x, int64[1] i) => (float[1] y) { a = Neg(x) y = Gather(a, i) }"
    session = compile_text(text, executor=executor)
    with pytest.raises(ps.RunError) as caught:
        session.run({"x": np.ones(3, np.float32), "i": [5]})
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert error.operation == "Gather"
        assert error.node is not None and error.node in str(error)
        assert error.inputs == ("a: float32[3]", "i: int64[1]")


@pytest.mark.parametrize("executor", ["linear", "frames", "interpret"])
def test_plans_steps_and_models_are_shown_in_a_line(executor: str) -> None:
    session = compile_text(NAMED, shapes={"batch": 1, "n": 1}, executor=executor)
    assert re.fullmatch(r"\w+\('g', \d+ steps, \d+ slots\)", repr(session.inspect.plan))
    for step in session.inspect.plan.steps:
        assert re.fullmatch(r"Step\(.* = \w+\(.*\), backend='\w*'\)", repr(step))
    assert re.fullmatch(r"Model\(Graph\('g', \d+ nodes\)\)", repr(session.model))


@pytest.mark.parametrize(
    ("name", "place"), [("granted", "session.effective"), ("latest", "session.inspect.executor")]
)
def test_attribute_that_was_renamed_names_its_place(name: str, place: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; it is {re.escape(place)}$"):
        getattr(compile_text(TEXT), name)
