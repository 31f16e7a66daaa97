"""Convolutions: Conv, CausalConvWithState.

Three strategies, chosen by shapes when a kernel is compiled:

* kernels of one element with stride 1 are a matrix product of the weights with a view of the input;
* depthwise convolutions, and those with few filters per channel, sum one product per kernel
  position over a padded copy of the input, in which the elements that one kernel position reads for
  all windows are contiguous (``_shifted``);
* all others unfold the input (im2col), a block of windows at a time, and multiply the matrix by the
  weights (``_unfolded``).

They work in any dtype that NumPy multiplies; integers are exact unless they overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.core.checkpoints import checkpoint
from penstock.core.records import NamedTuple, replace
from penstock.core.types import RunValue, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.constant_cache import Shared, shared
from penstock.ops.common.products import convolution_work, is_long, product_in_parts
from penstock.ops.common.specialize import Field, Routine, Scratch, Tensors, by_shape, static_type
from penstock.ops.common.windows import Window, window_counts, windows
from penstock.ops.registry import operator

Strategy: TypeAlias = tuple[Callable[..., None], int]
"""``into(x, w, out[, workspace])`` without a bias, and the size of its workspace in bytes"""

BLOCK_BYTES = 2**20  # scratch of a block, which fits into a second-level cache
# Unfolded elements below which call overhead dominates; unfolding needs the fewest calls.
SMALL = 2**15
MIN_BLOCK = 64  # the minimum number of windows in a block, as each block reads all weights


def convolution_dims(
    x: Shape | None, w: Shape | None, attrs: Attrs, filters_first: bool = True
) -> tuple[Shape, Shape, int, Shape] | None:
    """The shapes of input (N, C, ...) and weights, the groups, and the kernel's dims.

    Weights are (M, C / group, ...), or (C, M / group, ...) if not ``filters_first``. ``None`` if
    both ranks are unknown.
    """
    if x is None and w is None:
        return None
    rank = len(w if x is None else x)  # type: ignore[arg-type]
    if rank < 3 or (x is not None and w is not None and len(w) != rank):
        raise ShapeError(f"input {x} and weights {w} must have the same rank, at least 3")
    x, w, group = x or (None,) * rank, w or (None,) * rank, attrs.get("group", 1)
    if group < 1:
        raise ShapeError(f"group must be positive, not {group}")
    for name, dim in (("channels", x[1]), ("filters", w[0] if filters_first else None)):
        if isinstance(dim, int) and dim % group:
            raise ShapeError(f"the {dim} {name} must be divisible by group={group}")
    channels = rules.dim_product((w[1], group)) if filters_first else w[0]
    if isinstance(x[1], int) and isinstance(channels, int) and x[1] != channels:
        raise ShapeError(f"the input has {x[1]} channels, but the weights expect {channels}")
    kernel = kernel_dims(attrs, w, rank - 2)
    if 0 in kernel:
        raise ShapeError(f"the kernel dims {kernel} must be positive")
    return x, w, group, kernel


def kernel_dims(attrs: Attrs, weights: Shape | None, rank: int) -> Shape:
    """The kernel's dims, from the weights or the ``kernel_shape`` attribute, which must agree."""
    declared = attrs.get("kernel_shape")
    if not declared:
        return (None,) * rank if weights is None else weights[2:]
    if len(declared) != rank:
        raise ShapeError(f"kernel_shape {list(declared)} must have {rank} entries, one per dim")
    kernel = tuple(declared)
    if weights is not None and weights[2:] != kernel:
        rules.check_shape(f"weights for kernel_shape {declared}", weights, (None, None, *kernel))
    return kernel


def conv_shape(x: Shape | None, w: Shape | None, attrs: Attrs) -> Shape | None:
    """The shape of a convolution of ``x`` (N, C, ...) with ``w`` (M, C / group, ...)."""
    dims = convolution_dims(x, w, attrs)
    if dims is None:
        return None
    x, w, _, kernel = dims
    return (x[0], w[0], *window_counts(attrs, kernel, x[2:]))


