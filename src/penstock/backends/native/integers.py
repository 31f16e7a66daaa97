"""Products of 8-bit integers with constant weights, and the codes or real numbers made of them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from penstock.backends.native import by_memory, family, rows_ns
from penstock.backends.native.integer_panels import unpacked
from penstock.backends.native.kernel import NativeCall, Site, Tensor, Word
from penstock.backends.native.quantized_convolution import (
    CodeWeights,
    Rescaling,
    code_bounds,
    products_of_rows,
)
from penstock.core.records import NamedTuple, replace
from penstock.core.types import FLOAT32, TensorType
from penstock.host.native import NativeLibrary, library
from penstock.ir.graph import Node
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.work_estimate import Workload, flops

_RESULTS = (INT32, FLOAT32, UINT8, INT8)

# Operations at once that weights of a cache allow: of one row, and for each further one.
_SPEED_OF_ROW, _SPEED_OF_FURTHER = 150, 50


class _Places(NamedTuple):
    """Where an operation has its inputs; those of x and w are codes, scale and zero point."""

    x: tuple[int, int, int]
    w: tuple[int, int, int]
    y: tuple[int, int] = (-1, -1)
    bias: int = -1


_OPERATIONS = {
    "MatMulInteger": _Places((0, -1, 2), (1, -1, 3)),
    "QGemm": _Places((0, 1, 2), (3, 4, 5), (7, 8), 6),
    "QLinearMatMul": _Places((0, 1, 2), (3, 4, 5), (6, 7)),
}


def integer_workload(node: Node) -> Workload | None:
    """The work of a product."""
    y, loaded = node.outputs[0], library()
    if loaded is None or y is None or not isinstance(y.type, TensorType) or not y.type.static:
        return None
    return Workload(
        "codes product", flops=flops(node) / _speed(loaded, math.prod(y.type.dims[:-1]))
    )


@family("MatMulInteger", "QLinearMatMul", "com.microsoft.QGemm", work=integer_workload)
def integer_product(site: Site) -> NativeCall | None:
    """The product of codes with a constant matrix of codes, whose zero point, and scales, are
    constants."""
    places = _OPERATIONS[site.node.op.name]
    x, weights, result = site.input(places.x[0]), site.weights(places.w[0]), site.output()
    if x is None or weights is None or weights.ndim != 2 or 0 in (*x.dims, *weights.shape):
        return None
    if x.dtype not in (INT8, UINT8) or weights.dtype not in (INT8, UINT8) or not x.dims:
        return None
    if result.dtype not in _RESULTS or site.attr("transA", 0):
        return None
    flipped = bool(site.attr("transB", 0))
    k, n = weights.shape[::-1] if flipped else weights.shape
    zero, x_zero = _constant(site, places.w[2], n), site.input(places.x[2])
    factors, terms = _factors(site, places, n), _constant(site, places.bias, n)
    y_zero = _constant(site, places.y[1], 1)
    if zero is None or terms is None or y_zero is None or factors is None:
        return None
    if x_zero is not None and (x_zero.elements != 1 or x_zero.dtype != x.dtype):
        return None
    turned = (lambda codes: codes) if flipped else (lambda codes: codes.T)
    held = CodeWeights(
        weights,
        (n, k, 1, 1),
        turned,
        zero,
        ("native integers", flipped, zero.tobytes()),
        lambda size: partial(unpacked, (k, n), size, weights.dtype, flipped),
    )
    bounds = None
    if result.dtype in (INT8, UINT8):
        bounds = code_bounds(result.dtype, int(y_zero[0]))
    offsets = None if bounds is None else np.zeros(n, FLOAT32)
    if result.dtype == INT32:
        factors = None
    rescaling = Rescaling(terms.astype(INT32), factors, offsets, bounds)
    late = 0 if x_zero is None else Tensor(places.x[2])
    call = products_of_rows(site, places.x[0], late, held, rescaling)
    return None if call is None else replace(call, reordered={places.w[0]: call.keep})


@family("DynamicQuantizeLinear", work=by_memory)
def dynamically_quantized(site: Site) -> NativeCall | None:
    """DynamicQuantizeLinear: codes of real numbers over their own range."""
    x = site.input(0)
    if x is None or x.dtype != FLOAT32:
        return None
    words: tuple[Word, ...] = Tensor(0), *[site.result(i) for i in range(3)], x.elements
    return NativeCall("dynamically_quantized", words, 1, rows_ns(10 * x.elements, rows=5))


def _speed(loaded: NativeLibrary, rows: int) -> int:
    """Operations at once, with the instructions that this processor has."""
    speed: int = loaded.functions.integer_speed
    return min(speed, _SPEED_OF_ROW + _SPEED_OF_FURTHER * (rows - 1))


def _constant(site: Site, i: int, size: int) -> np.ndarray | None:
    """A constant of one element or of ``size``, as a vector of ``size``; zeros if it is left out,
    None if it has another size."""
    if i < 0 or site.input(i) is None:
        return np.zeros(size, INT32)
    constant = site.constant(i)
    if constant is None or constant.size not in (1, size):
        return None
    return np.broadcast_to(constant.reshape(-1), (size,))


def _factors(site: Site, places: _Places, n: int) -> np.ndarray | None:
    """The factor of each column, as NumPy's kernel computes it; None if it is not constant."""
    if places.x[1] < 0:
        return np.ones(1, FLOAT32)
    is_scaled = site.input(places.y[0]) is not None
    constants = [site.constant(i) for i in (places.x[1], places.w[1], places.y[0])]
    a, b, y = constants if is_scaled else (*constants[:2], np.ones(1, FLOAT32))
    if a is None or b is None or y is None or b.size not in (1, n) or not a.size == y.size == 1:
        return None
    if any(scale.dtype != FLOAT32 for scale in (a, b, y)):
        return None
    alpha = np.float32(site.attr("alpha", 1.0))
    factors = alpha * a.reshape(-1) * b.reshape(-1)
    if is_scaled:
        factors = factors / y.reshape(-1)
    # An infinite factor times a sum of 0 is NaN, which is no code.
    if not np.all(np.isfinite(factors)):
        return None
    return np.ascontiguousarray(np.broadcast_to(factors.astype(FLOAT32), (n,)))
