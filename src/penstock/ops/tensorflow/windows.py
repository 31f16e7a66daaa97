"""Gradients of convolution and pooling, and depthwise convolution by filters of any shape.

The gradient of a convolution for its input takes the size of the input, which may be known only at
run time. All others have channels last, and process the k-th elements of all windows at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import Dim, RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Infer, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import is_half
from penstock.ops.common.shape_rules import ints, same_type, tensor
from penstock.ops.common.windows import Window, behind, windows
from penstock.ops.registry import ATTRS, standard
from penstock.ops.tensorflow.common import array_operator, lengths, operator


def backward_attrs(
    image: Sequence[int], window: Sequence[int], attrs: Attrs, gradient: Sequence[Dim] = ()
) -> dict[str, Any]:
    """The attributes of the ConvTranspose whose result has the spatial dims ``image``.

    ``attrs``: ``strides`` and ``dilations`` of the spatial axes, ``padding`` of the forward
    convolution, and ``pads`` if that is EXPLICIT. ``gradient``: the spatial dims of the gradient,
    which must match the output of the forward convolution where they are known.
    """
    forward = {
        "strides": attrs["strides"],
        "dilations": attrs["dilations"],
        "auto_pad": "SAME_UPPER" if attrs["padding"] == "SAME" else "NOTSET",
        "pads": attrs.get("pads"),
    }
    axes = windows(forward, window[: len(image)], image)
    if max(image) > 2**31:
        raise ShapeError(
            f"image dims {list(image)} are too large for a convolution with window {list(window)}"
        )
    for i, (axis, size) in enumerate(zip(axes, gradient, strict=False)):
        if isinstance(size, int) and size != axis.count:
            raise ShapeError(
                f"the gradient has {size} windows along spatial axis {i}, but an image of "
                f"{list(image)} has {axis.count} windows of {list(window)}"
            )
    return {
        "strides": list(attrs["strides"]),
        "dilations": list(attrs["dilations"]),
        "pads": [*(axis.begin for axis in axes), *(axis.end for axis in axes)],
        # Pixels after the last window, which the forward convolution does not read.
        "output_padding": [a.end - padding for a, padding in zip(axes, behind(axes), strict=True)],
    }


def _image(sizes: Sequence[Any], rank: int) -> list[Any]:
    if len(sizes) not in (rank - 2, rank):
        raise ShapeError(f"the image size {list(sizes)} must have {rank - 2} or {rank} entries")
    return list(sizes[2 - rank :])


def _infer_backward(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    given, weights = tensor(types, 0), tensor(types, 1)
    sizes = lengths(ints(types, consts, 2))
    rank = len(attrs["strides"]) + 2
    batch = given.shape[0] if given.shape else None
    channels = sizes[1] if sizes is not None and len(sizes) == rank else None
    if channels is None and weights.shape and len(weights.shape) == rank:
        channels = weights.shape[1] if sizes is not None else None
    image = _image(sizes, rank) if sizes is not None else [None] * (rank - 2)
    return (TensorType(given.dtype, (batch, channels, *image)),)


@operator("Conv2DBackpropInput", infer=_infer_backward)
@operator("Conv3DBackpropInputV2", infer=_infer_backward)
def conv_backward(node: Node, types: Types) -> Kernel:
    """Inputs: the gradient [N, O, h, w], the weights [O, I / groups, kh, kw], and the size of the
    image, [H, W] or [N, I, H, W], or the same in 3D; attributes as in ``backward_attrs``."""
    rank = len(node.attrs["strides"]) + 2
    op = standard("ConvTranspose")

    @lru_cache(maxsize=8)
    def kernel(image: tuple[int, ...], window: tuple[int, ...], groups: int) -> Kernel:
        backward = {**backward_attrs(image, window, node.attrs), "group": groups}
        inner = Node(op, [Value("x"), Value("w")], [Value("y")], backward, origin=node.origin)
        return op.compile(inner, [TensorType(), TensorType()])

    def function(x: np.ndarray, weights: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        if x.ndim != rank or weights.ndim != rank:
            raise ShapeError(
                f"the gradient {x.shape} and the weights {weights.shape} must have rank {rank}"
            )
        image = tuple(_image(sizes.tolist(), rank))
        channels = sizes.tolist()[1] if sizes.size == rank else weights.shape[1]
        groups = max(channels // max(weights.shape[1], 1), 1)
        y = kernel(image, weights.shape[2:], groups)(x, weights)
        wanted = tuple(sizes.tolist()) if sizes.size == rank else (*y.shape[:2], *image)
        if y.shape != wanted:
            raise ShapeError(
                f"the image shape {list(wanted)}, channels first, does not match "
                f"{list(y.shape)}, the shape that follows from the gradient {list(x.shape)} and "
                f"weights {list(weights.shape)}"
            )
        return y

    return Kernel(function)


def _infer_depthwise(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, weights = tensor(types, 0), rules.all_known(tensor(types, 1).shape)
    if weights is None or len(weights) != 4 or not x.shape or len(x.shape) != 4:
        return (TensorType(x.dtype, (x.shape[0] if x.shape else None, None, None, None)),)
    image = rules.all_known(x.shape[2:])
    counts = [None] * 2 if image is None else [w.count for w in windows(attrs, weights[:2], image)]
    return (TensorType(x.dtype, (x.shape[0], weights[2] * weights[3], *counts)),)


@operator("DepthwiseConv2dNative", infer=_infer_depthwise)
def depthwise_conv(node: Node, types: Types) -> Kernel:
    """The convolution of images [N, C, H, W] with a filter [h, w, C, M], in C groups."""
    op = standard("Conv")

    @lru_cache(maxsize=8)
    def kernel(groups: int) -> Kernel:
        attrs = {**node.attrs, "group": groups}
        inner = Node(op, [Value("x"), Value("w")], [Value("y")], attrs, origin=node.origin)
        return op.compile(inner, [TensorType(), TensorType()])

    def function(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        if x.ndim != 4 or weights.ndim != 4 or x.shape[1] != weights.shape[2]:
            raise ShapeError(f"images {x.shape}, channels first, and a filter {weights.shape}")
        height, width, channels, multiplier = weights.shape
        flat = weights.reshape(height, width, 1, channels * multiplier).transpose(3, 2, 0, 1)
        y: np.ndarray = kernel(channels)(x, flat)
        return y

    return Kernel(function)


# Gradients with channels last.


_Index: TypeAlias = tuple[RunValue, ...]


def _elements(axes: Sequence[Window]) -> Iterator[tuple[_Index, _Index, _Index]]:
    """For each window element, yield its position in the window, the index of the windows that
    contain it, and the index of these elements in images [N, ..., C].
    """
    whole = slice(None)
    for taps in with_checkpoints(list(product(*(axis.taps() for axis in axes)))):
        places, seen, elements = zip(*taps, strict=True)
        yield places, (whole, *seen), (whole, *elements)


def _axes(x: Sequence[int], kernel: Sequence[int], attrs: Attrs, dy: np.ndarray) -> list[Window]:
    """The windows over images of shape ``x``, checked against the gradient ``dy``."""
    if len(x) != len(kernel) + 2 or min(x, default=0) < 0:
        raise ShapeError(f"windows {list(kernel)} do not match images of shape {list(x)}")
    axes = list(windows(attrs, kernel, x[1:-1]))
    if dy.shape[:-1] != (x[0], *(axis.count for axis in axes)):
        raise ShapeError(f"a gradient of shape {dy.shape} does not match images of shape {list(x)}")
    return axes


def _wide(x: np.ndarray) -> np.ndarray:
    """Convert half precision to float32, the accumulator dtype."""
    return x.astype(np.float32) if is_half(x.dtype) else x


def _infer_sized(index: int, dtype: int) -> Infer:
    """``infer`` for one output whose shape is given by input ``index``."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        shape = lengths(ints(types, consts, index))
        return (TensorType(tensor(types, dtype).dtype, shape),)

    return infer


