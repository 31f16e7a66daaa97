"""Softmax and LogSoftmax along the axis that is innermost in memory."""

from __future__ import annotations

import math

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import channels_last
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.onnx.softmax import SINGLE_AXIS


def softmax(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification along the last axis, or along the channels of images, which are then
    innermost in memory. For other axes oneDNN has reference code only."""
    x = desc.input(0)
    if x is None or not x.dims or any(post.tensor >= 0 for post in desc.post_ops):
        return None
    node, dims = desc.node, x.dims
    order = tuple(range(len(dims)))
    if node.op.since < SINGLE_AXIS:
        first = node.attrs.get("axis", 1)
        if first == len(dims):
            return None
        first = normalize_axis(first, len(dims))
        width = math.prod(dims[first:])
    else:
        axis = normalize_axis(node.attrs.get("axis", -1), len(dims))
        width = dims[axis]
        if math.prod(dims[axis + 1 :]) > 1:
            if axis != 1 or len(dims) < 4:
                return None
            order = channels_last(len(dims))
    shape = math.prod(dims) // width, width
    algorithm = "accurate" if node.op.name == "Softmax" else "log"

    def create(context: SpecContext) -> BoundPrimitive:
        ends = [context.descriptor(i, shape, order) for i in (desc.inputs[0], desc.outputs[0])]
        return context.primitive("softmax_forward", [f"softmax_{algorithm}", *ends, 1])

    whole = (desc.inputs[0],)
    return PrimitiveSpec(desc, create, order, whole, inplace=whole)
