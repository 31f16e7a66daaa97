"""Copies in another layout or dtype."""

from __future__ import annotations

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.spec import BoundPrimitive, PrimitiveSpec, SpecContext


def reorder(desc: OpDesc) -> PrimitiveSpec | None:
    """A copy that a plan makes between kernels that want different layouts."""
    return copy_spec(desc, tuple(desc.node.attrs["order"])) if desc.output.dims else None


def copy_spec(desc: OpDesc, dims_order: tuple[int, ...] = ()) -> PrimitiveSpec:
    """A copy of the first input in the dtype and layout of the output."""

    def create(context: SpecContext) -> BoundPrimitive:
        engine = context.library.engine
        return context.primitive("reorder", [context.source, engine, context.target, engine])

    return PrimitiveSpec(desc, create, dims_order)
