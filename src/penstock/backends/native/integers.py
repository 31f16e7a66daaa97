"""Products of 8-bit integers with constant weights, and the codes or real numbers made of them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from penstock.backends.native import by_memory, family, part_ns, rows_ns
from penstock.backends.native.kernel import NativeCall, Site, Tensor, Word
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, TensorType
from penstock.host.native import NativeLibrary, library
from penstock.ir.graph import Node
from penstock.ops.common.constant_cache import reordered
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.work_estimate import Workload, flops

# As in c/integers.c.
_PANEL, _QUAD, _GROUP, _BLOCK, _TILE = 32, 4, 4, 64, 16
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


class IntegerPanels(NamedTuple):
    """Weights as compiled code reads them (``c/integers.h``), sums of columns less what zero points
    add, and zero points less what is taken off uint8."""

    panels: np.ndarray
    sums: np.ndarray
    zeros: np.ndarray


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
    held = reordered(
        ("native integers", zero.tobytes(), flipped),
        weights,
        lambda codes: integer_panels(codes.T if flipped else codes, zero),
        partial(_codes, (k, n), weights.dtype, flipped),
        panel_types(k, n),
    )
    packed = IntegerPanels(*held.arrays)
    rows = x.elements // k
    blocks, groups = math.ceil(rows / _BLOCK), math.ceil(n / (_PANEL * _GROUP))
    columns = min(n, _PANEL * _GROUP)
    # A model's weights may be larger than the caches: threads that are worth it then cost little
    # where they are not.
    products = 2 * k * min(rows, _BLOCK) * columns / _speed(site.library, rows)
    multiplied = part_ns(Workload("codes product", flops=products, items=1))
    read = part_ns(Workload("codes product", weights=k * columns, items=1))
    return NativeCall(
        "integer_product",
        (
            *(Tensor(places.x[0]), None if x_zero is None else Tensor(places.x[2]), *packed[:2]),
            packed.zeros if np.any(packed.zeros) else None,
            *(terms.astype(INT32) if np.any(terms) else None, factors, site.result()),
            *(rows, k, n, x.dtype == INT8, _RESULTS.index(result.dtype), int(y_zero[0])),
        ),
        items=blocks * groups,
        item_ns=max(multiplied, read),
        reordered={places.w[0]: held},
    )


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


def integer_panels(weights: np.ndarray, zero: np.ndarray) -> IntegerPanels:
    """Pack a matrix [k, n] of codes with a zero point for each column."""
    k, n = weights.shape
    shift = 128 if weights.dtype == UINT8 else 0
    zeros = zero.astype(INT32) - shift
    # int8 would overflow before the shift is taken off.
    signed = weights.astype(np.int16) - shift
    quads, panels = math.ceil(k / _QUAD), math.ceil(n / _PANEL)
    padded = np.zeros((quads * _QUAD, panels * _PANEL), INT8)
    padded[:k, :n] = signed
    packed = padded.reshape(quads, _QUAD, panels, _PANEL).transpose(2, 0, 3, 1)
    # Whole tiles are loaded, also where K ends within one.
    tail = np.zeros(_TILE * _PANEL * _QUAD, INT8)
    sums = signed.sum(axis=0, dtype=np.int64) - k * zeros.astype(np.int64)
    return IntegerPanels(np.concatenate([packed.reshape(-1), tail]), sums.astype(INT32), zeros)


def panel_types(k: int, n: int) -> list[TensorType]:
    """The types of what ``integer_panels`` makes."""
    elements = (math.ceil(k / _QUAD) * math.ceil(n / _PANEL) + _TILE) * _QUAD * _PANEL
    return [TensorType(INT8, (elements,)), *[TensorType(INT32, (n,))] * 2]


def _codes(
    dims: tuple[int, int],
    dtype: np.dtype,
    flipped: bool,
    packed: np.ndarray,
    *others: np.ndarray,
) -> np.ndarray:
    """The matrix of these ``dims`` that panels were made of."""
    k, n = dims
    quads, panels = math.ceil(k / _QUAD), math.ceil(n / _PANEL)
    tiles = packed[: quads * panels * _QUAD * _PANEL].reshape(panels, quads, _PANEL, _QUAD)
    codes = tiles.transpose(1, 3, 0, 2).reshape(quads * _QUAD, -1)[:k, :n].view(np.uint8)
    codes = (codes ^ (128 if dtype == UINT8 else 0)).view(dtype)
    return np.ascontiguousarray(codes.T if flipped else codes)
