"""Products of small matrices, of matrices of integers, and of those that indices choose."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from penstock.backends.native import family, part_ns
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.records import NamedTuple
from penstock.core.types import INT64, TensorType
from penstock.ir.graph import Node
from penstock.ops.common.constant_cache import reordered
from penstock.ops.work_estimate import Workload

_ROWS, _MOST_TAIL, _PADDED_BYTES, _DOT_COLUMNS = 4, 1024, 64, 64  # as in c/matmul.c

_DTYPES = ("float32", "float64", "int32", "int64")
# Of all products in float32, beyond which libraries are faster, rows counting at least as four and
# columns as 16; and of one in float64, with elements of its right matrix that stay in a cache.
_MOST_MACS, _MOST_DOUBLE_MACS, _MOST_DOUBLES = 400_000, 32_000_000, 2**17
# Elements of a matrix of integers: a block of rows reads larger ones from memory for seconds.
_MOST_ELEMENTS = 50_000_000


def _macs(batches: int, rows: int, inner: int, columns: int) -> int:
    """About the multiplications that a product takes the time of."""
    return batches * (rows + 1) * inner * math.ceil(columns / 16) * 16


def _work(dtype: object, macs: int) -> Workload:
    return Workload(f"product {dtype}", flops=2 * macs)


class _Dims(NamedTuple):
    """Products of [rows, inner] with [inner, columns]; several if there are as many right
    matrices."""

    batches: int
    rows: int
    inner: int
    columns: int


def _dims(a: TensorType, b: TensorType, transposed: bool) -> _Dims | None:
    """None unless there is one right matrix, or one for each left one."""
    if len(b.dims) < 2 or not a.dims or 0 in (*a.dims, *b.dims):
        return None
    inner, columns = b.dims[::-1][:2] if transposed else b.dims[-2:]
    batches = math.prod(b.dims[:-2])
    if batches > 1 and (a.dims[:-2] != b.dims[:-2] or len(a.dims) != len(b.dims)):
        return None
    return _Dims(batches, a.elements // inner // batches, inner, columns)


def product(site: Site) -> NativeCall | None:
    """MatMul and Gemm of numbers whose product is small, and of integers."""
    a, b, c = (site.input(i) for i in range(3))
    if a is None or b is None or str(a.dtype) not in _DTYPES or a.dtype != b.dtype:
        return None
    left, right = site.attr("transA", 0), site.attr("transB", 0)
    factors = float(site.attr("alpha", 1.0)), float(site.attr("beta", 1.0))
    dims = _dims(a, b, right)
    strides = (0, 0) if c is None or dims is None else _strides_of(c, dims)
    if dims is None or strides is None:
        return None
    if not _is_small(str(a.dtype), dims, factors):
        return None
    batches, rows, inner, columns = dims
    weights, held = site.weights(1), None
    if weights is not None and batches == 1:
        back = partial(_unpadded, weights.shape, right)
        lanes = _PADDED_BYTES // weights.dtype.itemsize
        padded = TensorType(weights.dtype, (inner, math.ceil(columns / lanes) * lanes))
        held = reordered(("padded", right), weights, lambda w: (_padded(w, right),), back, [padded])
    elif right or (inner > _MOST_TAIL and columns % 16):
        return None
    return NativeCall(
        f"product_{a.dtype}",
        (
            *(Tensor(0), Tensor(1) if held is None else held.arrays[0]),
            *(None if c is None else Tensor(2), site.result(), rows, inner, columns),
            *((1, rows) if left else (inner, 1)),
            *(rows * inner, columns if held is None else held.arrays[0].shape[1]),
            *(inner * columns if batches > 1 else 0, *strides, int(held is not None), *factors),
            *(None, 0, 1),
        ),
        items=batches * math.ceil(rows / _ROWS),
        item_ns=part_ns(_work(a.dtype, _macs(1, _ROWS, inner, columns))),
        reordered={} if held is None else {1: held},
    )


@family("penstock.ChosenMatMul")
def chosen_product(site: Site) -> NativeCall | None:
    """ChosenMatMul, with indices of int64."""
    x, matrices, indices = (site.input(i) for i in range(3))
    if x is None or matrices is None or indices is None or 0 in (*x.dims, *matrices.dims):
        return None
    if str(x.dtype) not in ("float32", "float64") or indices.dtype != INT64:
        return None
    transposed, count = site.attr("transposed", False), matrices.dims[0]
    columns, inner = matrices.dims[1:] if transposed else matrices.dims[:0:-1]
    rows, batches = 1 if site.attr("columns", False) else x.dims[-2], indices.elements
    sharing = _sharing(x.dims[:-2], indices.dims)
    if sharing is None:
        return None
    operands, sizes = (Tensor(0), Tensor(1)), (rows, inner, columns)
    if transposed:
        words = *sizes, inner, rows * inner, inner, inner * columns
        return NativeCall(
            f"dots_{x.dtype}",
            (*operands, site.result(), *words, Tensor(2), count, sharing),
            items=batches * math.ceil(columns / _DOT_COLUMNS),
            item_ns=part_ns(_work(x.dtype, rows * inner * min(columns, _DOT_COLUMNS))),
            can_fail=True,
        )
    if inner > _MOST_TAIL and columns % 16:
        return None
    strides = inner, 1, rows * inner, columns, inner * columns
    ends = 0, 0, 0, 1.0, 0.0  # without a third operand, padding and factors
    return NativeCall(
        f"product_{x.dtype}",
        (*operands, None, site.result(), *sizes, *strides, *ends, Tensor(2), count, sharing),
        items=batches * math.ceil(rows / _ROWS),
        item_ns=part_ns(_work(x.dtype, _macs(1, rows, inner, columns))),
        can_fail=True,
    )


def _sharing(lead: tuple[int, ...], indices: tuple[int, ...]) -> int | None:
    """How many indices in a row are of one x, whose last leading dims may be 1; None for others."""
    end = len(lead)
    while end and lead[end - 1] == 1:
        end -= 1
    return math.prod(indices[end:]) if lead[:end] == indices[:end] else None


def _is_small(dtype: str, dims: _Dims, factors: tuple[float, float]) -> bool:
    """Whether compiled code is faster than libraries, or can be stopped in time."""
    right = dims.inner * dims.columns
    if dtype.startswith("int"):
        return factors == (1, 1) and right <= _MOST_ELEMENTS
    if dtype == "float64":
        return _macs(*dims._replace(batches=1)) <= _MOST_DOUBLE_MACS and right <= _MOST_DOUBLES
    return _macs(*dims) <= _MOST_MACS


def _padded(weights: np.ndarray, transposed: bool) -> np.ndarray:
    """A matrix whose rows go on with zeros, to a multiple of 64 bytes."""
    matrix: np.ndarray = weights.reshape(weights.shape[-2:])
    if transposed:
        matrix = matrix.T
    rows, columns = matrix.shape
    lanes = _PADDED_BYTES // matrix.itemsize
    padded = np.zeros((rows, math.ceil(columns / lanes) * lanes), matrix.dtype)
    padded[:, :columns] = matrix
    return padded


def _unpadded(shape: tuple[int, ...], transposed: bool, padded: np.ndarray) -> np.ndarray:
    """The matrix that was padded."""
    matrix = padded[:, : shape[-2] if transposed else shape[-1]]
    return np.ascontiguousarray(matrix.T if transposed else matrix).reshape(shape)


def _strides_of(c: TensorType, dims: _Dims) -> tuple[int, int] | None:
    """The strides of a term that broadcasts to [rows, columns]; None for other terms."""
    height, width = (1, 1, *c.dims)[-2:]
    if c.elements != height * width or dims.batches > 1:
        return None
    return width if height > 1 else 0, int(width > 1)


def product_workload(node: Node) -> Workload | None:
    """The work of a product; None where there is no kernel."""
    a, b = (None if v is None else v.type for v in node.inputs[:2])
    if (
        not isinstance(a, TensorType)
        or not isinstance(b, TensorType)
        or not (a.static and b.static)
    ):
        return None
    dims = _dims(a, b, node.attrs.get("transB", 0))
    return None if dims is None or str(a.dtype) not in _DTYPES else _work(a.dtype, _macs(*dims))
