"""SpaceToBatch, BatchToSpace, SpaceToDepth, DepthToSpace, padding and fused batch normalization."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import FLOAT32, ShapeError, TensorType, Type, is_static
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Infer, Types
from penstock.ops.common.shape_rules import tensor
from penstock.ops.onnx.arrange import block_dims, rearrange_blocks
from penstock.ops.onnx.quantized_conv import channels_back, channels_first
from penstock.ops.tensorflow.common import array_operator, operator, sized


def _blocks(block: np.ndarray, pairs: np.ndarray, rank: int) -> list[int]:
    """Check and return the sides of a block."""
    if block.ndim != 1 or pairs.shape != (block.size, 2) or block.size >= rank:
        raise ShapeError(
            f"block_shape {block.shape} and paddings or crops {pairs.shape} do not match rank "
            f"{rank}"
        )
    if (block < 1).any() or (pairs < 0).any():
        raise ShapeError(
            f"block_shape {block.tolist()} must be positive, paddings or crops {pairs.tolist()} "
            "not negative"
        )
    return [int(size) for size in block]


def _batched_dims(x: Sequence[int], block: np.ndarray, pads: np.ndarray) -> list[int]:
    dims = list(x)
    for axis, side in enumerate(_blocks(block, pads, len(dims)), 1):
        dims[0], dims[axis] = dims[0] * side, (dims[axis] + sum(pads[axis - 1].tolist())) // side
    return dims


def _kept_channels(whole: Infer) -> Infer:
    """``infer`` for a rearrangement of the first axes, whose dims ``whole`` infers from known ones:
    the dims of the others are known without these."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        (type_,) = whole(types, attrs, consts)
        x, sides = tensor(types, 0), tensor(types, 1).shape
        moved = sides[0] if sides else None
        if is_static(type_) or x.shape is None or not isinstance(moved, int):
            return (type_,)
        axes = min(1 + moved, len(x.shape))
        return (TensorType(x.dtype, (*[None] * axes, *x.shape[axes:])),)

    return infer


