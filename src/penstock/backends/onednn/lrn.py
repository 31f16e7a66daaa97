"""Local response normalization."""

from __future__ import annotations

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import channels_last


def lrn(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification for an odd number of channels. For an even one oneDNN uses one channel less
    than ONNX."""
    x, attrs = desc.input(0), desc.node.attrs
    if x is None or len(x.dims) != 4 or attrs["size"] % 2 == 0 or desc.post_ops:
        return None
    scales = [attrs.get(*pair) for pair in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))]

    def create(context: SpecContext) -> BoundPrimitive:
        ends = context.source, context.target
        return context.primitive(
            "lrn_forward", ["lrn_across_channels", *ends, attrs["size"], *scales]
        )

    return PrimitiveSpec(desc, create, channels_last(4), (desc.inputs[0],))
