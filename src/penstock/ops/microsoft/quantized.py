"""Element by element on quantised tensors: the QLinear operations of com.microsoft.

All take 8-bit codes with a scale and a zero point for the whole tensor and give such codes again.
A function of one input is a table of 256 codes. Everything else is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Node, Value
from penstock.ir.op import Attrs, Consts, Kernel, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import INT8, UINT8
from penstock.ops.common.elementwise import BLOCK
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape, specialized
from penstock.ops.onnx.activation import applied, leaky_relu, sigmoid
from penstock.ops.onnx.quantization import blocks, store, subtract_zero_point, zero_of
from penstock.ops.onnx.quantized_conv import channels_back, channels_first
from penstock.ops.registry import MICROSOFT, operator, standard
from penstock.types import FLOAT32, ShapeError, TensorType, Type

Function = Callable[[np.ndarray, np.ndarray], Any]  # from an array, or in place


def _zero(zero: np.ndarray | None, name: str) -> np.ndarray | None:
    return None if zero is None else zero_of(rules.one_element(zero, f"{name}_zero_point"))


def _scale(scale: np.ndarray, name: str) -> np.float32:
    return np.float32(rules.one_element(scale, f"{name}_scale"))


def _dequantize(x: np.ndarray, scale: np.ndarray, zero: Any, values: np.ndarray) -> None:
    """``x`` as real numbers, in ``values``, float32."""
    subtract_zero_point(x, _zero(zero, "x"), values)
    np.multiply(values, _scale(scale, "x"), values)


def _quantize(values: np.ndarray, scale: np.ndarray, zero: Any, out: np.ndarray) -> None:
    """``values``, which are lost, as codes in ``out``."""
    np.divide(values, _scale(scale, "y"), values)
    store(values, _zero(zero, "y"), out, True)


def _requantize(means: np.ndarray, x_scale: Any, y_scale: Any, zero: Any, out: np.ndarray) -> None:
    """``means`` of codes less their zero points, which are lost, as codes in ``out``. Of equal
    scales the factor is 1, so that exact ties stay ties."""
    np.multiply(means, _scale(x_scale, "x") / _scale(y_scale, "y"), means)
    store(means, _zero(zero, "y"), out, True)


# Functions of one input, and codes of another scale and zero point: as tables


def _table(dtype: np.dtype, parameters: Sequence[Any], function: Function | None) -> bytes | None:
    """The code of the result for each byte of the input; ``None`` if both are the same.
    ``parameters`` are scale and zero point of the input and of the result."""
    x_scale, x_zero, y_scale, y_zero = parameters
    if function is None and x_scale == y_scale and x_zero == y_zero:
        return None
    values, out = np.empty(256, np.float32), np.empty(256, dtype)
    _dequantize(np.arange(256, dtype=np.uint8).view(dtype), x_scale, x_zero, values)
    if function is not None:
        function(values, values)
    _quantize(values, y_scale, y_zero, out)
    return out.tobytes()


def _recoder(
    node: Node, places: tuple[int, int, int, int], function: Function | None = None
) -> Callable[[np.ndarray, Sequence[Any], np.ndarray], None]:
    """``recode(x, inputs, out)``: the codes of ``function`` of ``x``, with other parameters.
    ``places`` are where the node's inputs have scale and zero point of ``x``, and of the result."""
    count = max(places) + 1
    tables: dict[np.dtype, bytes | None] = {}
    if rules.all_constant(node, places):
        parameters = [rules.constants(node, count)[i] for i in places]
        for dtype in (UINT8, INT8):
            tables[dtype] = _table(dtype, parameters, function)

    def recode(x: np.ndarray, inputs: Sequence[Any], out: np.ndarray) -> None:
        if x.dtype in tables:
            table = tables[x.dtype]
        else:
            inputs = rules.pad_with_none(inputs, count)
            table = _table(x.dtype, [inputs[i] for i in places], function)
        if table is None:
            np.copyto(out, x)
        else:  # faster than indexing, which needs indices of 64 bits
            codes = x.tobytes().translate(table)
            np.copyto(out, np.frombuffer(codes, out.dtype).reshape(x.shape))

    return recode


_FUNCTIONS = {"QLinearSigmoid": (sigmoid, 0), "QLinearLeakyRelu": (leaky_relu, 1)}


@operator("QLinearSigmoid", domain=MICROSOFT, infer=rules.same_type)
@operator("QLinearLeakyRelu", domain=MICROSOFT, infer=rules.same_type)
def qlinear_function(node: Node, types: Types) -> Kernel:
    recode = _recoder(node, (1, 2, 3, 4), applied(*_FUNCTIONS[node.op.name], node.attrs))

    def into(*args: Any) -> None:
        recode(args[0], args[:-1], args[-1])

    return specialized(node, types, lambda *_: Routine(into), inplace=(0,))


# Two inputs


