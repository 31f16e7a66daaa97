"""Elements picked and written by index, and the most extreme along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.backends.native import by_memory, by_result, family, rows_ns, str_
from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor
from penstock.core.types import FLOAT32, INT64, TensorType
from penstock.host.threads import core_budget
from penstock.ops.common.dtypes import UINT8
from penstock.ops.common.shape_rules import normalize_axis

_MOST_TOP, _PART = 64, 48  # beyond, and in rows beyond a part of all elements, they are sorted
_PARTITION, _CALLS = 3, 22_000  # comparisons that an element and a node take by NumPy's partition
_TOP_COLUMNS = 16  # as in c/tables/index.c
_BLOCK_AXES = "gather_axis", "quantize_axis"


def _strides(dims: Sequence[int]) -> list[int]:
    return [math.prod(dims[i + 1 :]) for i in range(len(dims))]


def _suffix(site: Site, x: TensorType) -> str | None:
    """What kernels of the elements of ``x`` are called: by size, or by dtype for a reduction."""
    reduction = site.attr("reduction", "none")
    name = site.node.op.name.lower()
    if x.dtype is None or x.dtype.kind not in "biuf":
        return None
    if name.startswith("scatter"):
        name = f"{name}_{reduction}"
    suffix = f"{name}_{x.dtype if reduction != 'none' else x.dtype.itemsize}"
    return suffix if suffix in site.library.kernels else None


@family("GatherElements", "ScatterElements", work=by_memory)
def by_elements(site: Site) -> NativeCall | None:
    """GatherElements, ScatterElements."""
    x, indices = site.input(0), site.input(1)
    name = None if x is None else _suffix(site, x)
    if x is None or indices is None or name is None or len(x.dims) != len(indices.dims):
        return None
    axis = normalize_axis(site.attr("axis", 0), len(x.dims))
    pairs = list(zip(x.dims, indices.dims, strict=True))
    if str_(indices.dtype) not in ("int32", "int64") or not indices.elements or not x.dims[axis]:
        return None
    if any(of_index > of_data for i, (of_data, of_index) in enumerate(pairs) if i != axis):
        return None
    strides = _strides(x.dims)
    steps = [0 if i == axis else stride for i, stride in enumerate(strides)]
    *dims, length = indices.dims
    rows = math.prod(dims)
    scatters = name.startswith("scatter")
    if scatters and site.input(2) != TensorType(x.dtype, indices.dims):
        return None
    item_ns = rows_ns(20 * length, rows=0.2)
    if scatters:
        item_ns = rows_ns(x.nbytes, rows=0.2 * indices.elements)
    return NativeCall(
        name,
        (
            *(Tensor(0), Tensor(1), Tensor(2) if scatters else None, site.result()),
            *(np.array(dims, np.int64), np.array(steps[:-1], np.int64)),
            *(len(x.dims), length, steps[-1], x.dims[axis], strides[axis]),
            *(int(indices.dtype == INT64), rows, x.nbytes),
        ),
        # One item: indices may name an element twice, and the last of the updates has to win.
        items=1 if scatters else rows,
        item_ns=item_ns,
        inplace=(0,) if scatters else (),
        can_fail=True,
    )


@family("Gather", work=by_result)
def gather_call(site: Site) -> NativeCall | None:
    """Gather: slices along one axis."""
    x, indices, y = site.input(0), site.input(1), site.output()
    if x is None or indices is None or x.dtype is None or x.dtype.kind not in "biufcV":
        return None
    if str_(indices.dtype) not in ("int32", "int64") or not y.elements:
        return None
    axis = normalize_axis(site.attr("axis", 0), len(x.dims))
    nbytes = math.prod(x.dims[axis + 1 :]) * x.dtype.itemsize
    words = (x.dims[axis], indices.elements, nbytes, int(indices.dtype == INT64))
    return NativeCall(
        "gather",
        (Tensor(0), Tensor(1), site.result(), *words),
        items=math.prod(x.dims[:axis]) * indices.elements,
        item_ns=rows_ns(2 * nbytes, rows=0.3),
        can_fail=True,
    )


@family("com.microsoft.GatherBlockQuantized", work=by_result)
def gather_blocks(site: Site) -> NativeCall | None:
    """GatherBlockQuantized along the first axis, of bytes with blocks along the last."""
    codes, indices, scales, zeros = (site.input(i) for i in range(4))
    y, attrs = site.output(), site.node.attrs
    if codes is None or indices is None or scales is None or codes.dtype != UINT8:
        return None
    rank, bits = len(codes.dims), attrs.get("bits", 4)
    axes = [normalize_axis(attrs.get(name, i), rank) for i, name in enumerate(_BLOCK_AXES)]
    per_byte, width = 8 // bits, y.dims[-1] if y.dims else 0
    block = attrs.get("block_size", 128) or width
    if axes != [0, rank - 1] or rank < 2 or scales.dtype != FLOAT32 or not y.elements:
        return None
    if scales.dims != (*codes.dims[:-1], -(-width // block)) or block % per_byte:
        return None
    packed = (*codes.dims[:-1], -(-scales.dims[-1] // per_byte))
    if zeros is not None and (zeros.dtype != UINT8 or zeros.dims != packed):
        return None
    if str(indices.dtype) not in ("int32", "int64"):
        return None
    rows = math.prod(codes.dims[1:-1])
    return NativeCall(
        "gather_blocks",
        (
            *(Tensor(0), Tensor(1), Tensor(2), None if zeros is None else Tensor(3)),
            *(site.result(), codes.dims[0], rows, width, block, bits, int(indices.dtype == INT64)),
        ),
        items=indices.elements,
        item_ns=rows_ns(3 * rows * width, rows=rows),
    )


@family("GatherND", "ScatterND", work=by_memory)
def by_tuples(site: Site) -> NativeCall | None:
    """GatherND, ScatterND."""
    x, indices = site.input(0), site.input(1)
    name = None if x is None else _suffix(site, x)
    if x is None or indices is None or name is None or indices.dtype != INT64:
        return None
    batch, depth = site.attr("batch_dims", 0), indices.dims[-1]
    if x.dims[:batch] != indices.dims[:batch] or not indices.elements or not x.elements:
        return None
    scatters = name.startswith("scatter")
    shape = (*indices.dims[:-1], *x.dims[depth:])
    if scatters and site.input(2) != TensorType(x.dtype, shape):
        return None
    end = batch + depth
    dims, strides = x.dims[batch:end], _strides(x.dims)[batch:end]
    count, size = math.prod(indices.dims[:-1]), math.prod(x.dims[end:])
    item_ns = rows_ns(2.5 * size, rows=0.4)
    if scatters:
        item_ns = rows_ns(20 * count * size + x.nbytes, rows=0.4 * count)
    return NativeCall(
        name,
        (
            *(Tensor(0), Tensor(1), Tensor(2) if scatters else None, site.result()),
            *(np.array(dims, np.int64), np.array(strides, np.int64)),
            *(depth, size, math.prod(indices.dims[batch:-1]), math.prod(x.dims[batch:])),
            *(count, x.nbytes),
        ),
        # As above: several tuples may name one slice.
        items=1 if scatters else count,
        item_ns=item_ns,
        inplace=(0,) if scatters else (),
        can_fail=True,
    )


@family("TopK", work=by_memory)
def top_k_call(site: Site) -> NativeCall | None:
    """TopK with a constant K that is small, or of few elements."""
    x, count = site.input(0), site.constant(1)
    if x is None or count is None or f"topk_{x.dtype}" not in site.library.kernels:
        return None
    k, axis = int(count.item()), normalize_axis(site.attr("axis", -1), len(x.dims))
    length, inner = x.dims[axis], math.prod(x.dims[axis + 1 :])
    outputs = site.tensors[len(site.node.inputs) :]
    # Places are numbers of 32 bits while they are sorted.
    if not 0 < k <= length < 2**31 or len(outputs) < 2 or None in outputs:
        return None
    # A heap of k takes log k comparisons for what enters it, and vectors find that in a few steps;
    # sorting by digits takes the same for all, and so does NumPy's partition.
    comparisons = length / 8 + 4 * k * math.log2(k + 1) * (1 + math.log(length / k))
    few = max(_MOST_TOP, length // _PART) if inner == 1 else _MOST_TOP
    sorts = k > few and length > 2 * _MOST_TOP
    if x.dtype == FLOAT32 and 4 * k < length:
        # Threads share chains; NumPy has one.
        heaps = comparisons * math.ceil(x.elements / length / core_budget())
        if sorts if inner > 1 else heaps > _CALLS + _PARTITION * x.elements:
            return None
    elif sorts:
        return _sort(site, x, k, axis)
    columns = min(inner, _TOP_COLUMNS)
    return NativeCall(
        f"topk_{x.dtype}",
        (
            *(Tensor(0), site.result(0), site.result(1), None, length, inner, k),
            *(1 if site.attr("largest", 1) else -1, 0),
        ),
        items=math.prod(x.dims[:axis]) * math.ceil(inner / _TOP_COLUMNS),
        item_ns=rows_ns(20 * columns * comparisons, rows=columns),
    )


def _sort(site: Site, x: TensorType, k: int, axis: int) -> NativeCall:
    """TopK by sorting all elements along the axis."""
    length, inner = x.dims[axis], math.prod(x.dims[axis + 1 :])
    assert x.dtype is not None
    chains = math.prod(x.dims[:axis]) * inner
    return NativeCall(
        f"topk_{x.dtype}",
        (
            *(Tensor(0), site.result(0), site.result(1), WORKSPACE, length, inner, k),
            *(1 if site.attr("largest", 1) else -1, chains),
        ),
        items=1,
        item_ns=rows_ns(60 * chains * length * max(x.dtype.itemsize, 4)),
        workspace=length * 2 * (max(x.dtype.itemsize, 4) + 4),
    )
