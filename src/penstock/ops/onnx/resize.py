"""Resize: separable interpolation, one axis after the other.

Each resized axis has a table, computed once per shape: for each output position, the input indices
that it reads and their weights. Mode nearest needs only indices; where these are evenly spaced or
repeat, it is a strided copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, STRING, Dim, ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.dtypes import FLOAT64
from penstock.ops.common.shape_rules import (
    all_known,
    check_shape,
    choice,
    given,
    ints,
    normalize_axes,
    tensor,
)
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape
from penstock.ops.registry import operator


class _Axis(NamedTuple):
    """One resized axis; ``width`` is the output size before rounding to ``out``."""

    axis: int
    size: int
    out: int
    scale: float
    width: float
    start: float
    end: float


def _floats(types: Types, consts: Consts, index: int) -> tuple[float, ...] | None:
    """The elements of a float input: () if it is omitted or empty, None if unknown."""
    if not given(types, index):
        return ()
    const = consts[index] if index < len(consts) else None
    if const is not None:
        return tuple(float(x) for x in const.reshape(-1))
    # Up to opset 12, an unused input is an empty tensor.
    return () if tensor(types, index).shape == (0,) else None


def _axes(attrs: Attrs, rank: int) -> tuple[int, ...]:
    axes = attrs.get("axes")
    return tuple(range(rank)) if axes is None else normalize_axes(axes, rank)


def _count(name: str, values: Sized, axes: Sequence[int], times: int = 1) -> None:
    if len(values) != times * len(axes):
        raise ShapeError(f"{name} has {len(values)} elements, but needs {times * len(axes)}")


def _by_scales(dims: Sequence[Dim], scales: Sequence[float]) -> list[tuple[Dim, float, float]]:
    """Output dim, scale and unrounded output size of each dim."""
    axes: list[tuple[Dim, float, float]] = []
    for dim, scale in zip(dims, scales, strict=True):
        if not 0 < scale < np.inf:
            raise ShapeError(f"scales must be positive and finite, not {scale}")
        if not isinstance(dim, int):
            axes.append((dim if scale == 1 else None, scale, 0.0))
            continue
        if not scale * dim < 2**62:
            raise ShapeError(f"dim {dim} times scale {scale} is too large")
        out = int(np.float32(dim) * np.float32(scale))
        # Scales are float32: if one is a rounded quotient of the sizes, use the exact quotient.
        exact = dim > 0 and np.float32(out / dim) == np.float32(scale)
        axes.append((out, out / dim if exact else scale, out if exact else scale * dim))
    return axes


def _by_sizes(
    dims: Sequence[Dim], sizes: Sequence[Dim], policy: str
) -> list[tuple[Dim, float, float]]:
    if any(isinstance(size, int) and size < 0 for size in sizes):
        raise ShapeError(f"sizes must not be negative: {tuple(sizes)}")
    if policy == "stretch":
        return [
            (size, size / dim, size)
            if isinstance(size, int) and isinstance(dim, int) and dim
            else (size, 1.0, 0.0)
            for dim, size in zip(dims, sizes, strict=True)
        ]
    old, new = all_known(dims), all_known(sizes)
    if old is None or new is None or 0 in old:
        return [(None, 1.0, 0.0)] * len(dims)
    choose = min if policy == "not_larger" else max
    scale = choose(size / dim for dim, size in zip(old, new, strict=True))
    # Halves are rounded up here.
    return [(int(scale * dim + 0.5), scale, scale * dim) for dim in old]


def _resized(types: Types, attrs: Attrs, consts: Consts) -> list[tuple[Dim, float, float]] | None:
    """``_by_scales`` or ``_by_sizes`` of every resized axis; ``None`` where neither is known."""
    shape = tensor(types, 0).shape
    if shape is None:
        return None
    axes = _axes(attrs, len(shape))
    dims = [shape[axis] for axis in axes]
    scales = _floats(types, consts, 2)
    sizes = ints(types, consts, 3) if given(types, 3) else ()
    if scales and sizes:
        raise ShapeError("only one of scales and sizes may be given")
    if scales:
        _count("scales", scales, axes)
        return _by_scales(dims, scales)
    if sizes:
        _count("sizes", sizes, axes)
        policies = ("stretch", "not_larger", "not_smaller")
        policy = choice(attrs, "keep_aspect_ratio_policy", "stretch", policies)
        return _by_sizes(dims, sizes, policy)
    if not axes:
        return []
    if scales == () and sizes == ():
        raise ShapeError("one of scales and sizes must be given")
    return None


def infer_resize(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    choice(attrs, "mode", "nearest", ("nearest", *_FILTERS))
    choice(attrs, "coordinate_transformation_mode", "half_pixel", _COORDINATES)
    choice(attrs, "nearest_mode", "round_prefer_floor", _NEAREST)
    if x.shape is None:
        return (TensorType(x.dtype),)
    axes = _axes(attrs, len(x.shape))
    if attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        roi = tensor(types, 1).shape if given(types, 1) else ()
        check_shape("roi", roi, (2 * len(axes),))
    resized = _resized(types, attrs, consts)
    shape = list(x.shape)
    for i, axis in enumerate(axes):
        shape[axis] = None if resized is None else resized[i][0]
    return (TensorType(x.dtype, tuple(shape)),)


def _every_axis(types: Types, attrs: Attrs, consts: Consts) -> list[_Axis]:
    shape = tensor(types, 0).dims
    axes = _axes(attrs, len(shape))
    resized = _resized(types, attrs, consts)
    assert resized is not None
    roi: Sequence[float] = ()
    if attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        roi = _floats(types, consts, 1) or ()
        _count("roi", roi, axes, 2)
    every = []
    for i, (axis, (out, scale, width)) in enumerate(zip(axes, resized, strict=True)):
        assert isinstance(out, int)
        if out and not shape[axis]:
            raise ShapeError(f"axis {axis} has dim 0 and cannot be resized to {out}")
        # roi has the starts of all axes, then the ends.
        start, end = (roi[i], roi[len(axes) + i]) if roi else (0.0, 1.0)
        # An attribute of Penstock's: corners are those of the output, not of its unrounded size.
        width = out if attrs.get("whole_length") else width
        every.append(_Axis(axis, shape[axis], out, scale, width, start, end))
    return every


def _corners(axis: _Axis, x: np.ndarray) -> np.ndarray:
    # A single output element reads the first input element.
    return x * 0.0 if axis.width == 1 else x * (axis.size - 1) / (axis.width - 1)


def _crop(axis: _Axis, x: np.ndarray) -> np.ndarray:
    last, extent = axis.size - 1, axis.end - axis.start
    # A single output element reads the centre of roi.
    if axis.out == 1:
        return x + 0.5 * (axis.start + axis.end) * last
    return axis.start * last + x * extent * last / (axis.width - 1)


def _symmetric(axis: _Axis, x: np.ndarray) -> np.ndarray:
    offset = axis.size / 2 * (1 - axis.out / (axis.width or 1))
    return offset + (x + 0.5) / axis.scale - 0.5


_COORDINATES: dict[str, Callable[[_Axis, np.ndarray], np.ndarray]] = {
    "half_pixel": lambda axis, x: (x + 0.5) / axis.scale - 0.5,
    "half_pixel_symmetric": _symmetric,
    "pytorch_half_pixel": lambda axis, x: (x + 0.5) / axis.scale - 0.5 if axis.out > 1 else x * 0.0,
    "align_corners": _corners,
    "asymmetric": lambda axis, x: x / axis.scale,
    "tf_crop_and_resize": _crop,
    "tf_half_pixel_for_nn": lambda axis, x: (x + 0.5) / axis.scale,
}


def _fixed_point(axis: _Axis, coordinates: str, bits: int) -> np.ndarray:
    """Positions in fixed point with ``bits`` fractional bits, as TFLite's integer kernels."""
    one, corners = 1 << bits, coordinates == "align_corners" and axis.out > 1
    size, out = (axis.size - 1, axis.out - 1) if corners else (axis.size, axis.out)
    step = (one * size + out // 2) // out
    x = np.arange(axis.out, dtype=np.int64) * step
    return (x + (step // 2 - one // 2 if coordinates == "half_pixel" else 0)) / one


_NEAREST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def near_weight(x: np.ndarray, a: float | np.floating) -> np.ndarray:
    """The weight of a pixel at a distance of at most 1, by Keys' cubic kernel: equation (4) of
    https://ieeexplore.ieee.org/document/1163711."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def far_weight(x: np.ndarray, a: float | np.floating) -> np.ndarray:
    """``near_weight`` at a distance between 1 and 2."""
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def cubic_weights(t: np.ndarray, a: float | np.floating) -> list[np.ndarray]:
    """The weights of four adjacent pixels for a position ``t`` after the second of them."""
    return [far_weight(1 + t, a), near_weight(t, a), near_weight(1 - t, a), far_weight(2 - t, a)]


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(x)
    return np.where(x <= 1, near_weight(x, a), np.where(x < 2, far_weight(x, a), 0))


_Filter = tuple[int, Callable[[np.ndarray, float], np.ndarray]]  # radius and shape
_FILTERS: dict[str, _Filter]
_FILTERS = {"linear": (1, lambda x, _: np.maximum(1 - np.abs(x), 0)), "cubic": (2, _cubic)}


class Table(NamedTuple):
    """The taps of an axis: ``indices[k]`` and ``weights[k]`` of tap k for each output position."""

    axis: int
    size: int
    out: int
    indices: np.ndarray  # intp [taps, out]
    weights: np.ndarray  # float64 [taps, out]; all ones for mode nearest
    outside: np.ndarray | None  # bool [out]: positions that are extrapolated, if any


def _table(axis: _Axis, attrs: Attrs) -> Table:
    name = choice(attrs, "coordinate_transformation_mode", "half_pixel", _COORDINATES)
    checkpoint()
    bits = attrs.get("fraction_bits", 0)
    mode = choice(attrs, "mode", "nearest", ("nearest", *_FILTERS))
    # Of a scale such as 0.6, whose float32 is larger, 3 / 0.6 is 5 in float32, where exporters and
    # ONNX Runtime compute, but less in float64: the nearest pixel would be another one.
    rounded = mode == "nearest" and axis.width != axis.out
    x = _COORDINATES[name](axis, np.arange(axis.out, dtype=np.float32 if rounded else np.float64))
    x = _fixed_point(axis, name, bits) if bits else x
    last = axis.size - 1
    outside = None
    if name == "tf_crop_and_resize":
        rounding_error = 1e-6 * axis.size  # of a roi that ends at the border
        outside = (x < -rounding_error) | (x > last + rounding_error)
        x = np.clip(x, 0, last)
        if not outside.any():
            outside = None
    if mode == "nearest":
        rounding = _NEAREST[choice(attrs, "nearest_mode", "round_prefer_floor", _NEAREST)]
        indices, weights = rounding(x).astype(np.intp)[None], np.ones((1, axis.out))
    else:
        indices, weights = _filtered(axis, attrs, mode, x)
    return Table(axis.axis, axis.size, axis.out, np.clip(indices, 0, last), weights, outside)


def _filtered(axis: _Axis, attrs: Attrs, mode: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices, which may be out of range, and weights of the taps that some position ``x`` uses."""
    parts = []
    for start in range(0, max(len(x), 1), _POSITIONS):
        checkpoint()
        parts.append(_taps(axis, attrs, mode, x[start : start + _POSITIONS]))
        # The size of the table follows from the first part, so that one that is too large is
        # rejected before it is built.
        if not start:
            reserve(3 * sum(part.nbytes for part in parts[0]) * (len(x) // _POSITIONS))
    indices, weights = (np.concatenate(part, 1) for part in zip(*parts, strict=True))
    checkpoint()
    used = np.flatnonzero(weights.any(1))  # drop taps that no position uses
    used = used if len(used) else np.zeros(1, np.intp)
    return indices[used], weights[used]


# Positions between two checks for cancellation.
_POSITIONS = 2**20


def _taps(axis: _Axis, attrs: Attrs, mode: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices, which may be out of range, and weights of all taps at positions ``x``."""
    radius, shape = _FILTERS[mode]
    # Antialiasing widens the filter by the downsampling factor.
    stretch = min(axis.scale, 1.0) if attrs.get("antialias") and axis.out else 1.0
    reach = int(np.ceil(radius / stretch))
    left = np.floor(x)
    offsets = np.arange(1 - reach, 1 + reach)[:, None]
    weights = shape((offsets - (x - left)) * stretch, attrs.get("cubic_coeff_a", -0.75))
    # The weights of a widened filter must be normalized.
    if stretch != 1:
        weights = weights / weights.sum(0)
    indices = (left + offsets).astype(np.intp)
    # With exclude_outside, weights outside are 0 and the others are normalized.
    if attrs.get("exclude_outside"):
        weights = np.where((indices < 0) | (indices >= axis.size), 0.0, weights)
        total = weights.sum(0)
        weights = weights / np.where(total == 0, 1, total)
    return indices, weights


def resize_tables(types: Types, attrs: Attrs, consts: Consts) -> list[Table]:
    """The tables of the resized axes, for known shapes and parameters."""
    return [
        _table(axis, attrs)
        for axis in _every_axis(types, attrs, consts)
        if axis.size != axis.out or abs(axis.scale - 1) >= 1e-9 or (axis.start, axis.end) != (0, 1)
    ]


# Running

Resampler = tuple[Callable[[np.ndarray, np.ndarray, np.ndarray], None], int]
"""``run(x, out, workspace)``, and its workspace in bytes"""

# Bytes of scratch memory that stay in the processor's cache.
_CACHE = 2**18


def _evenly(indices: np.ndarray) -> slice | None:
    """The slice equivalent to ``indices``, if one exists."""
    step = int(indices[1] - indices[0]) if len(indices) > 1 else 1
    if step < 1 or (np.diff(indices) != step).any():
        return None
    return slice(int(indices[0]), int(indices[-1]) + 1, step)


def _repeats(table: Table) -> int:
    """How often each element is repeated, if equally often and in order; otherwise 0."""
    factor = table.out // table.size
    even = np.array_equal(table.indices[0], np.repeat(np.arange(table.size), factor))
    return factor if even else 0


def _sorted(tables: Sequence[Table]) -> list[Table]:
    """Order axes: those that shrink first, then from the last one, which gathers single elements
    while the others gather rows."""
    return sorted(tables, key=lambda table: (table.out / table.size, -table.axis))


def _nearest(tables: Sequence[Table], shape: Sequence[int], dtype: np.dtype) -> Resampler:
    picks = [slice(None)] * len(shape)
    rest: list[Table] = []
    for table in tables:
        evenly = _evenly(table.indices[0])
        if evenly is None:
            rest.append(table)
        else:
            picks[table.axis] = evenly
    pick = tuple(picks)
    picked = [len(range(size)[p]) for size, p in zip(shape, pick, strict=True)]
    factors = {table.axis: _repeats(table) for table in rest}
    if not rest or (dtype != STRING and all(factors.values())):
        inner, size = _repeater(picked, factors, dtype)
    else:
        inner, size = _gatherer(picked, _sorted(rest), dtype)

    def run(x: np.ndarray, out: np.ndarray, workspace: np.ndarray) -> None:
        inner(x[pick], out, workspace)

    return run, size


def _gatherer(shape: Sequence[int], tables: Sequence[Table], dtype: np.dtype) -> Resampler:
    layout, current = Scratch(), list(shape)
    steps = []
    for table in tables:
        current[table.axis] = table.out
        # The workspace is raw memory, which cannot hold object references.
        field = None if dtype == STRING else layout.field(current, dtype)
        steps.append((table.indices[0], table.axis, field))
    *steps, (last_indices, last_axis, _) = steps

    def run(x: np.ndarray, out: np.ndarray, workspace: np.ndarray) -> None:
        for indices, axis, field in steps:
            checkpoint()
            # The indices are valid, but in mode "raise" np.take buffers its output.
            x = np.take(x, indices, axis, None if field is None else field(workspace), "clip")
        np.take(x, last_indices, last_axis, out, "clip")

    return run, layout.size


def _repeater(shape: Sequence[int], factors: dict[int, int], dtype: np.dtype) -> Resampler:
    """Integer scales: strided copies repeat the last axis, one broadcast copy all others."""
    last = len(shape) - 1
    repeat = factors.get(last, 1)
    across = len(factors) > (repeat > 1)
    layout, rows = Scratch(), [*shape[:-1], shape[-1] * repeat]
    field = layout.field(rows, dtype) if across and repeat > 1 else None
    # Each axis as (dim, repetitions), for the rows and for the output.
    narrow = [d for size in rows for d in (size, 1)]
    wide = [d for axis, size in enumerate(rows) for d in (size, factors.get(axis, 1))]
    wide[-1] = 1

    def run(x: np.ndarray, out: np.ndarray, workspace: np.ndarray) -> None:
        if repeat > 1 or not across:
            target = out if field is None else field(workspace)
            for start in range(repeat):
                checkpoint()
                target[..., start::repeat] = x
            x = target
        if across:
            checkpoint()
            np.copyto(out.reshape(wide), x.reshape(narrow))

    return run, layout.size


def _interpolate(tables: Sequence[Table], shape: Sequence[int], dtype: np.dtype) -> Resampler:
    if dtype == STRING:
        raise ShapeError("strings cannot be interpolated: use mode 'nearest'")
    wide = FLOAT64 if dtype.itemsize >= 4 and dtype != FLOAT32 else FLOAT32
    if dtype.kind == "c":
        wide = dtype
    order, layout, current = _sorted(tables), Scratch(), list(shape)
    widened = layout.field(shape, wide) if dtype != wide else None
    passes = []  # per axis: indices and weights of its taps, the result, and scratch memory
    for table in order:
        current[table.axis] = table.out
        last = table is order[-1] and widened is None
        trailing = (1,) * (len(shape) - table.axis - 1)
        weights = table.weights.astype(wide).reshape(-1, table.out, *trailing)
        taps = list(zip(table.indices, weights, strict=True))
        result = None if last else layout.field(current, wide)  # the last pass writes to the output
        passes.append((table.axis, taps, result, layout.field(current, wide)))
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None

    def run(x: np.ndarray, out: np.ndarray, workspace: np.ndarray) -> None:
        if widened is not None:
            wider = widened(workspace)
            np.copyto(wider, x, casting="unsafe")
            x = wider
        for axis, taps, result, spare in passes:
            target = out if result is None else result(workspace)
            (indices, weights), *others = taps
            checkpoint()
            np.take(x, indices, axis, target, "clip")
            checkpoint()
            np.multiply(target, weights, target)
            for indices, weights in others:
                checkpoint()
                other = np.take(x, indices, axis, spare(workspace), "clip")
                checkpoint()
                np.multiply(other, weights, other)
                checkpoint()
                np.add(target, other, target)
            x = target
        # Cubic weights may be negative, so that results may exceed the range of the dtype.
        if limits is not None:
            np.rint(x, x)
            np.clip(x, limits.min, limits.max, x)
        if widened is not None:
            np.copyto(out, x, casting="unsafe")

    return run, layout.size


def _blocked(
    make: Callable[..., Resampler], tables: Sequence[Table], x: TensorType, out: TensorType
) -> Resampler:
    """Run a resampler in blocks along the leading axes, which limits its scratch memory."""
    assert x.dtype is not None
    first = min(table.axis for table in tables)
    run, size = make(tables, x.dims, x.dtype)
    if first == 0 or size <= _CACHE:
        return run, size
    # Axes before the first resized one are batch axes: their blocks share the scratch memory.
    count = math.prod(x.dims[:first])
    block = max(count * _CACHE // size, 1)
    inner, outer = x.dims[first:], out.dims[first:]
    moved = [table._replace(axis=table.axis - first + 1) for table in tables]
    run, size = make(moved, (block, *inner), x.dtype)
    rest, _ = make(moved, (count % block, *inner), x.dtype)

    def blocks(x: np.ndarray, out: np.ndarray, workspace: np.ndarray) -> None:
        x, flat = x.reshape(count, *inner), out.reshape(count, *outer)
        for start in range(0, count - block + 1, block):
            run(x[start : start + block], flat[start : start + block], workspace)
        if count % block:
            start = count - count % block
            rest(x[start:], flat[start:], workspace)
        # Reshaping a non-contiguous array copies it.
        if not np.may_share_memory(flat, out):
            np.copyto(out, flat.reshape(out.shape))

    return blocks, size


@operator("Resize", since=11, infer=infer_resize, strings=True)
@by_shape(widen=lambda node: not _is_nearest(node.attrs), values=(1, 2, 3))
def resize(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    attrs, x, y = node.attrs, tensor(inputs, 0), tensor(outputs, 0)
    position, prepared = len(inputs), (1, 2, 3)
    if 0 in y.dims:
        return Routine(lambda *_: None, prepared=prepared)
    tables = resize_tables(inputs, attrs, consts)
    if not tables:
        return Routine(lambda *a: np.copyto(a[position], a[0]), prepared=prepared)
    run, size = _blocked(_nearest if _is_nearest(attrs) else _interpolate, tables, x, y)
    outsides = [(t.axis, t.outside) for t in tables if t.outside is not None]
    value = attrs.get("extrapolation_value", 0.0)

    def into(*arguments: np.ndarray) -> None:
        out = arguments[position]
        run(arguments[0], out, arguments[-1])
        for axis, outside in outsides:
            np.moveaxis(out, axis, 0)[outside] = value

    return Routine(into, size, prepared)


def _is_nearest(attrs: Attrs) -> bool:
    return (attrs.get("mode") or "nearest") == "nearest"
