"""Quantization and dequantization: ``y = saturate(round(x / scale) + zero_point)``.

All of it is computed in float32 (float64 where the scale is an integer). That is exact where it
matters: a rounded quotient that float32 cannot hold exactly is above 2**24, far outside the range
of any quantized type, and saturates. Scales and zero points come in three layouts: one for the
whole tensor, one for each index of an axis, one for each block of consecutive indices of an axis.
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

# Integers of less than a byte keep their low bits in one. All types go by their names.
_PACKED_INTS = {
    name: (UINT8 if name.startswith("u") else INT8, np.uint8((1 << bits) - 1))
    for name, bits in SUB_BYTE.items()
    if "int" in name
}
# Types of less than a byte have neither infinity nor NaN: casts to them saturate.
_FLOATS = {*FLOAT8, *SUB_BYTE} - _PACKED_INTS.keys()
TARGETS = {"int8", "uint8", "int16", "uint16", *FLOAT8, *SUB_BYTE}
SOURCES = TARGETS | {"int32"}


class _Spread(NamedTuple):
    """The layout of a scale or zero point along a tensor."""

    shape: tuple[int, ...]  # in which it broadcasts against the tensor
    repeat: tuple[int, int, int] | None = None  # axis, how often, and how many indices that makes
    seen: tuple[int, ...] | None = None  # the shape in which to see the tensor, if not its own

    def __call__(self, parameter: np.ndarray) -> np.ndarray:
        if self.repeat is not None:
            axis, times, size = self.repeat
            repeated = np.repeat(parameter, times, axis)
            return repeated[(slice(None),) * axis + (slice(size),)]
        return parameter.reshape(self.shape)


def _spread(parameter: tuple[int, ...], shape: tuple[int, ...], axis: int, block: int) -> _Spread:
    """The layout of a scale or zero point of shape ``parameter`` along a tensor of ``shape``.
    Blocks that fill their axis are not repeated: the tensor is seen with an axis more then."""
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
        raise ShapeError(f"blocks of {block} along axis {axis} have scales of shape {wanted}")
    if shape[axis] % block:
        return _Spread(shape, (axis, block, shape[axis]))
    outer, inner = shape[:axis], shape[axis + 1 :]
    return _Spread((*outer, blocks, 1, *inner), None, (*outer, blocks, block, *inner))


def _misfit(parameter: tuple[int, ...], axis: int, shape: Shape) -> ShapeError:
    hint = " without a block_size" if len(parameter) > 1 else ""
    return ShapeError(f"a scale of shape {parameter} does not fit axis {axis} of {shape}{hint}")


def _axis_and_block(attrs: Attrs) -> tuple[int, int]:
    """The axis that scales belong to, and how many of its indices share one (0: each has its own).
    com.microsoft has no default for the axis, and uses that of ONNX."""
    block = attrs.get("block_size") or 0
    if block < 0:
        raise ShapeError(f"block_size is {block}, it must be positive")
    axis = attrs.get("axis")
    return 1 if axis is None else axis, block


def _check_parameters(types: Types, attrs: Attrs) -> None:
    """Raise what ``_spread`` would, as far as the shapes are known."""
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
            # The one axis that matters may be known.
            at = 0 if len(x) == 1 else normalize_axis(axis, len(x))
            fits = len(parameter) == 1 and x[at] in (parameter[0], None)
            if not fits and not isinstance(x[at], str):
                raise _misfit(parameter, axis, x)
    if scale is not None and zero is not None and math.prod(scale) != math.prod(zero):
        raise ShapeError(f"scale has shape {scale}, zero point {zero}: they must be the same")


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
    """The value of each byte as an element of a float type of at most 8 bits, as float32."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def subtract_zero_point(x: np.ndarray, zero: np.ndarray | None, out: np.ndarray) -> None:
    """``x - zero`` in float32; ``zero`` is float32 and broadcasts, ``None`` means 0."""
    if x.dtype.kind not in "iu" and x.dtype.name in _FLOATS:
        # No byte is out of range; but in its mode "raise" NumPy would buffer what it writes.
        np.take(_decoded(x.dtype), x.view(np.uint8), out=out, mode="clip")
        if zero is not None:
            np.subtract(out, zero, out)
    elif zero is None:
        np.copyto(out, x, casting="unsafe")
    else:
        np.subtract(x, zero, out=out, dtype=np.float32, casting="unsafe")


