"""Inputs that are lists of numbers (shapes, axes, sizes) have one dim at most."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from tests.support.onnx_text import model_from_text

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

CASES = {
    "Reshape": ("y = Reshape(x, n)", [6, 4]),
    "Slice": ("y = Slice(x, n, n)", [0, 0]),
    "Split": ("y, z = Split <axis = 0> (x, n)", [1, 1]),
    "Squeeze": ("a = Unsqueeze(x, n) y = Squeeze(a, n)", [0]),
    "ReduceSum": ("y = ReduceSum(x, n)", [1, 2]),
    "ReduceMax": ("y = ReduceMax(x, n)", [1, 2]),
    "TopK": ("y, i = TopK(x, n)", [2]),
    "CumSum": ("y = CumSum(x, n)", [1]),
    "Tile": ("y = Tile(x, n)", [1, 2, 1]),
    "CenterCropPad": ("y = CenterCropPad(x, n)", [2, 2, 2]),
}


@pytest.mark.parametrize("executor", ["linear", "interpret", "frames"])
@pytest.mark.parametrize("form", ["constant", "input", "input of unknown dims"])
@pytest.mark.parametrize("name", CASES)
def test_matrix_is_refused_as_by_onnx_runtime(name, form, executor):
    body, numbers = CASES[name]
    matrix = np.array([numbers], np.int64)
    feeds = {"x": X}
    if form == "constant":
        inputs = "float[2, 3, 4] x"
        rows = ", ".join(map(str, numbers))
        inside = f"<int64[1, {len(numbers)}] n = {{{rows}}}>"
    else:
        dims = f"[1, {len(numbers)}]" if form == "input" else "[A, B]"
        inputs, inside = f"float[2, 3, 4] x, int64{dims} n", ""
        feeds["n"] = matrix
    model = model_from_text(f"g ({inputs}) => (float y) {inside} {{ {body} }}")
    with pytest.raises(Exception):  # noqa: B017 - of its many kinds
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    with pytest.raises(ps.PenstockError, match=r"dim|repeats"):
        ps.compile(model, executor=executor).run(feeds)


def test_pads_may_be_a_matrix_of_one_row():
    model = model_from_text("g (float[2, 3, 4] x, int64[1, 6] n) => (float y) { y = Pad(x, n) }")
    feeds = {"x": X, "n": np.array([[0, 0, 1, 1, 0, 0]], np.int64)}
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    np.testing.assert_array_equal(ps.compile(model).run(feeds)["y"], wanted)
