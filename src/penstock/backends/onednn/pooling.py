"""MaxPool, AveragePool and GlobalAveragePool in float32, over one to three spatial axes."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import channels_last
from penstock.ops.common.windows import Window, behind
from penstock.ops.onnx.pooling import pool_windows

# Elements of a window along one axis.
_MOST_TAPS = 2**16


def pooling(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a pooling without indices of maxima as output."""
    node, x = desc.node, desc.input(0)
    if x is None or len(desc.outputs) != 1 or not 3 <= len(x.dims) <= 5:
        return None
    name = node.op.name
    if name.startswith("Global"):
        axes: Sequence[Window] = [Window(size, 1, size) for size in x.dims[2:]]
    else:
        axes = pool_windows(node.attrs, x.dims)
    if max(axis.kernel for axis in axes) > _MOST_TAPS:
        return None  # the library would go through all of them to find how to compute one
    after = behind(axes)
    algorithm = "max" if "Max" in name else "avg_exclude_padding"
    if "Max" not in name and node.attrs.get("count_include_pad", 0):
        # oneDNN cannot leave out of the mean the elements that only ceil_mode has added.
        if any(n > axis.end for n, axis in zip(after, axes, strict=True)):
            return None
        algorithm = "avg_include_padding"

    def create(context: SpecContext) -> BoundPrimitive:
        rows = zip(*[(a.stride, a.kernel, a.dilation - 1, a.begin) for a in axes], strict=True)
        ends = context.source, context.target
        arguments = [f"pooling_{algorithm}", *ends, *map(list, rows), after]
        return context.primitive("pooling_forward", arguments)

    order = channels_last(len(desc.output.dims))
    return PrimitiveSpec(desc, create, order, (desc.inputs[0], *desc.whole()))
