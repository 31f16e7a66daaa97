"""The gradient of a convolution for its image, whose size only the run knows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.core.types import ShapeError, TensorType, Type
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import ints, tensor
from penstock.ops.registry import standard
from penstock.ops.tensorflow.common import lengths, operator


def backward_attrs(image: Sequence[int], window: Sequence[int], attrs: Attrs) -> dict[str, Any]:
    """Attributes of the ConvTranspose whose result is an image of that size.

    ``attrs``: ``strides`` and ``dilations`` of the dims that the window moves along, ``padding`` of
    the convolution forward, and ``pads`` if that is EXPLICIT.
    """
    begins, ends, more = [], [], []
    given = attrs.get("pads") or []
    for i, size in enumerate(image):
        stride = attrs["strides"][i]
        reach = (window[i] - 1) * attrs["dilations"][i] + 1
        if attrs["padding"] == "SAME":
            count = -(-size // stride)
            total = max((count - 1) * stride + reach - size, 0)
            front = total // 2
        else:
            front = given[i] if given else 0
            total = front + given[i + len(image)] if given else 0
            count = (size + total - reach) // stride + 1
        begins.append(front)
        ends.append(total - front)
        # Pixels behind the last window, which the convolution forward has not read.
        more.append(size - ((count - 1) * stride + reach - total))
    if min(more) < 0 or max(image) > 2**31:
        raise ShapeError(f"no convolution with a window of {list(window)} takes {list(image)}")
    return {
        "strides": list(attrs["strides"]),
        "dilations": list(attrs["dilations"]),
        "pads": [*begins, *ends],
        "output_padding": more,
    }


def _image(sizes: Sequence[Any], rank: int) -> list[Any]:
    if len(sizes) not in (rank - 2, rank):
        raise ShapeError(f"{list(sizes)} is no size of an image")
    return list(sizes[2 - rank :])


def _infer_backward(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    given, weights = tensor(types, 0), tensor(types, 1)
    sizes = lengths(ints(types, consts, 2))
    rank = len(attrs["strides"]) + 2
    batch = given.shape[0] if given.shape else None
    channels = weights.shape[1] if weights.shape and len(weights.shape) == rank else None
    image = _image(sizes, rank) if sizes is not None else [None] * (rank - 2)
    return (TensorType(given.dtype, (batch, channels, *image)),)


@operator("Conv2DBackpropInput", infer=_infer_backward)
@operator("Conv3DBackpropInputV2", infer=_infer_backward)
def conv_backward(node: Node, types: Types) -> Kernel:
    """The gradient [N, O, h, w], weights [O, I, kh, kw], and the size [..., H, W] of the image,
    channels first, or the same with depth; attributes as in ``backward_attrs``."""
    rank = len(node.attrs["strides"]) + 2
    op = standard("ConvTranspose")

    @lru_cache(maxsize=8)
    def kernel(image: tuple[int, ...], window: tuple[int, ...]) -> Kernel:
        backward = backward_attrs(image, window, node.attrs)
        inner = Node(op, [Value("x"), Value("w")], [Value("y")], backward, origin=node.origin)
        return op.compile(inner, [TensorType(), TensorType()])

    def function(x: np.ndarray, weights: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        if x.ndim != rank or weights.ndim != rank:
            raise ShapeError(f"images of {x.shape} with weights of {weights.shape}")
        image = tuple(_image(sizes.tolist(), rank))
        return kernel(image, weights.shape[2:])(x, weights)

    return Kernel(function)
