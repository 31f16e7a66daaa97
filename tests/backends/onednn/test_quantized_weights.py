"""Weights of 8-bit codes are held in the layouts of primitives alone, and given back exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ref

import numpy as np
import pytest

import penstock as ps
from tests.backends.onednn.quantized_nets import (
    I8,
    U8,
    Net,
    close,
    codes,
    needs_int8,
    restart_rng,
    rng,
)
from tests.support.sweeps import sweep

pytestmark = needs_int8


@pytest.fixture(autouse=True)
def _restart_rng() -> None:
    restart_rng()


CASES: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "convolution": ("Conv", (1, 24, 9, 9), (80, 24, 3, 3), {}),
    "of odd channels": ("Conv", (1, 37, 9, 9), (75, 37, 3, 3), {}),
    "of points": ("Conv", (1, 130, 5, 6), (140, 130, 1, 1), {}),
    "of an image": ("Conv", (1, 3, 40, 40), (130, 3, 7, 7), {"strides": [2, 2]}),
    "grouped convolution": ("Conv", (1, 64, 9, 9), (128, 32, 3, 3), {"group": 2}),
    "depthwise convolution": ("Conv", (1, 2000, 9, 9), (2000, 1, 3, 3), {"group": 2000}),
    "convolution along a line": ("Conv", (1, 48, 30), (96, 48, 5), {}),
    "product": ("MatMul", (50, 70), (70, 250), {}),
    "product of one row": ("MatMul", (1, 131), (131, 257), {}),
    "flipped product": ("Gemm", (50, 70), (250, 70), {"transB": 1}),
}
SHIFTED = ("int8", "uint8", "int8 with zero points", "uint8 with zero points")


def net(case: str, weights: str, source: tuple[Any, int]) -> tuple[Net, str, np.ndarray]:
    """One operation whose weights are codes of some ``weights``, among ``SHIFTED``."""
    op, shape, dims, attrs = CASES[case]
    made, per_filter = Net(), "points" in weights
    axis = 1 if op == "MatMul" else 0
    if weights.startswith("uint8"):
        w = rng.integers(40, 160, dims).astype(U8)
        zero: Any = rng.integers(110, 140, dims[axis]).astype(U8) if per_filter else U8(128)
    else:
        w = codes(I8, *dims)
        zero = np.zeros(dims[axis], I8)
        if per_filter:
            w, zero = w // I8(2), rng.integers(-60, 60, dims[axis]).astype(I8)
    scale = np.full(np.shape(zero), 0.004)
    read = made.dequantize(made.constant(w), scale, zero, **({"axis": axis} if zero.ndim else {}))
    x = made.dequantize(made.feed(codes(source[0], *shape)), 0.03, source[0](source[1]))
    return made, made.quantize(made.add(op, [x, read], **attrs), 0.5, U8(127)), w


@pytest.mark.parametrize("source", sweep([(U8, 119), (U8, 0), (I8, -11), (I8, 0)], 1))
@pytest.mark.parametrize("weights", SHIFTED)
@pytest.mark.parametrize("case", CASES)
def test_codes_are_given_back_bit_by_bit(case: str, weights: str, source: tuple[Any, int]) -> None:
    made, result, w = net(case, weights, source)
    model = ps.load(made.proto(result, dims={"x0": ("n", *made.feeds["x0"].shape[1:])}))
    (value,) = [
        v
        for node in model.graph.nodes
        for v in node.inputs
        if v is not None and v.const is not None and v.const.size == w.size
    ]
    read = ref(value.const)
    session = ps.compile(model, backends=["onednn", "numpy"], threads=1)
    want = ps.compile(made.proto(result), backends=["numpy"]).run(made.feeds)[result]
    close(session.run(made.feeds)[result], want)
    on_codes = [
        s for s in session.inspect.plan.walk() if "QuantizeLinear" in s.node.attrs.get("ops", "")
    ]
    assert [step.backend for step in on_codes][:1] == ["onednn"]
    assert value.held is None
    assert read() is None
    assert np.array_equal(value.const, w)
    assert value.const.dtype == w.dtype
    for _ in range(2):
        twice = np.concatenate([made.feeds["x0"]] * 2)
        close(session.run({"x0": twice})[result], np.concatenate([want] * 2))
        session.trim()
        assert value.held is None
