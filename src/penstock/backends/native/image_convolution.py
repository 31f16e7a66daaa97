"""Convolutions of images with their channels innermost, and what is added to them and bounds them.

Calls of these kernels are cheaper than oneDNN's, which pays for images of a few thousand elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.backends.native import family, fused_with, part_ns, rows_ns
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.records import NamedTuple, replace
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Node, Value
from penstock.ir.layout import ALIGNMENT, channels_last, packed_strides
from penstock.ops.common.constant_cache import ConstantRef, reordered
from penstock.ops.common.windows import Window, windows
from penstock.ops.internal.fused import is_fused, parts
from penstock.ops.work_estimate import Workload, flops, layout_seconds

# As in c/image_convolution.c.
_PANEL, _COPIED, _MOST_TAPS, _LINES = 16, 14336, 256, 4
_ROWS, _MOST_WEIGHTS = 64, 1 << 18  # positions of an item; elements, of which caches have more
_FOLLOWERS = frozenset({"Add", "Clip", "LeakyRelu", "Relu"})


class _Chain(NamedTuple):
    """A convolution, the tensors that it reads and adds to its result, the slope below 0 of what
    that gives, and its bounds."""

    conv: Node
    x: int
    w: int
    bias: np.ndarray | None
    addend: int | None
    slope: float = 1.0
    low: float = -math.inf
    high: float = math.inf


def image_workload(node: Node) -> Workload | None:
    """The work of a convolution; None where there is no kernel, and for images that enter the
    graph, with their channels first."""
    conv, *others = parts(node)
    values = *conv.inputs[:2], node.outputs[0]
    types = [v.type for v in values if v]
    tensors = [t for t in types if isinstance(t, TensorType) and t.static]
    source = None if node.inputs[0] is None else node.inputs[0].producer
    if source is None or len(tensors) < 3:
        return None
    if not _FOLLOWERS.issuperset([p.op.name for p in others]):
        return None
    x, w, y = tensors
    kernel, filters, copies_s = w.dims[2:], max(w.dims[0], 1), layout_seconds(node)[0]
    if conv.attrs.get("group", 1) == 1:
        positions, padded = y.elements // filters, math.ceil(w.dims[0] / _PANEL) * _PANEL
        lines = math.prod(kernel[:-1]) if math.prod(kernel) > 1 else 0
        products, elements = flops(node) * padded / filters, positions * padded
        return Workload("image", 0, products, 0, elements, positions * lines, copies_s)
    return Workload("depthwise image", x.nbytes, flops(node), beside_s=copies_s)


@family(fused_with("Conv"), work=image_workload)
def image_convolution(site: Site) -> NativeCall | None:
    """Conv over one or two axes with constant weights, by all channels or by one each, with an Add
    of another image, LeakyRelu, Relu and Clip behind it."""
    chain = _chain(site)
    w = None if chain is None else site.weights(chain.w)
    x = None if chain is None else site.input(chain.x)
    if chain is None or x is None or w is None or x.dtype != FLOAT32 or w.dtype != FLOAT32:
        return None
    sizes, group = x.dims[2:], chain.conv.attrs.get("group", 1)
    if not 1 <= len(sizes) <= 2 or 0 in (*x.dims, *site.output().dims, *w.shape):
        return None
    if w.size > _MOST_WEIGHTS or (group != 1 and not group == w.shape[0] == x.dims[1]):
        return None
    axes = [Window(1, 1, 1)] * (2 - len(sizes))
    axes += list(windows(chain.conv.attrs, w.shape[2:], sizes))
    if not all(axis.addressable for axis in axes):
        return None
    build = _of_all_channels if group == 1 else _of_each_channel
    call = build(site, chain, w, *axes)
    images = chain.x, chain.addend, len(site.node.inputs)
    return None if call is None else of_any_strides(site, call, images, turned=False)


def _chain(site: Site) -> _Chain | None:
    """What a node computes, if it is one that there are kernels for."""
    if not is_fused(site.node):
        bias = site.node.const(2)
        if len(site.node.inputs) > 2 and site.node.inputs[2] is not None and bias is None:
            return None
        return _Chain(site.node, 0, 1, bias, None)
    region = site.node.attrs["region"]
    place: dict[Value | None, int] = {value: i for i, value in enumerate(region.inputs)}
    conv, *others = region.nodes
    addend = None
    if others and others[0].op.name == "Add":
        add, *others = others
        (other,) = [v for v in add.inputs if v is not conv.outputs[0]] or [None]
        addend = place.get(other)
        if addend is None or site.tensors[addend] != site.output():
            return None
    slope = 1.0
    if others and others[0].op.name == "LeakyRelu":
        slope = others.pop(0).attrs.get("alpha", 0.01)
    limits = bounds_of(site, place, others)
    bias = None if conv.input(2) is None else site.constant(place[conv.input(2)])
    if limits is None or (bias is None) != (conv.input(2) is None) or not 0 < slope <= 1:
        return None
    x, w, *_ = conv.inputs
    return _Chain(conv, place[x], place[w], bias, addend, slope, *limits)


def _words(chain: _Chain, site: Site, bias: np.ndarray, weights: np.ndarray) -> tuple:
    addend = None if chain.addend is None else Tensor(chain.addend)
    return Tensor(chain.x), weights, bias, addend, site.result()


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy whose vectors never lie in two lines of the cache."""
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    memory = memory[-memory.ctypes.data % ALIGNMENT :][: array.nbytes]
    copy: np.ndarray = memory.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _of_all_channels(
    site: Site, chain: _Chain, w: ConstantRef, rows: Window, columns: Window
) -> NativeCall | None:
    filters, x = w.shape[0], site.input(chain.x)
    assert x is not None
    k = math.prod(w.shape[1:])
    every = -(-filters // _PANEL) * _PANEL

    last = *w.shape[2:], w.shape[1], filters  # the dims of a matrix of [k, filters]

    def packed(w: np.ndarray) -> tuple[np.ndarray]:
        matrix = np.zeros((k, every), FLOAT32)
        matrix[:, :filters] = np.moveaxis(w, (0, 1), (-1, -2)).reshape(k, filters)
        return (_aligned(matrix.reshape(k, -1, _PANEL).swapaxes(0, 1)),)

    def back(panels: np.ndarray) -> np.ndarray:
        matrix = panels.swapaxes(0, 1).reshape(k, every)[:, :filters].reshape(last)
        return np.ascontiguousarray(np.moveaxis(matrix, (-1, -2), (0, 1)))

    # The rows that are copied lie in an array of fixed size on the stack of the compiled function.
    if k > _COPIED:
        return None
    panels = TensorType(FLOAT32, (every // _PANEL, k, _PANEL))
    weights = reordered("native image", w, packed, back, [panels])
    positions = x.dims[0] * rows.count * columns.count
    block = min(_COPIED // k, _ROWS)
    products = Workload("image", flops=2 * k * every * block)
    bias = np.zeros(every, FLOAT32)
    bias[:filters] = 0 if chain.bias is None else chain.bias
    return NativeCall(
        "image_convolution",
        (
            *_words(chain, site, bias, *weights.arrays),
            *(axis_words(rows), axis_words(columns), *chain[-3:]),
            *(x.dims[0], x.dims[1], filters, block, None, None, None),
        ),
        items=-(-positions // block),
        item_ns=rows_ns(0, rows=5) + part_ns(products),
        reordered={chain.w: weights},
    )


def _of_each_channel(
    site: Site, chain: _Chain, w: ConstantRef, rows: Window, columns: Window
) -> NativeCall | None:
    channels, x = w.shape[0], site.input(chain.x)
    assert x is not None
    # Vectors run on into the channels of adjacent positions, so that weights repeat themselves
    # where a vector begins with the first channel.
    taps, period = rows.kernel * columns.kernel, math.lcm(channels, _PANEL)
    reach = (columns.kernel - 1) * columns.dilation // columns.stride

    def block_of(chunk: int) -> int:
        """Rows of the result that the copy of what ``chunk`` columns see has room for."""
        seen = _COPIED // (columns.stride * (chunk + reach) * channels)
        return (seen - (rows.kernel - 1) * rows.dilation - 1) // rows.stride + 1

    # Columns are divided before rows are, of which several are computed together.
    chunk = columns.count
    while block_of(chunk) < min(_LINES, rows.count) and chunk > 1:
        chunk = -(-chunk // 2)
    block = min(block_of(chunk), rows.count)
    block -= block % _LINES if block > _LINES else 0
    if block < 1 or taps > _MOST_TAPS or taps * period > _COPIED:
        return None

    def packed(w: np.ndarray) -> tuple[np.ndarray]:
        return (_aligned(np.tile(w.reshape(channels, taps).T, (1, period // channels))),)

    def back(rows: np.ndarray, shape: tuple[int, ...] = w.shape) -> np.ndarray:
        return np.ascontiguousarray(rows[:, :channels].T).reshape(shape)

    tiled = TensorType(FLOAT32, (taps, period))
    weights = reordered("native depthwise images", w, packed, back, [tiled])
    products = Workload("depthwise image", flops=2 * block * chunk * channels * taps)
    bias = np.zeros(channels, FLOAT32) if chain.bias is None else chain.bias
    items = x.dims[0] * -(-rows.count // block) * -(-columns.count // chunk)
    return NativeCall(
        "image_depthwise",
        (
            *_words(chain, site, np.tile(bias, period // channels), *weights.arrays),
            *(axis_words(rows), axis_words(columns), *chain[-3:], x.dims[0], channels),
            *(period, block, chunk, reach, None, None, None),
        ),
        items=items,
        item_ns=rows_ns(0, rows=5) + part_ns(products),
        reordered={chain.w: weights},
    )


def of_any_strides(
    site: Site, call: NativeCall, images: Sequence[int | None], *, turned: bool
) -> NativeCall:
    """``call``, whose last words are the steps of these ``images``, for any strides of them.
    ``turned``: rows and columns change places."""

    def restrided(strides: Sequence[tuple[int, ...] | None]) -> NativeCall:
        words = list(call.words[: -len(images)])
        for i in images:
            type_ = None if i is None else site.tensors[i]
            if i is None or type_ is None:
                words.append(None)
                continue
            image, channel, *spatial = strides[i] or packed_strides(type_.dims, 1)
            spatial = [image] * (2 - len(spatial)) + spatial
            steps = [image, channel, *(spatial[::-1] if turned else spatial)]
            words.append(np.array(steps, np.int64))
        return replace(call, words=tuple(words))

    plain = restrided([None] * len(site.tensors))
    order = channels_last(len(site.output().dims))
    return replace(plain, restrided=restrided, dims_order=order)


def bounds_of(
    site: Site, place: Mapping[Value | None, int], nodes: Sequence[Node]
) -> tuple[float, float] | None:
    """The bounds of the result, in real numbers; None if they are no constants."""
    low, high = -math.inf, math.inf
    for node in nodes:
        least, most = -math.inf, math.inf
        if node.op.name == "Relu":
            least = 0.0
        elif node.op.name == "Clip":
            ends = [
                None if v is None else site.constant(place[v])
                for v in [*node.inputs, None, None][1:3]
            ]
            for value, end in zip([*node.inputs, None, None][1:3], ends, strict=True):
                if value is not None and (end is None or end.size != 1 or np.isnan(end).any()):
                    return None
            least, most = [
                default if end is None else float(end.item())
                for end, default in zip(ends, (least, most), strict=True)
            ]
        else:
            return None
        low, high = min(max(low, least), most), min(max(high, least), most)
    return low, high


def axis_words(axis: Window) -> np.ndarray:
    """An axis as compiled code takes it."""
    own = axis.size, axis.count, axis.kernel, axis.stride, axis.dilation, axis.begin
    return np.array(own, np.int64)
