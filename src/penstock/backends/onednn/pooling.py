"""MaxPool, AveragePool and GlobalAveragePool in float32, over one to three spatial axes."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import channels_last
from penstock.ops.common.windows import Window, behind
from penstock.ops.onnx.pooling import pool_windows


def pooling(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a pooling without indices of maxima as output."""
    node, x = desc.node, desc.input(0)
    if x is None or len(desc.outputs) != 1 or not 3 <= len(x.dims) <= 5:
        return None
    y = desc.output
    name = node.op.name
    if name.startswith("Global"):
        axes: Sequence[Window] = [Window(size, 1, size) for size in x.dims[2:]]
    else:
        axes = pool_windows(node.attrs, x.dims)
    after = behind(axes)
    algorithm = "max"
    if "Max" not in name:
        algorithm = "avg_exclude_padding"
        if node.attrs.get("count_include_pad", 0):
            # oneDNN cannot leave out of the mean the elements that only ceil_mode has added.
            if any(n > axis.end for n, axis in zip(after, axes, strict=True)):
                return None
            algorithm = "avg_include_padding"

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        lib = context.lib
        return context.primitive(
            lib.dnnl_pooling_forward_primitive_desc_create,
            [
                lib.dnnl_forward_inference,
                getattr(lib, f"dnnl_pooling_{algorithm}"),
                context.source,
                context.target,
                context.dims([a.stride for a in axes]),
                context.dims([a.kernel for a in axes]),
                context.dims([a.dilation - 1 for a in axes]),
                context.dims([a.begin for a in axes]),
                context.dims(after),
            ],
            context.ends,
        )

    same = tuple([i for i in desc.post_ops.tensors if desc.tensors[i] == y])
    return PrimitiveSpec(
        desc, create_primitive, channels_last(len(y.dims)), (desc.inputs[0], *same)
    )
