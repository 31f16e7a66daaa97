"""Elements picked and written by index, and the most extreme along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.backends.native import by_memory, by_result, family, rows_ns, str_
from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, INT64, TensorType
from penstock.host.threads import core_budget
from penstock.ops.common.dtypes import UINT8, dtype_info
from penstock.ops.common.shape_rules import normalize_axis

_MOST_TOP, _PART = 64, 48  # beyond, and in rows beyond a part of all elements, they are sorted
_PARTITION, _CALLS = 3, 22_000  # comparisons that an element and a node take by NumPy's partition
_TOP_COLUMNS = 16  # as in c/tables/index.c
_BLOCK_AXES = "gather_axis", "quantize_axis"
_BUCKETED, _FEW_BOUNDS = 1024, 24  # as in c/tables/index.c


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


# What becomes of indices out of range, as in c/tables/index.c.
_FROM_END, _EXACT, _FROM_ZERO, _INSIDE, _NEAREST = range(5)
_REDUCTIONS = {"add": "add", "multiply": "mul", "minimum": "min", "maximum": "max", "": "none"}
# Sums of small integers wrap, and those of truth values are true if one is.
_SUMS = {
    **dict.fromkeys(("int8", "uint8"), "add_uint8"),
    **dict.fromkeys(("int16", "uint16"), "add_uint16"),
    "bool": "max_uint8",
}
_IDENTITIES = {
    "sum": ("add", lambda dtype: 0),
    "prod": ("mul", lambda dtype: 1),
    "max": ("max", lambda dtype: dtype_info(dtype).min),
    "min": ("min", lambda dtype: dtype_info(dtype).max),
}


class _Slices(NamedTuple):
    """Slices of ``data`` at tuples of indices along some ``axes``: behind ``batch`` axes of both.
    ``inputs`` are the data, indices and updates; of no data, ``fill`` is an element of it.
    ``depth``: the length of a tuple; ``mode``: what becomes of indices out of range."""

    name: str
    data: TensorType
    axes: Sequence[int]
    inputs: tuple[int | None, int, int | None]
    batch: int = 0
    fill: Tensor | np.ndarray | None = None
    mode: int = _FROM_END


def _by_slices(site: Site, slices: _Slices) -> NativeCall | None:
    """The call for these slices; None if shapes do not fit."""
    data, axes, batch = slices.data, slices.axes, slices.batch
    of_data, of_indices, of_updates = slices.inputs
    indices, updates = site.input(of_indices), None
    if indices is None or str_(indices.dtype) not in ("int32", "int64") or not data.elements:
        return None
    depth, end, scatters = len(axes), batch + len(axes), of_updates is not None
    size, count = math.prod(data.dims[end:]), indices.elements // max(depth, 1)
    if not indices.elements or f"{slices.name}" not in site.library.kernels:
        return None
    if of_updates is not None:
        updates = site.input(of_updates)
        if updates is None or updates.dtype != data.dtype or updates.elements != count * size:
            return None
    strides = _strides(data.dims)
    item_ns = rows_ns(2.5 * size, rows=0.4)
    if scatters:
        item_ns = rows_ns(20 * count * size + data.nbytes, rows=0.4 * count)
    return NativeCall(
        slices.name,
        (
            None if of_data is None else Tensor(of_data),
            *(Tensor(of_indices), None if of_updates is None else Tensor(of_updates)),
            *(site.result(), np.array([data.dims[i] for i in axes], np.int64)),
            *(np.array([strides[i] for i in axes], np.int64), depth, size),
            *(count // math.prod(data.dims[:batch]), math.prod(data.dims[batch:])),
            *(count, data.nbytes, slices.fill, int(indices.dtype == INT64), slices.mode),
        ),
        # As above: several tuples may name one slice.
        items=1 if scatters else count,
        item_ns=item_ns,
        inplace=(0,) if scatters and of_data == 0 else (),
        can_fail=slices.mode not in (_INSIDE, _NEAREST),
    )


@family("GatherND", "ScatterND", work=by_memory)
def by_tuples(site: Site) -> NativeCall | None:
    """GatherND, ScatterND."""
    x, indices = site.input(0), site.input(1)
    name = None if x is None else _suffix(site, x)
    if x is None or indices is None or name is None or not indices.dims:
        return None
    batch, depth = site.attr("batch_dims", 0), indices.dims[-1]
    if x.dims[:batch] != indices.dims[:batch] or not depth:
        return None
    inputs = 0, 1, 2 if name.startswith("scatter") else None
    shape = (*indices.dims[:-1], *x.dims[depth:])
    if inputs[2] and site.input(2) != TensorType(x.dtype, shape):
        return None
    return _by_slices(site, _Slices(name, x, range(batch, batch + depth), inputs, batch))


@family("tensorflow.ScatterNd", work=by_result)
def scatter_into_zeros(site: Site) -> NativeCall | None:
    """ScatterNd of constant dims."""
    indices, updates, y = site.input(0), site.input(1), site.output()
    if indices is None or updates is None or y.dtype is None or not indices.dims:
        return None
    depth = indices.dims[-1]
    if updates.dims != (*indices.dims[:-1], *y.dims[depth:]) or not 0 < depth <= len(y.dims):
        return None
    name = f"scatternd_{_SUMS.get(str_(y.dtype), f'add_{y.dtype}')}"
    fill = np.zeros(1, y.dtype)
    return _by_slices(
        site, _Slices(name, y, range(depth), (None, 0, 1), fill=fill, mode=_EXACT)
    )


@family("tflite.SparseToDense", work=by_result)
def scatter_into_default(site: Site) -> NativeCall | None:
    """SparseToDense of constant dims, with a value for each place."""
    indices, values, default, y = site.input(0), site.input(2), site.input(3), site.output()
    if indices is None or values is None or default is None or site.attr("sorted", False):
        return None
    depth = indices.dims[-1] if len(indices.dims) == 2 else 1
    if not indices.dims or depth != len(y.dims) or values.dims != indices.dims[:1]:
        return None
    if default.dtype != y.dtype or default.elements != 1 or y.dtype is None:
        return None
    name = f"scatternd_none_{y.dtype.itemsize}"
    slices = _Slices(name, y, range(depth), (None, 0, 2), fill=Tensor(3), mode=_EXACT)
    return _by_slices(site, slices) if y.dtype.kind in "biuf" else None


@family("tflite.Segment", work=by_memory)
def segments(site: Site) -> NativeCall | None:
    """Segment with a constant count."""
    x, places, y = site.input(0), site.input(1), site.output()
    reduction, identity = _IDENTITIES[site.node.attrs["reduction"]]
    if x is None or places is None or x.dims[: len(places.dims)] != places.dims or not y.dtype:
        return None
    name, fill = f"scatternd_{reduction}_{y.dtype}", np.full(1, identity(y.dtype), y.dtype)
    return _by_slices(
        site, _Slices(name, y, (0,), (None, 1, 0), fill=fill, mode=_FROM_ZERO)
    )


def _leading_axes(
    site: Site, window_dims: Sequence[int], axes: Sequence[int], dropped: Sequence[int]
) -> bool:
    """Whether each vector of indices leads to whole slices behind the first axes."""
    x, indices = site.input(0), site.input(1)
    if x is None or indices is None or sorted(axes) != [*dropped] != [*range(len(axes))]:
        return False
    at, rank = site.node.attrs["index_vector_dim"], len(indices.dims)
    depth = indices.dims[-1] if at == rank - 1 else 1 if at == rank else 0
    lead = rank - (at < rank)
    kept = len(x.dims) - len(axes)
    return depth == len(axes) > 0 and [*window_dims] == [*range(lead, lead + kept)]


@family("tflite.SliceGather", work=by_result)
def gather_slices(site: Site) -> NativeCall | None:
    """SliceGather of whole slices behind the first axes."""
    x, attrs = site.input(0), site.node.attrs
    axes = attrs["start_index_map"]
    if x is None or x.dtype is None or x.dtype.kind not in "biuf":
        return None
    if not _leading_axes(site, attrs["offset_dims"], axes, attrs["collapsed_slice_dims"]):
        return None
    if [*attrs["slice_sizes"]] != [*[1] * len(axes), *x.dims[len(axes) :]]:
        return None
    name = f"gathernd_{x.dtype.itemsize}"
    return _by_slices(site, _Slices(name, x, axes, (0, 1, None), mode=_NEAREST))


@family("tflite.SliceScatter", work=by_memory)
def scatter_slices(site: Site) -> NativeCall | None:
    """SliceScatter of whole slices behind the first axes."""
    x, updates, attrs = site.input(0), site.input(2), site.node.attrs
    axes, reduction = attrs["scatter_dims_to_operand_dims"], _REDUCTIONS.get(attrs["reduction"])
    if x is None or updates is None or x.dtype is None or reduction is None:
        return None
    if not _leading_axes(site, attrs["update_window_dims"], axes, attrs["inserted_window_dims"]):
        return None
    kept = len(x.dims) - len(axes)
    if updates.dims[len(updates.dims) - kept :] != x.dims[len(axes) :] or x.dtype.kind not in "biuf":
        return None
    suffix = x.dtype.itemsize if reduction == "none" else x.dtype
    name = f"scatternd_{reduction}_{suffix}"
    return _by_slices(site, _Slices(name, x, axes, (0, 1, 2), mode=_INSIDE))


@family("tflite.DynamicUpdateSlice", work=by_memory)
def update_slice(site: Site) -> NativeCall | None:
    """DynamicUpdateSlice."""
    x, part, place = (site.input(i) for i in range(3))
    if x is None or part is None or place is None or x.dtype is None or x.dtype.kind not in "biufc":
        return None
    pairs = zip(x.dims, part.dims, strict=False)
    if len(x.dims) != len(part.dims) or place.dims != (len(x.dims),) or not 0 < len(x.dims) <= 64:
        return None
    if str_(place.dtype) not in ("int32", "int64") or any(own > dim for dim, own in pairs):
        return None
    dims = np.array([x.dims, part.dims], np.int64)
    sizes = len(x.dims), x.dtype.itemsize, x.nbytes, int(place.dtype == INT64)
    return NativeCall(
        "update_slice",
        (Tensor(0), Tensor(1), Tensor(2), site.result(), dims, *sizes),
        items=1,
        item_ns=rows_ns(x.nbytes + part.elements, rows=1),
        inplace=(0,),
    )


@family("tflite.Bucketize", work=by_memory)
def bucketize(site: Site) -> NativeCall | None:
    """Bucketize."""
    x = site.input(0)
    if x is None or f"buckets_{x.dtype}" not in site.library.kernels:
        return None
    bounds = np.array(site.node.attrs["boundaries"], np.result_type(x.dtype, "f"))
    steps = len(bounds) if len(bounds) <= _FEW_BOUNDS else 20 * math.log2(len(bounds))
    return NativeCall(
        f"buckets_{x.dtype}",
        (Tensor(0), site.result(), bounds, len(bounds), x.elements),
        items=math.ceil(x.elements / _BUCKETED),
        item_ns=rows_ns(2 * _BUCKETED * steps, rows=1),
    )


@family("tflite.EmbeddingLookupSparse", work=by_result)
def embedding_sums(site: Site) -> NativeCall | None:
    """EmbeddingLookupSparse of constant places."""
    ids, weights, table, y = site.input(0), site.input(3), site.input(4), site.output()
    indices, shape = site.constant(1), site.constant(2)
    if ids is None or weights is None or table is None or indices is None or shape is None:
        return None
    dims, places = tuple(shape.reshape(-1)[:-1].tolist()), indices[..., :-1]
    plain = {table.dtype, weights.dtype, y.dtype} == {FLOAT32} and y.elements > 0
    if not plain or str_(ids.dtype) not in ("int32", "int64") or not dims or indices.ndim != 2:
        return None
    if ids.dims != weights.dims or ids.dims != (len(places),) or places.shape[1] != len(dims):
        return None
    if ((places < 0) | (places >= dims)).any():
        return None
    rows = np.ravel_multi_index(tuple(places.T), dims)
    order = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[order], np.arange(math.prod(dims) + 1))
    width = table.elements // max(table.dims[0], 1)
    numbers = table.dims[0], width, site.node.attrs["combiner"], int(ids.dtype == INT64)
    return NativeCall(
        "embedding_sums",
        (Tensor(0), Tensor(3), Tensor(4), site.result(), order, starts, *numbers),
        items=math.prod(dims),
        item_ns=rows_ns(4 * width * (1 + ids.elements / math.prod(dims)), rows=1),
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
