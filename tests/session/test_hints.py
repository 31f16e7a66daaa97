"""Errors that say what to write instead, for those who come from other runtimes."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.onnx_text import compile_text

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
