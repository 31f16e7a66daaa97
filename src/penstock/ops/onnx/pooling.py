"""Pooling over windows: MaxPool, AveragePool, LpPool and the global ones, and MaxUnpool.

The maximum of a window that contains NaN is NaN; ONNX Runtime ignores NaN.

Pooling is separable: windows are reduced axis by axis, combining the k-th elements of all windows
at once (``_reduction``). Padding is not materialized: windows whose k-th element is padding are
skipped. Along the last axis, where rows may be short, padded rows are faster (``_Rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.records import NamedTuple
from penstock.core.types import (
    INT64,
    Dim,
    RunValue,
    Shape,
    ShapeError,
    TensorType,
    Type,
    dtype_name,
)
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.dtypes import UINT8, is_float, is_half
from penstock.ops.common.elementwise import smallest
from penstock.ops.common.shape_rules import check_shape, given, ints, tensor
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape
from penstock.ops.common.windows import Window, kernel_shape, parse_axes, window_counts, windows
from penstock.ops.registry import ArrayFunction, operator

BLOCK = 2**17
"""input elements pooled at a time, so that the scratch memory stays in the caches"""


def _check_image(x: TensorType) -> None:
    if x.shape is not None and len(x.shape) < 3:
        raise ShapeError(
            f"the input of a pooling must have shape [N, C, ...] of rank 3 or more, not {x.shape}"
        )


def _check_power(attrs: Attrs) -> None:
    if not attrs.get("p", 2) > 0:
        raise ShapeError(f"p must be positive, not {attrs['p']}")


def _infer_pool(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    """The types of the pooled values, and of the indices of MaxPool."""
    x = tensor(types, 0)
    _check_image(x)
    _check_power(attrs)
    if x.shape is None:
        rank = len(attrs.get("kernel_shape") or ()) + 2
        shape: Shape | None = (None,) * rank if rank > 2 else None
    else:
        kernel, ceil = kernel_shape(attrs, len(x.shape) - 2), bool(attrs.get("ceil_mode", 0))
        shape = (*x.shape[:2], *window_counts(attrs, kernel, x.shape[2:], ceil))
    return TensorType(x.dtype, shape), TensorType(INT64, shape)


def pool_windows(attrs: Attrs, shape: Sequence[int]) -> tuple[Window, ...]:
    kernel = kernel_shape(attrs, len(shape) - 2)
    return windows(attrs, kernel, shape[2:], bool(attrs.get("ceil_mode", 0)))


def _lowest(dtype: np.dtype | None) -> np.ndarray:
    """The lowest value of a dtype, which is the identity of the maximum."""
    assert dtype is not None
    if dtype.kind not in "iu" and not is_float(dtype):
        raise ShapeError(f"maxima of {dtype_name(dtype)} are not defined: it must be numeric")
    return smallest(dtype)


def _reduction(
    combine: ArrayFunction, identity: float | np.ndarray, axis: Window, at: int
) -> Callable[[np.ndarray, np.ndarray], None]:
    """``into(x, out)`` that combines windows along axis ``at`` by ``combine(a, b, out=out)``."""
    lead = (slice(None),) * at
    # A single window is a plain reduction: one NumPy call.
    if axis.count == 1 and isinstance(combine, np.ufunc):
        window = (*lead, axis.covered)
        settings: Any = {"axis": at, "keepdims": True, "initial": identity}
        return lambda x, out: combine.reduce(x[window], out=out, **settings)
    # Elements inside the input for all windows; (windows, elements) of the others.
    full, partial = [], []
    for _, seen, elements in axis.taps():
        if seen.stop - seen.start == axis.count:
            full.append((*lead, elements))
        else:
            partial.append(((*lead, seen), (*lead, elements)))

    first, others = full[:2], full[2:]

    def into(x: np.ndarray, out: np.ndarray) -> None:
        if len(first) == 2:
            combine(x[first[0]], x[first[1]], out=out)
        elif first:
            np.copyto(out, x[first[0]])
        else:
            out.fill(identity)
        for elements in others:
            combine(out, x[elements], out=out)
        for seen, elements in partial:
            part = out[seen]
            combine(part, x[elements], out=part)

    return into


class _Rows(NamedTuple):
    """Windows along the last axis, where the elements of a window are adjacent.

    Rows are copied into a buffer with padding around them. The k-th elements of all windows of all
    rows are then at one offset in flat memory, and are combined in one call. Windows that cross row
    ends are dropped when the result is copied.
    """

    combine: Callable[..., RunValue]
    identity: float | np.ndarray
    pitch: int  # elements of a padded row
    inside: slice  # the unpadded row within it
    shifts: range  # offsets of the elements of a window from its first one
    windows: int  # number of windows in a row

    def pad(self, x: np.ndarray, rows: np.ndarray) -> None:
        rows.fill(self.identity)
        np.copyto(rows[..., self.inside], x[..., : self.inside.stop - self.inside.start])

    def combined(self, rows: np.ndarray, spare: np.ndarray, out: np.ndarray) -> None:
        x, total = rows.reshape(-1), spare.reshape(-1)
        n = x.size - self.shifts[-1]
        _, second, *others = self.shifts
        total = total[:n]
        self.combine(x[:n], x[second : second + n], out=total)
        for shift in others:
            self.combine(total, x[shift : shift + n], out=total)
        np.copyto(out, spare[..., : self.windows])


def _rows(
    combine: ArrayFunction, identity: float | np.ndarray, axis: Window, dtype: np.dtype
) -> _Rows | None:
    """The layout of padded rows, or None where ``_reduction`` is faster.

    It is faster if most results would be dropped, because strides are large or windows are mostly
    padding, or for operations that NumPy does not vectorize.
    """
    pitch = axis.count - 1 + axis.span
    used = min(axis.size, pitch - axis.begin)
    vectorized = dtype.kind in "iuf" and not is_half(dtype)
    if axis.stride > 1 or axis.kernel < 2 or pitch > 2 * min(axis.count, used) or not vectorized:
        return None
    inside, shifts = slice(axis.begin, axis.begin + used), range(0, axis.span, axis.dilation)
    return _Rows(combine, identity, pitch, inside, shifts, axis.count)


def _separable(
    x: TensorType, axes: Sequence[Window], combine: ArrayFunction, identity: float | np.ndarray
) -> tuple[Callable[[np.ndarray, np.ndarray, Any], None], int]:
    """``into(x, out, workspace)`` that reduces the windows of (N, C, ...), and its workspace."""
    assert x.dtype is not None
    rows = _rows(combine, identity, axes[-1], x.dtype)
    spatial = list(x.dims[2:])
    shapes: list[
        list[int]
    ] = []  # fields of the workspace: the padded rows, and the result of each stage
    stages = []
    if rows is not None:
        spatial[-1] = rows.pitch
        shapes.append(list(spatial))
    for i, axis in enumerate(axes if rows is None else axes[:-1]):
        if not axis.trivial:
            stages.append(_reduction(combine, identity, axis, i + 2))
            spatial[i] = axis.count
            shapes.append(list(spatial))
    if rows is None and shapes:
        shapes.pop()  # the result of the last stage is the output
    elif rows is not None:
        shapes.append(list(spatial))
    blocks = _blocks(x.dims)
    images, channels = (max(b - a for a, b in ranges) for ranges in zip(*blocks, strict=True))
    # The stages alternate between two buffers.
    layout = Scratch()
    sizes = [images * channels * prod(shape) for shape in shapes]
    fields = [layout.field((max(sizes[i::2]),), x.dtype) for i in range(min(len(sizes), 2))]

    def into(x: np.ndarray, out: np.ndarray, workspace: Any = None) -> None:
        if rows is None and not stages:
            np.copyto(out, x)
            return
        for (n0, n1), (c0, c1) in blocks:
            part, result = x[n0:n1, c0:c1], out[n0:n1, c0:c1]
            rooms = [
                fields[i % 2].reshaped(*part.shape[:2], *shape)(workspace)
                for i, shape in enumerate(shapes)
            ]
            if rows is not None:
                rows.pad(part, rooms[0])
                part = rooms.pop(0)
            for stage, room in zip(stages, [*rooms, result], strict=False):
                stage(part, room)
                part = room
            if rows is not None:
                rows.combined(part, rooms[-1], result)

    return into, layout.size


def _blocks(shape: Sequence[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of images and channels whose elements are about ``BLOCK``."""
    n, c = shape[:2]
    plane = max(prod(shape[2:]), 1)
    if c * plane <= BLOCK:
        step = max(BLOCK // max(c * plane, 1), 1)
        return [((i, min(i + step, n)), (0, c)) for i in range(0, max(n, 1), step)]
    step = max(BLOCK // plane, 1)
    parts = [(j, min(j + step, c)) for j in range(0, c, step)]
    return [((i, i + 1), part) for i in range(n) for part in parts] or [((0, 0), parts[0])]


@operator("MaxPool", infer=_infer_pool, traits={"begins", "selects"})
@by_shape(widen=False)
def max_pool(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    x = tensor(inputs, 0)
    axes = pool_windows(node.attrs, x.dims)
    if given(outputs, 1):
        return _indexed(x, axes, bool(node.attrs.get("storage_order", 0)))
    pool, size = _separable(x, axes, np.maximum, _lowest(x.dtype))
    return Routine(lambda x, out, *rest: pool(x, out, rest[-1] if rest else None), size)


def _indexed(x: TensorType, axes: Sequence[Window], column_major: bool) -> Routine:
    """Maxima, and their indices in the flattened input; the first of equal elements."""
    n, c, *spatial = x.dims
    # With storage_order 1, indices are in column-major order.
    where = np.arange(prod(spatial)).reshape(spatial, order="F" if column_major else "C")
    start = (np.arange(n * c) * prod(spatial)).reshape(n, c, *(1,) * len(spatial))
    taps: list[tuple[Any, tuple[Any, ...]]] = [
        ((..., *(seen for _, seen, _ in position)), tuple(elements for _, _, elements in position))
        for position in product(*(axis.taps() for axis in axes))
    ]
    shape = (n, c, *(axis.count for axis in axes))
    layout = Scratch()
    mask = layout.field(shape, np.dtype(np.bool_))
    low, every = _lowest(x.dtype), slice(None)

    def into(x: np.ndarray, out: np.ndarray, indices: np.ndarray, workspace: np.ndarray) -> None:
        greater = mask(workspace)
        out.fill(low)
        # No index yet: take the first element even if it equals the lowest value.
        indices.fill(-1)
        for seen, elements in taps:
            checkpoint()
            part, at, better = out[seen], indices[seen], greater[seen]
            values = x[(every, every, *elements)]
            # Negated, so that NaN, which compares false, replaces the maximum.
            np.less_equal(values, part, out=better)
            np.logical_not(better, out=better)
            np.logical_or(better, at < 0, out=better)
            # A NaN found earlier is kept.
            np.logical_and(better, part == part, out=better)
            np.copyto(part, values, where=better)
            np.copyto(at, where[elements], where=better)
        # A window that is all padding has no maximum; its index stays -1.
        np.add(indices, start, out=indices, where=indices >= 0)

    return Routine(into, layout.size)


def _window_sizes(axes: Sequence[Window], padding: bool) -> int | np.ndarray:
    """The number of elements of each window, with or without padding; one number if all agree."""
    sizes: Any = np.ones((), np.int64)
    for axis in axes:
        start = np.arange(axis.count) * axis.stride - axis.begin
        bounds = (-axis.begin, axis.size + axis.end) if padding else (0, axis.size)
        # The number of kernel positions before each bound.
        low, high = (np.clip(-((start - b) // axis.dilation), 0, axis.kernel) for b in bounds)
        sizes = np.multiply.outer(sizes, high - low)
    return int(sizes.flat[0]) if sizes.size and (sizes == sizes.flat[0]).all() else sizes


def _sums(x: TensorType, axes: Sequence[Window] | None) -> tuple[Callable[..., None], int]:
    """``into(x, out, workspace)`` that sums over windows or whole images, and its workspace."""
    if axes is not None:
        return _separable(x, axes, np.add, 0)
    _refuse_empty(x.dims)
    rows, columns = prod(x.dims[:2]), prod(x.dims[2:])
    ones = np.ones(columns, x.dtype)
    spatial = tuple(range(2, len(x.dims)))

    def into(x: np.ndarray, out: np.ndarray, _: np.ndarray | None = None) -> None:
        if x.flags.c_contiguous:  # a matrix product is several times as fast as sums of short rows
            np.dot(x.reshape(rows, columns), ones, out.reshape(rows))
        else:
            np.add.reduce(x, spatial, out=out, keepdims=True)

    return into, 0


def _infer_global(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    _check_image(x)
    _check_power(attrs)
    if x.shape is None:
        return (TensorType(x.dtype, None),)
    return (TensorType(x.dtype, (*x.shape[:2], *(1,) * (len(x.shape) - 2))),)


def _is_global(node: Node) -> bool:
    return node.op.name.startswith("Global")


@operator("AveragePool", infer=_infer_pool, traits={"begins"})
@operator("GlobalAveragePool", infer=_infer_global, traits={"begins"})
@by_shape(contiguous=_is_global)
def average_pool(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    x = tensor(inputs, 0)
    axes = None if _is_global(node) else pool_windows(node.attrs, x.dims)
    sums, size = _sums(x, axes)
    padding = bool(node.attrs.get("count_include_pad", 0))
    counts = prod(x.dims[2:]) if axes is None else _window_sizes(axes, padding)
    # Dividing float32 by integers would compute in float64.
    if isinstance(counts, np.ndarray):
        counts = counts.astype(x.dtype)

    def into(x: np.ndarray, out: np.ndarray, workspace: np.ndarray | None = None) -> None:
        sums(x, out, workspace)
        np.divide(out, counts, out)

    return Routine(into, size)


@operator("LpPool", infer=_infer_pool)
@operator("GlobalLpPool", infer=_infer_global)
@by_shape(contiguous=_is_global)
def lp_pool(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    x, layout, p = tensor(inputs, 0), Scratch(), node.attrs.get("p", 2)
    sums, size = _sums(x, None if _is_global(node) else pool_windows(node.attrs, x.dims))
    scratch, powers = layout.field((size,), UINT8), layout.field(x.dims, x.dtype)

    def into(x: np.ndarray, out: np.ndarray, workspace: np.ndarray) -> None:
        raised = powers(workspace)
        _power(x, p, raised)
        sums(raised, out, scratch(workspace))
        if p == 2:
            np.sqrt(out, out)
        elif p != 1:
            np.power(out, 1 / p, out)

    return Routine(into, layout.size)


def _power(x: np.ndarray, p: float, out: np.ndarray) -> None:
    """``abs(x) ** p``."""
    if p == 2:
        np.multiply(x, x, out)
        return
    np.abs(x, out)
    if p != 1:
        np.power(out, p, out)


def _refuse_empty(shape: Sequence[int]) -> None:
    if 0 in shape[2:]:
        raise ShapeError(f"the spatial dims of shape {tuple(shape)} must not be 0")


@operator("GlobalMaxPool", infer=_infer_global)
@by_shape(widen=False)
def global_max_pool(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    dims = tensor(inputs, 0).dims
    _refuse_empty(dims)
    axes = tuple(range(2, len(dims)))
    return Routine(lambda x, out: np.maximum.reduce(x, axes, out=out, keepdims=True))


def _infer_max_unpool(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, indices = tensor(types, 0), tensor(types, 1)
    _check_image(x)
    check_shape("indices", indices.shape, x.shape)
    shape = ints(types, consts, 2)
    if shape is None and given(types, 2):
        return (TensorType(x.dtype, None if x.shape is None else (None,) * len(x.shape)),)
    if shape is None:
        return (TensorType(x.dtype, unpooled_shape(x, attrs)),)
    if x.shape is not None:
        check_shape("the output", shape, (*x.shape[:2], *(None,) * (len(x.shape) - 2)))
    if any(isinstance(dim, int) and dim < 0 for dim in shape):
        raise ShapeError(f"output_shape {shape} must not be negative")
    return (TensorType(x.dtype, shape),)


def unpooled_shape(x: TensorType, attrs: Attrs) -> Any:
    """The shape of an input that pooling would reduce to the shape of ``x``."""
    if x.shape is None:
        return None
    rank = len(x.shape) - 2
    axes, _ = parse_axes(attrs, rank)
    dims: list[Dim] = []
    for axis, k, dim in zip(axes, kernel_shape(attrs, rank), x.shape[2:], strict=True):
        size = (dim - 1) * axis.stride + k - axis.begin - axis.end if isinstance(dim, int) else None
        if size is not None and size < 1:
            raise ShapeError(
                f"the output dim of {dim} windows of size {k} would be {size}: reduce pads"
            )
        dims.append(size)
    return (*x.shape[:2], *dims)


@operator("MaxUnpool", since=9, infer=_infer_max_unpool, traits={"exact"})
@by_shape(contiguous=True, values=(2,), widen=False)
def max_unpool(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    # Indices refer to the shape implied by the attributes; output_shape may be larger.
    source, shape = unpooled_shape(tensor(inputs, 0), node.attrs), tensor(outputs, 0).dims
    if any(a > b for a, b in zip(source, shape, strict=True)):
        source = shape
    size = prod(source)

    def into(x: np.ndarray, indices: np.ndarray, *rest: np.ndarray) -> None:
        at, out = indices.reshape(-1), rest[-1]
        # NumPy would interpret a negative index from the end.
        if at.size and (at.min() < 0 or at.max() >= size):
            raise ShapeError(f"the indices must be in [0, {size}), the elements of shape {source}")
        if source != shape:
            at = np.ravel_multi_index(np.unravel_index(at, source), shape)
        out.fill(0)
        out.reshape(-1)[at] = x.reshape(-1)

    return Routine(into)
