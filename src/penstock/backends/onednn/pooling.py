"""MaxPool in float32 and of 8-bit integers, over one to three spatial axes."""

from __future__ import annotations

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import channels_last
from penstock.ops.common.windows import behind
from penstock.ops.onnx.pooling import pool_windows

# Elements of a window along one axis.
_MOST_TAPS = 2**16


def pooling(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a pooling without indices of maxima as output."""
    node, x = desc.node, desc.input(0)
    if x is None or len(desc.outputs) != 1 or not 3 <= len(x.dims) <= 5:
        return None
    axes = pool_windows(node.attrs, x.dims)
    if max(axis.kernel for axis in axes) > _MOST_TAPS:
        return None  # the library would go through all of them to find how to compute one

    def create(context: SpecContext) -> BoundPrimitive:
        rows = zip(*[(a.stride, a.kernel, a.dilation - 1, a.begin) for a in axes], strict=True)
        ends = context.source, context.target
        arguments = ["pooling_max", *ends, *map(list, rows), behind(axes)]
        return context.primitive("pooling_forward", arguments)

    order = channels_last(len(desc.output.dims))
    return PrimitiveSpec(desc, create, order, (desc.inputs[0], *desc.whole()))
