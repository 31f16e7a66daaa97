"""Convolutions and transposed convolutions with few channels on channels-first (NCHW) images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from penstock.backends.native import below_numpy, cheaper, family, part_ns, rows_ns
from penstock.backends.native.image_axes import TRANSPOSED_WINDOWS
from penstock.backends.native.image_convolution import image_convolution, image_workload
from penstock.backends.native.image_strides import WINDOW, of_any_strides
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.records import NamedTuple
from penstock.core.traced import EXTREMES, TRACED, int64s
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.common.constant_cache import reordered, weights_of
from penstock.ops.common.windows import Window, windows
from penstock.ops.work_estimate import Workload, flops, layout_seconds

# As in c/windows/convolution.c.
_AXES, _BUFFER, _LINE, _MOST_SLICES, _BLOCK = 3, 10240, 2048 - 16, 32, 4
_LEAST_COLUMNS, _LANES = 8, 16
_LINE_COPIED = 0.06  # of the time of an item
_TOGETHER = 4096  # elements per item of CausalConvWithState
_SUMS, _GROUP = 4096, 8  # as in c/windows/scattered_convolution.c
_MOST_SCATTERED, _MOST_OF_PHASE = 75_000, 18_500  # operations, also of each phase of the result


class _Spread(NamedTuple):
    """An axis of rows or columns, as in convolution.c; and, for each phase of the result, its taps
    of the kernel, with the split of the copy that each tap reads, and the offset there."""

    axis: Window
    phases: int
    splits: int
    lead: int
    taps: list[list[tuple[int, int, int]]]
    elements: int
    """of a phase"""
    reach: int
    """elements of a split that a window spans, less one"""

    def words(self, block: int) -> list[int]:
        axis = self.axis
        own = self.phases, self.splits, self.lead, block + self.reach, block
        return [axis.size, axis.count, *own]


def plane_workload(node: Node) -> Workload | None:
    """Return the workload of a convolution: groups, copies of the input tiles of items, and
    products. A single filter is bound by loads."""
    images = [v.type for v in (node.inputs[0], node.outputs[0]) if v is not None]
    tensors = [t for t in images if isinstance(t, TensorType) and t.static and len(t.dims) > 2]
    w = weights_of(node.input(1))
    if w is None or len(tensors) < len(images) or not all(t.elements for t in tensors):
        return None
    group, transposed = node.attrs.get("group", 1), node.op.name == "ConvTranspose"
    filters = w.shape[1] if transposed else w.shape[0] // group
    # Room for a line, in positions of a phase of the result or a split of the input.
    steps, (x, y) = math.prod(node.attrs.get("strides", ())), [t.dims for t in tensors]
    room = _BUFFER // max(x[1] // group * (1 if transposed else steps), 1)
    every = math.prod(y[2:]) // (steps if transposed else 1)
    line, again, lines = every, 1.0, 0.0
    smaller, larger = EXTREMES[type(every) in TRACED]
    if len(y) > 3:
        # Input rows and columns that two items share are copied for both.
        strides, dilations = [node.attrs.get(name) or (1, 1) for name in ("strides", "dilations")]
        sizes = zip(w.shape[-2:], dilations[-2:], strides[-2:], strict=True)
        shared = [(kernel - 1) * dilation // stride for kernel, dilation, stride in sizes]
        (rows, columns), (row, column) = y[-2:], shared
        if transposed:
            rows, columns = -(-rows // strides[-2]), -(-columns // strides[-1])
        chunks = columns
        while room // (columns + column) <= row and columns > _LEAST_COLUMNS:
            columns = -(-columns // 2)
        own = larger(smaller(room // (columns + column) - row, rows), 1)
        line = own * columns
        again = 1 + smaller(rows - own, 1) * row / own
        lines = tensors[0].elements / x[-1] * again * chunks / columns
        again *= 1 + column / columns
    line = larger(smaller(smaller(line, every), room), 1)
    return Workload(
        "planes" if filters > 1 else "planes, one filter",
        flops=flops(node) * -(-line // _LANES) * _LANES / line,
        elements=again * tensors[0].elements + tensors[1].elements,
        items=tensors[0].dims[0] * group + _LINE_COPIED * lines,
        beside_s=layout_seconds(node)[1],
    )


def plane_convolution(site: Site) -> NativeCall | None:
    """Conv and ConvTranspose with constant weights, if a result row's input fits the cache."""
    x, w, bias, y = site.tensor(0), site.constant(1), site.input(2), site.output()
    if w is None or x.dtype != FLOAT32 or w.dtype != FLOAT32:
        return None
    sizes, group = x.dims[2:], site.attr("group", 1)
    if not 1 <= len(sizes) <= _AXES or 0 in (*x.dims, *y.dims):
        return None
    transposed = site.node.op.name == "ConvTranspose"
    axes = [Window(1, 1, 1)] * (_AXES - len(sizes)) + _axes(site.node, w, sizes)
    if not all(axis.addressable for axis in axes):
        return None
    depth, rows, columns = axes[0], _spread(axes[1], transposed), _spread(axes[2], transposed)
    channels, filters = x.dims[1] // group, y.dims[1] // group
    copied = channels * depth.kernel * rows.splits * columns.splits
    blocks = _blocks(rows, columns, copied)
    if blocks is None or depth.kernel > _MOST_SLICES:
        return None
    band, chunk = blocks
    length = chunk + columns.reach
    taps: list[int] = []
    for of_row, of_column in product(rows.taps, columns.taps):
        taps.append(len(of_row) * len(of_column))
        for (_, p, i), (_, q, j) in product(of_row, of_column):
            taps.append(((p * columns.splits + q) * (band + rows.reach) + i) * length + j)
    strides = [(a.kernel, a.stride, a.dilation, a.begin) for a in axes]
    of_phases = [sum(map(len, spread.taps)) for spread in (rows, columns)]
    elements = math.prod(w.shape[:2]) * axes[0].kernel * math.prod(of_phases)
    packed = reordered(
        ("native convolution", transposed, group, *strides[1:]),
        w,
        lambda w: (_packed(w, group, transposed, rows.taps, columns.taps),),
        None,
        [TensorType(FLOAT32, (elements,))],
    )
    items = (
        x.dims[0] * group * depth.count * -(-rows.elements // band) * -(-columns.elements // chunk)
    )
    return NativeCall(
        "convolution",
        (
            *(Tensor(0), packed.arrays[0], None if bias is None else Tensor(2), site.result()),
            *int64s([depth.size, depth.count, *strides[0]], rows.words(band)),
            *int64s(columns.words(chunk), taps),
            *(int(transposed), group, channels, filters, math.prod(w.shape[2:]) // depth.kernel),
        ),
        items=items,
        item_ns=part_ns(Workload("planes, a part", flops=flops(site.node) / items, items=1)),
        keep=packed,
    )


@family("CausalConvWithState", work=below_numpy)
def causal_convolution(site: Site) -> NativeCall | None:
    """CausalConvWithState of float32."""
    x, w, *others = [site.input(i) for i in range(4)]
    y, state = (*site.tensors[len(site.node.inputs) :], None)[:2]
    if x is None or w is None or y is None or not x.elements:
        return None
    if any(t is not None and t.dtype != FLOAT32 for t in (x, w, *others, state)):
        return None
    (n, channels, length), kernel = x.dims, w.dims[2]
    optional = [None if t is None else Tensor(2 + i) for i, t in enumerate(others)]
    silu, block = site.attr("activation", "none") != "none", max(1, _TOGETHER // length)
    return NativeCall(
        "causal",
        (
            *(Tensor(0), Tensor(1), *optional, site.result()),
            None if state is None else site.result(1),
            *(n * channels, channels, length, kernel, int(silu), block),
        ),
        items=-(-n * channels // block),
        item_ns=rows_ns(block * length * (kernel + 5 * silu), rows=block),
    )


@family(
    *("Conv", "ConvTranspose"),
    work=lambda node: cheaper(image_workload(node), plane_workload(node)),
)
def convolution_call(site: Site) -> NativeCall | None:
    """A convolution of channels-last or channels-first images, whichever is estimated faster."""
    scattered = scattered_convolution(site)
    if scattered is not None:
        return scattered
    node = _of_one_sample(site.node) if site.ordered else site.node
    image, plane = image_workload(node), plane_workload(node)
    # The faster estimate may have no kernel for these shapes; then the other one is used.
    if cheaper(image, plane) is plane:
        return plane_convolution(site) or image_convolution(site)
    return image_convolution(site) or plane_convolution(site)


def _of_one_sample(node: Node) -> Node:
    """Return the node for a batch of one: the kernel for it is that for all batches where the order
    of sums must not depend on the batch."""
    images = []
    for value in (node.inputs[0], node.outputs[0]):
        assert value is not None and isinstance(value.type, TensorType)
        type_ = TensorType(value.type.dtype, (1, *value.type.dims[1:]))
        images.append(Value(value.name, type_, value.producer))
    return Node(node.op, [images[0], *node.inputs[1:]], [images[1]], node.attrs)


def scattered_convolution(site: Site) -> NativeCall | None:
    """ConvTranspose with constant weights, if its phases are so small that most time would go to
    finding what each position reads."""
    if site.node.op.name != "ConvTranspose" or site.attr("group", 1) > 1:
        return None
    x, w, y = site.tensor(0), site.tensor(1), site.output()
    if x.dtype != FLOAT32 or w.dtype != FLOAT32 or not y.elements:
        return None
    sizes, (channels, filters) = x.dims[2:], w.dims[:2]
    if not 1 <= len(sizes) <= _AXES or site.ordered or site.rounds:
        return None
    axes = [Window(1, 1, 1)] * (_AXES - len(sizes))
    axes += TRANSPOSED_WINDOWS(site.node.attrs, w.dims[2:], sizes)
    every, taps = -(-filters // _GROUP) * _GROUP, math.prod(w.dims[2:])
    work = 2 * math.prod(sizes) * taps * channels * every
    phases = math.prod([axis.stride for axis in axes])
    if math.prod(y.dims[2:]) * every > _SUMS or not all(axis.addressable for axis in axes):
        return None
    if work > min(_MOST_SCATTERED, _MOST_OF_PHASE * phases):
        return None
    # Only here: this may give the constants back that other kernels hold in their own order.
    weights, bias = site.constant(1), site.constant(2)
    if weights is None or (bias is None and site.input(2) is not None):
        return None

    def pack(w: np.ndarray) -> tuple[np.ndarray]:
        packed = np.zeros((taps, channels, every), FLOAT32)
        packed[..., :filters] = w.reshape(channels, filters, taps).transpose(2, 0, 1)
        return (packed,)

    type_ = TensorType(FLOAT32, (taps, channels, every))
    packed = reordered("native scattered", weights, pack, None, [type_])
    biases = np.zeros(every, FLOAT32)
    biases[:filters] = 0 if bias is None else bias
    call = NativeCall(
        "scattered_convolution",
        (
            *(Tensor(0, any_order=True), packed.arrays[0], biases, site.result()),
            *int64s(*map(WINDOW, axes)),
            *(channels, filters, every, None, None),
        ),
        items=x.dims[0],
        item_ns=part_ns(Workload("image", flops=work)),
        keep=packed,
        any_layout=True,
    )
    return of_any_strides(site, call, (0, len(site.node.inputs)))


def _axes(node: Node, w: np.ndarray, sizes: Sequence[int]) -> list[Window]:
    """Return the windows along each axis. Those of a transposed convolution are seen from the
    result: each of ``count`` elements reads some of the ``size`` elements of the input."""
    if node.op.name == "Conv":
        return list(windows(node.attrs, w.shape[2:], sizes))
    axes = TRANSPOSED_WINDOWS(node.attrs, w.shape[2:], sizes)
    return [
        Window(a.count, a.size, a.kernel, a.stride, a.dilation, a.begin)
        for a in axes
        if isinstance(a, Window)
    ]


def _spread(axis: Window, transposed: bool) -> _Spread:
    stride, steps = axis.stride, [k * axis.dilation for k in range(axis.kernel)]
    if not transposed:
        taps = [(k, step % stride, step // stride) for k, step in enumerate(steps)]
        return _Spread(axis, 1, stride, axis.begin, [taps], axis.count, _reach(taps))
    seen = [
        [
            (k, (r + axis.begin - at) // stride)
            for k, at in enumerate(steps)
            if (r + axis.begin - at) % stride == 0
        ]
        for r in range(stride)
    ]
    lead = -min([0, *[at for phase in seen for _, at in phase]])
    taps_of = [[(k, 0, at + lead) for k, at in phase] for phase in seen]
    reach = max(map(_reach, taps_of))
    return _Spread(axis, stride, 1, lead, taps_of, -(-axis.count // stride), reach)


def _reach(taps: Sequence[tuple[int, int, int]]) -> int:
    return max([0, *[at for _, _, at in taps]])


def _blocks(rows: _Spread, columns: _Spread, copied: int) -> tuple[int, int] | None:
    """Return the rows and columns of an item, such that ``copied`` copies of their input and the
    result fit into the kernel's buffers; None if one row does not fit."""
    chunk = columns.elements
    while True:
        length = chunk + columns.reach
        band = min(_LINE // columns.phases // length, _BUFFER // (copied * length) - rows.reach)
        if band > 0:
            return min(band, rows.elements), chunk
        if chunk <= _LEAST_COLUMNS:
            return None
        chunk = -(-chunk // 2)


def _packed(
    w: np.ndarray,
    group: int,
    transposed: bool,
    rows: Sequence[Sequence[tuple[int, int, int]]],
    columns: Sequence[Sequence[tuple[int, int, int]]],
) -> np.ndarray:
    """Return weights in the kernel's order: group, phase of rows, block of filters, phase of
    columns, slice, channel, tap, filter."""
    kernel = (1,) * (_AXES + 2 - w.ndim) + w.shape[2:]
    grouped = w.reshape(group, w.shape[0] // group, w.shape[1], *kernel)
    grouped = grouped if transposed else grouped.swapaxes(1, 2)

    def parts() -> Iterator[np.ndarray]:
        # Those of a group are [channels, filters, slices, rows, columns].
        for own, of_row in product(grouped, rows):
            for first in range(0, own.shape[1], _BLOCK):
                some = own[:, first : first + _BLOCK][..., [k for k, _, _ in of_row], :]
                for of_column in columns:
                    block = some[..., [k for k, _, _ in of_column]]
                    yield block.transpose(2, 0, 3, 4, 1).reshape(-1)

    return np.concatenate(list(parts()))
