"""Convolutions of 8-bit codes, channels innermost: between DequantizeLinear and QuantizeLinear, and
ConvInteger.

A product with constant weights (Gemm) is one of images of one element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.backends.native import family, fused_with, part_ns
from penstock.backends.native.image_convolution import (
    axis_words,
    bounds_of,
    line_aligned,
    of_any_strides,
)
from penstock.backends.native.integer_panels import IntegerPanels, integer_panels, panel_types
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.records import NamedTuple, replace
from penstock.core.types import FLOAT32, TensorType
from penstock.host.native import library
from penstock.ir.graph import Node, Value
from penstock.ops.common.constant_cache import ConstantRef, Reordered, reordered
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.common.windows import Window, windows
from penstock.ops.internal.fused import is_fused, parts
from penstock.ops.work_estimate import Workload, flops

# As in c/quantized_convolution.c.
_PANEL, _GROUP, _CHUNK, _COPIED, _LINES, _MOST_TAPS = 32, 4, 64, 65536, 4, 256
_TILE, _HALF = 64, 16  # bytes of a row of a tile; filters
_ITEMS, _LEAST_WORK = 8, 1 << 22  # of a call that are enough; operations of one
_LEAST_WEIGHTS, _MOST_WEIGHTS = 1 << 17, 1 << 19  # bytes of an item; bytes that stay in a cache
_MOST_PERIOD = 1 << 17  # of channels whose weights repeat themselves
_LEAST, _MOST = 1e-30, 1e30


class _Quantized(NamedTuple):
    """A tensor of a fused node, and what its codes stand for."""

    tensor: int
    scale: np.ndarray
    zero: np.ndarray


class Rescaling(NamedTuple):
    """What becomes of sums, by filter: plus ``terms``, times ``factors``, they are real numbers,
    and plus ``offsets`` codes; ``bounds`` has their range and zero point (``code_bounds``)."""

    terms: np.ndarray
    factors: np.ndarray | None = None
    offsets: np.ndarray | None = None
    bounds: np.ndarray | None = None


class CodeWeights(NamedTuple):
    """Weights made of the constant ``source``: ``codes`` of it have these ``dims``, [filters,
    channels, rows, columns], and ``zeros`` as zero points. ``back`` gives the inverse for a number
    of rows of the panels."""

    source: np.ndarray | ConstantRef
    dims: tuple[int, ...]
    codes: Callable[[np.ndarray], np.ndarray]
    zeros: np.ndarray
    name: tuple
    back: Callable[[int], Callable] | None = None


class _Chain(NamedTuple):
    """A convolution of codes ``x`` with ``weights``, or a product with a matrix of them as its
    filters, which are those of ``source`` less its zero point."""

    node: Node
    x: _Quantized
    weights: np.ndarray
    source: tuple[np.ndarray, np.ndarray]
    rescaling: Rescaling


class _Axes(NamedTuple):
    """How many images there are, and their axes, which may have changed places."""

    images: int
    rows: Window
    columns: Window
    turned: bool = False

    @property
    def are_rows(self) -> bool:
        """Whether images are of one element, as rows of a matrix are."""
        return self.rows == self.columns == Window(1, 1, 1)


def code_workload(node: Node) -> Workload | None:
    """The work: products and of copies of what each position sees."""
    conv, loaded = _product(parts(node)), library()
    weights = conv.inputs[3 if conv.op.name == "QLinearConv" else 1]
    types_ = [v.type for v in (conv.inputs[0], weights, node.outputs[0]) if v is not None]
    tensors = [t for t in types_ if isinstance(t, TensorType) and t.static]
    if loaded is None or len(tensors) < 3:
        return None
    x, w, result = tensors
    is_matrix, elements = conv.op.name in ("Gemm", "MatMul"), result.elements
    if is_matrix and len(w.dims) != 2:
        return None
    filters = max(result.dims[-1] if is_matrix else w.dims[0], 1)
    # Depthwise code multiplies fours of taps, at about the same rate on all instruction sets.
    if conv.attrs.get("group", 1) > 1:
        fours = elements * math.prod(w.dims[2:-1]) * -(-w.dims[-1] // 4)
        copied = elements * math.prod(conv.attrs.get("strides", ()))
        return Workload("depthwise codes image", 0, fours, 0, elements, copied)
    return Workload(
        "codes layer" if is_matrix else "codes image",
        nbytes=0 if is_matrix or math.prod(w.dims[2:]) == 1 else x.elements,
        flops=flops(node) / loaded.functions.integer_speed,
        weights=w.elements,
        elements=elements // filters * _up(filters, _TILE // 4),
    )


@family(
    fused_with("DequantizeLinear"),
    "QLinearConv",
    "com.microsoft.QLinearConv",
    work=code_workload,
)
def quantized_convolution(site: Site) -> NativeCall | None:
    """QLinearConv, and DequantizeLinear of all operands, Conv or a product, bounds and
    QuantizeLinear, with one scale for the input and for the output, all of them constant."""
    chain = _chain(site) if is_fused(site.node) else _chain_of_operation(site)
    x = None if chain is None else site.input(chain.x.tensor)
    if chain is None or x is None:
        return None
    w, group, zero = chain.weights, chain.node.attrs.get("group", 1), int(chain.x.zero[0])
    name = "native codes", chain.source[1].tobytes()
    zeros = np.zeros(w.shape[0], INT32)
    weights = CodeWeights(chain.source[0], w.shape, lambda _: w, zeros, name)
    if w.ndim == 2:
        return products_of_rows(site, chain.x.tensor, zero, weights, chain.rescaling)
    if group != 1 and (w.shape[1] != 1 or group != x.dims[1]):
        return None
    axes = _axes(site, chain.node, chain.x.tensor, w)
    if axes is None:
        return None
    if group == 1:
        return _of_images(site, axes, chain.x.tensor, zero, weights, chain.rescaling)
    dense = w.reshape(*w.shape[:2], axes.rows.kernel, axes.columns.kernel)
    call = _of_each_channel(site, chain, dense, axes)
    images = chain.x.tensor, len(site.node.inputs)
    return None if call is None else of_any_strides(site, call, call, images, turned=axes.turned)


@family("ConvInteger", work=code_workload)
def integer_convolution(site: Site) -> NativeCall | None:
    """ConvInteger in one group, of constant weights and zero points: sums of int32."""
    x, w = site.input(0), site.constant(1)
    if x is None or w is None or site.attr("group", 1) != 1:
        return None
    if x.dtype not in (INT8, UINT8) or w.dtype not in (INT8, UINT8):
        return None
    if any(site.input(i) is not None and site.constant(i) is None for i in (2, 3)):
        return None
    axes = _axes(site, site.node, 0, w)
    if axes is None:
        return None
    zero, w_zero = (
        np.zeros(1, INT32) if zeros is None else zeros.reshape(-1).astype(INT32)
        for zeros in (site.constant(2), site.constant(3))
    )
    name, w_zero = ("native sums", w_zero.tobytes()), np.broadcast_to(w_zero, (w.shape[0],))
    weights = CodeWeights(w, w.shape, lambda w: w, w_zero, name)
    rescaling = Rescaling(np.zeros(w.shape[0], INT32))
    return _of_images(site, axes, 0, int(zero[0]), weights, rescaling)


def _of_images(
    site: Site,
    axes: _Axes,
    tensor: int,
    zero: int,
    weights: CodeWeights,
    rescaling: Rescaling,
) -> NativeCall | None:
    """``_of_all_channels`` for images of any strides."""
    if axes.are_rows:
        return products_of_rows(site, tensor, zero, weights, rescaling)
    call = _of_all_channels(site, axes, tensor, zero, weights, rescaling)
    images = tensor, len(site.node.inputs)
    return None if call is None else of_any_strides(site, call, call, images, turned=axes.turned)


def _axes(site: Site, node: Node, tensor: int, w: np.ndarray) -> _Axes | None:
    """The axes of images, the input ``tensor``; None if there is no compiled kernel."""
    x = site.input(tensor)
    if x is None or len(x.dims) > 4 or 0 in (*x.dims, *site.output().dims, *w.shape):
        return None
    axes = [Window(1, 1, 1)] * (4 - len(x.dims))
    axes += list(windows(node.attrs, w.shape[2:], x.dims[2:]))
    if not all(axis.addressable for axis in axes):
        return None
    # An image of one column is a row, whose taps are computed together.
    turned = axes[1] == Window(1, 1, 1)
    rows, columns = axes[::-1] if turned else axes
    return _Axes(x.dims[0], rows, columns, turned)


def products_of_rows(
    site: Site, tensor: int, zero: int | Tensor, weights: CodeWeights, rescaling: Rescaling
) -> NativeCall | None:
    """``_of_all_channels`` for whatever number of rows without gaps, the columns of one image."""
    x, (n, k, *_) = site.input(tensor), weights.dims
    if x is None or 0 in (*x.dims, n) or not x.dims:
        return None
    rows = Window(x.elements // k, x.elements // k, 1)
    if not rows.addressable:
        return None
    axes = _Axes(1, Window(1, 1, 1), rows)
    call = _of_all_channels(site, axes, tensor, zero, weights, rescaling)
    if call is None:
        return None
    steps = [np.array([0, 1, 0, size], np.int64) for size in (k, n)]
    return replace(call, words=(*call.words[:-2], *steps))


class _Depth(NamedTuple):
    """What a position sees: ``parts`` of ``part`` codes each, which are padded to ``size``;
    tiles take ``deep`` of them at once."""

    parts: int
    part: int
    size: int
    deep: int


def _depth(rows: Window, columns: Window, channels: int) -> _Depth:
    # Where taps of a row are adjacent in memory, what they see is one part.
    taps = columns.kernel if columns.dilation > 1 else 1
    part = columns.kernel // taps * channels
    tiles = -(-part // _TILE)
    deep = _up(-(-part // tiles), 4)
    return _Depth(rows.kernel * taps, part, tiles * deep, deep)


def _panels_of(weights: CodeWeights, depth: _Depth) -> Reordered:
    """Weights as panels, with their filters as columns."""
    filters, channels = weights.dims[:2]

    def panels(source: np.ndarray) -> IntegerPanels:
        codes = weights.codes(source).reshape(filters, channels, -1)
        matrix = codes.transpose(2, 1, 0).reshape(depth.parts * depth.part, filters)
        return integer_panels(matrix, weights.zeros, (depth.part, depth.size))

    back = None if weights.back is None else weights.back(depth.size)
    types = panel_types(depth.parts * depth.size, filters)
    return reordered((*weights.name, weights.dims, depth), weights.source, panels, back, types)


def _of_all_channels(
    site: Site,
    axes: _Axes,
    tensor: int,
    zero: int | Tensor,
    weights: CodeWeights,
    rescaling: Rescaling,
) -> NativeCall | None:
    """Products of what positions see of the input ``tensor``, whose zero point is ``zero``, with
    ``weights``."""
    x, (filters, channels, *_) = site.input(tensor), weights.dims
    assert x is not None
    rows, columns = axes.rows, axes.columns
    depth = _depth(rows, columns, channels)
    block, chunk, reach = _divided(rows, columns, channels, adjacent_columns=False)
    if block < 1 or depth.parts > _MOST_TAPS:
        return None
    packed = _panels_of(weights, depth)
    panels = IntegerPanels(*packed.arrays)
    positions = axes.images * -(-rows.count // block) * -(-columns.count // chunk)
    # Few positions are divided by filters as well, and weights that caches do not hold.
    every, seen, panel = -(-filters // _PANEL), block * chunk, depth.parts * depth.size * _PANEL
    size, ops = panel * every, 2 * panel * seen * every
    divided = min(_ITEMS // positions, every, max(ops // _LEAST_WORK, size // _LEAST_WEIGHTS))
    divided = max(divided, -(-size // _MOST_WEIGHTS) if positions > 1 else 1, 1)
    group = _up(-(-every // divided), _GROUP)
    rated = ops / site.library.functions.integer_speed
    work = Workload("codes image, a part", seen * channels, rated, 0, seen * every * _PANEL)
    # A model's weights may be larger than the caches: threads that are worth it then cost little
    # where they are not.
    read = Workload("codes product", weights=size, items=1)
    padded, (terms, factors, offsets, bounds) = _up(filters, _CHUNK), rescaling
    late = zero if isinstance(zero, Tensor) else None
    return NativeCall(
        "quantized_convolution",
        (
            *(Tensor(tensor), panels.panels, late, _filled(panels.sums, padded)),
            _filled(terms, padded) if np.any(terms) else None,
            _filled(panels.zeros, padded) if np.any(panels.zeros) else None,
            *(None if each is None else _by_sums(each) for each in (factors, offsets)),
            *(site.result(), axis_words(rows), axis_words(columns), bounds),
            *(axes.images, channels, filters, depth.size // 4, depth.deep // 4),
            *(block, chunk, reach, group, 128 if x.dtype == INT8 else 0),
            *(0 if isinstance(zero, Tensor) else zero, None, None),
        ),
        items=positions * -(-every // group),
        item_ns=max(part_ns(work), part_ns(read)) * group / every,
        keep=packed,
    )


def _divided(
    rows: Window, columns: Window, channels: int, *, adjacent_columns: bool
) -> tuple[int, int, int]:
    """Rows and columns of the result that the copy of what they see has room for, less than 1 if
    it has not, and how many more columns than these lie in a row of the copy, a stride apart.
    Unless they are ``adjacent_columns`` which do, rows a stride apart are."""
    # It has a fixed size, and is on the thread's stack.
    reach = (columns.kernel - 1) * columns.dilation // columns.stride

    def block_of(chunk: int) -> int:
        seen, below = _COPIED // (columns.stride * (chunk + reach) * channels), rows.span - 1
        if adjacent_columns:
            return (seen - below - 1) // rows.stride + 1
        return seen // rows.stride - below // rows.stride

    # Columns are divided before rows are, of which several are computed together.
    chunk = columns.count
    while block_of(chunk) < min(_LINES, rows.count) and chunk > 1:
        chunk = -(-chunk // 2)
    block = min(block_of(chunk), rows.count)
    return block - (block % _LINES if block > _LINES else 0), chunk, reach


def _by_sums(array: np.ndarray) -> np.ndarray:
    """A number for each filter, in the order of their sums: those of a group of panels follow one
    another, for one position after another. Of a last group, with few filters, they repeat
    themselves until they fill whole chunks."""
    whole = array.size // (_PANEL * _GROUP) * _PANEL * _GROUP
    row = _filled(array[whole:], _up(array.size - whole, _HALF))
    repeated = np.tile(row, math.lcm(row.size, _CHUNK) // max(row.size, 1))
    return line_aligned(np.concatenate([array[:whole], repeated]))


def _of_each_channel(site: Site, chain: _Chain, w: np.ndarray, axes: _Axes) -> NativeCall | None:
    x, filters, rows, columns = site.input(chain.x.tensor), w.shape[0], axes.rows, axes.columns
    assert x is not None
    quads = -(-columns.kernel // 4)
    block, chunk, reach = _divided(rows, columns, filters, adjacent_columns=True)
    # Weights repeat until they fill whole vectors, so that any number of filters has no rest.
    period = math.lcm(filters, _CHUNK)
    if block < 1 or period > _MOST_PERIOD or columns.kernel > _MOST_TAPS:
        return None

    change = 128 if x.dtype == INT8 else 0
    zero = int(chain.x.zero[0])
    weights = reordered(
        ("native depthwise codes", w.shape, chain.source[1].tobytes()),
        chain.source[0],
        lambda _: (_fours_of_taps(w, period),),
        None,
        [TensorType(INT8, (rows.kernel, quads, period, 4))],
    )
    sums = w.sum(axis=(1, 2, 3), dtype=np.int64)
    plus, factors, offsets, bounds = chain.rescaling
    assert factors is not None and offsets is not None
    terms = _repeated((plus - (zero + change) * sums).astype(INT32), period)
    repeated = _repeated(factors, period), _repeated(offsets, period)
    items = axes.images * -(-rows.count // block) * -(-columns.count // chunk)
    codes = block * chunk * filters
    fours, copied = codes * quads * rows.kernel, codes * rows.stride * columns.stride
    part = Workload("depthwise codes image", 0, fours, 0, codes, copied)
    return NativeCall(
        "code_depthwise",
        (
            *(Tensor(chain.x.tensor), weights.arrays[0], terms, *repeated, site.result()),
            *(axis_words(rows), axis_words(columns), bounds, axes.images, filters),
            *(filters // x.dims[1], period, block, chunk, reach, change, zero, None, None),
        ),
        items=items,
        item_ns=part_ns(part),
        keep=weights,
    )


def _fours_of_taps(w: np.ndarray, period: int) -> np.ndarray:
    """Weights [filters, 1, rows, columns] in fours of columns, repeated to ``period`` filters: as
    [rows, fours, period, 4]."""
    filters, _, rows, columns = w.shape
    quads = -(-columns // 4)
    taps = np.zeros((rows, quads * 4, filters), INT8)
    taps[:, :columns] = w[:, 0].transpose(1, 2, 0)
    fours = _repeated(taps, period).reshape(rows, quads, 4, period).swapaxes(2, 3)
    return line_aligned(fours)


def _repeated(array: np.ndarray, period: int) -> np.ndarray:
    """The last axis repeated, and put into the order of vectors (``c/quantized_convolution.c``)."""
    *outer, size = array.shape
    chunks = np.tile(array, period // size).reshape(*outer, -1, 4, 4, 4)
    return line_aligned(chunks.swapaxes(-2, -3).reshape(*outer, period))


# Nodes.


def _chain(site: Site) -> _Chain | None:
    """What a fused node computes, if it is a convolution or product of codes with constants."""
    region = site.node.attrs["region"]
    place: dict[Value | None, int] = {value: i for i, value in enumerate(region.inputs)}
    nodes = list(region.nodes)
    conv = _product(nodes)
    at, axis = nodes.index(conv), _axis_of_filters(conv)
    if axis is None or any(node.op.name != "DequantizeLinear" for node in nodes[:at]):
        return None
    axes = {conv.inputs[1]: axis}
    sources = {
        node.outputs[0]: _codes(site, place, node, axes.get(node.outputs[0], 0))
        for node in nodes[:at]
    }
    x, w = sources.get(conv.inputs[0]), sources.get(conv.inputs[1])
    y, bias = _codes(site, place, nodes[-1]), _bias(site, place, sources, conv)
    limits = bounds_of(site, place, nodes[at + 1 : -1])
    if x is None or w is None or y is None or bias is None or limits is None:
        return None
    factors, offsets = x.scale * w.scale / y.scale, bias / y.scale
    return _chain_of(site, conv, (x, w, y), np.zeros(1, INT32), (factors, offsets), limits)


def _chain_of_operation(site: Site) -> _Chain | None:
    """What a QLinearConv of constants computes."""
    x, w, y = [
        _quantized(site, tensor, scale, scale + 1) for tensor, scale in ((0, 1), (3, 4), (-1, 6))
    ]
    bias = np.zeros(1, INT32) if site.input(8) is None else site.constant(8)
    if x is None or w is None or y is None or bias is None or site.attr("channels_last", 0):
        return None
    # In float32 step by step, as NumPy's kernel computes them.
    scales = [each.scale.astype(FLOAT32) for each in (x, w, y)]
    if any(each.size != 1 for each in (scales[0], scales[2])):
        return None
    factors = scales[0] * scales[1] / scales[2]
    limits = -math.inf, math.inf
    return _chain_of(site, site.node, (x, w, y), bias, (factors, np.zeros(1)), limits)


def _chain_of(
    site: Site,
    node: Node,
    operands: tuple[_Quantized, _Quantized, _Quantized],
    terms: np.ndarray,
    scaling: tuple[np.ndarray, np.ndarray],
    limits: tuple[float, float],
) -> _Chain | None:
    """The chain of a node whose ``operands`` are the input, the weights and the result; ``scaling``
    has factors and offsets."""
    x, w, y = operands
    codes, type_, dtype = site.constant(w.tensor), site.input(x.tensor), site.output().dtype
    if codes is None or type_ is None or dtype is None or not codes.size:
        return None
    if {codes.dtype, type_.dtype, dtype} - {INT8, UINT8}:
        return None
    if any(each.size != 1 for each in (x.scale, x.zero, y.scale, y.zero)):
        return None
    if _axis_of_filters(node) and codes.ndim != 2:
        return None
    filters = codes.T if _axis_of_filters(node) else codes
    # Codes less their zero points may need nine bits: those of int8 alone are multiplied.
    less = filters.astype(np.int32) - w.zero.reshape(-1, *[1] * (codes.ndim - 1))
    if less.min() < -128 or less.max() > 127:
        return None
    count = (filters.shape[0],)
    factors, offsets = [np.broadcast_to(each, count).astype(FLOAT32) for each in scaling]
    # float64 may hold what float32 cannot, and infinity times a sum of 0 would be NaN.
    if not np.all(np.isfinite(factors) & np.isfinite(offsets)):
        return None
    low, high = [float(np.rint(limit / y.scale[0])) for limit in limits]
    bounds = code_bounds(dtype, int(y.zero[0]), low, high)
    rescaling = Rescaling(np.broadcast_to(terms, count), factors, offsets, bounds)
    return _Chain(node, x, less.astype(INT8), (codes, w.zero), rescaling)


def code_bounds(
    dtype: np.dtype, zero: int, low: float = -math.inf, high: float = math.inf
) -> np.ndarray:
    """The range of codes with this zero point as the struct of c/quantized_convolution.c, a double
    and three integers; ``low`` and ``high`` are less the zero point."""
    ends, change = np.iinfo(dtype), 128 if dtype == INT8 else 0
    low, high = [min(max(end, ends.min - zero), ends.max - zero) for end in (low, high)]
    bounds = np.array([high, 0.0, 0.0, 0.0])
    bounds.view(np.int64)[1:] = zero + change, int(low) + zero + change, change
    return bounds


def _product(nodes: Sequence[Node]) -> Node:
    """The node behind conversions of its operands."""
    return next(node for node in nodes if node.op.name != "DequantizeLinear")


def _axis_of_filters(node: Node) -> int | None:
    """The axis of the weights along which filters lie, or columns of a matrix; None for a product
    that is not plain."""
    if node.op.name == "MatMul":
        return 1
    factors = [node.attrs.get(name, 1.0) for name in ("alpha", "beta")]
    is_plain = factors == [1.0, 1.0] and not node.attrs.get("transA", 0)
    if node.op.name != "Gemm":
        return 0
    return (0 if node.attrs.get("transB", 0) else 1) if is_plain else None


def _codes(
    site: Site, place: Mapping[Value | None, int], node: Node, axis: int = 0
) -> _Quantized | None:
    """What a conversion reads or, the last one, writes; one scale for all or for each index of an
    axis."""
    index, scale, zero = [-1 if v is None else place.get(v, -1) for v in [*node.inputs, None][:3]]
    codes = _quantized(site, index, scale, zero)
    if codes is None or node.attrs.get("block_size"):
        return None
    # Scales along another axis do not factor out of the sums.
    several = max(codes.scale.size, codes.zero.size) > 1
    allowed = (1, -1) if axis else (0,)
    return None if several and node.attrs.get("axis", 1) not in allowed else codes


def _quantized(site: Site, tensor: int, scale: int, zero: int) -> _Quantized | None:
    """Codes with the scales and zero points in these inputs, -1 for none."""
    scales = site.constant(scale) if scale >= 0 else None
    is_left_out = zero < 0 or site.input(zero) is None
    zeros = np.zeros(1, INT32) if is_left_out else site.constant(zero)
    if scales is None or zeros is None or scales.dtype != FLOAT32:
        return None
    if zeros.dtype not in (INT8, UINT8, INT32) or max(scales.ndim, zeros.ndim) > 1:
        return None
    if not np.all((scales > _LEAST) & (scales < _MOST)):
        return None
    numbers = scales.reshape(-1).astype(np.float64)
    return _Quantized(tensor, numbers, zeros.reshape(-1).astype(INT32))


def _bias(
    site: Site,
    place: Mapping[Value | None, int],
    sources: Mapping[Value | None, _Quantized | None],
    conv: Node,
) -> np.ndarray | None:
    """The bias in real numbers, None if it is no constant."""
    value = conv.input(2)
    if value is None:
        return np.zeros(1)
    codes = sources.get(value)
    if value in sources and codes is None:
        return None
    constant = site.constant(place[value] if codes is None else codes.tensor)
    if constant is None or math.prod(constant.shape[:-1]) != 1:
        return None
    bias = constant.reshape(-1).astype(np.float64)
    return bias if codes is None else (bias - codes.zero) * codes.scale


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _filled(array: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([array, np.zeros(size - array.size, array.dtype)])
