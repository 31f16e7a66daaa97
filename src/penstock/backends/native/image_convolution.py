"""Convolutions and transposed convolutions of channels-last (NHWC) images, with epilogues."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from penstock.backends.native import LANES, blocks_of_rows, family, fused_with, part_ns
from penstock.backends.native.bounds import bounds_of, scalar_operand
from penstock.backends.native.dense import BLOCK, GRAIN, PANEL, of_pairs, padded
from penstock.backends.native.image_axes import POINT, SeenAxis, spans
from penstock.backends.native.image_strides import AXES, of_any_strides
from penstock.backends.native.image_weights import Packing, groups_of_vectors, weights_order
from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor, Word
from penstock.core.records import NamedTuple, replace
from penstock.core.traced import EXTREMES, TRACED, int64s
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.common.constant_cache import Reordered
from penstock.ops.internal.fused import is_fused, parts
from penstock.ops.work_estimate import Workload, flops, layout_seconds

# As in c/windows/image_convolution.c.
_COPIED, _MOST_CHANNELS, _ADDRESSES, _MOST_ROWS = 14336, 8192, 4096, 64
_TILE = 6  # rows of a register tile of a product with many columns
_TOGETHER = 128  # channels of narrow groups that are processed together, as in image_groups.c
_CACHED = 1152  # weights that stay in the L1 cache
# Bytes of images whose copies stay in a core's private cache, and least channels for copies.
_NEAR, _LEAST_COPIED = 2**21, 16
# Channels below which the taps of a row are read together, and positions per item that suffice for
# this.
_FEW_CHANNELS, _LEAST_BLOCK = 32, 24
# Positions of a line that suffice for a separate product; with 16-lane vectors, those of one tile
# do.
_LEAST_LINE, _LEAST_WIDE = 24, 9
# Most elements of a row of taps, with strides more, and of all taps, with one address each; and
# positions of a line per position that reads padding.
_MOST_OF_ROW, _MOST_OF_STRIDED, _MOST_ELEMENTS, _PER_END = 24, 40, 192, 16
# With narrow vectors: most channels of single positions that have an address each; least positions
# of a line for elements of copies that do, and most such elements per position of a line.
_MOST_OF_POSITION, _LEAST_OF_ELEMENTS, _PER_POSITION = 64, 14, 12
_ELEMENTS = np.array([0, 0, 1], np.int64)  # ``even_lines`` for elements with addresses
# Most channels for which image rows are copied with zero padding, least positions of a line, and
# least positions per item for which layout copies take less time than a separate step.
_MOST_COPIED, _LEAST_COPIED_LINE, _LEAST_OF_COPIES = 16, 2, 96
# Most channels for which a line of a depthwise convolution is computed as one run of elements.
_MOST_FLAT = 12
_FOLLOWERS = frozenset(
    {"Add", "Clip", "HardSwish", "LeakyRelu", "Max", "Min", "Mul", "PRelu", "Relu"}
)
_NO_GATE = (0.0, 0.0, 1.0, 0.0)


class _Chain(NamedTuple):
    """A convolution with its operands and epilogue: bias, an addend tensor, slopes for negative
    sums (LeakyRelu, PRelu) or a gate, and clipping bounds."""

    conv: Node
    x: int
    w: int
    bias: np.ndarray | int | None
    """constants, or the index of the tensor given at run time"""
    addend: int | None
    slopes: np.ndarray | None = None
    gate: tuple[float, ...] = _NO_GATE
    """HardSwish: x * min(max(x * gate[0] + gate[1], 0), 1) * gate[2] + gate[3]"""
    low: float = -math.inf
    high: float = math.inf
    first: int = 0
    """the first part left to an elementwise program, 0 if there is none"""


def image_workload(node: Node) -> Workload | None:
    """Return the workload of a convolution; None if no kernel is available."""
    conv, *others = parts(node)
    values = *conv.inputs[:2], node.outputs[0]
    tensors = [v.type for v in values if v and isinstance(v.type, TensorType) and v.type.static]
    if len(tensors) < 3:
        return None
    added = 0.0
    for part in others:
        # Count programs only: other epilogues cost almost nothing when sums are written.
        if part.op.name in _FOLLOWERS:
            continue
        from penstock.backends.native.elementwise import additions_of

        additions = additions_of(part)
        if additions is None:
            return None
        added += additions
    x, w, y = tensors
    source = None if node.inputs[0] is None else node.inputs[0].producer
    given, filters, kernel = conv.attrs.get("group", 1), y.dims[1], list(map(float, w.dims[2:]))
    constant = conv.inputs[1] is not None and conv.inputs[1].is_constant
    positions, moved = y.elements // max(filters, 1), x.nbytes + y.nbytes
    few = moved > _NEAR or x.dims[1] < _LEAST_COPIED
    if source is None and given == x.dims[1] > 1 and constant and few:
        return None  # too little work to pay for layout copies
    if conv.op.name == "ConvTranspose":  # taps of a phase
        strides = conv.attrs.get("strides") or [1] * len(kernel)
        sizes = zip(kernel, strides, x.dims[2:], strict=True)
        kernel = [1 if size == 1 else k / stride for k, stride, size in sizes]
    taps, of_rows = math.prod(kernel), math.prod(kernel[:-1])
    more, copies_s = y.elements * added, layout_seconds(node)[0]
    copies_s += 0 if constant else part_ns(Workload("gather", w.nbytes)) * 1e-9
    if 1 < given == filters == x.dims[1]:
        lines = positions * of_rows
        return Workload("depthwise image", moved, flops(conv), 0, more, lines, copies_s)
    groups = groups_of_vectors(given, max(filters // given, 1))
    channels, each = x.dims[1] // groups, filters // groups
    # Pairs of channels take turns in the vectors of few filters.
    is_half = each <= GRAIN // 2 and channels % 2 == 0
    elements = positions * groups * (GRAIN // 2 if is_half else padded(each))
    products = 2 * elements * channels * taps
    # The address of each tap, or row of taps, is computed once for all filters.
    lines = positions * (taps if x.dims[1] >= _FEW_CHANNELS else of_rows)
    return Workload("image", moved, products, 0, elements + more, lines, copies_s)


@family(fused_with("Conv"), work=image_workload)
def image_convolution(site: Site) -> NativeCall | None:
    """Conv and ConvTranspose over one to three axes, dense, grouped or depthwise; Conv with an
    epilogue of an Add of another image and elementwise operations."""
    chain = _chain(site)
    if chain is None:
        return None
    x, w = site.tensor(chain.x), site.tensor(chain.w)
    if x.dtype != FLOAT32 or w.dtype != FLOAT32:
        return None
    sizes, group = x.dims[2:], chain.conv.attrs.get("group", 1)
    if not 1 <= len(sizes) <= AXES or 0 in (*x.dims, *site.output().dims, *w.dims):
        return None
    axes = spans(chain.conv, w.dims[2:], sizes)
    if axes is None:
        return None
    axes = [POINT] * (AXES - len(sizes)) + axes
    is_depthwise = group == site.output().dims[1] == x.dims[1] > 1
    build = _of_each_channel if is_depthwise else _of_all_channels
    call = build(site, chain, axes)
    if call is None:
        return None
    images = chain.x, chain.addend, len(site.node.inputs)
    # Not a closure, whose cells the garbage collector would traverse while plans live.
    copying = partial(build, site, chain, axes, copies=True)
    # A channels-first result is transposed while sums are in the cache.
    in_order = call.kernel.endswith("_convolution") and chain.addend is None
    call = replace(call, any_layout=in_order)
    return of_any_strides(site, call, images, copying, first=chain.first)


def _chain(site: Site) -> _Chain | None:
    """Return the convolution and the epilogue of a node, or None if no kernel is available."""
    if not is_fused(site.node):
        return _Chain(site.node, 0, 1, _bias(site, 2), None)
    region, output = site.node.attrs["region"], site.output()
    types = [None if v is None else v.type for part in region.nodes for v in part.outputs]
    if types.count(output) < len(types):
        return None
    place: dict[Value | None, int] = {value: i for i, value in enumerate(region.inputs)}
    conv, *others = region.nodes
    bias, addend = None if conv.input(2) is None else _bias(site, place[conv.input(2)]), None
    if others and others[0].op.name == "Add":
        (other,) = [v for v in others[0].inputs if v is not conv.outputs[0]] or [None]
        addend = place.get(other)
        # Other addends, such as broadcast rows, are left to the program.
        addend = None if addend is None or site.tensors[addend] != output else addend
        others = others if addend is None else others[1:]
    slopes, gate, rest = _activated(site, place, others)
    limits, x, w = bounds_of(site, place, rest), place[conv.inputs[0]], place[conv.inputs[1]]
    if limits is None:
        return _Chain(conv, x, w, bias, addend, first=len(region.nodes) - len(others))
    return _Chain(conv, x, w, bias, addend, slopes, gate, limits[0], limits[1])


def _bias(site: Site, i: int) -> np.ndarray | int | None:
    bias = site.constant(i)
    return i if bias is None and site.input(i) is not None else bias


def _activated(
    site: Site, place: Mapping[Value | None, int], nodes: Sequence[Node]
) -> tuple[np.ndarray | None, tuple[float, ...], Sequence[Node]]:
    """Return the slopes or the gate that ``nodes`` begin with, and the remaining nodes."""
    name = nodes[0].op.name if nodes else ""
    if name in ("LeakyRelu", "PRelu"):
        slopes = _slopes(site, place, nodes[0])
        return slopes, _NO_GATE, nodes if slopes is None else nodes[1:]
    if name != "HardSwish":
        return None, _NO_GATE, nodes
    gate, nodes = [1 / 6, 0.5, 1.0, 0.0], nodes[1:]
    for name, i in (("Mul", 2), ("Add", 3)):
        number = (
            scalar_operand(site, place, nodes[0]) if nodes and nodes[0].op.name == name else None
        )
        if number is not None:
            gate[i], nodes = number, nodes[1:]
    return None, tuple(gate), nodes


def _slopes(site: Site, place: Mapping[Value | None, int], node: Node) -> np.ndarray | None:
    """Return the per-channel slopes of a LeakyRelu or PRelu; None unless constant."""
    shape = (1, site.output().dims[1], *[1] * (len(site.output().dims) - 2))
    if node.op.name == "LeakyRelu":
        return np.full(shape[1], node.attrs.get("alpha", 0.01), FLOAT32)
    slopes = site.constant(place[node.inputs[1]]) if node.inputs[1] in place else None
    if slopes is None or np.broadcast_shapes(slopes.shape, shape) != shape:
        return None
    return np.broadcast_to(slopes, shape).reshape(-1)


def _words(
    chain: _Chain,
    site: Site,
    packing: Packing,
    every: int,
    weights: Reordered | None,
    any_order: bool,
) -> tuple[Word, ...]:
    """Return the first arguments of a call, with ``weights`` unless they are given at run time;
    bias and slopes are padded to ``every`` filters in each group."""
    groups, none = packing.groups or 1, np.zeros(1, FLOAT32)
    bias = chain.bias if isinstance(chain.bias, np.ndarray) else none
    slopes = (
        None if chain.slopes is None else _of_filters(chain.slopes, groups, every, packing.repeats)
    )
    addend = None if chain.addend is None else Tensor(chain.addend)
    packed: tuple[Word, ...] = (WORKSPACE, None)
    if weights is not None:
        packed = weights.arrays[0], _of_filters(bias, groups, every, packing.repeats)
    return Tensor(chain.x, any_order=any_order), *packed, slopes, addend, site.result()


def _of_filters(numbers: np.ndarray, groups: int, every: int, repeats: int) -> np.ndarray:
    """Return per-filter ``numbers``, broadcast if scalar, repeated or zero-padded in each group."""
    if numbers.size == groups * every and numbers.dtype == FLOAT32:
        return np.ascontiguousarray(numbers)  # so that kernels for several shapes share them
    if repeats > 1:
        return np.tile(np.broadcast_to(numbers, every // repeats), repeats).astype(FLOAT32)
    own = numbers.reshape(-1 if numbers.size == 1 else groups, numbers.size // groups or 1)
    result = np.zeros((groups, every), FLOAT32)
    result[:, : own.shape[1] if numbers.size > 1 else every] = own
    return result


def _convolution(
    site: Site,
    chain: _Chain,
    packing: Packing,
    axes: Sequence[SeenAxis],
    numbers: Sequence[int],
    parts: tuple[int, Workload, np.ndarray | None, bool],
) -> NativeCall:
    """Return a call. ``numbers``: channels and filters per group, positions per item, whether taps
    of a row are adjacent, and elements of copies. ``parts``: the number of items, the workload of
    one, ``even_lines`` of the kernel, and whether it reads images in any layout equally fast.
    """
    items, work, lines, any_order = parts
    channels, filters, *_, room = numbers
    every = padded(filters) if packing.groups else channels * packing.repeats
    x, constant = site.tensor(chain.x), site.weights(chain.w)
    given, rounds = constant is None or isinstance(chain.bias, int), packing.pairs == "rounded"
    weights = None if constant is None or given else packing.weights(constant)
    name = "image_convolution" if packing.groups else "image_depthwise"
    words = (
        *_words(chain, site, packing, every, weights, any_order),
        # At the end the start of each phase, and the end.
        *int64s(*[axis.words for axis in axes], [0, *accumulate(packing.sizes)]),
        *(*chain.gate, chain.low, chain.high),
        *(x.dims[0], packing.groups or 1, *numbers, lines),
        *(int(packing.pairs == "in turn"), int(not site.ordered), items),
        WORKSPACE if rounds else None,
        *(packing.given_words(chain.w, chain.bias) if given else (None,) * 3),
        *(None, None, None),
    )
    ns = part_ns(work)
    if weights is not None:
        held = {"reordered": {chain.w: weights}} if weights.restores else {"keep": weights}
        call = NativeCall(name, words, items, ns, can_fail=room > _COPIED, **held)
        return of_pairs(call, "convolution", x.elements // 2) if rounds else call
    size = sum(packing.sizes) + (packing.groups or 1) * every
    return NativeCall(
        name.replace("image", "given"),
        words,
        items=1,
        item_ns=items * ns + part_ns(Workload("gather", size * FLOAT32.itemsize)),
        workspace=size * FLOAT32.itemsize,
        stages=(2, items),
        can_fail=room > _COPIED,
    )


def _of_all_channels(
    site: Site, chain: _Chain, axes: Sequence[SeenAxis], *, copies: bool = False
) -> NativeCall | None:
    """Return the call for channels-last images, or, with ``copies``, for other layouts."""
    x, w, given = site.tensor(chain.x), site.tensor(chain.w), chain.conv.attrs.get("group", 1)
    # Narrow groups are merged to fill vectors: one wider group, with zeros for the weights between
    # channels and filters of different groups.
    every_filter = site.output().dims[1]
    groups = groups_of_vectors(given, every_filter // given)
    filters, channels = every_filter // groups, x.dims[1] // groups
    columns, taps = axes[-1], math.prod([axis.most_taps for axis in axes])
    k, every = taps * channels, padded(filters)
    # Taps of a row are read together if they read few adjacent elements. Rows that are partly
    # outside of the image need room for copies.
    is_run = groups == 1 and columns.adjacent and channels < _FEW_CHANNELS
    is_run = is_run and (columns.inside or k <= _COPIED // _LEAST_BLOCK)
    together = columns.most_taps if is_run else 1
    addresses = taps // together
    constant = site.weights(chain.w) is not None and not isinstance(chain.bias, int)
    pairs = _pairs(site, channels, filters) if constant else ""
    rounds = pairs == "rounded"
    k //= 1 + rounds
    if max(x.dims[1], together * channels) > _MOST_CHANNELS or addresses > _ADDRESSES:
        return None
    packing = weights_order(chain.conv, w.dims, axes, groups, pairs)
    most_rows = BLOCK * PANEL // min(every, PANEL)
    phases, positions = len(packing.phases), x.dims[0] * math.prod([a.positions for a in axes])
    joined = _joined(site, packing, columns, channels, filters) * (constant and not copies)

    def of_block(most: int, room: int, lines: np.ndarray | None = None) -> NativeCall:
        panels = math.ceil(every / PANEL) * math.ceil(groups / max(joined, 1)) * phases
        whole = 2 * k * every * groups * phases * positions
        most = min(most, BLOCK if lines is None else most_rows)
        blocks = blocks_of_rows(positions, panels, most, whole)
        # Whole lines if there is room, else whole tiles.
        block = math.ceil(positions / blocks)
        unit = columns.positions if columns.positions <= most else _TILE
        smaller, _ = EXTREMES[type(block) in TRACED]
        block = smaller(math.ceil(block / unit) * unit, most // unit * unit or most)
        items = math.ceil(positions / block) * panels
        work = Workload("image", flops=2 * k * min(every, PANEL) * max(joined, 1) * block)
        numbers = channels, filters, block, int(is_run), room
        of_items = items, work, lines, any_order
        call = _convolution(site, chain, packing, axes, numbers, of_items)
        return replace(call, kernel="image_groups") if joined else call

    most, any_order = _ADDRESSES // addresses, False
    if joined:  # its kernel splits lines itself
        return of_block(*_copied_positions(columns, together, k, max(most, BLOCK), False))
    if _has_elements(site, packing, columns, channels, filters):
        any_order = True
        return of_block(most_rows, 0, _ELEMENTS)
    room = None if rounds else _copied_lines(axes, channels, min(most, most_rows))
    lines = None if rounds else _even_lines(site, columns, together, room, x.dims[1], copies)
    any_order = room is not None and room[0] >= _LEAST_OF_COPIES
    if lines is not None:
        by_element = lines[1] > 0 and _has_copied_elements(site, packing, columns, channels)
        return of_block(min(lines[0], most), 0, *int64s([*lines[1:], int(by_element)]))
    has_copies = copies and not rounds  # to channels last
    return of_block(*_copied_positions(columns, together, k, most, has_copies))


def _pairs(site: Site, channels: int, filters: int) -> str:
    """Return how to pack pairs of channels of a group: a value of ``Packing.pairs``."""
    if channels % 2:
        return ""
    if site.rounds:
        return "rounded"
    if site.ordered:  # pairs are added up at the end
        return ""
    # A vector of 16 lanes holds the products of 8 filters with two channels, while more filters
    # fill it without pairs.
    return "in turn" if site.library.level == "x86-64-v4" and filters <= GRAIN // 2 else ""


def _even_lines(
    site: Site,
    columns: SeenAxis,
    together: int,
    room: tuple[int, int, int] | None,
    channels: int,
    copies: bool,
) -> tuple[int, int, int] | None:
    """Return the positions per item, and ``even_lines``, if adjacent positions of a line read
    elements at a constant stride, in an image of ``channels`` or in ``room`` for copies; None if
    each position needs an address."""
    # Each part that a position reads must be inside or outside of the image. Tiles that end with a
    # line have fewer positions, which costs most with narrow vectors.
    is_whole, is_wide = columns.inside or together == 1, LANES.get(site.library.level, 0) == GRAIN
    least = _LEAST_WIDE if is_wide else _LEAST_LINE * (1 if columns.inside else 2)
    if is_whole and columns.positions >= least and not copies:
        return BLOCK * PANEL, 0, 0
    return room if copies or channels <= _MOST_COPIED else None


def _has_elements(
    site: Site, packing: Packing, columns: SeenAxis, channels: int, filters: int
) -> bool:
    """Whether each element that a position reads gets an address, so that images of any layout are
    read without copies. This pays off if rows of taps have few elements and few positions of a line
    read padding, as in the first convolution of most networks. The summation order depends on the
    positions of an item."""
    if site.ordered or packing.pairs or len(packing.phases) > 1:
        return False
    elements, lanes = channels * math.prod(packing.shape[2:]), LANES.get(site.library.level, 0)
    # Tiles of narrow vectors are so small that more must not be done for each of them.
    if elements == channels <= _MOST_OF_POSITION and lanes < GRAIN and columns.inside:
        return True
    most = _MOST_OF_ROW if columns.stride == 1 else _MOST_OF_STRIDED
    if channels * columns.most_taps > most or elements > _MOST_ELEMENTS:
        return False
    if columns.results < _LEAST_WIDE + _PER_END * columns.ends:
        return False
    # Overlapping taps of adjacent positions are faster when read together.
    return filters > lanes or columns.most_taps == 1 or columns.stride > 1


def _has_copied_elements(site: Site, packing: Packing, columns: SeenAxis, channels: int) -> bool:
    """Whether each element that a position reads in copies of image rows gets an address, which
    pays off for lines of many positions with narrow vectors. Sums are in another order."""
    lanes, elements = LANES.get(site.library.level, 0), channels * math.prod(packing.shape[2:])
    if site.ordered or packing.pairs or lanes == GRAIN or columns.results < _LEAST_OF_ELEMENTS:
        return False
    return elements <= min(_PER_POSITION * columns.results, _MOST_ELEMENTS)


def _copied_positions(
    columns: SeenAxis, together: int, k: int, most: int, copies: bool
) -> tuple[int, int]:
    """Return the positions per item, at most ``most``, if each has its own addresses, and the
    elements of workspace for copies of the ``k`` elements that a position reads."""
    # Copies of a few large windows are in workspace.
    copied = min(_COPIED // k if k <= _COPIED // _TILE else _LEAST_BLOCK, most)
    if copies:
        return copied, copied * k
    return most if columns.inside or together == 1 else copied, 0


def _copied_lines(
    axes: Sequence[SeenAxis], channels: int, most_rows: int
) -> tuple[int, int, int] | None:
    """Return the positions per item, at most ``most_rows``, for which copies of their part of each
    image row fit; the number of copies, and the columns of each. None if positions are too few."""
    slices, rows, columns = axes
    of_line, line, stride = slices.most_taps * rows.most_taps, columns.positions, columns.stride
    if line < _LEAST_COPIED_LINE or 2 * of_line > _MOST_ROWS or max(len(a.taps) for a in axes) > 1:
        return None
    columns_of_line = (line - 1) * stride + columns.reach
    room = min(_COPIED // (columns_of_line * channels), _MOST_ROWS) // of_line
    if line <= most_rows and room:
        count = min(most_rows // line, room)
        return count * line, count * of_line, columns_of_line
    # Parts of lines: an item may span the end of one and the beginning of the next.
    most = (_COPIED // (2 * of_line * channels) - columns.reach) // stride + 1
    most = min(most, most_rows, line) // _TILE * _TILE
    if most < _LEAST_LINE:
        return None
    return most, 2 * of_line, (most - 1) * stride + columns.reach


def _joined(site: Site, packing: Packing, columns: SeenAxis, channels: int, filters: int) -> int:
    """Return the groups per item of the kernel for narrow groups; 0 where a product is faster. The
    filters of a group fit into a vector, and taps are processed singly, or three at once for few
    filters in whole tiles. Its summation order depends on the lines of an item, and differs from
    that of the kernel for copied images."""
    lanes = LANES.get(site.library.level, 0)
    if site.ordered or packing.groups == 1 or packing.pairs == "rounded" or filters > lanes:
        return 0
    if columns.most_taps > 1:
        is_slow = lanes == GRAIN and not packing.pairs
        if is_slow or columns.most_taps != 3 or len(columns.taps) > 1:
            return 0
        apart = columns.seen[0][1] - columns.seen[0][0]
        if columns.stride not in (apart, 2 * apart) or columns.results < 7 or columns.results == 9:
            return 0
    return max(_TOGETHER // channels, 1)


def _of_each_channel(
    site: Site, chain: _Chain, axes: Sequence[SeenAxis], *, copies: bool = False
) -> NativeCall | None:
    """As ``_of_all_channels``."""
    x, w = site.tensor(chain.x), site.tensor(chain.w)
    channels, columns = x.dims[1], axes[-1]
    rows = axes[0].most_taps * axes[1].most_taps
    taps, positions = rows * columns.most_taps, x.dims[0] * math.prod([a.positions for a in axes])
    reach = columns.reach
    if rows > _ADDRESSES or rows * reach > _COPIED:
        return None
    phases, of_line = math.prod([len(axis.taps) for axis in axes]), columns.positions

    def most_positions(room: int) -> int:
        """Return how many positions read at most ``room`` columns, wherever they begin in a line;
        each line reads ``reach`` more columns than its positions."""
        stride, more = columns.stride, max(reach - columns.stride, 0)
        # The positions on an endless line, less the cost of line ends.
        most = min(BLOCK, (room - more) // stride)
        while most > 1 and most * stride + (1 + -(-(most - 1) // of_line)) * more > room:
            most -= 1
        return max(most, 1)

    def of_chunk(chunk: int, most: int, repeats: int = 1) -> NativeCall:
        chunks = math.ceil(channels / chunk) * phases
        whole = 2 * positions * channels * taps
        block = math.ceil(positions / blocks_of_rows(positions, chunks, most, whole))
        # Whole lines if there is room, since tiles of positions end with a line.
        smaller, _ = EXTREMES[type(block) in TRACED]
        block = smaller(math.ceil(block / of_line), most // of_line) * of_line or block
        items = math.ceil(positions / block) * chunks
        work = Workload("depthwise image", flops=2 * block * chunk * taps)
        numbers = channels, chunk * repeats, block, int(columns.adjacent), 0
        packing = weights_order(chain.conv, w.dims, axes, 0, "", repeats)
        return _convolution(site, chain, packing, axes, numbers, (items, work, None, False))

    if copies:
        chunk = min(channels, PANEL, _COPIED // (rows * reach))
        return of_chunk(chunk, most_positions(_COPIED // (rows * chunk)))
    # Keep the weights of some channels, and their inputs for a few positions, in the L1 cache.
    most = max(_CACHED // taps // PANEL, 1) * PANEL
    most = math.ceil(channels / max(round(channels / most), 1) / GRAIN) * GRAIN
    repeats = 1
    if site.weights(chain.w) is not None and not isinstance(chain.bias, int) and phases == 1:
        repeats = _repeats(axes, channels)
    return of_chunk(min(channels, most), BLOCK, repeats)


def _repeats(axes: Sequence[SeenAxis], channels: int) -> int:
    """Return the repetitions of weights for lines computed as one run of elements; else 1."""
    slices, rows, columns = axes
    line = (columns.results + columns.reach) * channels
    few = channels <= _MOST_FLAT and max(rows.reach, columns.most_taps) <= _MOST_ROWS
    if few and slices.most_taps == columns.stride == 1 and line <= _COPIED // max(rows.reach, 4):
        return GRAIN // math.gcd(channels, GRAIN)
    return 1