@array_operator("ConvBackpropFilter", infer=_infer_sized(1, 2), prepared=ATTRS)
def conv_filter_backward(
    x: np.ndarray, sizes: np.ndarray, dy: np.ndarray, *, depthwise: bool, attrs: Attrs
) -> np.ndarray:
    """Inputs: images [N, ..., I], the shape of the filter, and the gradient [N, ..., O]. The filter
    has shape [..., I / groups, O], or if ``depthwise`` [..., I, O / I]; the other attributes are
    those of Conv."""
    *kernel, depth, last = sizes.tolist()
    channels, filters = x.shape[-1], dy.shape[-1]
    groups = depth if depthwise else channels // max(depth, 1)
    wanted = (groups, groups * last) if depthwise else (groups * depth, last)
    if groups < 1 or (channels, filters) != wanted or filters % groups:
        raise ShapeError(
            f"a filter of shape {sizes.tolist()} does not match {channels} input and {filters} "
            "output channels"
        )
    axes = _axes(x.shape, kernel, attrs, dy)
    x, back = _wide(x), _wide(dy)
    result = np.zeros((*kernel, groups, channels // groups, filters // groups), x.dtype)
    for place, seen, elements in _elements(axes):
        rows = x[elements].reshape(-1, groups, channels // groups)
        result[place] = rows.transpose(1, 2, 0) @ back[seen].reshape(
            len(rows), groups, filters // groups
        ).transpose(1, 0, 2)
    if not depthwise:  # concatenate the channels of all groups
        result = np.moveaxis(result, -3, -2)
    return result.reshape(sizes.tolist()).astype(dy.dtype, copy=False)


@array_operator("MaxPoolGrad", infer=same_type, prepared=ATTRS)
def max_pool_backward(x: np.ndarray, y: np.ndarray, dy: np.ndarray, *, attrs: Attrs) -> np.ndarray:
    """Inputs: images, their maxima, and the gradient of the maxima, which flows to the first of
    equal elements; the attributes are those of MaxPool.
    """
    if y.shape != dy.shape:
        raise ShapeError(f"the gradient has shape {dy.shape}, but the maxima have {y.shape}")
    result = np.zeros(x.shape, _wide(dy[:0]).dtype)
    left = np.ones(y.shape, np.bool_)
    for _, seen, elements in _elements(_axes(x.shape, attrs["kernel_shape"], attrs, dy)):
        chosen = left[seen] & (x[elements] == y[seen])
        left[seen] ^= chosen
        # The k-th elements of different windows are distinct, so that += adds each of them.
        result[elements] += np.where(chosen, dy[seen], np.zeros((), dy.dtype))
    return result.astype(dy.dtype, copy=False)


@array_operator("AvgPoolGrad", infer=_infer_sized(0, 1), prepared=ATTRS)
def average_pool_backward(sizes: np.ndarray, dy: np.ndarray, *, attrs: Attrs) -> np.ndarray:
    """Inputs: the shape of the images, and the gradient of the averages, which exclude padding; the
    attributes are those of AveragePool."""
    axes = _axes(sizes.tolist(), attrs["kernel_shape"], attrs, dy)
    counts = [np.zeros(axis.count, np.float32) for axis in axes]
    for axis, count in zip(axes, counts, strict=True):
        for _, covered, _ in axis.taps():
            count[covered] += 1
    share = _wide(dy) / reduce(np.multiply.outer, counts)[..., np.newaxis].astype(dy.dtype)
    result = np.zeros(sizes.tolist(), share.dtype)
    for _, seen, elements in _elements(axes):
        result[elements] += share[seen]
    return result.astype(dy.dtype, copy=False)