def store(values: np.ndarray, zero: np.ndarray | None, out: np.ndarray, saturate: bool) -> None:
    """Round ``values``, add ``zero``, saturate, write to ``out``; ``values`` is lost. NaN becomes
    the lowest integer, as in ONNX Runtime and the reference."""
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
        # The minimum is NaN if one of the values is.
        lowest = np.minimum.reduce(values, axis=None, initial=0)  # far cheaper than fmax
        if lowest != lowest:
            np.fmax(values, low, values)
        if packed is not None:
            # Many times faster than the cast to the type itself.
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
    """A zero point in float; ``None`` for the many that are 0."""
    if zero is None or not np.count_nonzero(zero):
        return None
    return zero.astype(work)


def blocks(*arrays: np.ndarray) -> np.nditer:
    """Arrays, of which the last is written, as one-dimensional pieces of at most ``BLOCK``. They
    are broadcast against one another."""
    flags: list[Any] = [["readonly"] for _ in arrays[:-1]]
    return np.nditer(
        arrays,
        ["external_loop", "buffered", "zerosize_ok"],
        [*flags, ["writeonly"]],
        [array.dtype for array in arrays],
        buffersize=BLOCK,
    )


class _Scaling(NamedTuple):
    """``convert(x, scale, zero, values, out)`` of a block.

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
    # One scale for all: block by block, so that values stay in the cache.
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
        raise ShapeError(f"{dtype_name(dtype)} is no type to quantize to")
    if dtype is not None and wanted is not None and dtype != wanted:
        raise ShapeError(f"output_dtype is {dtype_name(wanted)}, but that of the zero point is not")
    return (TensorType(dtype, tensor(types, 0).shape),)


def _precision(scale: np.dtype, attrs: Attrs) -> np.dtype:
    """The type in which ``x / scale`` is rounded."""
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
        raise ShapeError(f"{dtype_name(x.dtype)} is no quantized type")
    _check_parameters(types, attrs)
    dtype = dtype_attribute(attrs, "output_dtype") or tensor(types, 1).dtype
    if dtype is not None and dtype_name(dtype) == POWERS:
        raise ShapeError("float8e8m0 scales need an output_dtype")
    return (TensorType(dtype, x.shape),)


@operator("DequantizeLinear", since=10, infer=_infer_dequantize, traits={"links"})
@operator("DequantizeLinear", domain=MICROSOFT, infer=_infer_dequantize, traits={"links"})
@_by_parameters
def dequantize_linear(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    """Computed in float32 and rounded once. That is the product in float16 or bfloat16 too: their
    products fit float32 exactly."""

    def dequantize(x: np.ndarray, scale: np.ndarray, *arguments: RunValue) -> None:
        zero, values, out = arguments
        target = out if values is None else values
        subtract_zero_point(x, zero, target)
        np.multiply(target, scale, out=out, dtype=np.float32, casting="unsafe")

    scratch = tensor(outputs, 0).dtype != FLOAT32
    return _scaled(inputs, consts, node.attrs, _Scaling(dequantize, FLOAT32, FLOAT32, scratch))


def _dynamic_parameters(x: np.ndarray) -> tuple[np.float32, np.uint8]:
    """Scale and zero point that spread uint8 over the range of ``x``, 0 included. A tensor of zeros
    has the scale 1, as in ONNX Runtime: the definition would divide by 0."""
    low = np.minimum.reduce(x, axis=None, initial=0)
    high = np.maximum.reduce(x, axis=None, initial=0)
    scale = np.float32((high - low) / np.float32(255))
    if scale == 0:
        return np.float32(1), np.uint8(0)
    zero = np.rint(-low / scale)
    return scale, np.uint8(min(max(zero, 0), 255)) if zero == zero else np.uint8(0)


def quantize_to_float(x: np.ndarray, out: np.ndarray) -> np.float32:
    """Quantize ``x`` to uint8 by its own range; ``out`` gets the codes less the zero point."""
    scale, zero = _dynamic_parameters(x)
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
        scale, zero = _dynamic_parameters(x)
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
