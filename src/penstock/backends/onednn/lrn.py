"""Local response normalisation."""

from __future__ import annotations

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import channels_last


def lrn(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification for an odd number of channels. For an even one oneDNN uses one channel less
    than ONNX."""
    x, attrs = desc.input(0), desc.node.attrs
    if x is None or len(x.dims) != 4 or attrs["size"] % 2 == 0 or len(desc.post_ops):
        return None

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        lib = context.lib
        return context.primitive(
            lib.dnnl_lrn_forward_primitive_desc_create,
            [
                lib.dnnl_forward_inference,
                lib.dnnl_lrn_across_channels,
                context.source,
                context.target,
                attrs["size"],
                attrs.get("alpha", 1e-4),
                attrs.get("beta", 0.75),
                attrs.get("bias", 1.0),
            ],
            context.ends,
        )

    return PrimitiveSpec(desc, create_primitive, channels_last(4), (desc.inputs[0],))