@array_operator("SpaceToBatchND", infer=_kept_channels(sized(_batched_dims, 1, 2)), strings=True)
def space_to_batch(x: np.ndarray, block: np.ndarray, pads: np.ndarray) -> np.ndarray:
    sides = _blocks(block, pads, x.ndim)
    n = len(sides)
    x = np.pad(x, [(0, 0), *map(tuple, pads.tolist()), *[(0, 0)] * (x.ndim - 1 - n)])
    if any(dim % side for dim, side in zip(x.shape[1:], sides, strict=False)):
        raise ShapeError(f"the padded shape {x.shape} must be divisible by block_shape {sides}")
    inner = [part for d, s in zip(x.shape[1:], sides, strict=False) for part in (d // s, s)]
    split = x.reshape(x.shape[0], *inner, *x.shape[n + 1 :])
    # In the new batch, the position in the block is outermost, then the image.
    order = [*range(2, 2 * n + 1, 2), 0, *range(1, 2 * n, 2), *range(2 * n + 1, split.ndim)]
    dims = x.shape[0] * int(np.prod(sides)), *inner[::2], *x.shape[n + 1 :]
    return split.transpose(order).reshape(dims)


def _unbatched_dims(x: Sequence[int], block: np.ndarray, crops: np.ndarray) -> list[int]:
    dims = list(x)
    for axis, side in enumerate(_blocks(block, crops, len(dims)), 1):
        dims[0], dims[axis] = dims[0] // side, dims[axis] * side - sum(crops[axis - 1].tolist())
    if min(dims) < 0:
        raise ShapeError(f"crops {crops.tolist()} exceed the dims of shape {tuple(x)}")
    return dims


@array_operator("BatchToSpaceND", infer=_kept_channels(sized(_unbatched_dims, 1, 2)), strings=True)
def batch_to_space(x: np.ndarray, block: np.ndarray, crops: np.ndarray) -> np.ndarray:
    sides = _blocks(block, crops, x.ndim)
    n, size = len(sides), int(np.prod(sides))
    _unbatched_dims(x.shape, block, crops)
    if x.shape[0] % size:
        raise ShapeError(
            f"the batch of {x.shape[0]} must be divisible by the product of block_shape {sides}"
        )
    split = x.reshape(*sides, x.shape[0] // size, *x.shape[1:])
    order = [n, *[axis for i in range(n) for axis in (n + 1 + i, i)]]
    moved = split.transpose([*order, *range(2 * n + 1, split.ndim)])
    whole = [dim * side for dim, side in zip(x.shape[1:], sides, strict=False)]
    joined = moved.reshape(x.shape[0] // size, *whole, *x.shape[n + 1 :])
    cut = [slice(a, d - b) for (a, b), d in zip(crops.tolist(), whole, strict=True)]
    # A view would keep the cropped elements in memory.
    return joined[(slice(None), *cut)].copy()


def _size(attrs: Attrs) -> int:
    size = attrs.get("block_size")
    if type(size) is not int or size < 1 or attrs.get("data_format") not in ("NHWC", "NCHW"):
        raise ShapeError(
            f"block_size {size!r} must be a positive integer, and data_format "
            f"{attrs.get('data_format')!r} NHWC or NCHW"
        )
    return size


def _infer_blocks(to_space: bool) -> Infer:
    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        x, size, last = tensor(types, 0), _size(attrs), attrs["data_format"] == "NHWC"
        dims = block_dims(channels_first(x.shape, last), size, to_space)
        return (TensorType(x.dtype, channels_back(dims, last)),)

    return infer


@operator("SpaceToDepth", infer=_infer_blocks(False), moves=True, strings=True)
@operator("DepthToSpace", infer=_infer_blocks(True), moves=True, strings=True)
def rearrange_images(node: Node, types: Types) -> Kernel:
    """ONNX's operations of the same names, for images with channels last or first."""
    size, to_space = _size(node.attrs), node.op.name == "DepthToSpace"
    if node.attrs["data_format"] == "NCHW":
        return Kernel(lambda x: rearrange_blocks(x, b=size, to_space=to_space))

    def run(x: np.ndarray) -> np.ndarray:
        dims = block_dims(channels_first(x.shape, True), size, to_space)
        out = np.empty(channels_back(dims, True), x.dtype)
        target = np.moveaxis(out, -1, 1)
        rearrange_blocks(np.moveaxis(x, -1, 1), target, b=size, to_space=to_space)
        return out

    return Kernel(run)


def _padded_dims(x: Sequence[int], pads: np.ndarray) -> list[int]:
    if pads.shape != (len(x), 2) or (pads < 0).any():
        raise ShapeError(f"paddings {pads.tolist()} must have a pair of at least 0 per axis of {x}")
    return [dim + sum(pair) for dim, pair in zip(x, pads.tolist(), strict=True)]


@array_operator("MirrorPad", infer=sized(_padded_dims, 1), strings=True)
def mirror_pad(x: np.ndarray, pads: np.ndarray, *, mode: str = "SYMMETRIC") -> np.ndarray:
    reflects = mode == "REFLECT"
    # REFLECT does not repeat the border.
    most = np.array(x.shape)[:, np.newaxis] - reflects
    if pads.shape != (x.ndim, 2) or (pads < 0).any() or (pads > most).any():
        raise ShapeError(f"paddings {pads.tolist()} are out of range for mirrored shape {x.shape}")
    return np.pad(x, pads.tolist(), mode="reflect" if reflects else "symmetric")


# FusedBatchNorm


def _infer_batch_norm(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, channels = tensor(types, 0), tensor(types, 1).shape
    vector = TensorType(FLOAT32, channels)
    return (x.without_data(), vector, vector, vector, vector, TensorType(FLOAT32, ()))


@operator("FusedBatchNorm", infer=_infer_batch_norm)
def fused_batch_norm(node: Node, types: Types) -> Kernel:
    """In training, normalize by the mean and variance of the batch, which are outputs too."""
    epsilon, factor = np.float32(node.attrs["epsilon"]), np.float32(node.attrs["factor"])
    first = node.attrs["data_format"].startswith("NC")
    count = len(node.outputs)

    def function(
        x: np.ndarray, scale: np.ndarray, offset: np.ndarray, mean: np.ndarray, var: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        moved = np.moveaxis(x, 1, -1) if first else x
        axes = tuple(range(moved.ndim - 1))
        # As in TensorFlow, statistics of float16 images are float32.
        wide = moved.astype(np.float32)
        own_mean, own_var = wide.mean(axes), wide.var(axes)
        y = (wide - own_mean) * (scale / np.sqrt(own_var + epsilon)) + offset
        y = y.astype(x.dtype)
        # The output variance is the sample variance (n - 1).
        size = wide.size // max(wide.shape[-1], 1)
        # TensorFlow divides by 1 for a batch of one value.
        given_var = own_var * np.float32(size / max(size - 1, 1))
        next_mean, next_var = own_mean, given_var
        # With exponential_avg_factor 1, the input mean and variance may be empty.
        if factor != 1:
            next_mean = mean * (1 - factor) + own_mean * factor
            next_var = var * (1 - factor) + given_var * factor
        y = np.ascontiguousarray(np.moveaxis(y, -1, 1)) if first else y
        results = (y, next_mean, next_var, own_mean, own_var, np.zeros((), np.float32))
        return results[:count]

    return Kernel(function)


def _infer_batch_norm_grad(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, vector = tensor(types, 1), TensorType(FLOAT32, tensor(types, 2).shape)
    scalar = TensorType(FLOAT32, ())
    return x.without_data(), vector, vector, scalar, scalar


@operator("FusedBatchNormGrad", infer=_infer_batch_norm_grad)
def fused_batch_norm_grad(node: Node, types: Types) -> Kernel:
    """Inputs: dy, x, scale, and the mean and variance of the forward pass. If ``training``, these
    are the batch's own, and the gradient flows through them too."""
    epsilon, training = np.float32(node.attrs["epsilon"]), node.attrs["training"]
    first, count = node.attrs["data_format"].startswith("NC"), len(node.outputs)

    def function(
        dy: np.ndarray, x: np.ndarray, scale: np.ndarray, mean: np.ndarray, var: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        if dy.shape != x.shape:
            raise ShapeError(f"the gradient has shape {dy.shape}, but x has {x.shape}")
        wide_dy, wide_x = (
            (np.moveaxis(a, 1, -1) if first else a).astype(np.float32) for a in (dy, x)
        )
        axes = tuple(range(x.ndim - 1))
        deviation = np.sqrt(var + epsilon)
        normal = (wide_x - mean) / deviation
        d_offset, d_scale = wide_dy.sum(axes), (wide_dy * normal).sum(axes)
        if training:
            size = np.float32(max(wide_x.size // max(wide_x.shape[-1], 1), 1))
            wide_dy = wide_dy - (d_offset + normal * d_scale) / size
        dx = (wide_dy * (scale / deviation)).astype(x.dtype)
        dx = np.ascontiguousarray(np.moveaxis(dx, -1, 1)) if first else dx
        zero = np.zeros((), np.float32)
        return (dx, d_scale, d_offset, zero, zero)[:count]

    return Kernel(function)
