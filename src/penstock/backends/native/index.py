"""Gather and scatter kernels, and TopK."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import ge

import numpy as np

from penstock.backends.native import by_memory, by_result, family, rows_ns, str_
from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor
from penstock.core.records import NamedTuple
from penstock.core.traced import int64s
from penstock.core.types import FLOAT32, INT64, TensorType
from penstock.host.threads import core_budget
from penstock.ops.common.dtypes import UINT8
from penstock.ops.common.shape_rules import normalize_axis

_MOST_TOP, _PART = 64, 48  # larger K, and K beyond a fraction of the row, are sorted
_PARTITION, _CALLS = 3, 22_000  # comparisons that an element and a node take by NumPy's partition
_TOP_COLUMNS, _MOST_SELECTED = 16, 1024  # as in c/tables/index.c
_BLOCK_AXES = "gather_axis", "quantize_axis"
_BUCKETED, _FEW_BOUNDS, _MOST_DIMS = 1024, 24, 64  # as in c/tables/index.c


def _strides(dims: Sequence[int]) -> list[int]:
    return [math.prod(dims[i + 1 :]) for i in range(len(dims))]


def _suffix(site: Site, x: TensorType) -> str | None:
    """Return the suffix of kernels for elements of ``x``: by size, or by dtype for a reduction."""
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
    """GatherElements and ScatterElements."""
    x, indices = site.tensor(0), site.tensor(1)
    name = _suffix(site, x)
    if name is None or len(x.dims) != len(indices.dims):
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
            *int64s(dims, steps[:-1]),
            *(len(x.dims), length, steps[-1], x.dims[axis], strides[axis]),
            *(int(indices.dtype == INT64), rows, x.nbytes),
        ),
        # A scatter is one item: indices may repeat, and the last update must win.
        items=1 if scatters else rows,
        item_ns=item_ns,
        inplace=(0,) if scatters else (),
        can_fail=True,
    )


@family("Gather", work=by_result)
def gather_call(site: Site) -> NativeCall | None:
    """Gather: slices along one axis."""
    x, indices, y = site.tensor(0), site.tensor(1), site.output()
    if x.dtype is None or x.dtype.kind not in "biufcV":
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
    """GatherBlockQuantized along axis 0, of bytes with blocks along the last axis."""
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


# Modes for indices out of range, as in c/tables/index.c.
_FROM_END, _EXACT, _FROM_ZERO, _INSIDE, _NEAREST = range(5)
_NAMES = "multiply=mul prod=mul minimum=min maximum=max sum=add =none"
_REDUCTIONS = dict([pair.split("=") for pair in _NAMES.split()])
# Sums of small integers wrap, and sums of bools are logical or.
_SUMS = {
    **dict.fromkeys(("add_int8", "add_uint8"), "add_uint8"),
    **dict.fromkeys(("add_int16", "add_uint16"), "add_uint16"),
    "add_bool": "max_uint8",
}
_GATHER_DIMS = "offset_dims", "collapsed_slice_dims", "start_index_map"
_SCATTER_DIMS = "update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims"


class _Slices(NamedTuple):
    """Slices of ``data`` at index tuples along ``axes``, after ``batch`` axes of both. ``inputs``:
    the data, indices and updates; ``fill``: a constant instead of data."""

    name: str
    data: TensorType
    axes: Sequence[int]
    inputs: tuple[int | None, int, int | None]
    mode: int
    batch: int = 0
    fill: Tensor | np.ndarray | None = None


def _by_slices(site: Site, slices: _Slices) -> NativeCall | None:
    name, data, axes, (source, at, updates), mode, batch, fill = slices
    indices, depth, end = site.tensor(at), len(axes), batch + len(axes)
    if str_(indices.dtype) not in ("int32", "int64") or not data.elements:
        return None
    if not indices.elements or name not in site.library.kernels:
        return None
    strides, size = _strides(data.dims), math.prod(data.dims[end:])
    count = indices.elements // depth
    places = int64s(*[[own[i] for i in axes] for own in (data.dims, strides)])
    scatters, item_ns = updates is not None, rows_ns(2.5 * size, rows=0.4)
    if scatters:
        item_ns = rows_ns(20 * count * size + data.nbytes, rows=0.4 * count)
    return NativeCall(
        name,
        (
            *(None if source is None else Tensor(source), Tensor(at)),
            *(None if updates is None else Tensor(updates), site.result()),
            *places,
            *(depth, size, count // math.prod(data.dims[:batch]), math.prod(data.dims[batch:])),
            *(count, data.nbytes),
            fill,
            *(int(indices.dtype == INT64), mode),
        ),
        # As above: several tuples may address one slice.
        items=1 if scatters else count,
        item_ns=item_ns,
        inplace=(0,) if scatters and source == 0 else (),
        can_fail=mode not in (_INSIDE, _NEAREST),
    )


@family("GatherND", "ScatterND", work=by_memory)
def by_tuples(site: Site) -> NativeCall | None:
    """GatherND and ScatterND."""
    x, indices = site.tensor(0), site.tensor(1)
    name = _suffix(site, x)
    if name is None or not indices.dims or not indices.dims[-1]:
        return None
    batch, depth = site.attr("batch_dims", 0), indices.dims[-1]
    shape = (*indices.dims[:-1], *x.dims[depth:])
    updates = 2 if name.startswith("scatter") else None
    if x.dims[:batch] != indices.dims[:batch] or batch + depth > len(x.dims):
        return None
    if updates and site.input(updates) != TensorType(x.dtype, shape):
        return None
    axes = range(batch, batch + depth)
    return _by_slices(site, _Slices(name, x, axes, (0, 1, updates), _FROM_END, batch))


@family("tensorflow.ScatterNd", "tflite.Segment", "tflite.SparseToDense", work=by_result)
def into_filled(site: Site) -> NativeCall | None:
    """ScatterNd, SparseToDense and Segment with constant dims, and one update per index."""
    op, y, dtype = site.node.op.name, site.output(), site.output().dtype
    at, of_updates, mode = 0, len(site.node.inputs) // 2, _EXACT  # the second, or behind the dims
    if op == "Segment":
        at, of_updates, mode = 1, 0, _FROM_ZERO
    indices, updates = site.tensor(at), site.tensor(of_updates)
    if updates.dtype != dtype:
        return None
    if dtype is None or dtype.kind not in "biuf":
        return None
    lead, default = indices.dims, site.input(3)
    if op == "ScatterNd" or (op == "SparseToDense" and len(lead) == 2):
        lead = lead[:-1]
    depth = math.prod(indices.dims[len(lead) :])
    if updates.dims != (*lead, *y.dims[depth:]) or not 0 < depth <= len(y.dims):
        return None
    reduction = _REDUCTIONS.get(name := site.attr("reduction", "sum"), name)
    kernel = f"{reduction}_{dtype}"
    fill: Tensor | np.ndarray = Tensor(3)
    if default is not None:
        kernel = f"none_{dtype.itemsize}"
        plain = default.dtype == dtype and default.elements == 1 and depth == len(y.dims)
        if not plain or site.attr("sorted", False):
            return None
    elif f"scatternd_{_SUMS.get(kernel, kernel)}" in site.library.kernels:
        from penstock.ops.tflite.arrays import IDENTITIES  # of segments, which few models have

        fill = np.full(1, IDENTITIES[name](dtype), dtype)
    kernel = f"scatternd_{_SUMS.get(kernel, kernel)}"
    inputs = None, at, of_updates
    return _by_slices(site, _Slices(kernel, y, range(depth), inputs, mode, fill=fill))


@family("tflite.SliceGather", "tflite.SliceScatter", work=by_memory)
def whole_slices(site: Site) -> NativeCall | None:
    """SliceGather and SliceScatter of whole slices along the leading axes."""
    x, indices, attrs = site.tensor(0), site.tensor(1), site.node.attrs
    gathers = len(site.node.inputs) == 2
    moved = site.output() if gathers else site.input(2)
    if moved is None:
        return None
    if x.dtype is None or x.dtype.kind not in "biuf" or x.dtype != moved.dtype:
        return None
    rank, at = len(indices.dims), attrs["index_vector_dim"]
    names = _GATHER_DIMS if gathers else _SCATTER_DIMS
    windows, dropped, axes = ([*attrs[name]] for name in names)
    # Index vectors may have length 1.
    depth = indices.dims[at] if at == rank - 1 else int(at == rank)
    lead, first = rank - (at < rank), [*range(len(axes))]
    if depth != len(axes) or not depth or not sorted(axes) == dropped == first:
        return None
    batch = tuple([dim for i, dim in enumerate(indices.dims) if i != at])
    whole = moved.dims == (*batch, *x.dims[depth:]) and windows == [*range(lead, len(moved.dims))]
    if not whole or (gathers and {*attrs["slice_sizes"][:depth]} != {1}):
        return None
    if gathers:
        slices = _Slices(f"gathernd_{x.dtype.itemsize}", x, axes, (0, 1, None), _NEAREST)
        return _by_slices(site, slices)
    reduction = _REDUCTIONS.get(attrs["reduction"], attrs["reduction"])
    suffix = x.dtype.itemsize if reduction == "none" else x.dtype
    slices = _Slices(f"scatternd_{reduction}_{suffix}", x, axes, (0, 1, 2), _INSIDE)
    return _by_slices(site, slices)


@family("tflite.DynamicUpdateSlice", work=by_memory)
def update_slice(site: Site) -> NativeCall | None:
    """DynamicUpdateSlice."""
    x, part, place = (site.input(i) for i in range(3))
    if x is None or part is None or place is None or x.dtype is None or x.dtype.kind not in "biufc":
        return None
    rank, fits = len(x.dims), all(map(ge, x.dims, part.dims))
    if not fits or place.dims != (rank,) or len(part.dims) != rank or not 0 < rank <= _MOST_DIMS:
        return None
    if str_(place.dtype) not in ("int32", "int64") or part.dtype != x.dtype:
        return None
    (dims,) = int64s((*x.dims, *part.dims))
    words = (dims, rank, x.dtype.itemsize, x.nbytes, int(place.dtype == INT64))
    arrays, item_ns = (Tensor(0), Tensor(1), Tensor(2), site.result()), rows_ns(2 * x.nbytes)
    return NativeCall("update_slice", (*arrays, *words), 1, item_ns, inplace=(0,))


@family("tflite.Bucketize", work=by_memory)
def bucketize(site: Site) -> NativeCall | None:
    """Bucketize."""
    x = site.tensor(0)
    if f"buckets_{x.dtype}" not in site.library.kernels:
        return None
    bounds = np.array(site.node.attrs["boundaries"], np.result_type(x.dtype, "f"))
    steps = len(bounds) if len(bounds) <= _FEW_BOUNDS else 20 * math.log2(len(bounds))
    words = (Tensor(0), site.result(), bounds, len(bounds), x.elements)
    items, item_ns = math.ceil(x.elements / _BUCKETED), rows_ns(2 * _BUCKETED * steps, rows=1)
    return NativeCall(f"buckets_{x.dtype}", words, items, item_ns)


@family("TopK", work=by_memory)
def top_k_call(site: Site) -> NativeCall | None:
    """TopK with a small constant K, or over few elements."""
    x, count = site.tensor(0), site.constant(1)
    if x.dtype is None or count is None:
        return None
    if f"topk_{x.dtype}" not in site.library.kernels:
        return None
    k, axis = int(count.item()), normalize_axis(site.attr("axis", -1), len(x.dims))
    length, inner = x.dims[axis], math.prod(x.dims[axis + 1 :])
    outputs = site.tensors[len(site.node.inputs) :]
    # Positions are 32-bit integers during sorting.
    if not 0 < k <= length < 2**31 or len(outputs) < 2 or None in outputs:
        return None
    # A heap of k takes log k comparisons per inserted element, found by vector comparisons, as many
    # of them at once take fewer; radix sort and NumPy's partition take the same time for every k.
    at_once = inner == 1 and x.dtype.itemsize <= 4 and _MOST_TOP < k <= _MOST_SELECTED
    inserted = (2.7 if at_once else 4) * k * math.log2(k + 1)
    comparisons = length / 8 + inserted * (1 + math.log(length / k))
    few = max(_MOST_TOP, length // _PART)
    sorts = k > few and length > 2 * _MOST_TOP
    if x.dtype == FLOAT32 and 4 * k < length:
        # Threads divide rows; NumPy uses a single thread.
        heaps = comparisons * math.ceil(x.elements / length / core_budget())
        if heaps > _CALLS + _PARTITION * x.elements:
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
    """Return TopK by a sort of all elements along the axis."""
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
