"""Quantized convolutions and matrix products with quantized or float results: fused between
DequantizeLinear and QuantizeLinear, QLinearConv and ConvInteger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.backends.native import family, fused_with, part_ns
from penstock.backends.native.bounds import bounds_of
from penstock.backends.native.code_products import (
    CHUNK,
    MOST_TAPS,
    Axes,
    CodeWeights,
    Operand,
    Rescaling,
    axes_of,
    code_bounds,
    divided,
    merged_groups,
    of_each,
    operand_zero,
    products_of_images,
    products_of_matrices,
    products_of_rows,
    scaled_sums,
    site_inputs,
)
from penstock.backends.native.image_strides import WINDOW, of_any_strides
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.records import NamedTuple
from penstock.core.traced import int64s
from penstock.core.types import FLOAT32, TensorType
from penstock.host.native import library
from penstock.ir.graph import Node, Value
from penstock.ir.layout import line_aligned
from penstock.ops.common.constant_cache import reordered
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.common.fixed_point import of_products
from penstock.ops.common.windows import Window
from penstock.ops.internal.fused import is_fused, parts
from penstock.ops.work_estimate import Workload, flops

_MOST_PERIOD = 1 << 17  # most channels with repeated weights
_LEAST, _MOST = 1e-30, 1e30


class _Quantized(NamedTuple):
    """A quantized tensor of a fused node, with its scale and zero point."""

    tensor: int
    scale: np.ndarray
    zero: np.ndarray


_REAL = _Quantized(-1, np.ones(1), np.zeros(1, INT32))


class _Chain(NamedTuple):
    """A convolution of quantized ``x`` and ``weights``, or a product with a matrix of weights;
    these are computed, or constant ``filters``."""

    node: Node
    x: _Quantized
    w: _Quantized
    filters: np.ndarray | None
    rescaling: Rescaling


def code_workload(node: Node) -> Workload | None:
    """Return the workload: products, and copies of each position's window."""
    conv, loaded = _product(parts(node)), library()
    weights = conv.inputs[3 if conv.op.name == "QLinearConv" else 1]
    types_ = [v.type for v in (conv.inputs[0], weights, node.outputs[0]) if v is not None]
    tensors = [t for t in types_ if isinstance(t, TensorType) and t.static]
    if loaded is None or len(tensors) < 3:
        return None
    x, w, result = tensors
    is_matrix, elements = conv.op.name in ("Gemm", "MatMul"), result.elements
    filters = max(result.dims[-1] if is_matrix else w.dims[0], 1)
    group, taps = conv.attrs.get("group", 1), w.dims[2:]
    # The depthwise kernel multiplies groups of four taps, at about the same rate on all instruction
    # sets.
    if group > 1 and w.dims[1] == 1 and len(taps) < 3:
        fours = elements * math.prod(taps[:-1]) * -(-taps[-1] // 4)
        copied = elements * math.prod(conv.attrs.get("strides", ()))
        return Workload("depthwise codes image", 0, fours, 0, elements, copied)
    together = 1 if is_matrix else merged_groups(group, filters // group, w.dims[1])
    return Workload(
        "codes layer" if is_matrix else "codes image",
        nbytes=0 if is_matrix or math.prod(taps) == 1 else x.elements,
        flops=flops(node) * together / loaded.integer_speed,
        weights=w.elements * together,
        elements=elements // filters * -(-filters // 16) * 16,
    )


@family(
    fused_with("DequantizeLinear"), "QLinearConv", "com.microsoft.QLinearConv", work=code_workload
)
def quantized_convolution(site: Site) -> NativeCall | None:
    """QLinearConv, and fused DequantizeLinear, Conv or product, bounds and QuantizeLinear, with
    constant per-tensor scales of input and output."""
    chain = _chain(site) if is_fused(site.node) else _chain_of_operation(site)
    if chain is None:
        return None
    x, w = [Operand(each.tensor, int(each.zero[0])) for each in (chain.x, chain.w)]
    codes, count = chain.filters, chain.node.attrs.get("group", 1)
    if codes is None:
        return products_of_matrices(site, x, w, chain.rescaling)
    made, zeros, less = codes, chain.w.zero, codes
    if codes.dtype != INT8 or zeros.any():
        less = codes.astype(np.int32) - zeros.reshape(-1, *[1] * (codes.ndim - 1))
        # Codes less their zero points may need nine bits.
        if less.min() >= -128 and less.max() <= 127:
            made, zeros = less.astype(INT8), np.zeros(1, INT32)
    source, dims = site.constant(chain.w.tensor), made.shape
    assert source is not None
    name, zeros = ("native codes", chain.w.zero.tobytes()), of_each(zeros, dims[0])
    weights = CodeWeights(source, dims, lambda _: made, zeros, name, groups=count)
    if codes.ndim == 2:
        return products_of_rows(site, x, weights, chain.rescaling)
    axes = axes_of(site, chain.node, x.tensor, dims[2:])
    if axes is None:
        return None
    is_depthwise = dims[1] == 1 < count and chain.rescaling.bounds is not None
    if is_depthwise and axes.planes == Window(1, 1, 1):
        call = _of_each_channel(site, chain, less, axes)
        if call is not None:
            images = x.tensor, len(site.node.inputs)
            return of_any_strides(site, call, images, turned=axes.turned)
    return products_of_images(site, axes, x, weights, chain.rescaling)


@family("ConvInteger", fused_with("ConvInteger"), work=code_workload)
def integer_convolution(site: Site) -> NativeCall | None:
    """ConvInteger of constant weights and zero points, with int32 accumulators or floats computed
    from them by the following nodes as the result."""
    conv, *others = parts(site.node)
    place = {value: i for i, value in enumerate(site_inputs(site))}
    x_at, w_at, zero_at, w_zero_at = [
        -1 if v is None else place[v] for v in [*conv.inputs, None, None][:4]
    ]
    x, w = site.tensor(x_at), site.constant(w_at)
    if w is None or {x.dtype, w.dtype} - {INT8, UINT8}:
        return None
    w_zero = np.zeros(1, INT32) if w_zero_at < 0 else site.constant(w_zero_at)
    axes = axes_of(site, conv, x_at, w.shape[2:])
    filters = w.shape[0]
    terms = np.zeros(filters, INT32)
    rescaling = scaled_sums(site, others, filters, 1) if others else Rescaling(terms)
    if axes is None or w_zero is None or rescaling is None or not w.size:
        return None
    zeros = of_each(w_zero.reshape(-1).astype(INT32), filters)
    name, count = ("native sums", zeros.tobytes()), conv.attrs.get("group", 1)
    weights = CodeWeights(w, w.shape, lambda w: w, zeros, name, groups=count)
    zero = operand_zero(site, zero_at, x.dtype, axes.images)
    if zero is None:
        return None
    return products_of_images(site, axes, Operand(x_at, zero), weights, rescaling)


def _of_each_channel(site: Site, chain: _Chain, w: np.ndarray, axes: Axes) -> NativeCall | None:
    x, filters, rows, columns = site.tensor(chain.x.tensor), w.shape[0], axes.rows, axes.columns
    taps = _taps_of_bytes(w.reshape(filters, rows.kernel, columns.kernel))
    read = taps.shape[-1]
    quads = -(-read // 4)
    block, chunk, reach = divided(rows, columns, filters, adjacent_columns=True)
    # Weights are repeated to whole vectors, so that no number of filters leaves a remainder.
    period = math.lcm(filters, CHUNK)
    if block < 1 or period > _MOST_PERIOD or read + 3 > MOST_TAPS:
        return None
    if taps.dtype != INT8 and (taps.min() < -128 or taps.max() > 127):
        return None

    change = 128 if x.dtype == INT8 else 0
    zero, source = int(chain.x.zero[0]), site.constant(chain.w.tensor)
    assert source is not None
    weights = reordered(
        ("native depthwise codes", w.shape, chain.w.zero.tobytes()),
        source,
        lambda _: (_fours_of_taps(taps, period),),
        None,
        [TensorType(INT8, (rows.kernel, quads, period, 4))],
    )
    sums = taps.sum(axis=(1, 2), dtype=np.int64)
    terms = (chain.rescaling.terms - (zero + change) * sums).astype(INT32)
    factors, offsets, bounds = chain.rescaling.of_codes(lambda each: _repeated(each, period))
    items = axes.images * -(-rows.count // block) * -(-columns.count // chunk)
    codes = block * chunk * filters
    fours, copied = codes * quads * rows.kernel, codes * rows.stride * columns.stride
    part = Workload("depthwise codes image", 0, fours, 0, codes, copied)
    return NativeCall(
        "code_depthwise",
        (
            *(Tensor(chain.x.tensor), weights.arrays[0], _repeated(terms, period)),
            *(factors, offsets, site.result(), *int64s(WINDOW(rows), WINDOW(columns)), bounds),
            *(axes.images, filters),
            *(filters // x.dims[1], period, read, block, chunk, reach, change, zero, None, None),
        ),
        items=items,
        item_ns=part_ns(part),
        keep=weights,
    )


def _taps_of_bytes(w: np.ndarray) -> np.ndarray:
    """Split 9-bit weights [filters, rows, columns] into twice as many columns of 8-bit summands;
    return others unchanged."""
    if w.dtype == INT8 or (w.min() >= -128 and w.max() <= 127):
        return w
    return np.concatenate([w >> 1, w - (w >> 1)], axis=-1)


def _fours_of_taps(w: np.ndarray, period: int) -> np.ndarray:
    """Return weights [filters, rows, columns] in groups of four columns, repeated to ``period``
    filters: [rows, groups, period, 4]."""
    filters, rows, columns = w.shape
    quads = -(-columns // 4)
    taps = np.zeros((rows, quads * 4, filters), INT8)
    taps[:, :columns] = w.transpose(1, 2, 0)
    fours = _repeated(taps, period).reshape(rows, quads, 4, period).swapaxes(2, 3)
    return line_aligned(fours)


def _repeated(array: np.ndarray, period: int) -> np.ndarray:
    """Repeat the last axis, in the lane order of vectors (``quantized_convolution.c``)."""
    *outer, size = array.shape
    repeated = np.tile(array, period // size) if period > size else array
    chunks = repeated.reshape(*outer, -1, 4, 4, 4)
    return line_aligned(chunks.swapaxes(-2, -3).reshape(*outer, period))


# Nodes.


def _chain(site: Site) -> _Chain | None:
    """Return the chain of a fused node; None if it is no quantized convolution or product."""
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
    bias, rest = _bias(site, place, sources, conv), nodes[at + 1 :]
    # Without a final QuantizeLinear, the result is float.
    is_quantized = bool(rest) and rest[-1].op.name == "QuantizeLinear"
    y = _codes(site, place, rest[-1]) if is_quantized else _REAL
    limits = bounds_of(site, place, rest[:-1] if is_quantized else rest)
    if x is None or w is None or y is None or bias is None or limits is None:
        return None
    factor = np.float32(conv.attrs.get("alpha", 1.0) if conv.op.name == "Gemm" else 1.0)
    factors, offsets = factor * x.scale * w.scale / y.scale, bias / y.scale
    return _chain_of(site, conv, (x, w, y), np.zeros(1, INT32), (factors, offsets), limits)


def _chain_of_operation(site: Site) -> _Chain | None:
    """Return the chain of a QLinearConv with constant scales and zero points."""
    x, w, y = [
        _quantized(site, tensor, scale, scale + 1) for tensor, scale in ((0, 1), (3, 4), (-1, 6))
    ]
    bias = np.zeros(1, INT32) if site.input(8) is None else site.constant(8)
    if x is None or w is None or y is None or bias is None or site.attr("channels_last", 0):
        return None
    # In float32, in the order of NumPy's kernel.
    scales = [each.scale.astype(FLOAT32) for each in (x, w, y)]
    if not scales[0].size == scales[2].size == 1:
        return None
    factors = scales[0] * scales[1] / scales[2]
    ends = np.array(site.attr("code_limits", (-math.inf, math.inf)))
    low, high = ((ends - y.zero[0]) * y.scale[0]).tolist()
    chain = _chain_of(site, site.node, (x, w, y), bias, (factors, np.zeros(1)), (low, high))
    if chain is None or not site.attr("fixed_point", 0):
        return chain
    exact = of_products(*scales, rounded=site.output().dtype == UINT8)
    return chain._replace(rescaling=chain.rescaling.of_each(exact))


def _chain_of(
    site: Site,
    node: Node,
    operands: tuple[_Quantized, _Quantized, _Quantized],
    terms: np.ndarray,
    scaling: tuple[np.ndarray, np.ndarray],
    limits: tuple[float, float],
) -> _Chain | None:
    """Return the chain of a node whose ``operands`` are the input, the weights and the result;
    ``scaling`` has factors and offsets."""
    x, w, y = operands
    codes, type_, dtype = site.constant(w.tensor), site.tensor(x.tensor), site.output().dtype
    w_type = site.tensor(w.tensor)
    if dtype is None or not w_type.elements:
        return None
    if {w_type.dtype, type_.dtype} - {INT8, UINT8} or dtype not in (INT8, UINT8, FLOAT32):
        return None
    if not x.scale.size == x.zero.size == y.scale.size == y.zero.size == 1:
        return None
    filters, axis = None, _axis_of_filters(node)
    if codes is not None:
        if axis is not None and axis != 0 and codes.ndim != 2:
            return None
        filters = codes.T if axis else codes
    elif node.op.name != "MatMul" or max(w.scale.size, w.zero.size) > 1:
        return None
    columns = w_type.dims[-1] if filters is None else filters.shape[0]
    factors, offsets = [each.astype(FLOAT32) for each in scaling]
    # float64 numbers may overflow float32, and infinity times an accumulator of 0 would be NaN.
    if not math.isfinite(sum([each.sum(dtype=np.float64) for each in (factors, offsets)])):
        return None
    terms, factors, offsets = [of_each(part, columns) for part in (terms, factors, offsets)]
    if dtype == FLOAT32:
        own = offsets if offsets.any() else None
        return _Chain(node, x, w, filters, Rescaling(terms, factors, own, None, *limits))
    low, high = [float(np.rint(limit / y.scale[0])) for limit in limits]
    bounds = code_bounds(dtype, int(y.zero[0]), low, high)
    return _Chain(node, x, w, filters, Rescaling(terms, factors, offsets, bounds))


def _product(nodes: Sequence[Node]) -> Node:
    """Return the convolution or product that follows the conversions of its operands."""
    return next(node for node in nodes if node.op.name != "DequantizeLinear")


def _axis_of_filters(node: Node) -> int | None:
    """Return the axis of filters, or of matrix columns, in the weights; None for a product with
    attributes that are not supported."""
    if node.op.name == "MatMul":
        return 1
    if node.op.name != "Gemm":
        return 0
    if node.attrs.get("transA", 0):
        return None
    return 0 if node.attrs.get("transB", 0) else 1


def _codes(
    site: Site, place: Mapping[Value | None, int], node: Node, axis: int = 0
) -> _Quantized | None:
    """Return the quantized tensor that a conversion reads or, the last one, writes, with per-tensor
    or per-axis scales."""
    index, scale, zero = [-1 if v is None else place.get(v, -1) for v in [*node.inputs, None][:3]]
    codes = _quantized(site, index, scale, zero)
    if codes is None or node.attrs.get("block_size"):
        return None
    # Scales along another axis cannot be factored out of the accumulators.
    several = max(codes.scale.size, codes.zero.size) > 1
    allowed = (1, -1) if axis else (0,)
    # With a single axis, ``axis`` is irrelevant.
    is_vector = node.inputs[0] is not None and node.inputs[0].rank == 1
    other = node.attrs.get("axis", 1) not in allowed and not is_vector
    return None if several and other else codes


def _quantized(site: Site, tensor: int, scale: int, zero: int) -> _Quantized | None:
    """Return codes with the scales and zero points in these inputs, -1 for none."""
    scales = site.constant(scale) if scale >= 0 else None
    is_left_out = zero < 0 or site.input(zero) is None
    zeros = np.zeros(1, INT32) if is_left_out else site.constant(zero)
    if scales is None or zeros is None or scales.dtype != FLOAT32:
        return None
    if zeros.dtype not in (INT8, UINT8, INT32) or max(scales.ndim, zeros.ndim) > 1:
        return None
    numbers = scales.reshape(-1).tolist()
    if False in [_LEAST < number < _MOST for number in numbers]:
        return None
    return _Quantized(tensor, np.array(numbers), zeros.reshape(-1).astype(INT32))


def _bias(
    site: Site,
    place: Mapping[Value | None, int],
    sources: Mapping[Value | None, _Quantized | None],
    conv: Node,
) -> np.ndarray | None:
    """Return the bias as floats, None if it is not constant."""
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
    bias = bias if codes is None else (bias - codes.zero) * codes.scale
    return bias * (conv.attrs.get("beta", 1.0) if conv.op.name == "Gemm" else 1.0)
