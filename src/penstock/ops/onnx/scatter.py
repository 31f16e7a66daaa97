"""ScatterElements, ScatterND and TensorScatter.

They copy the first input and write to the copy; if the output reuses the memory of the first input,
nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import check_shape, choice, normalize_axis, same_dtype, tensor
from penstock.ops.onnx import index as indexing
from penstock.ops.registry import operator

_LITTLE = 16 * 1024  # bytes
_ACCUMULATE = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _accumulation(attrs: Attrs) -> np.ufunc | None:
    return _ACCUMULATE.get(choice(attrs, "reduction", "none", ("none", *_ACCUMULATE)))


def _updating(place: Callable[..., None]) -> Kernel:
    """A kernel that copies input 0 and calls ``place(copy, *other inputs)``."""

    def run(x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        out = x.copy()
        place(out, *rest)
        return out

    def into(x: np.ndarray, *rest: np.ndarray) -> None:
        out = rest[-1]
        if not _same_memory(x, out):
            out[...] = x
        place(out, *rest[:-1])

    return Kernel(run, into, inplace=(0,))


def _same_memory(x: np.ndarray, out: np.ndarray) -> bool:
    """Whether ``out`` and ``x`` are the same memory, as they may be in different array objects.
    Small arrays count as different, since copying them costs less than the test."""
    return out is x or (out.nbytes > _LITTLE and out.ctypes.data == x.ctypes.data)


def _accumulate(
    ufunc: np.ufunc, out: np.ndarray, index: Sequence[np.ndarray], updates: np.ndarray
) -> None:
    """``out[index] = ufunc(out[index], updates)``, applied once per occurrence of an index.

    ``index`` has one array for each leading axis. ``ufunc.at`` is several times faster for flat
    indices, so indices are flattened where possible.
    """
    # Reshaping a non-contiguous array would copy it, and the updates would be lost.
    if not out.flags.c_contiguous:
        ufunc.at(out, tuple(index), updates)
        return
    depth = len(index)
    dims, block = out.shape[:depth], math.prod(out.shape[depth:])
    try:
        # Negative indices count from the end of an axis, which ravel_multi_index does not support.
        positions = np.ravel_multi_index(
            [np.where(i < 0, i + n, i) for i, n in zip(index, dims, strict=True)], dims
        )
    except ValueError as error:
        raise ShapeError(
            f"an index is out of range for data of shape {out.shape}: {error}"
        ) from None
    if depth < out.ndim:
        positions = positions[..., None] * block + np.arange(block)
    ufunc.at(out.reshape(-1), positions.reshape(-1), updates.reshape(-1))


_MOST_WRITTEN = 2**20
"""elements written per call, which takes NumPy up to 0.1 s"""


def _write(
    ufunc: np.ufunc | None, out: np.ndarray, index: Sequence[np.ndarray], updates: np.ndarray
) -> None:
    rows = len(updates) if updates.size > _MOST_WRITTEN and index[0].ndim else 1
    if rows > 1:
        step, rank = max(rows * _MOST_WRITTEN // updates.size, 1), max(i.ndim for i in index)
        for begin in range(0, rows, step):
            checkpoint()
            part = slice(begin, begin + step)
            # Arrays of an open grid broadcast along the rows.
            places = [i[part] if i.ndim == rank else i for i in index]
            _write_at_once(ufunc, out, places, updates[part])
    else:
        _write_at_once(ufunc, out, index, updates)


def _write_at_once(
    ufunc: np.ufunc | None, out: np.ndarray, index: Sequence[np.ndarray], updates: np.ndarray
) -> None:
    if ufunc is None:
        # For duplicate indices, NumPy writes in memory order, and the last write wins.
        *places, updates = [np.asarray(i, order="C") for i in (*index, updates)]
        out[tuple(places)] = updates
    else:
        _accumulate(ufunc, out, index, updates)


def _infer_scatter_elements(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    data, indices, updates = (tensor(types, i) for i in range(3))
    indexing.check_same_rank(data, indices)
    indexing.check_same_rank(data, updates)
    check_shape("updates", updates.shape, indices.shape)
    if data.shape is not None:
        normalize_axis(attrs.get("axis", 0), len(data.shape))
    _accumulation(attrs)
    return (TensorType(same_dtype(types, (0, 2)), data.shape),)


@operator("Scatter", since=9, infer=_infer_scatter_elements, traits={"exact"})
@operator(
    "ScatterElements", since=11, infer=_infer_scatter_elements, strings=True, traits={"exact"}
)
def scatter_elements(node: Node, types: Types) -> Kernel:
    axis, ufunc = node.attrs.get("axis", 0), _accumulation(node.attrs)

    def place(out: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> None:
        if out.ndim != indices.ndim:
            raise ShapeError(f"data has rank {out.ndim}, but indices rank {indices.ndim}")
        check_shape("updates", updates.shape, indices.shape)
        _write(ufunc, out, indexing.element_index(indices, normalize_axis(axis, out.ndim)), updates)

    return _updating(place)


def _infer_scatter_nd(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    data, indices, updates = (tensor(types, i) for i in range(3))
    _accumulation(attrs)
    if data.shape is not None and indices.shape is not None and updates.shape is not None:
        check_shape("updates", updates.shape, _updates_shape(data.shape, indices.shape))
    return (TensorType(same_dtype(types, (0, 2)), data.shape),)


def _updates_shape(dims: Shape, indices: Shape) -> Shape | None:
    """The expected shape of updates; None if the length of the index tuples is unknown."""
    if not indices:
        raise ShapeError("indices is a scalar: it must have rank 1 or more")
    depth = indices[-1]
    if not isinstance(depth, int):
        return None
    indexing.check_depth(depth, 0, len(dims))
    return (*indices[:-1], *dims[depth:])


@operator("ScatterND", since=11, infer=_infer_scatter_nd, strings=True, traits={"exact"})
def scatter_nd(node: Node, types: Types) -> Kernel:
    ufunc = _accumulation(node.attrs)

    def place(out: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> None:
        if updates.shape != (shape := _updates_shape(out.shape, indices.shape)):
            check_shape("updates", updates.shape, shape)
        if updates.size or indices.size:
            _write(ufunc, out, indexing.index_columns(indices), updates)

    return _updating(place)


def _infer_tensor_scatter(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    cache, update = tensor(types, 0), tensor(types, 1)
    if cache.shape is not None and update.shape is not None:
        _check_update(cache.shape, update.shape, _cache_axis(attrs, len(cache.shape)))
    return (TensorType(same_dtype(types, (0, 1)), cache.shape),)


def _cache_axis(attrs: Attrs, rank: int) -> int:
    axis = normalize_axis(attrs.get("axis", -2), rank)
    if axis == 0:
        raise ShapeError("axis must not be 0, the batch axis")
    return axis


def _check_update(cache: Shape, update: Shape, axis: int) -> None:
    length, size = (d[axis] if len(d) > axis else None for d in (update, cache))
    check_shape("update", update, (*cache[:axis], length, *cache[axis + 1 :]))
    if isinstance(length, int) and isinstance(size, int) and length > size:
        raise ShapeError(f"update has length {length} along the axis, but past_cache only {size}")


@operator("TensorScatter", since=24, infer=_infer_tensor_scatter, strings=True, traits={"exact"})
def tensor_scatter(node: Node, types: Types) -> Kernel:
    circular = choice(node.attrs, "mode", "linear", ("linear", "circular")) == "circular"

    def place(out: np.ndarray, update: np.ndarray, start: np.ndarray | None = None) -> None:
        axis = _cache_axis(node.attrs, out.ndim)
        _check_update(out.shape, update.shape, axis)
        length, size = update.shape[axis], out.shape[axis]
        if start is None:
            out[(*[slice(None)] * axis, slice(length))] = update
            return
        if start.shape != out.shape[:1]:
            raise ShapeError(
                f"write_indices has shape {start.shape}, but must be [{out.shape[0]}], one entry "
                "per sample"
            )
        positions = start[:, None] + np.arange(length)
        if circular:
            positions %= size
        elif positions.size and (positions.min() < 0 or positions.max() >= size):
            raise ShapeError(
                f"update of length {length} at write_indices exceeds the cache of length {size}"
            )
        batch = np.arange(len(start))[:, None]
        np.moveaxis(out, axis, 1)[batch, positions] = np.moveaxis(update, axis, 1)

    return _updating(place)
