"""Matrix products of 8-bit integers, with requantized, int32 or float results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.backends.native import by_memory, family, fused_with, rows_ns
from penstock.backends.native.code_products import (
    CodeWeights,
    Operand,
    Rescaling,
    code_bounds,
    operand_zero,
    products_of_matrices,
    products_of_rows,
    scaled_sums,
    site_inputs,
)
from penstock.backends.native.codes import check_order
from penstock.backends.native.integer_panels import unpacked
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError, Word
from penstock.core.records import NamedTuple, replace
from penstock.core.types import FLOAT32, TensorType
from penstock.host.native import NativeLibrary, library
from penstock.ir.graph import Node
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.common.fixed_point import of_products
from penstock.ops.internal.fused import parts
from penstock.ops.work_estimate import Workload, flops

_RESULTS = (INT32, FLOAT32, UINT8, INT8)

# Parallel operations that cached weights allow: for one row, and for each further row.
_SPEED_OF_ROW, _SPEED_OF_FURTHER = 150, 50


class _Places(NamedTuple):
    """Input indices of an operation; those of x and w are codes, scale and zero point."""

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
    """Return the workload of a product."""
    y, loaded = node.outputs[0], library()
    if loaded is None or y is None or not isinstance(y.type, TensorType) or not y.type.static:
        return None
    return Workload(
        "codes product", flops=flops(node) / _speed(loaded, math.prod(y.type.dims[:-1]))
    )


@family(
    "MatMulInteger",
    fused_with("MatMulInteger"),
    "QLinearMatMul",
    "com.microsoft.QGemm",
    work=integer_workload,
)
def integer_product(site: Site) -> NativeCall | None:
    """Products of quantized matrices with constant scales; MatMulInteger also with a fused epilogue
    that converts its accumulators to floats."""
    node, *others = parts(site.node)
    places = _places(site, node)
    x, w, result = site.tensor(places.x[0]), site.tensor(places.w[0]), site.output()
    if {x.dtype, w.dtype} - {INT8, UINT8} or 0 in (*x.dims, *w.dims):
        return None
    if result.dtype not in _RESULTS or node.attrs.get("transA", 0) or not x.dims or not w.dims:
        return None
    n = result.dims[-1] if len(w.dims) > 1 else 1
    x_zero = operand_zero(site, places.x[2], x.dtype)
    rescaling = _rescaling(site, node, places, n)
    if others:
        rescaling = scaled_sums(site, others, n, len(result.dims) - 1)
    if rescaling is None or x_zero is None:
        return None
    operand = Operand(places.x[0], x_zero)
    held = _weights(site, node, places, n)
    if held is not None:
        call = products_of_rows(site, operand, held, rescaling)
        return None if call is None else replace(call, reordered={places.w[0]: call.keep})
    w_zero = operand_zero(site, places.w[2], w.dtype)
    if w_zero is None or np.any(rescaling.terms) or node.attrs.get("transB", 0):
        return None
    return products_of_matrices(site, operand, Operand(places.w[0], w_zero), rescaling)


def _places(site: Site, node: Node) -> _Places:
    """Return the indices of a product's tensors among those of ``site``."""
    own = _OPERATIONS[node.op.name]
    if node is site.node:
        return own
    place = {value: i for i, value in enumerate(site_inputs(site))}
    inputs = [-1 if value is None else place[value] for value in node.inputs]
    # Omitted at the end, or without an index.
    (x, _, x_zero), (w, _, w_zero) = own.x, own.w
    inputs += [-1] * (1 + max(x_zero, w_zero) - len(inputs))
    x_at, w_at = (inputs[x], -1, inputs[x_zero]), (inputs[w], -1, inputs[w_zero])
    return own._replace(x=x_at, w=w_at)


def _weights(site: Site, node: Node, places: _Places, n: int) -> CodeWeights | None:
    """Return a constant matrix with constant zero points; None if it is not constant."""
    weights, zero = site.weights(places.w[0]), _constant(site, places.w[2], n)
    if weights is None or zero is None or weights.ndim != 2:
        return None
    flipped = bool(node.attrs.get("transB", 0))
    k, n = weights.shape[::-1] if flipped else weights.shape
    return CodeWeights(
        weights,
        (n, k, 1, 1),
        (lambda codes: codes) if flipped else (lambda codes: codes.T),
        zero,
        ("native integers", flipped, zero.tobytes()),
        lambda size: partial(unpacked, (k, n), size, weights.dtype, flipped),
    )


def _rescaling(site: Site, node: Node, places: _Places, n: int) -> Rescaling | None:
    """Return the rescaling of accumulators; None if scales or the bias are not constant."""
    factors, terms = _factors(site, places, n), _constant(site, places.bias, n)
    y_zero, dtype = _constant(site, places.y[1], 1), site.output().dtype
    if factors is None or terms is None or y_zero is None or dtype is None:
        return None
    bounds, offsets, zero = None, None, int(y_zero[0])
    if dtype in (INT8, UINT8):
        limits = [end - zero for end in site.attr("code_limits", (-math.inf, math.inf))]
        bounds, offsets = code_bounds(dtype, zero, *limits), np.zeros(n, FLOAT32)
    made = Rescaling(terms.astype(INT32), None if dtype == INT32 else factors, offsets, bounds)
    if not site.attr("fixed_point", 0):
        return made
    scales: Any = [site.constant(i) for i in (places.x[1], places.w[1], places.y[0])]
    return made.of_each(of_products(*scales, rounded=dtype == UINT8))


@family("DynamicQuantizeLinear", "tflite.DynamicRangeCodes", work=by_memory)
def dynamically_quantized(site: Site) -> NativeCall | None:
    """Quantize floats over their own range, or those of each image (DynamicRangeCodes)."""
    x, images = site.tensor(0), 1
    if site.node.op.name == "DynamicRangeCodes":
        images, *_ = x.dims
    if x.dtype != FLOAT32 or not images:
        return None
    each = x.elements // images

    def restrided(strides: Sequence[tuple[int, ...] | None]) -> NativeCall:
        check_order(x.dims, strides[:2])
        steps = [s and s[0] for s in strides] if images > 1 else []
        if any(step not in (None, n) for step, n in zip(steps, (each, each, 1, 1), strict=False)):
            raise UnsupportedError
        words: tuple[Word, ...] = Tensor(0), *[site.result(i) for i in range(3)], each
        item_ns = rows_ns(10 * each, rows=5)
        return NativeCall("dynamically_quantized", words, images, item_ns, restrided=restrided)

    return restrided([None, None])


def _speed(loaded: NativeLibrary, rows: int) -> int:
    """Return the operations per instruction on this processor, at most those the cache allows."""
    speed: int = loaded.integer_speed
    return min(speed, _SPEED_OF_ROW + _SPEED_OF_FURTHER * (rows - 1))


def _constant(site: Site, i: int, size: int) -> np.ndarray | None:
    """Return a constant of 1 or ``size`` elements as a vector of ``size``; zeros if omitted, None
    for other sizes."""
    if i < 0 or site.input(i) is None:
        return np.zeros(size, INT32)
    constant = site.constant(i)
    if constant is None or constant.size not in (1, size):
        return None
    return np.broadcast_to(constant.reshape(-1), (size,))


def _factors(site: Site, places: _Places, n: int) -> np.ndarray | None:
    """Return the factor of each column, as NumPy's kernel computes it; None if not constant."""
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
    # An infinite factor times an accumulator of 0 is NaN, which has no code.
    if not np.all(np.isfinite(factors)):
        return None
    return np.ascontiguousarray(np.broadcast_to(factors.astype(FLOAT32), (n,)))
