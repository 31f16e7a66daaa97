"""Block-quantized weights of 2, 4 or 8 bits: MatMulNBits and GatherBlockQuantized.

In packed weights, the element with the lowest index is in the lowest bits of a byte. A table maps
each byte to all of its elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.core.types import RunValue, ShapeError, TensorType, Type, constant_type, dtype_name
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.constant_cache import Shared, shared
from penstock.ops.common.dtypes import UINT8
from penstock.ops.common.products import product_in_parts, product_work
from penstock.ops.common.specialize import Routine, Tensors, by_shape, specialized, static_type
from penstock.ops.registry import MICROSOFT, operator

FIXED_BYTES = 32 * 2**20
"""Constant weights of at most this size in float32 are dequantized at compile time. Larger ones are
dequantized in panels in each run, to save memory."""
PANEL = 2**18
"""elements of a panel, which stays in the second-level cache until it is multiplied"""


@cache
def _unpacked(bits: int) -> np.ndarray:
    """A table of the float32 elements of each byte, as one item of 4, 8 or 16 bytes per byte."""
    codes = np.arange(256)
    shifts = range(0, 8, bits)
    columns = [codes >> shift & (1 << bits) - 1 for shift in shifts]
    elements = np.stack(columns, axis=-1).astype(np.float32)
    item = {1: np.float32, 2: np.complex64, 4: np.complex128}[len(columns)]
    return elements.view(item).reshape(256)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The elements along the last axis of ``packed``, uint8, as float32."""
    # Complex dtypes only serve as items of the right size.
    items = np.take(_unpacked(bits), packed)
    return items.view(np.float32).reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))


def _bits(attrs: Attrs) -> int:
    bits: int = attrs.get("bits", 4)
    if bits not in (2, 4, 8):
        raise ShapeError(f"bits is {bits}: only 2, 4 and 8 are supported")
    return bits


# MatMulNBits


