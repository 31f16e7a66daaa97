"""Matrix products with arbitrary strides, and with matrices selected by indices (``matmul.c``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TypeAlias

import numpy as np

from penstock.backends.native import blocks_of_rows, family, part_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError, Word
from penstock.core.records import NamedTuple, replace
from penstock.core.traced import TRACED, int64s
from penstock.core.types import INT64, TensorType
from penstock.ir.graph import Node
from penstock.ir.layout import packed_strides
from penstock.ops.common.constant_cache import ConstantRef, Reordered, reordered
from penstock.ops.internal.fused import is_fused, parts
from penstock.ops.work_estimate import Workload

_DTYPES = ("float32", "float64", "int32", "int64")
_FACTORS = ("Div", "Mul")
"""operations that may follow a product in a fused node"""
_SMALLEST = 1e-6  # factors of operands between which float32 neither underflows nor overflows
_UNIT, _STRIP, _MOST_ROWS = 64, 256, 256  # bytes of a line and of a strip; rows of an item

_Axis: TypeAlias = tuple[int, int, int, int]
"""the size of an axis, and the strides of both matrices and of the result along it"""


class _Product(NamedTuple):
    """Products of [rows, inner] with [inner, columns], batched over the axes ``lead``; and the
    strides of a third operand along rows and columns. ``ordered``: as in ``Site``."""

    lead: Sequence[_Axis]
    rows: _Axis
    columns: _Axis
    inner: _Axis
    term: tuple[int, int] = (0, 0)
    ordered: bool = False

    @property
    def swapped(self) -> _Product:
        """Return the transposed product: that of the transposed matrices in reverse order."""
        lead, rows, columns, inner = self[:4]
        swap = _swapped
        return _Product([*map(swap, lead)], swap(columns), swap(rows), swap(inner), self.term[::-1])


def _swapped(axis: _Axis) -> _Axis:
    size, a, b, y = axis
    return size, b, a, y


def _macs(rows: int, inner: int, columns: int) -> int:
    """Return the approximate multiplications of a product, with columns padded to whole vectors."""
    return rows * inner * math.ceil(columns / 16) * 16


def _work(dtype: object, macs: int, products: int) -> Workload:
    return Workload(f"product {str_(dtype)}", flops=2 * macs, items=products)


def _product(
    node: Node, types: Sequence[TensorType], strides: Sequence[tuple[int, ...] | None]
) -> _Product | None:
    """Return the product of two matrices with these strides; None if it is empty. Raises
    ``UnsupportedError`` for a non-contiguous result."""
    a, b = types
    if not a.dims or not b.dims or 0 in (*a.dims, *b.dims):
        return None
    is_plain = TRACED.isdisjoint(map(type, (*a.dims, *b.dims)))
    dense = packed_strides if is_plain else packed_strides.__wrapped__
    of_a, of_b = strides[0] or dense(a.dims, 1), strides[1] or dense(b.dims, 1)
    # Vectors are matrices of one row or one column.
    left = [(1, 0), *zip(a.dims, of_a, strict=True)]
    right = [*zip(b.dims, of_b, strict=True)]
    right = right if len(right) > 1 else [*right, (1, 0)]
    (rows, a_row), (inner, a_inner) = left[-2:][:: -1 if node.attrs.get("transA", 0) else 1]
    (_, b_inner), (columns, b_column) = right[-2:][:: -1 if node.attrs.get("transB", 0) else 1]
    dims = a.dims[:-2]
    if b.dims[:-2] != dims:
        dims = np.broadcast_shapes(dims, b.dims[:-2])
    shape = (*dims, *(rows,) * (len(a.dims) > 1), *(columns,) * (len(b.dims) > 1))
    of_y = [*(strides[2] or dense(shape, 1))]
    y_column = of_y.pop() if len(b.dims) > 1 else 1
    y_row = of_y.pop() if len(a.dims) > 1 else columns
    leads = [_steps(m[:-2], len(dims)) for m in (left[1:] if len(a.dims) > 1 else left, right)]
    axes = _merged([*zip(dims, *leads, of_y, strict=True), (rows, a_row, 0, y_row)])
    # Axes along which the right matrix is broadcast become rows.
    of_rows = axes.pop() if axes and not axes[-1][2] else (1, 0, 0, 0)
    of_columns, of_inner = (columns, 0, b_column, y_column), (inner, a_inner, b_inner, 0)
    return _Product(axes, of_rows, of_columns, of_inner)


def _steps(lead: Sequence[tuple[int, int]], rank: int) -> list[int]:
    """Return the strides of leading dims, broadcast to ``rank`` axes."""
    return [0] * (rank - len(lead)) + [0 if size == 1 else step for size, step in lead]


def _merged(axes: Sequence[_Axis]) -> list[_Axis]:
    """Drop axes of length 1, and merge adjacent axes whose strides are contiguous."""
    merged: list[_Axis] = []
    for size, *steps in axes:
        if merged and merged[-1][1:] == tuple([size * step for step in steps]):
            size *= merged.pop()[0]
        if size > 1:
            a, b, y = steps
            merged.append((size, a, b, y))
    return merged


def product(site: Site) -> NativeCall | None:
    """MatMul and Gemm, optionally with a scalar factor in a fused node; of integers, without
    factors."""
    a, b = site.tensor(0), site.tensor(1)
    if str_(a.dtype) not in _DTYPES or a.dtype != b.dtype:
        return None
    alpha = _alpha(site)
    if alpha is None or (
        str_(a.dtype).startswith("int") and (alpha, site.attr("beta", 1.0)) != (1, 1)
    ):
        return None
    return _call(site, a, b, alpha, [None] * len(site.tensors))


def _alpha(site: Site) -> float | None:
    """Return the factor of a product, alone or fused with a scalar Mul or Div; None for others."""
    product, *others = parts(site.node)
    if not others:
        return float(site.attr("alpha", 1.0))
    scale, result, factor = others[0], product.outputs[0], site.constant(2)
    if len(others) > 1 or product.op.name != "MatMul" or scale.op.name not in _FACTORS:
        return None
    # A number divided by a product is no factor, and one of higher rank changes the shape.
    if scale.op.name == "Div" and scale.inputs[0] is not result:
        return None
    if factor is None or factor.size != 1 or result is None or result.type != site.output():
        return None
    number = float(factor.reshape(()))
    if not _SMALLEST < abs(number) < 1 / _SMALLEST:
        return None
    return number if scale.op.name == "Mul" else 1 / number


def _call(
    site: Site,
    a: TensorType,
    b: TensorType,
    alpha: float,
    strides: Sequence[tuple[int, ...] | None],
) -> NativeCall:
    """The call for tensors of these strides. Raises ``UnsupportedError``."""
    product = _product(parts(site.node)[0], (a, b), (*strides[:2], strides[-1]))
    if product is None:
        raise UnsupportedError
    # As ONNX defines, C is not read if beta is 0; a fused node's third input is ``alpha``.
    beta, third = float(site.attr("beta", 1.0)), site.input(2)
    third = third if beta and not is_fused(site.node) else None
    if third is not None:
        if strides[2] is not None:
            raise UnsupportedError
        tall, wide = (1, 1, *third.dims)[-2:]
        product = product._replace(term=(wide if tall > 1 else 0, int(wide > 1)))
    operands: list[Word] = [Tensor(0), Tensor(1)]
    weights, held = site.weights(1), None
    if weights is not None and weights.ndim == 2 and product.columns[0] > 1:
        held = _padded_weights(weights, bool(site.attr("transB", 0)))
        (operands[1],) = held.arrays
        (inner, a_inner, *_), (width, *_, y_column) = product.inner, product.columns
        product = product._replace(
            inner=(inner, a_inner, held.arrays[0].shape[1], 0), columns=(width, 0, 1, y_column)
        )
    rows, columns = product.rows, product.columns
    # A single column has contiguous rows, as does a result that is transposed in memory.
    is_swapped = rows[3] == 1 and (columns[0] == 1 or columns[3] != 1)
    if is_swapped:
        # Transposing a result with few columns is faster than transposing a wider operand.
        if 1 < columns[0] < product.inner[0] and columns[2] == 1 != rows[1]:
            raise UnsupportedError
        product, operands = product.swapped, operands[::-1]
    elif columns[0] > 1 and columns[3] != 1:
        raise UnsupportedError
    words = [*operands, None if third is None else Tensor(2), site.result()]
    padded = held is not None and not is_swapped
    product = product._replace(ordered=site.ordered)
    call = _native_call(str_(a.dtype), words, product, padded, (alpha, beta))
    restrided = partial(_call, site, a, b, alpha)
    packed = {} if held is None else {1: held}
    return replace(call, reordered=packed, restrided=restrided, any_layout=True)


def _native_call(
    dtype: str,
    words: Sequence[Word],
    product: _Product,
    padded: bool = False,
    factors: tuple[float, float] = (1.0, 1.0),
    chosen: tuple[Word, int, int] = (None, 0, 0),
) -> NativeCall:
    """Return the call of a product's kernel, given the pointers to operands and result, and to
    matrix indices, with their number and stride."""
    lead, (rows, a_row, _, y_row), (columns, _, b_column, _), inner, term, ordered = product
    products = math.prod([size for size, *_ in lead])
    strips = math.ceil(columns * np.dtype(dtype).itemsize / _STRIP)
    macs = products * _macs(rows, inner[0], columns)
    groups = blocks_of_rows(rows, products * strips, _MOST_ROWS, 2 * macs)
    items = products * groups * strips
    (table,) = int64s([*chain(*lead)] if lead else None)
    return NativeCall(
        f"product_{dtype}",
        (
            *(*words, rows, inner[0], columns, a_row, inner[1], inner[2], b_column, *term, y_row),
            *(groups, strips, int(padded), table, len(lead), *factors, *chosen, int(ordered)),
        ),
        items=items,
        item_ns=part_ns(_work(dtype, macs, products).part(items)),
    )


@family("penstock.ChosenMatMul")
def chosen_product(site: Site) -> NativeCall | None:
    """ChosenMatMul, with indices of int64."""
    x, matrices, indices = (site.input(i) for i in range(3))
    if x is None or matrices is None or indices is None or 0 in (*x.dims, *matrices.dims):
        return None
    if str_(x.dtype) not in ("float32", "float64") or indices.dtype != INT64:
        return None
    transposed, count = site.attr("transposed", False), matrices.dims[0]
    columns, inner = matrices.dims[1:] if transposed else matrices.dims[:0:-1]
    rows, products = 1 if site.attr("columns", False) else x.dims[-2], indices.elements
    sharing = _sharing(x.dims[:-2], indices.dims)
    if sharing is None or not products:
        return None
    size = rows * columns
    product = _Product(
        [(products // sharing, rows * inner, 0, sharing * size), (sharing, 0, 0, size)],
        (rows, inner, 0, columns),
        (columns, 0, inner if transposed else 1, 1),
        (inner, 1, 1 if transposed else columns, 0),
    )
    words = Tensor(0), Tensor(1), None, site.result()
    chosen = Tensor(2), count, inner * columns
    product = product._replace(ordered=site.ordered)
    return replace(_native_call(str_(x.dtype), words, product, chosen=chosen), can_fail=True)


def _sharing(lead: tuple[int, ...], indices: tuple[int, ...]) -> int | None:
    """Return how many consecutive indices share one x, whose last leading dims may be 1, or
    None."""
    end = len(lead)
    while end and lead[end - 1] == 1:
        end -= 1
    return math.prod(indices[end:]) if lead[:end] == indices[:end] else None


def _padded_weights(weights: ConstantRef, transposed: bool) -> Reordered:
    """Return a matrix with rows zero-padded to a multiple of 64 bytes."""
    inner, columns = weights.shape[::-1] if transposed else weights.shape
    lanes = _UNIT // weights.dtype.itemsize
    type_ = TensorType(weights.dtype, (inner, math.ceil(columns / lanes) * lanes))
    back = partial(_unpadded, weights.shape, transposed)
    make = partial(_padded, type_, transposed)
    return reordered(("padded", transposed), weights, make, back, [type_])


def _padded(type_: TensorType, transposed: bool, weights: np.ndarray) -> tuple[np.ndarray]:
    matrix = weights.T if transposed else weights
    padded = np.zeros(type_.dims, type_.dtype)
    padded[:, : matrix.shape[1]] = matrix
    return (padded,)


def _unpadded(shape: tuple[int, ...], transposed: bool, padded: np.ndarray) -> np.ndarray:
    """Return the matrix without padding."""
    matrix = padded[:, : shape[-2] if transposed else shape[-1]]
    return np.ascontiguousarray(matrix.T if transposed else matrix).reshape(shape)


def product_workload(fused: Node) -> Workload | None:
    """Return the workload of a product, also of a fused node's first one; None without a kernel."""
    node, *others = parts(fused)
    if others and others[0].op.name not in _FACTORS:
        return None
    a, b = [None if v is None else v.type for v in node.inputs[:2]]
    if not isinstance(a, TensorType) or not isinstance(b, TensorType):
        return None
    if not (a.static and b.static) or str_(a.dtype) not in _DTYPES:
        return None
    product = _product(node, (a, b), [None] * 3)
    if product is None:
        return None
    lead, (rows, *_), (columns, *_), (inner, *_), *_ = product
    products = math.prod([size for size, *_ in lead])
    return _work(a.dtype, products * _macs(rows, inner, columns), products)