def _infer_conv(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = conv_shape(rules.tensor(types, 0).shape, rules.tensor(types, 1).shape, attrs)
    rules.check_shape("bias", rules.tensor(types, 2).shape, (None if shape is None else shape[1],))
    return (TensorType(rules.same_dtype(types, range(min(len(types), 4))), shape),)


def _pointwise(
    x: TensorType, w: TensorType, axes: Sequence[Window], group: int, weights: np.ndarray | None
) -> Strategy:
    n, m, depth, positions = x.dims[0], w.dims[0], w.dims[1], prod(x.dims[2:])
    assert x.dtype is not None
    is_slow = is_long(2 * n * m * depth * positions, x.dtype)
    multiply: Callable[..., RunValue] = product_in_parts if is_slow else np.matmul
    shape_w: tuple[int, ...] = (group, m // group, depth)
    shape_x: tuple[int, ...] = (n, group, depth, positions)
    shape_out: tuple[int, ...] = (n, group, m // group, positions)
    if group == n == 1:
        shape_w, shape_x, shape_out = shape_w[1:], shape_x[2:], shape_out[2:]
        multiply = multiply if is_slow else np.dot
    ready = None if weights is None else weights.reshape(shape_w)

    def into(x: np.ndarray, w: np.ndarray, out: np.ndarray) -> None:
        matrix = w.reshape(shape_w) if ready is None else ready
        multiply(matrix, x.reshape(shape_x), out.reshape(shape_out))

    return into, 0


def boxes(counts: Sequence[int], limit: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Boxes, of about ``limit`` positions each, that cover a grid in row-major order.

    Each covers whole trailing axes, a range of one axis, and one position of the leading ones, so
    that its positions are consecutive.
    """
    axis, whole = len(counts) - 1, 1
    while axis > 0 and whole * counts[axis] <= limit:
        whole *= counts[axis]
        axis -= 1
    pieces = -(-counts[axis] // max(1, limit // whole))
    step = max(-(-counts[axis] // max(pieces, 1)), 1)
    tail = tuple((0, size) for size in counts[axis + 1 :])
    for lead in product(*(range(size) for size in counts[:axis])):
        for low in range(0, counts[axis], step):
            high = min(low + step, counts[axis])
            yield (*((i, i + 1) for i in lead), (low, high), *tail)


class _Block(NamedTuple):
    """A box of windows: the source of their elements, and their places in the workspace."""

    columns: slice  # the flat indices of the windows
    source: tuple[slice, ...]  # their elements in an image (C, ...), padding excluded
    padded: Field  # the workspace field of these elements with their padding
    strides: tuple[int, ...]  # of the windows over the padded elements
    inner: tuple[slice, ...] | None  # what of ``padded`` is not padding; None without padding
    unfolded: Field  # the element of each window for each channel and kernel position
    matrix: Field  # the same as a matrix, or one for each group


def _window_strides(strides: Sequence[int], axes: Sequence[Window]) -> tuple[int, ...]:
    """The strides of a view (channels, kernel, windows) of an array (channels, elements)."""
    spatial = list(zip(strides[1:], axes, strict=True))
    taps = [stride * axis.dilation for stride, axis in spatial]
    return (strides[0], *taps, *[stride * axis.stride for stride, axis in spatial])


def _blocks(x: TensorType, axes: Sequence[Window], group: int) -> tuple[list[_Block], int]:
    """The blocks of a convolution, and the workspace they share."""
    channels, dtype = x.dims[1], x.dtype
    assert dtype is not None
    kernel = tuple(axis.kernel for axis in axes)
    rows = channels * prod(kernel)
    limit = max(BLOCK_BYTES // max(rows * dtype.itemsize, 1), MIN_BLOCK)
    blocks: list[_Block] = []
    start = padded_bytes = 0
    covering = list(boxes([axis.count for axis in axes], limit))
    sizes = [prod(high - low for low, high in box) for box in covering]
    # The workspace holds the unfolded elements, followed by the padded elements.
    layout = Scratch()
    layout.field((rows * max(sizes),), dtype)
    behind = layout.size
    for box, size in zip(covering, sizes, strict=True):
        spans = [axis.elements(*span) for axis, span in zip(axes, box, strict=True)]
        inside = [axis.inner(*span) for axis, span in zip(axes, spans, strict=True)]
        places = zip(inside, spans, strict=True)
        inner = (slice(None), *(slice(b - first, e - first) for (b, e), (first, _) in places))
        padded = (channels, *(last - first for first, last in spans))
        strides = [dtype.itemsize * prod(padded[i + 1 :]) for i in range(len(padded))]
        if inside != spans:
            padded_bytes = max(padded_bytes, prod(padded) * dtype.itemsize)
        unfolded = Field((channels, *kernel, *(high - low for low, high in box)), dtype, 0)
        blocks.append(
            _Block(
                slice(start, start + size),
                (slice(None), *(slice(*span) for span in inside)),
                Field(padded, dtype, behind),
                _window_strides(strides, axes),
                None if inside == spans else inner,
                unfolded,
                unfolded.reshaped(*((group,) if group > 1 else ()), rows // group, size),
            )
        )
        start += size
    return blocks, behind + padded_bytes


def _unfolded(
    x: TensorType, w: TensorType, axes: Sequence[Window], group: int, weights: np.ndarray | None
) -> Strategy:
    n, m, depth = x.dims[0], w.dims[0], prod(w.dims[1:])
    blocks, size = _blocks(x, axes, group)
    shape_w = (m, depth) if group == 1 else (group, m // group, depth)
    shape_out = (n, *shape_w[:-1], prod(axis.count for axis in axes))
    ready = None if weights is None else weights.reshape(shape_w)

    def unfold(image: np.ndarray, block: _Block, workspace: np.ndarray) -> np.ndarray:
        image = image[block.source]
        shape = block.unfolded.shape
        if block.inner is None:
            view = as_strided(image, shape, _window_strides(image.strides, axes))
        else:
            padded = block.padded(workspace)
            # The workspace still holds the previous block; elements that nothing is copied to are
            # is the padding.
            padded.fill(0)
            np.copyto(padded[block.inner], image)
            view = np.ndarray(shape, padded.dtype, workspace, block.padded.offset, block.strides)
        np.copyto(block.unfolded(workspace), view)
        return block.matrix(workspace)

    def into(x: np.ndarray, w: np.ndarray, out: np.ndarray, workspace: np.ndarray) -> None:
        matrix = w.reshape(shape_w) if ready is None else ready
        for image, result in zip(x, out.reshape(shape_out), strict=True):
            for block in blocks:
                checkpoint()
                np.matmul(matrix, unfold(image, block, workspace), result[..., block.columns])

    return into, size


class _Shifts(NamedTuple):
    """The layout of windows in planes: see ``_shifted``."""

    grid: tuple[int, ...]  # cells of a plane along each axis
    length: int  # cells that windows start at, including the superfluous ones at the ends of rows
    distance: int  # cells between the first and the last element of a window
    # For each kernel position: its plane, and the cells that the windows read.
    taps: list[tuple[int, slice]]
    # For each plane: its cells, and the input elements copied to them.
    fills: list[tuple[tuple[slice, ...], tuple[slice, ...]]]
    rows: tuple[int, ...]  # shape of the cells that windows start at
    inside: tuple[slice, ...]  # the windows among them


def _shifts(axes: Sequence[Window]) -> _Shifts:
    # Along an axis, kernel position k looks at plane (k * dilation) % stride, and as many cells
    # further as the stride goes into k * dilation.
    reach = [(axis.span - 1) // axis.stride for axis in axes]
    grid = tuple(axis.count + extra for axis, extra in zip(axes, reach, strict=True))
    pitch = [prod(grid[i + 1 :]) for i in range(len(grid))]
    length = axes[0].count * pitch[0]
    taps: list[tuple[int, slice]] = []
    planes: dict[tuple[int, ...], int] = {}
    for position in product(*(range(0, axis.span, axis.dilation) for axis in axes)):
        steps = [divmod(k, axis.stride) for k, axis in zip(position, axes, strict=True)]
        start = sum(cells * p for (cells, _), p in zip(steps, pitch, strict=True))
        index = planes.setdefault(tuple(phase for _, phase in steps), len(planes))
        taps.append((index, slice(start, start + length)))
    fills = []
    for phases in planes:
        cells, elements = zip(*map(_cells, axes, phases, grid), strict=True)
        fills.append((cells, elements))
    distance = sum(extra * p for extra, p in zip(reach, pitch, strict=True))
    inside = tuple(slice(axis.count) for axis in axes)
    return _Shifts(grid, length, distance, taps, fills, (axes[0].count, *grid[1:]), inside)


def _cells(axis: Window, phase: int, size: int) -> tuple[slice, slice]:
    """The cells of a plane along one axis that are not padding, and the input elements in them."""
    first = phase - axis.begin
    low = max(-(first // axis.stride), 0)
    high = min((axis.size - 1 - first) // axis.stride + 1, size)
    if high <= low:
        return slice(0, 0), slice(0, 0)
    start = low * axis.stride + first
    return slice(low, high), slice(start, start + (high - low - 1) * axis.stride + 1, axis.stride)


def _pieces(axes: Sequence[Window], rows: int) -> list[tuple[slice, _Shifts]]:
    """Split the windows into pieces of at most ``rows`` along the first axis."""
    first, *others = axes
    pieces = []
    for low in range(0, first.count, rows):
        high = min(low + rows, first.count)
        part = replace(first, count=high - low, begin=first.begin - low * first.stride)
        pieces.append((slice(low, high), _shifts([part, *others])))
    return pieces


def _shift_blocks(
    axes: Sequence[Window], group: int, filters: int, depth: int, dtype: np.dtype
) -> tuple[bool, int, int]:
    """Whether channels come first in memory, and the groups and rows computed at a time."""
    shifts, count = _shifts(axes), axes[0].count
    planes = len(shifts.fills) * depth * (shifts.length + shifts.distance)
    size = (planes + 2 * filters * shifts.length) * dtype.itemsize  # of one group
    small_images = group * len(shifts.taps) >= 2 * shifts.length
    if depth == 1 and group * size <= 2 * BLOCK_BYTES and small_images:
        return False, group, count
    # Blocks of groups, or of the first axis where one group is too large.
    groups = max(1, min(group, BLOCK_BYTES // max(size, 1)))
    per_row = groups * size // count
    return True, groups, max(1, min(count, 2 * BLOCK_BYTES // max(per_row, 1)))


def _by_position(w: np.ndarray, group: int) -> np.ndarray:
    """The weights as one matrix (filters, channels) for each kernel position and group."""
    filters, depth, *kernel = w.shape
    moved = w.reshape(group, filters // group, depth, prod(kernel)).transpose(3, 0, 1, 2)
    return np.ascontiguousarray(moved)


def _fill_planes(planes: np.ndarray, image: np.ndarray, shifts: _Shifts) -> None:
    """Lay out the channels of ``image`` as planes, one for each phase of the strides."""
    channels, size = len(image), prod(shifts.grid)
    for plane, (to, elements) in zip(planes, shifts.fills, strict=True):
        cube = plane[:, :size].reshape(channels, *shifts.grid)
        np.copyto(cube[(slice(None), *to)], image[(slice(None), *elements)])


def _shifted(
    x: TensorType, w: TensorType, axes: Sequence[Window], group: int, weights: np.ndarray | None
) -> Strategy:
    """Sum one product per kernel position.

    The padded input is laid out as one plane for each remainder of positions modulo the strides.
    In a flattened plane, the k-th elements of all windows are at the same offset from the windows,
    so that nothing is unfolded. The superfluous windows across row ends are dropped when the result
    is copied. Depthwise products are elementwise; for many channels of small images, the layout is
    then channels-last.
    """
    n, m, depth, dtype = x.dims[0], w.dims[0], w.dims[1], x.dtype
    assert dtype is not None
    filters = m // group
    multiply: Callable[..., RunValue] = np.multiply if depth == 1 else np.matmul
    by_channel, groups, rows = _shift_blocks(axes, group, filters, depth, dtype)
    pieces = _pieces(axes, rows)
    layout = Scratch()
    largest = pieces[0][1]
    shape_rows = len(largest.fills), groups * depth, largest.length + largest.distance
    shape_sums = groups, filters, largest.length
    source = layout.field(shape_rows if by_channel else (shape_rows[0], *shape_rows[:0:-1]), dtype)
    total, term = (layout.field(shape_sums[:: 1 if by_channel else -1], dtype) for _ in range(2))
    shape_out = (n, group, filters, *(axis.count for axis in axes))
    ready: Shared[np.ndarray] | None = None
    if weights is not None:
        ready = shared(("by position", group), lambda: _by_position(weights, group), weights)

    def into(x: np.ndarray, w: np.ndarray, out: np.ndarray, workspace: np.ndarray) -> None:
        factors = _by_position(w, group) if ready is None else ready.value
        planes, sums, terms = source(workspace), total(workspace), term(workspace)
        if not by_channel:
            planes, sums, terms = planes.swapaxes(1, 2), sums.T, terms.T
        for image, result in zip(x, out.reshape(shape_out), strict=True):
            for where, shifts in pieces:
                # Elements that nothing is copied to are padding; clear what the previous piece left
                # there.
                planes.fill(0)
                length = shifts.length
                for low in range(0, group, groups):
                    checkpoint()
                    block = slice(low, min(low + groups, group))
                    used = block.stop - low
                    channels = slice(block.start * depth, block.stop * depth)
                    _fill_planes(planes[:, : used * depth], image[channels], shifts)
                    partial, scratch = sums[:used, :, :length], terms[:used, :, :length]
                    target = partial
                    for i, (index, span) in enumerate(shifts.taps):
                        seen = planes[index, : used * depth, span].reshape(used, depth, length)
                        # The first product initializes the sums, so that they need not be zeroed.
                        multiply(factors[i, block], seen, target)
                        if i:
                            np.add(partial, scratch, partial)
                        target = scratch
                    full = partial.reshape(used, filters, *shifts.rows)
                    np.copyto(result[block, :, where], full[:, :, *shifts.inside])

    return into, layout.size


def _shifting_pays(w: TensorType, axes: Sequence[Window], group: int) -> bool:
    """Whether summing shifted products is faster than unfolding, as measured on one core."""
    filters, depth = w.dims[0] // group, w.dims[1]
    unfolded = group * prod(w.dims[1:]) * prod(axis.count for axis in axes)
    if unfolded < SMALL or w.nbytes > BLOCK_BYTES:
        return False
    # Sums are written once for each filter, unfolded elements once for each channel.
    return 0 < filters <= 2 if depth == 1 else 2 * filters <= depth


def convolution_routine(
    x: TensorType, w: TensorType, attrs: Attrs, weights: np.ndarray | None = None
) -> Routine:
    """The routine ``into(x, w, out[, workspace])`` of a convolution without a bias.

    ``x`` (N, C, ...) may be strided, ``out`` must be contiguous, both of one dtype. ``weights`` are
    the elements of ``w`` where they are constant; then the argument ``w`` is not read.
    """
    group = attrs.get("group", 1)
    axes = windows(attrs, w.dims[2:], x.dims[2:])
    if weights is not None:
        if group == 1 and len(weights) > 1 and weights.strides[0] == 0:
            return _repeated(x, w, attrs, weights)
        weights = np.ascontiguousarray(weights)
    strategy = _shifted if _shifting_pays(w, axes, group) else _unfolded
    if all(axis.trivial for axis in axes):
        strategy = _pointwise
    into, size = strategy(x, w, axes, group, weights)
    return Routine(into, size, () if weights is None else (1,))


def _repeated(x: TensorType, w: TensorType, attrs: Attrs, weights: np.ndarray) -> Routine:
    """One filter broadcast with stride 0, as ConstantOfShape produces.

    The filter is stored and computed once, so that all output channels are bitwise equal; in a
    matrix product, rounding depends on the position of a row in the tiles of the BLAS library.
    """
    image, first = TensorType(x.dtype, (1, *x.dims[1:])), TensorType(w.dtype, (1, *w.dims[1:]))
    single = convolution_routine(image, first, attrs, weights[:1])

    def into(x: np.ndarray, w: np.ndarray, out: np.ndarray, *workspace: np.ndarray) -> None:
        for i in range(len(x)):
            single.into(x[i : i + 1], w, out[i : i + 1, :1], *workspace)
            out[i, 1:] = out[i, :1]

    return single._replace(into=into)


@operator("Conv", infer=_infer_conv, work=convolution_work(1), traits={"heavy"})
@by_shape(contiguous=True)
def conv(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    x = rules.tensor(inputs, 0)
    routine = convolution_routine(x, rules.tensor(inputs, 1), node.attrs, consts[1])
    multiply, others = routine.into, len(inputs) - 2
    if others == 0:
        return routine
    column = (-1, *(1,) * (len(x.dims) - 2))
    bias = consts[2].reshape(column) if others > 0 and consts[2] is not None else None
    has_bias = rules.given(inputs, 2)

    def into(x: np.ndarray, w: np.ndarray, *rest: np.ndarray) -> None:
        out = rest[others]
        multiply(x, w, *rest[others:])
        if has_bias:
            np.add(out, rest[0].reshape(column) if bias is None else bias, out)

    prepared = routine.prepared if bias is None else (*routine.prepared, 2)
    return Routine(into, routine.workspace, prepared)


def _infer_causal(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, w, past = rules.tensor(types, 0), rules.tensor(types, 1), rules.tensor(types, 3)
    dtype = rules.same_dtype(types, range(len(types)))
    rules.choice(attrs, "activation", "none", ("none", "silu", "swish"))
    rules.check_shape("input", x.shape, (None, None, None))
    n, channels, length = x.shape or (None, None, None)
    rules.check_shape("weight", w.shape, (channels, 1, None))
    filters, _, kernel = w.shape or (None, None, None)
    channels = filters if channels is None else channels
    if kernel == 0:
        raise ShapeError("the kernel dims must be positive")
    rules.check_shape("bias", rules.tensor(types, 2).shape, (channels,))
    state = (n, channels, kernel - 1 if isinstance(kernel, int) else None)
    rules.check_shape("past_state", past.shape, state)
    return TensorType(dtype, (n, channels, length)), TensorType(dtype, state)


@operator("CausalConvWithState", since=27, infer=_infer_causal)
@by_shape(arity=(4, 2), contiguous=True)
def causal_conv(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    (n, channels, length), dtype = static_type(inputs, 0)
    w_type, layout = rules.tensor(inputs, 1), Scratch()
    state = w_type.dims[2] - 1
    joined, term = (layout.field((n, channels, m), dtype) for m in (state + length, length))
    from penstock.ops.onnx.activation import swish  # of this operation alone

    silu, activated = swish(dtype, {}), node.attrs.get("activation", "none") != "none"

    def into(*arguments: RunValue) -> None:
        x, w, bias, past, out, present, workspace = arguments
        sequence, product = joined(workspace), term(workspace)
        sequence[..., :state] = 0 if past is None else past
        sequence[..., state:] = x
        out[...] = 0 if bias is None else bias[:, np.newaxis]
        for k in range(state + 1):
            np.multiply(sequence[..., k : k + length], w[..., k], product)
            np.add(out, product, out)
        if activated:
            silu(out, out, product)
        if present is not None:
            np.copyto(present, sequence[..., length:])

    return Routine(into, layout.size)