class PackedWeights:
    """The weights [N, K] of a MatMulNBits node."""

    def __init__(self, attrs: Attrs) -> None:
        self.bits, self.block = _bits(attrs), attrs["block_size"]
        self.n, self.k = attrs["N"], attrs["K"]
        if min(self.block, self.n, self.k) < 1:
            raise ShapeError("N, K and block_size must be positive")
        if attrs.get("weight_prepacked", 0):
            raise ShapeError("weight_prepacked weights, which are for GPUs, are not supported")
        self.blocks = -(-self.k // self.block)
        self.blob = self.block * self.bits // 8

    def rows(
        self,
        low: int,
        high: int,
        b: np.ndarray,
        scales: np.ndarray,
        zeros: np.ndarray | None,
        g_idx: np.ndarray | None,
    ) -> np.ndarray:
        """Rows ``low`` to ``high`` as float32."""
        weights = unpack(b.reshape(self.n, -1)[low:high], self.bits)
        scale = scales.reshape(self.n, -1)[low:high].astype(np.float32, copy=False)
        if g_idx is None:
            weights = weights.reshape(high - low, self.blocks, self.block)
            index: Any = (..., None)
        else:  # g_idx names the group, and so the scale, of each element
            weights = weights.reshape(high - low, -1)[:, : self.k]
            index = (slice(None), g_idx[: self.k])
        # The default zero point is the middle of the range of codes.
        zero: Any = np.float32(1 << (self.bits - 1))
        if zeros is not None:
            zero = zeros.reshape(self.n, -1)[low:high]
            # Float zero points are not packed.
            if zeros.dtype == UINT8:
                zero = unpack(zero, self.bits)
            zero = zero[:, : self.blocks].astype(np.float32, copy=False)[index]
        np.subtract(weights, zero, weights)
        np.multiply(weights, scale[index], weights)
        return weights.reshape(high - low, -1)[:, : self.k]

    def check(self, types: Types) -> None:
        """Check that the sizes of the inputs match the attributes."""
        count = self.n * self.blocks
        zeros = rules.tensor(types, 3).dtype
        packed = self.n * -(-self.blocks * self.bits // 8)
        of_zeros = {packed, count} if zeros is None else {packed if zeros == UINT8 else count}
        for i, sizes in enumerate(({count * self.blob}, {count}, of_zeros), start=1):
            shape = rules.tensor(types, i).shape if rules.given(types, i) else None
            elements = None if shape is None else rules.dim_product(shape)
            if isinstance(elements, int) and elements not in sizes:
                raise ShapeError(
                    f"input {i} of MatMulNBits has shape {shape}, but N={self.n}, K={self.k}, "
                    f"bits={self.bits} and block_size={self.block} require {max(sizes)} elements"
                )


def _infer_matmul_nbits(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    packed = PackedWeights(attrs)
    packed.check(types)
    a = rules.tensor(types, 0)
    if a.shape is None:
        return (TensorType(a.dtype),)
    if not a.shape or (isinstance(a.shape[-1], int) and a.shape[-1] != packed.k):
        raise ShapeError(f"the last dim of A {a.shape} must be K={packed.k}")
    rules.check_shape("bias", rules.tensor(types, 5).shape, (packed.n,))
    return (TensorType(a.dtype, (*a.shape[:-1], packed.n)),)


@operator("MatMulNBits", domain=MICROSOFT, infer=_infer_matmul_nbits, work=product_work)
def matmul_nbits(node: Node, types: Types) -> Kernel:
    packed = PackedWeights(node.attrs)
    weights: list[Any] = rules.constants(node, 5)[1:5]
    fixed: Shared[np.ndarray] | None = None
    if rules.all_constant(node, range(1, 5)) and packed.n * packed.k * 4 <= FIXED_BYTES:
        packed.check([None if c is None else constant_type(c) for c in (None, *weights)])
        _check_groups(packed, weights[3])
        name = "MatMulNBits", packed.n, packed.k, packed.bits, packed.block
        fixed = shared(
            name, lambda: np.ascontiguousarray(packed.rows(0, packed.n, *weights)), *weights
        )
    step = max(1, PANEL // packed.k)

    def into(a: np.ndarray, *arguments: RunValue) -> None:
        b, scales, zeros, g_idx, bias, out = arguments
        left, result = a.reshape(-1, packed.k), out.reshape(-1, packed.n)
        if fixed is not None:
            product_in_parts(left, fixed.value.T, result)
        else:
            _check_groups(packed, g_idx)
            for low in range(0, packed.n, step):
                high = min(low + step, packed.n)
                panel = packed.rows(low, high, b, scales, zeros, g_idx)
                product_in_parts(left, panel.T, result[:, low:high])
        if bias is not None:
            np.add(result, bias, result)

    routine = Routine(into, prepared=() if fixed is None else (1, 2, 3, 4))
    # float16 and bfloat16 are computed in float32. A strided output cannot be reshaped.
    return specialized(node, types, lambda *_: routine, arity=(6, 1), contiguous=True)


def _check_groups(packed: PackedWeights, g_idx: np.ndarray | None) -> None:
    if g_idx is None:
        return
    if g_idx.size < packed.k:
        raise ShapeError(f"g_idx has {g_idx.size} elements, but needs {packed.k}")
    if g_idx.min() < 0 or g_idx.max() >= packed.blocks:
        raise ShapeError(f"g_idx must be in [0, {packed.blocks}), the number of blocks")


# GatherBlockQuantized


def _infer_gather(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    if attrs.get("block_size", 128) < 0:
        raise ShapeError(f"block_size is {attrs['block_size']}: it must not be negative")
    from penstock.ops.onnx.quantization import SOURCES  # not needed by MatMulNBits

    data, indices, scales = (rules.tensor(types, i) for i in range(3))
    if data.dtype is not None and data.dtype.name not in SOURCES:
        raise ShapeError(f"{dtype_name(data.dtype)} is not a quantized type")
    if data.shape is None or indices.shape is None or data.dtype is None:
        return (TensorType(scales.dtype),)
    per_byte = _per_byte(data.dtype, attrs)
    axis = rules.normalize_axis(attrs.get("gather_axis", 0), len(data.shape))
    dims = (*data.shape[:-1], rules.dim_product((data.shape[-1], per_byte)))
    return (TensorType(scales.dtype, (*dims[:axis], *indices.shape, *dims[axis + 1 :])),)


def _per_byte(dtype: np.dtype, attrs: Attrs) -> int:
    """The number of elements in a byte of ``data``."""
    return 8 // _bits(attrs) if dtype == UINT8 else 1


class _GatheredBlocks:
    """The scale and zero point of each gathered element."""

    def __init__(
        self,
        data: tuple[int, ...],
        scales: tuple[int, ...],
        index_rank: int,
        attrs: Attrs,
        per_byte: int,
    ) -> None:
        rank = len(data)
        axis = self.axis = rules.normalize_axis(attrs.get("gather_axis", 0), rank)
        along = self.along = rules.normalize_axis(attrs.get("quantize_axis", 1), rank)
        if per_byte > 1 and axis == rank - 1:
            raise ShapeError("gather_axis must not be the last, along which elements are packed")
        dims = [*data[:-1], data[-1] * per_byte]
        size = self.size = max(attrs.get("block_size", 128) or dims[along], 1)
        blocks = -(-dims[along] // size)
        for i, (dim, have) in enumerate(zip(dims, scales, strict=False)):
            if have not in ((blocks if i == along else dim), 1):
                raise ShapeError(f"scales of shape {scales} do not match data of shape {dims}")
        if len(scales) != rank:
            raise ShapeError(f"scales must have rank {rank}, the rank of data")
        # The quantization axis in the result.
        self.moved = along if along < axis else along + index_rank - 1
        self.cut = (slice(None),) * self.moved + (slice(dims[along]),)

    def per_element(self, parameter: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Scales or zero points of the gathered elements, which broadcast to the result."""
        if self.axis == self.along:
            where = where // self.size
        if parameter.shape[self.axis] == 1:
            where = np.zeros_like(where)
        gathered = np.take(parameter, where, self.axis)
        if self.axis == self.along or gathered.shape[self.moved] == 1:
            return gathered
        return np.repeat(gathered, self.size, self.moved)[self.cut]


@operator("GatherBlockQuantized", domain=MICROSOFT, infer=_infer_gather)
@by_shape(arity=(4, 1), widen=False)
def gather_blocks(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    from penstock.ops.onnx.quantization import subtract_zero_point

    attrs, bits = node.attrs, node.attrs.get("bits", 4)
    dims, dtype = static_type(inputs, 0)
    index_type, scale_type = rules.tensor(inputs, 1), rules.tensor(inputs, 2)
    per_byte = _per_byte(dtype, attrs)
    blocks = _GatheredBlocks(dims, scale_type.dims, len(index_type.dims), attrs, per_byte)
    axis, count = blocks.axis, dims[blocks.axis]
    if not count:
        raise ShapeError(f"gather_axis {axis} of shape {dims} must not have dim 0")

    def into(data: np.ndarray, *arguments: RunValue) -> None:
        indices, scales, zeros, out = arguments
        outside = (indices < -count) | (indices >= count)
        where = np.where(outside, 0, np.where(indices < 0, indices + count, indices))
        picked_data = np.take(data, where, axis)
        if per_byte == 1:
            real = np.empty(picked_data.shape, np.float32)
            subtract_zero_point(picked_data, None, real)
        else:
            real = unpack(picked_data, bits)
        if zeros is not None:
            codes = unpack(zeros, bits)[..., : scale_type.dims[-1]] if per_byte > 1 else zeros
            real -= blocks.per_element(codes, where).astype(np.float32, copy=False)
        elif data.dtype == UINT8:
            real -= np.float32(1 << (bits - 1))
        real *= blocks.per_element(scales, where).astype(np.float32, copy=False)
        if outside.any():
            # Indices out of range yield 0 rather than an error, unlike in Gather.
            real[(slice(None),) * axis + (outside,)] = 0
        np.copyto(out, real, casting="unsafe")

    return Routine(into)
