"""Weights that are subnormal numbers count as 0 in products, beside larger ones."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.passes.optimize.flush_subnormals import without_subnormals
from tests.support.onnx_text import model_from_text

TINY = float(np.finfo(np.float32).smallest_normal)
LEAST = float(np.finfo(np.float32).smallest_subnormal)
WEIGHTS = np.array(
    [[1.5, TINY / 2, -LEAST, 0.0], [TINY, -TINY * 0.99, -0.0, 2.0**-100]], np.float32
)
FLUSHED = np.array([[1.5, 0, 0, 0], [TINY, 0, 0, 2.0**-100]], np.float32)


@pytest.mark.parametrize("size", [1, 8, 2**15, 2**15 + 1, 100_003])
def test_without_subnormals_flushes_what_is_subnormal_and_nothing_else(size):
    rng = np.random.default_rng(size)
    weights = rng.standard_normal(size).astype(np.float32)
    assert without_subnormals(weights) is weights
    weights[-1] = TINY
    assert without_subnormals(weights) is weights
    where = rng.integers(size)
    weights[0], weights[where] = 1, -LEAST
    wanted = weights.copy()
    wanted[where] = 0
    if size > 1:
        np.testing.assert_array_equal(without_subnormals(weights), wanted)


def test_without_subnormals_takes_arrays_of_any_strides():
    for weights in (WEIGHTS, WEIGHTS.T, np.repeat(WEIGHTS, 2, axis=1)[:, ::2], WEIGHTS[::-1]):
        wanted = np.where(np.abs(weights) < TINY, np.float32(0), weights)
        np.testing.assert_array_equal(without_subnormals(weights), wanted)
    for few in (WEIGHTS[:, :, None], WEIGHTS[1:, :, None]):
        flushed = without_subnormals(np.broadcast_to(few, (*few.shape[:2], 2**40)))
        np.testing.assert_array_equal(flushed[..., 5], without_subnormals(few[..., 0]))
        assert flushed.shape[2] == 2**40
    empty = np.empty((0, 4), np.float32)
    assert without_subnormals(empty) is empty


@pytest.mark.parametrize("largest", [LEAST, TINY, 2.0**-101, np.nan])
def test_without_subnormals_keeps_them_where_they_count(largest):
    weights = np.array([largest, TINY / 2], np.float32)
    assert without_subnormals(weights) is weights


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "frames"])
@pytest.mark.parametrize(
    "node", ["MatMul(x, w)", "Gemm<transB = 1>(x, v)", "Conv(x, k)", "ConvTranspose(x, t)"]
)
def test_subnormal_weights_count_as_zero_but_with_strict_precision(executor, node):
    """A product with 1e38 shows what a subnormal weight is."""
    rows = np.array([[1e38, 0], [0, 1e38], [1, 1]], np.float32)
    image = "Conv" in node
    x = rows.T.reshape(1, 2, 3, 1) if image else rows
    text = f"""g (float[{", ".join(map(str, x.shape))}] x) => (float[{"1, 4, 3, 1" if image else "3, 4"}] y)
        <float[2, 4] w = {{{_numbers(WEIGHTS)}}}, float[4, 2] v = {{{_numbers(WEIGHTS.T)}}},
        float[4, 2, 1, 1] k = {{{_numbers(WEIGHTS.T)}}}, float[2, 4, 1, 1] t = {{{_numbers(WEIGHTS)}}}>
        {{ y = {node} }}"""
    for precision, weights in [("float32", FLUSHED), ("strict", WEIGHTS)]:
        session = ps.compile(model_from_text(text), executor=executor, precision=precision)
        y = session.run({"x": x})["y"]
        wanted = rows.astype(np.float64) @ weights
        y = y[0, :, :, 0].T if image else y
        np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=2.0**-126)


def _numbers(array: np.ndarray) -> str:
    return ", ".join(map(repr, map(float, array.ravel())))


def test_what_else_reads_subnormal_weights_gets_them():
    text = f"""g (float[3, 2] x, int64[1] i) => (float[3, 4] y, float[1, 4] z)
        <float[2, 4] w = {{{_numbers(WEIGHTS)}}}> {{ y = MatMul(x, w) z = Gather(w, i) }}"""
    outputs = ps.compile(model_from_text(text)).run(
        {"x": np.full((3, 2), 1e38, np.float32), "i": np.array([0])}
    )
    np.testing.assert_array_equal(outputs["z"], WEIGHTS[:1])
    np.testing.assert_allclose(outputs["y"][:, 2], 0)
