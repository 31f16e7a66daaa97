"""Quantization and dequantization: ``y = saturate(round(x / scale) + zero_point)``.

All of it is computed in float32 (float64 where the scale is an integer), which is exact: a rounded
quotient that float32 does not represent exactly is above 2**24, out of the range of any quantized
type, and saturates. Scales and zero points are per tensor, per axis, or per block of consecutive
indices of an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, RunValue, Shape, ShapeError, TensorType, Type, dtype_name
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.dtypes import FLOAT8, FLOAT64, INT8, POWERS, SUB_BYTE, UINT8, dtype_info
from penstock.ops.common.elementwise import BLOCK, clip
from penstock.ops.common.shape_rules import (
    all_known,
    dtype_attribute,
    given,
    normalize_axis,
    tensor,
)
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape, static_type
from penstock.ops.registry import MICROSOFT, operator

# 4-bit and smaller integers are stored in the low bits of a byte. Types are keyed by name.
_PACKED_INTS = {
    name: (UINT8 if name.startswith("u") else INT8, np.uint8((1 << bits) - 1))
    for name, bits in SUB_BYTE.items()
    if "int" in name
}
# Float types below 8 bits have neither infinity nor NaN: casts to them saturate.
_FLOATS = {*FLOAT8, *SUB_BYTE} - _PACKED_INTS.keys()
TARGETS = {"int8", "uint8", "int16", "uint16", *FLOAT8, *SUB_BYTE}
SOURCES = TARGETS | {"int32"}


class _Spread(NamedTuple):
    """How a scale or zero point broadcasts against a tensor."""

    shape: tuple[int, ...]  # to which it is reshaped for broadcasting
    repeat: tuple[int, int, int] | None = (
        None  # axis, repetitions of each index, and the resulting dim
    )
    seen: tuple[int, ...] | None = None  # the shape to which the tensor is reshaped, if any

    def __call__(self, parameter: np.ndarray) -> np.ndarray:
        if self.repeat is not None:
            axis, times, size = self.repeat
            repeated = np.repeat(parameter, times, axis)
            return repeated[(slice(None),) * axis + (slice(size),)]
        return parameter.reshape(self.shape)


def _spread(parameter: tuple[int, ...], shape: tuple[int, ...], axis: int, block: int) -> _Spread:
    """The broadcasting of a scale or zero point of shape ``parameter`` against a tensor of
    ``shape``. If blocks divide the axis evenly, the tensor is reshaped instead of repeating the
    parameter.
    """
    if parameter.count(1) == len(parameter):
        return _Spread(())
    rank = len(shape)
    if not block:
        axis = 0 if rank == 1 else normalize_axis(axis, rank)
        if not rank or parameter != (shape[axis],):
            raise _misfit(parameter, axis, shape)
        return _Spread((-1, *(1,) * (rank - 1 - axis)))
    axis = normalize_axis(axis, rank)
    blocks = -(-shape[axis] // block)
    wanted = (*shape[:axis], blocks, *shape[axis + 1 :])
    if parameter != wanted:
        raise ShapeError(f"block_size {block} requires scales of shape {wanted}, not {parameter}")
    if shape[axis] % block:
        return _Spread(shape, (axis, block, shape[axis]))
    outer, inner = shape[:axis], shape[axis + 1 :]
    return _Spread((*outer, blocks, 1, *inner), None, (*outer, blocks, block, *inner))


def _misfit(parameter: tuple[int, ...], axis: int, shape: Shape) -> ShapeError:
    hint = " without a block_size" if len(parameter) > 1 else ""
    return ShapeError(
        f"a scale of shape {parameter} does not match axis {axis} of shape {shape}{hint}"
    )


def _axis_and_block(attrs: Attrs) -> tuple[int, int]:
    """The quantization axis and the block size (0: one scale per index). com.microsoft's operations
    define no default axis; ONNX's default, 1, is used."""
    block = attrs.get("block_size") or 0
    if block < 0:
        raise ShapeError(f"block_size is {block}: it must not be negative")
    axis = attrs.get("axis")
    return 1 if axis is None else axis, block


