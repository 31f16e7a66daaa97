"""Local response normalisation."""

from __future__ import annotations

from penstock.backends.onednn.layouts import channels_last
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext


def lrn(work: OpDesc) -> PrimitiveSpec | None:
    """Over an odd number of channels: of an even one, oneDNN takes one less than ONNX."""
    x, attrs = work.input(0), work.node.attrs
    if x is None or len(x.dims) != 4 or attrs["size"] % 2 == 0 or len(work.posts):
        return None

    def make(maker: SpecContext) -> BoundPrimitive:
        lib = maker.lib
        return maker.primitive(
            lib.dnnl_lrn_forward_primitive_desc_create,
            [
                lib.dnnl_forward_inference,
                lib.dnnl_lrn_across_channels,
                maker.source,
                maker.target,
                attrs["size"],
                attrs.get("alpha", 1e-4),
                attrs.get("beta", 0.75),
                attrs.get("bias", 1.0),
            ],
            maker.ends,
        )

    return PrimitiveSpec(work, make, channels_last(4), (work.inputs[0],))