def _infer_binary(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    a, b = rules.tensor(types, 0), rules.tensor(types, 3)
    return (TensorType(a.dtype, rules.broadcast_shapes([a.shape, b.shape])),)


def _add(a: Any, b: Any, a_scale: Any, b_scale: Any, c_scale: Any, values: np.ndarray) -> None:
    """Of float32 codes less zero points; ``a`` and ``b`` are overwritten."""
    np.multiply(a, a_scale / c_scale, a)
    np.multiply(b, b_scale / c_scale, b)
    np.add(a, b, values)


def _multiply(a: Any, b: Any, a_scale: Any, b_scale: Any, c_scale: Any, values: np.ndarray) -> None:
    np.multiply(a, b, values)  # exact
    np.multiply(values, a_scale * b_scale / c_scale, values)


@operator("QLinearAdd", domain=MICROSOFT, infer=_infer_binary)
@operator("QLinearMul", domain=MICROSOFT, infer=_infer_binary)
@by_shape(arity=(8, 1), inplace=(0, 3))
def qlinear_binary(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    combine = _add if node.op.name == "QLinearAdd" else _multiply
    a_type, b_type = rules.tensor(inputs, 0), rules.tensor(inputs, 3)
    c_type = rules.tensor(outputs, 0)
    # Block by block, so that values stay in the cache and scratch memory is bounded.
    in_blocks = math.prod(c_type.dims) > BLOCK
    shapes = [(BLOCK,)] * 2 if in_blocks else [a_type.dims, b_type.dims]
    layout = Scratch()
    left, right = (layout.field(shape, FLOAT32) for shape in shapes)
    result = left
    if not in_blocks and c_type.dims != a_type.dims:
        result = layout.field(c_type.dims, FLOAT32)

    def into(*args: Any) -> None:
        a, a_scale, a_zero, b, b_scale, b_zero, c_scale, c_zero, out, workspace = args
        zeros = _zero(a_zero, "a"), _zero(b_zero, "b"), _zero(c_zero, "c")
        scales = _scale(a_scale, "a"), _scale(b_scale, "b"), _scale(c_scale, "c")
        x, y, values = left(workspace), right(workspace), result(workspace)

        def block(a: Any, b: Any, x: Any, y: Any, values: Any, out: Any) -> None:
            subtract_zero_point(a, zeros[0], x)
            subtract_zero_point(b, zeros[1], y)
            combine(x, y, *scales, values)
            store(values, zeros[2], out, True)

        if not in_blocks:
            block(a, b, x, y, values, out)
            return
        with blocks(a, b, out) as pieces:
            for a_piece, b_piece, target in pieces:
                n = target.size
                block(a_piece, b_piece, x[:n], y[:n], x[:n], target)

    return Routine(into, layout.size)


# Choosing and joining: each input has codes of its own


def _infer_concat(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    parts = [TensorType(shape=rules.tensor(types, i).shape) for i in range(2, len(types), 3)]
    (joined,) = standard("Concat").infer(parts, attrs, ())
    return (TensorType(rules.tensor(types, 1).dtype, rules.tensor((joined,), 0).shape),)


@operator("QLinearConcat", domain=MICROSOFT, infer=_infer_concat)
def qlinear_concat(node: Node, types: Types) -> Kernel:
    count = len(node.inputs)
    if count < 5 or count % 3 != 2:
        raise ShapeError(f"QLinearConcat takes 2 inputs and some triples, not {count} inputs")
    recoders = [_recoder(node, (i + 1, i + 2, 0, 1)) for i in range(2, count, 3)]
    axis = node.attrs["axis"]

    def into(*args: Any) -> None:
        inputs, parts, out = args[:count], args[2:count:3], args[count]
        at = rules.normalize_axis(axis, out.ndim)
        place: list[slice] = [slice(None)] * out.ndim
        start = 0
        for part, recode in zip(parts, recoders, strict=True):
            place[at] = slice(start, start + part.shape[at])
            start += part.shape[at]
            recode(part, inputs, out[tuple(place)])

    return specialized(node, types, lambda *_: Routine(into))


def _infer_where(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shapes = [rules.tensor(types, i).shape for i in (0, 1, 4)]
    return (TensorType(rules.tensor(types, 1).dtype, rules.broadcast_shapes(shapes)),)


@operator("QLinearWhere", domain=MICROSOFT, infer=_infer_where)
@by_shape()
def qlinear_where(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    recoders = [_recoder(node, (i + 1, i + 2, 7, 8)) for i in (1, 4)]
    layout = Scratch()
    operands = [rules.tensor(inputs, i) for i in (1, 4)]
    rooms = [layout.field(x.dims, x.dtype) for x in operands]

    def into(*args: Any) -> None:
        *given, out, workspace = args
        chosen = [room(workspace) for room in rooms]
        for i, recode, codes in zip((1, 4), recoders, chosen, strict=True):
            recode(given[i], given, codes)
        np.copyto(out, chosen[1])
        np.copyto(out, chosen[0], where=given[0])

    return Routine(into, layout.size)


# Along axes


@operator("QLinearSoftmax", domain=MICROSOFT, infer=rules.same_type)
@by_shape(arity=(5, 1), inplace=(0,))
def qlinear_softmax(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    axis = node.attrs.get("axis", -1)
    # Softmax before version 13 ran over all axes from ``axis`` on.
    flattened = node.attrs.get("opset", 13) < 13
    x_type = rules.tensor(inputs, 0)
    rank = len(x_type.dims)
    first = rules.normalize_axis(axis, rank)
    axes = tuple(range(first, rank)) if flattened else (first,)
    layout = Scratch()
    room = layout.field(x_type.dims, FLOAT32)

    def into(*args: Any) -> None:
        x, x_scale, _, y_scale, y_zero, out, workspace = args
        if not x.size:
            return
        values = room(workspace)
        subtract_zero_point(x, None, values)  # a shift of all codes is of no consequence
        np.subtract(values, values.max(axes, keepdims=True), values)
        np.multiply(values, _scale(x_scale, "x"), values)
        np.exp(values, values)
        np.divide(values, values.sum(axes, keepdims=True), values)
        _quantize(values, y_scale, y_zero, out)

    return Routine(into, layout.size)


def _register_mean(name: str, axes_of: Callable[[Attrs, int], tuple[int, ...]]) -> None:
    """Register the mean over some axes; ``axes_of`` gives them for attributes and a rank."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        x = rules.tensor(types, 0)
        if x.shape is None:
            return (TensorType(x.dtype),)
        axes, keepdims = axes_of(attrs, len(x.shape)), bool(attrs.get("keepdims", 1))
        return (TensorType(x.dtype, rules.reduced_shape(x.shape, axes, keepdims)),)

    @operator(name, domain=MICROSOFT, infer=infer)
    @by_shape(arity=(5, 1))
    def mean(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
        keepdims = bool(node.attrs.get("keepdims", 1))
        dims = rules.tensor(inputs, 0).dims
        axes = axes_of(node.attrs, len(dims))
        count = math.prod(dims[i] for i in axes)

        def into(x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any, out: Any) -> None:
            total = x.sum(axes, np.int64, keepdims=keepdims)  # of codes, exactly
            offset = 0 if x_zero is None else int(x_zero.reshape(()))
            values = np.asarray((total - offset * count) / np.float64(count), np.float32)
            _requantize(values, x_scale, y_scale, y_zero, out)

        return Routine(into)


def _global_axes(attrs: Attrs, rank: int) -> tuple[int, ...]:
    if rank < 3:
        raise ShapeError(f"pooling needs batch, channels and spatial axes, not rank {rank}")
    return tuple(range(1, rank - 1)) if attrs.get("channels_last") else tuple(range(2, rank))


def _mean_axes(attrs: Attrs, rank: int) -> tuple[int, ...]:
    axes = attrs.get("axes")
    return rules.normalize_axes(axes, rank) if axes else tuple(range(rank))


_register_mean("QLinearGlobalAveragePool", _global_axes)
_register_mean("QLinearReduceMean", _mean_axes)


# Average pooling, which is that of real numbers between DequantizeLinear and QuantizeLinear


def _infer_average_pool(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    last = bool(attrs.get("channels_last", 0))
    inner = TensorType(FLOAT32, channels_first(x.shape, last))
    y = rules.tensor(standard("AveragePool").infer([inner], attrs, [None]), 0)
    return (TensorType(x.dtype, channels_back(y.shape, last)),)


@operator("QLinearAveragePool", domain=MICROSOFT, infer=_infer_average_pool)
@by_shape(arity=(5, 1))
def qlinear_average_pool(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    last = bool(node.attrs.get("channels_last", 0))
    x_type, y_type = rules.tensor(inputs, 0), rules.tensor(outputs, 0)
    inner_type = TensorType(FLOAT32, channels_first(x_type.dims, last))
    inner = Node(standard("AveragePool"), [Value("x", inner_type)], [Value("y")], node.attrs)
    pool = inner.op.compile(inner, [inner_type])
    layout = Scratch()
    room, pooled = (layout.field(t.dims, FLOAT32) for t in (x_type, y_type))
    scratch = layout.field((pool.workspace,), UINT8) if pool.workspace else None

    def into(*args: Any) -> None:
        x, x_scale, x_zero, y_scale, y_zero, out, workspace = args
        values, means = room(workspace), pooled(workspace)
        subtract_zero_point(x, _zero(x_zero, "x"), values)
        source, target = values, means
        if last:
            source, target = np.moveaxis(values, -1, 1), np.moveaxis(means, -1, 1)
        if pool.into is None or (last and pool.contiguous):
            np.copyto(target, pool.function(source))
        elif scratch is None:
            pool.into(source, target)
        else:
            pool.into(source, target, scratch(workspace))
        _requantize(means, x_scale, y_scale, y_zero, out)

    return Routine(into, layout.size)