def _check_parameters(types: Types, attrs: Attrs) -> None:
    """Raise the errors of ``_spread``, as far as the shapes are known."""
    axis, block = _axis_and_block(attrs)
    x = tensor(types, 0).shape
    shape = all_known(x)
    scale, zero = all_known(tensor(types, 1).shape), all_known(tensor(types, 2).shape)
    for parameter in (scale, zero):
        if parameter is None or x is None:
            continue
        if shape is not None:
            _spread(parameter, shape, axis, block)
        elif not block and any(dim != 1 for dim in parameter):
            # The quantization axis may be known.
            at = 0 if len(x) == 1 else normalize_axis(axis, len(x))
            fits = len(parameter) == 1 and x[at] in (parameter[0], None)
            if not fits and not isinstance(x[at], str):
                raise _misfit(parameter, axis, x)
    if scale is not None and zero is not None and math.prod(scale) != math.prod(zero):
        raise ShapeError(f"scale and zero point must have the same shape, not {scale} and {zero}")


@cache
def bounds(dtype: np.dtype) -> tuple[float, float]:
    """The lowest and the highest finite number of a quantized type."""
    info = dtype_info(dtype)
    return float(info.min), float(info.max)


@cache
def _limits(dtype: np.dtype, work: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    low, high = bounds(dtype)
    return np.array(low, work), np.array(high, work)


@cache
def _decoded(dtype: np.dtype) -> np.ndarray:
    """A table that decodes each byte of a float type of at most 8 bits to float32, shape [256]."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def subtract_zero_point(x: np.ndarray, zero: np.ndarray | None, out: np.ndarray) -> None:
    """``x - zero`` in float32; ``zero`` is float32 and broadcasts, ``None`` means 0."""
    if x.dtype.kind not in "iu" and x.dtype.name in _FLOATS:
        # All bytes are valid indices, but in mode "raise" np.take buffers its output.
        np.take(_decoded(x.dtype), x.view(np.uint8), out=out, mode="clip")
        if zero is not None:
            np.subtract(out, zero, out)
    elif zero is None:
        np.copyto(out, x, casting="unsafe")
    else:
        np.subtract(x, zero, out=out, dtype=np.float32, casting="unsafe")


def store(values: np.ndarray, zero: np.ndarray | None, out: np.ndarray, saturate: bool) -> None:
    """Round ``values``, add ``zero``, saturate, and store in ``out``; ``values`` is overwritten.
    NaN becomes the lowest integer, as in ONNX Runtime and the reference implementation."""
    dtype = out.dtype
    packed = None if dtype.kind in "iu" else _PACKED_INTS.get(dtype.name)
    is_integer = packed is not None or dtype.kind in "iu"
    if is_integer:
        np.rint(values, values)
    if zero is not None:
        np.add(values, zero, values)
    if is_integer:
        low, high = _limits(dtype, values.dtype)
        clip(values, low, high, values)
        # The minimum is NaN if any value is NaN.
        lowest = np.minimum.reduce(values, axis=None, initial=0)  # far cheaper than fmax
        if lowest != lowest:
            np.fmax(values, low, values)
        if packed is not None:
            # Many times faster than a direct cast.
            storage, mask = packed
            np.copyto(out.view(storage), values, casting="unsafe")
            raw = out.view(np.uint8)
            np.bitwise_and(raw, mask, raw)
            return
    elif dtype.name in FLOAT8 and saturate:
        low, high = _limits(dtype, values.dtype)
        clip(values, low, high, values)
    np.copyto(out, values, casting="unsafe")


def zero_of(zero: np.ndarray | None, work: np.dtype = FLOAT32) -> np.ndarray | None:
    """A zero point as float, or None if it is 0, as it often is."""
    if zero is None or not np.count_nonzero(zero):
        return None
    return zero.astype(work)


def blocks(*arrays: np.ndarray) -> np.nditer:
    """Iterate over arrays, broadcast against each other, in one-dimensional pieces of at most
    ``BLOCK`` elements. The last array is writable."""
    flags: list[Any] = [["readonly"] for _ in arrays[:-1]]
    return np.nditer(
        arrays,
        ["external_loop", "buffered", "zerosize_ok"],
        [*flags, ["writeonly"]],
        [array.dtype for array in arrays],
        buffersize=BLOCK,
    )


class _Scaling(NamedTuple):
    """``convert(x, scale, zero, values, out)`` for a block of elements.

    Scale (in ``precision``) and zero point (in ``work``, or ``None``) broadcast against ``x``;
    ``values`` is scratch memory of dtype ``work``, or ``None`` without ``scratch``.
    """

    convert: Callable[..., None]
    precision: np.dtype
    work: np.dtype
    scratch: bool = True


def _scaled(inputs: Tensors, consts: Consts, attrs: Attrs, scaling: _Scaling) -> Routine:
    """The routine of a conversion."""
    convert, precision, work, scratch = scaling
    along = _spread(tensor(inputs, 1).dims, tensor(inputs, 0).dims, *_axis_and_block(attrs))
    shape = along.seen or tensor(inputs, 0).dims
    # A per-tensor scale: process blocks that stay in the cache.
    in_blocks = math.prod(shape) > BLOCK and not along.shape
    layout = Scratch()
    field = layout.field((BLOCK,) if in_blocks else shape, work) if scratch else None

    def scale_along(scale: np.ndarray) -> np.ndarray:
        return along(scale.astype(precision, copy=False))

    def zero_along(zero: np.ndarray | None) -> np.ndarray | None:
        offset = zero_of(zero, work)
        return offset if offset is None else along(offset)

    _, scale, zero = consts
    const_scale = None if scale is None else scale_along(scale)
    fixed = zero is not None or inputs[2] is None
    const_zero = zero_along(zero)

    def run(
        x: np.ndarray,
        scale: np.ndarray,
        zero: np.ndarray | None,
        out: np.ndarray,
        *scratch: np.ndarray,
    ) -> None:
        by = scale_along(scale) if const_scale is None else const_scale
        offset = const_zero if fixed else zero_along(zero)
        values = None if field is None else field(scratch[0])
        if not in_blocks:
            convert(x.reshape(shape), by, offset, values, out.reshape(shape))
            return
        with blocks(x, out) as pairs:
            for piece, target in pairs:
                convert(piece, by, offset, None if values is None else values[: piece.size], target)

    return Routine(run, layout.size)


def _infer_quantize(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    _check_parameters(types, attrs)
    wanted = dtype_attribute(attrs, "output_dtype")
    # ONNX: uint8 without an output_dtype and without a zero point.
    dtype = tensor(types, 2).dtype or wanted or (None if given(types, 2) else UINT8)
    if dtype is not None and dtype_name(dtype) not in TARGETS:
        raise ShapeError(
            f"{dtype_name(dtype)} is not a quantized type; these are {', '.join(TARGETS)}"
        )
    if dtype is not None and wanted is not None and dtype != wanted:
        raise ShapeError(
            f"output_dtype is {dtype_name(wanted)}, but the zero point is {dtype_name(dtype)}"
        )
    return (TensorType(dtype, tensor(types, 0).shape),)


def _precision(scale: np.dtype, attrs: Attrs) -> np.dtype:
    """The dtype in which ``x / scale`` is computed and rounded."""
    wanted = dtype_attribute(attrs, "precision")
    if wanted is not None:
        return wanted
    if scale.kind in "iu":
        return FLOAT64
    return FLOAT32 if scale.name == POWERS else scale


_by_parameters = by_shape(
    arity=(3, 1), widen=False, contiguous=lambda node: bool(_axis_and_block(node.attrs)[1])
)


@operator("QuantizeLinear", since=10, infer=_infer_quantize, traits={"links"})
@operator("QuantizeLinear", domain=MICROSOFT, infer=_infer_quantize, traits={"links"})
@_by_parameters
def quantize_linear(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    saturate = bool(node.attrs.get("saturate", 1))
    precision = _precision(static_type(inputs, 1)[1], node.attrs)
    work = FLOAT64 if precision == FLOAT64 else FLOAT32

    def quantize(x: np.ndarray, scale: np.ndarray, *arguments: RunValue) -> None:
        zero, values, out = arguments
        if precision == work:
            np.divide(x, scale, out=values, dtype=work, casting="unsafe")
        else:
            np.copyto(values, np.divide(x.astype(precision, copy=False), scale))
        store(values, zero, out, saturate)

    return _scaled(inputs, consts, node.attrs, _Scaling(quantize, precision, work))


def _infer_dequantize(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    if x.dtype is not None and dtype_name(x.dtype) not in SOURCES:
        raise ShapeError(
            f"{dtype_name(x.dtype)} is not a quantized type; these are {', '.join(SOURCES)}"
        )
    _check_parameters(types, attrs)
    dtype = dtype_attribute(attrs, "output_dtype") or tensor(types, 1).dtype
    if dtype is not None and dtype_name(dtype) == POWERS:
        raise ShapeError("scales of type float8e8m0 require the attribute output_dtype")
    return (TensorType(dtype, x.shape),)


@operator("DequantizeLinear", since=10, infer=_infer_dequantize, traits={"exact", "links"})
@operator("DequantizeLinear", domain=MICROSOFT, infer=_infer_dequantize, traits={"exact", "links"})
@_by_parameters
def dequantize_linear(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    """Computed in float32 and rounded once. This equals the product in float16 or bfloat16, as
    float32 represents products of these exactly."""

    def dequantize(x: np.ndarray, scale: np.ndarray, *arguments: RunValue) -> None:
        zero, values, out = arguments
        target = out if values is None else values
        subtract_zero_point(x, zero, target)
        np.multiply(target, scale, out=out, dtype=np.float32, casting="unsafe")

    scratch = tensor(outputs, 0).dtype != FLOAT32
    return _scaled(inputs, consts, node.attrs, _Scaling(dequantize, FLOAT32, FLOAT32, scratch))


def dynamic_parameters(x: np.ndarray) -> tuple[np.float32, np.uint8]:
    """The scale and zero point that map the range of ``x``, extended to include 0, to uint8. A
    tensor of zeros has scale 1, as in ONNX Runtime; the definition would divide by 0.
    """
    low = np.minimum.reduce(x, axis=None, initial=0)
    high = np.maximum.reduce(x, axis=None, initial=0)
    scale = np.float32((high - low) / np.float32(255))
    if scale == 0:
        return np.float32(1), np.uint8(0)
    zero = np.rint(-low / scale)
    return scale, np.uint8(min(max(zero, 0), 255)) if zero == zero else np.uint8(0)


def quantize_to_float(x: np.ndarray, out: np.ndarray) -> np.float32:
    """Quantize ``x`` to uint8 over its own range; ``out`` receives codes minus zero point."""
    scale, zero = dynamic_parameters(x)
    np.divide(x, scale, out)
    np.rint(out, out)
    clip(out, np.float32(-int(zero)), np.float32(255 - int(zero)), out)
    return scale


def _infer_dynamic(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return TensorType(UINT8, tensor(types, 0).shape), TensorType(FLOAT32, ()), TensorType(UINT8, ())


@operator("DynamicQuantizeLinear", since=11, infer=_infer_dynamic)
@by_shape()
def dynamic_quantize(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    layout, dims = Scratch(), tensor(inputs, 0).dims
    size = math.prod(dims)
    field = layout.field((BLOCK,) if size > BLOCK else dims, FLOAT32)

    def run(x: np.ndarray, *arrays: np.ndarray) -> None:
        out, out_scale, out_zero, workspace = arrays
        scale, zero = dynamic_parameters(x)
        plus = zero_of(np.asarray(zero))
        values = field(workspace)
        if size > BLOCK:
            with blocks(x, out) as pairs:
                for piece, target in pairs:
                    part = values[: piece.size]
                    np.divide(piece, scale, part)
                    store(part, plus, target, True)
        else:
            np.divide(x, scale, values)
            store(values, plus, out, True)
        out_scale[...] = scale
        out_zero[...] = zero

    return Routine(run, layout.size)
