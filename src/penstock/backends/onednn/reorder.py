"""Copies in another layout or dtype."""

from __future__ import annotations

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.spec import BoundPrimitive, PrimitiveSpec, SpecContext


def reorder(desc: OpDesc) -> PrimitiveSpec | None:
    """A copy that a plan makes between kernels that want different layouts."""
    if not desc.output.dims:
        return None

    def create(context: SpecContext) -> BoundPrimitive:
        engine = context.library.engine
        return context.primitive("reorder", [context.source, engine, context.target, engine])

    return PrimitiveSpec(desc, create, tuple(desc.node.attrs["order"]))
