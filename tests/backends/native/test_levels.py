"""Kernels of ``reproducible=True`` give the same bits at every level of x86-64 that it takes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.backend import NativeBackend, is_reproducible
from tests.support.differential import drawn, every_form, values_of
from tests.support.draws import Draw, is_float
from tests.support.kernel_draws import DRAWS
from tests.support.native_kernels import LIBRARIES, node_of

BACKENDS = [NativeBackend(x, reproducible=True) for x in LIBRARIES if is_reproducible(x)]
SEEDS = range(3)

pytestmark = pytest.mark.skipif(len(BACKENDS) < 2, reason="kernels for a single level")


def bits(result: np.ndarray) -> Any:
    """The bits of a result; those of NaNs, whose signs and payloads processors choose, are one."""
    if result.dtype == object:
        return repr(result.tolist())
    if result.dtype.kind in "fc":
        result = np.where(np.isnan(result), np.array(np.nan, result.dtype), result)
    return result.tobytes()


def results_of(draw: Draw, backend: NativeBackend, inputs: Any, wanted: Any, seed: int) -> Any:
    """The bits of each output of each form of a call; None if there is no kernel."""
    kernel = backend.kernel(draw.node, [v and v.type for v in draw.node.inputs])
    if kernel is None:
        return None
    found = {}
    with np.errstate(all="ignore"):
        for how, results in every_form(draw, kernel, backend, inputs, wanted, seed):
            found[how] = [*map(bits, results)]
    return found


def is_skipped(draw: Draw) -> bool:
    """Whether weights of a convolution are not finite: padding may be multiplied by them or not."""
    constants = [draw.inputs[i] for i in draw.constants]
    return "Conv" in draw.node.attrs.get("ops", draw.node.op.name) and not all(
        np.isfinite(x).all() for x in constants if is_float(x)
    )


def difference(operation: str, seed: int) -> str | None:
    """The first form of a call whose bits differ between levels."""
    draw = drawn(operation, seed)
    inputs = [draw.inputs[int(v.name[1:])] if v else None for v in draw.node.inputs]
    wanted = None
    with suppress(Exception), np.errstate(all="ignore"):  # inputs that are refused
        wanted = values_of(draw, inputs)
    if wanted is None or is_skipped(draw):
        return None
    first, *others = [results_of(draw, b, inputs, wanted, seed) for b in BACKENDS]
    for other in others:
        if (first is None) != (other is None):
            return "a kernel at one level alone"
        for how, results in (first or {}).items():
            if results != other[how]:
                return f"{how}: {draw.node}"
    return None


@pytest.mark.parametrize("operation", DRAWS)
def test_operation_has_the_same_bits_at_every_level(operation: str) -> None:
    assert [difference(operation, seed) for seed in SEEDS] == [None] * len(SEEDS)


@pytest.mark.full
@pytest.mark.parametrize("operation", DRAWS)
def test_operation_of_more_draws_has_the_same_bits_at_every_level(operation: str) -> None:
    for seed in range(len(SEEDS), 40):
        assert difference(operation, seed) is None, seed


def numbers(*dims: int) -> np.ndarray:
    return np.random.default_rng(dims).standard_normal(dims).astype(np.float32)


def check(name: str, *inputs: np.ndarray, constants: Any = (1, 2), **attrs: Any) -> None:
    constants = [i for i in constants if i < len(inputs)]
    node = node_of(name, inputs, constants, **attrs)
    kernels = [b.kernel(node, [v and v.type for v in node.inputs]) for b in BACKENDS]
    found = {kernel.function(*inputs).tobytes() for kernel in kernels if kernel is not None}
    assert len(found) == 1, f"{name} of {[x.shape for x in inputs]}, {attrs}"


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 9, 17, 200])
@pytest.mark.parametrize("columns", [1, 8, 10, 16, 24, 64, 65, 100])
@pytest.mark.parametrize("inner", [1, 16, 383, 385, 800, 3000])
def test_product_in_slices_has_the_same_bits_at_every_level(rows, columns, inner):
    x, w, bias = numbers(rows, inner), numbers(inner, columns), numbers(columns)
    check("MatMul", x, w)
    check("Gemm", x, w, bias)
    check("MatMul", x, w, constants=())


@pytest.mark.parametrize("size", [1, 6, 7, 14, 33])
@pytest.mark.parametrize(("channels", "filters"), [(3, 16), (8, 8), (24, 16), (70, 40), (200, 64)])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("step", [1, 2])
def test_convolution_has_the_same_bits_at_every_level(size, channels, filters, kernel, step):
    image, around = numbers(2, channels, size, size), [kernel // 2] * 4
    w, bias = numbers(filters, channels, kernel, kernel), numbers(filters)
    own = numbers(channels, 1, kernel, kernel)
    for strides, dilations in ((step, 1), (1, step)):
        attrs = {"strides": [strides] * 2, "dilations": [dilations] * 2}
        pads = [dilations * p for p in around]
        check("Conv", image, w, bias, pads=pads, **attrs)
        check("Conv", image, own, pads=pads, group=channels, **attrs)
        check("Conv", image, w, pads=pads, constants=(), **attrs)


@pytest.mark.parametrize("length", [1, 7, 8, 15, 16, 17, 31, 100, 128, 1000, 1025])
def test_sums_along_rows_have_the_same_bits_at_every_level(length):
    x, scale, bias = numbers(3, length), numbers(length), numbers(length)
    for dtype in ("float32", "float64"):
        own = [a.astype(dtype) for a in (x, scale, bias)]
        check("Softmax", own[0])
        check("LogSoftmax", own[0])
        check("LayerNormalization", *own)
        check("ReduceMean", own[0], np.array([1]))
        check("ReduceL2", own[0], np.array([1]))
