"""Convolutions of 8-bit codes, channels innermost: between DequantizeLinear and QuantizeLinear, and
ConvInteger.

A product with constant weights (Gemm) is one of images of one element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from penstock.backends.native import family, fused_with, part_ns
from penstock.backends.native.image_convolution import axis_words, bounds_of, of_any_strides
from penstock.backends.native.integers import IntegerPanels, integer_panels, panel_types
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, TensorType
from penstock.host.native import library
from penstock.ir.graph import Node, Value
from penstock.ops.common.constant_cache import Reordered, reordered
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.common.windows import Window, windows
from penstock.ops.internal.fused import parts
from penstock.ops.work_estimate import Workload, flops

# As in c/quantized_convolution.c.
_PANEL, _COPY, _ROWS, _PAIRS, _MOST_CHANNELS = 32, 65536, 64, 32768, 4096
_LEAST, _MOST = 1e-30, 1e30
_PRODUCTS = ("Conv", "ConvInteger", "Gemm")


class _Quantized(NamedTuple):
    """A tensor of a fused node, and what its codes stand for."""

    tensor: int
    scale: np.ndarray
    zero: np.ndarray


class _Chain(NamedTuple):
    """A convolution of codes ``x`` with ``weights``, which are those of ``source`` less its zero
    point. Its sums times ``factors`` plus ``offsets`` are codes, by filter; ``bounds`` has their
    range less the zero point, and that, as in c/quantized_convolution.c."""

    node: Node
    x: _Quantized
    weights: np.ndarray
    source: tuple[np.ndarray, np.ndarray]
    factors: np.ndarray
    offsets: np.ndarray
    bounds: np.ndarray


def code_workload(node: Node) -> Workload | None:
    """The work: products and of copies of what each position sees."""
    conv, loaded = next(part for part in parts(node) if part.op.name in _PRODUCTS), library()
    types_ = [v.type for v in (conv.inputs[1], node.outputs[0]) if v is not None]
    tensors = [t for t in types_ if isinstance(t, TensorType) and t.static]
    if loaded is None or len(tensors) < 2:
        return None
    w, result = tensors
    filters, elements = max(w.dims[0], 1), result.elements
    rows, pairs = math.prod(w.dims[2:-1]), -(-w.dims[-1] // 2)
    # Depthwise code multiplies pairs of int16, at the same rate on all instruction sets.
    if conv.attrs.get("group", 1) > 1:
        stride = [1, *conv.attrs.get("strides", ())][-1]
        taps = elements * pairs
        return Workload("depthwise codes image", 0, taps * rows, 0, elements, taps * stride)
    positions = elements / filters
    return Workload(
        "codes layer" if conv.op.name == "Gemm" else "codes image",
        nbytes=positions * w.elements / filters,
        flops=flops(node) / loaded.functions.integer_speed,
        weights=w.elements,
        elements=positions * _up(filters, _PANEL),
        items=positions * rows,
    )


@family(fused_with("DequantizeLinear"), work=code_workload)
def quantized_convolution(site: Site) -> NativeCall | None:
    """DequantizeLinear of all operands, Conv, bounds and QuantizeLinear, with one scale for the
    input and for the output, all of them constant."""
    chain = _chain(site)
    x = None if chain is None else site.input(chain.x.tensor)
    if chain is None or x is None or not _is_plain(chain.node):
        return None
    w, group = chain.weights, chain.node.attrs.get("group", 1)
    if group != 1 and (w.shape[1] != 1 or group != x.dims[1]):
        return None
    axes = _axes(site, chain.node, chain.x.tensor, w)
    if axes is None:
        return None
    rows, columns, turned = axes
    dense = w.reshape(*w.shape[:2], rows.kernel, columns.kernel)
    if group == 1:
        call = _of_all_channels(site, chain, dense, rows, columns)
    else:
        call = _of_each_channel(site, chain, dense, rows, columns)
    if call is None:
        return None
    return of_any_strides(site, call, call, (chain.x.tensor, len(site.node.inputs)), turned=turned)


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
    rows, columns, turned = axes
    zero, w_zero = (
        np.zeros(1, INT32) if zeros is None else zeros.reshape(-1).astype(INT32)
        for zeros in (site.constant(2), site.constant(3))
    )
    filters, k = w.shape[0], math.prod(w.shape[1:])
    packed = reordered(
        ("native sums", w_zero.tobytes()),
        w,
        lambda w: integer_panels(
            w.reshape(*w.shape[:2], -1).transpose(2, 1, 0).reshape(k, filters),
            np.broadcast_to(w_zero, (filters,)),
        ),
        None,
        panel_types(k, filters),
    )
    call = _products(site, 0, packed, int(zero[0]), (rows, columns))
    if call is None:
        return None
    return of_any_strides(site, call, call, (0, len(site.node.inputs)), turned=turned)


def _axes(site: Site, node: Node, tensor: int, w: np.ndarray) -> tuple[Window, Window, bool] | None:
    """The windows of rows and of columns of images, the input ``tensor``, and whether these have
    changed places; None if there is no compiled kernel."""
    x = site.input(tensor)
    if x is None or len(x.dims) > 4 or 0 in (*x.dims, *site.output().dims, *w.shape):
        return None
    axes = [Window(1, 1, 1)] * (4 - len(x.dims))
    axes += list(windows(node.attrs, w.shape[2:], x.dims[2:]))
    if not all(axis.addressable for axis in axes):
        return None
    # An image of one column is a row, whose taps are computed in pairs.
    turned = axes[1] == Window(1, 1, 1)
    rows, columns = axes[::-1] if turned else axes
    return rows, columns, turned


def _of_all_channels(
    site: Site, chain: _Chain, w: np.ndarray, rows: Window, columns: Window
) -> NativeCall | None:
    k, filters = math.prod(w.shape[1:]), w.shape[0]
    packed = reordered(
        ("native codes", w.shape, chain.source[1].tobytes()),
        chain.source[0],
        lambda _: integer_panels(
            w.transpose(2, 3, 1, 0).reshape(k, filters), np.zeros(filters, INT32)
        ),
        None,
        panel_types(k, filters),
    )
    zero = int(chain.x.zero[0])
    return _products(site, chain.x.tensor, packed, zero, (rows, columns), chain)


def _products(
    site: Site,
    tensor: int,
    packed: Reordered,
    zero: int,
    axes: tuple[Window, Window],
    chain: _Chain | None = None,
) -> NativeCall | None:
    """Products of what positions see of the input ``tensor``, whose zero point is ``zero``, with
    the ``packed`` matrix: sums, or what ``chain`` makes of them."""
    x, (rows, columns), panels = site.input(tensor), axes, IntegerPanels(*packed.arrays)
    assert x is not None
    k, filters = x.dims[1] * rows.kernel * columns.kernel, panels.sums.size
    padded = _up(k, 64)
    if padded > _COPY // 4:
        return None
    positions = x.dims[0] * rows.count * columns.count
    block = min(_COPY // padded, _ROWS)
    change = 128 if x.dtype == INT8 else 0
    terms = -(zero + change) * panels.sums.astype(np.int64)
    every = _up(filters, _PANEL)
    part = Workload("codes image, a part", k * block, 2 * k * filters * block, items=1)
    zeros = _filled(panels.zeros, every) if np.any(panels.zeros) else None
    scaled: tuple[np.ndarray | None, ...] = (None, None)
    if chain is not None:
        scaled = _filled(chain.factors, every), _filled(chain.offsets, every)
    return NativeCall(
        "quantized_convolution",
        (
            *(Tensor(tensor), panels.panels, _filled(terms.astype(INT32), every), zeros),
            *(*scaled, site.result(), axis_words(rows), axis_words(columns)),
            *(None if chain is None else chain.bounds, x.dims[0], x.dims[1], filters),
            *(block, change, zero, None, None),
        ),
        items=-(-positions // block),
        item_ns=part_ns(part),
        keep=packed,
    )


def _of_each_channel(
    site: Site, chain: _Chain, w: np.ndarray, rows: Window, columns: Window
) -> NativeCall | None:
    x, filters = site.input(chain.x.tensor), w.shape[0]
    assert x is not None
    pairs = -(-columns.kernel // 2)

    def block_of(chunk: int) -> int:
        """Rows of the result that what is seen of ``chunk`` columns has room for."""
        # The copy of what an item sees has a fixed size, which is on the thread's stack.
        seen = _PAIRS // (chunk * filters * pairs)
        return (seen - (rows.kernel - 1) * rows.dilation - 1) // rows.stride + 1

    chunk = columns.count
    while block_of(chunk) < 1 and chunk > 1:
        chunk = -(-chunk // 2)
    block = min(block_of(chunk), rows.count)
    # Weights repeat until they fill whole vectors, so that any number of filters has no rest.
    period = math.lcm(filters, _PANEL)
    if block < 1 or filters > _MOST_CHANNELS or period > _MOST_CHANNELS * _PANEL:
        return None

    weights = reordered(
        ("native depthwise codes", w.shape, chain.source[1].tobytes()),
        chain.source[0],
        lambda _: (_pairs_of_taps(w, period),),
        None,
        [TensorType(np.dtype(np.int16), (rows.kernel, pairs, period, 2))],
    )
    factors, offsets = [np.tile(each, period // filters) for each in (chain.factors, chain.offsets)]
    items = x.dims[0] * -(-rows.count // block) * -(-columns.count // chunk)
    taps = block * chunk * filters * pairs
    family = "depthwise codes image, a part"
    part = Workload(family, 0, taps * rows.kernel, 0, 1, taps * rows.stride)
    change = 128 if x.dtype == INT8 else 0
    return NativeCall(
        "code_depthwise",
        (
            *(Tensor(chain.x.tensor), weights.arrays[0], factors, offsets, site.result()),
            *(axis_words(rows), axis_words(columns), chain.bounds, x.dims[0], filters),
            *(filters // x.dims[1], period, block, chunk, change, int(chain.x.zero[0]), None, None),
        ),
        items=items,
        item_ns=part_ns(part),
        keep=weights,
    )


def _pairs_of_taps(w: np.ndarray, period: int) -> np.ndarray:
    """Weights [filters, 1, rows, columns] in pairs of columns, repeated to ``period`` filters: as
    [rows, pairs, period, 2]."""
    filters, _, rows, columns = w.shape
    pairs = -(-columns // 2)
    taps = np.zeros((rows, pairs * 2, filters), np.int16)
    taps[:, :columns] = w[:, 0].transpose(1, 2, 0)
    both = taps.reshape(rows, pairs, 2, filters).swapaxes(2, 3)
    return np.tile(both, (1, 1, period // filters, 1)).copy()


# Fused nodes.


def _chain(site: Site) -> _Chain | None:
    """What a fused node computes, if it is a convolution of codes with constants."""
    region = site.node.attrs["region"]
    place: dict[Value | None, int] = {value: i for i, value in enumerate(region.inputs)}
    nodes = list(region.nodes)
    conv = next(node for node in nodes if node.op.name in _PRODUCTS)
    at = nodes.index(conv)
    if any(node.op.name != "DequantizeLinear" for node in nodes[:at]):
        return None
    sources = {node.outputs[0]: _codes(site, place, node) for node in nodes[:at]}
    x, w = sources.get(conv.inputs[0]), sources.get(conv.inputs[1])
    y, bias = _codes(site, place, nodes[-1]), _bias(site, place, sources, conv)
    limits = bounds_of(site, place, nodes[at + 1 : -1])
    if x is None or w is None or y is None or bias is None or limits is None:
        return None
    codes, type_, result = site.constant(w.tensor), site.input(x.tensor), site.output()
    if codes is None or type_ is None or x.scale.size != 1 or y.scale.size != 1:
        return None
    if (
        not codes.size
        or {codes.dtype, type_.dtype, result.dtype} - {INT8, UINT8}
        or x.zero.size != 1
    ):
        return None
    # Codes less their zero points may need nine bits: those of int8 alone are multiplied.
    less = codes.astype(np.int32) - w.zero.reshape(-1, *[1] * (codes.ndim - 1))
    if less.min() < -128 or less.max() > 127 or y.zero.size != 1:
        return None
    ends, zero = np.iinfo(result.dtype), int(y.zero[0])
    low, high = [float(np.rint(limit / y.scale[0])) for limit in limits]
    low, high = [min(max(end, ends.min - zero), ends.max - zero) for end in (low, high)]
    count = (codes.shape[0],)
    factors = np.broadcast_to(x.scale * w.scale / y.scale, count).astype(FLOAT32)
    offsets = np.broadcast_to(bias / y.scale, count).astype(FLOAT32)
    # float64 may hold what float32 cannot, and infinity times a sum of 0 would be NaN.
    if not np.all(np.isfinite(factors) & np.isfinite(offsets)):
        return None
    bounds = np.array([low, high, 0.0])
    # The struct of C has two doubles and an integer.
    bounds.view(np.int64)[2] = zero
    return _Chain(conv, x, less.astype(INT8), (codes, w.zero), factors, offsets, bounds)


def _is_plain(node: Node) -> bool:
    """Whether a node is Conv, or Gemm of rows with the rows of weights, and nothing more."""
    factors = [node.attrs.get(name, 1.0) for name in ("alpha", "beta")]
    turned = [node.attrs.get(name, 0) for name in ("transA", "transB")]
    return node.op.name == "Conv" or (factors == [1.0, 1.0] and turned == [0, 1])


def _codes(site: Site, place: Mapping[Value | None, int], node: Node) -> _Quantized | None:
    """What a conversion reads or, the last one, writes; one scale for all or for each filter."""
    index, scale, *rest = [-1 if v is None else place.get(v, -1) for v in node.inputs]
    scales = site.constant(scale) if scale >= 0 else None
    zeros = site.constant(rest[0]) if rest and rest[0] >= 0 else np.zeros(1, INT32)
    if scales is None or zeros is None or scales.dtype != FLOAT32 or node.attrs.get("block_size"):
        return None
    if zeros.dtype not in (INT8, UINT8, INT32) or max(scales.ndim, zeros.ndim) > 1:
        return None
    # Filters are the first axis of weights: scales along another do not factor out of the sums.
    if (scales.size > 1 or zeros.size > 1) and node.attrs.get("axis", 1) != 0:
        return None
    if not np.all((scales > _LEAST) & (scales < _MOST)):
        return None
    return _Quantized(index, scales.reshape(-1).astype(np.float64), zeros.reshape(-1).astype(INT32))


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
    if value not in sources:
        constant = site.constant(place[value])
        return None if constant is None else constant.astype(np.float64)
    codes = sources[value]
    constant = None if codes is None else site.constant(codes.tensor)
    return None if constant is None or codes is None else (constant - codes.zero) * codes.scale


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _filled(array: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([array, np.zeros(size - array.size, array.dtype)])
