"""Copies in another layout or dtype."""

from __future__ import annotations

from typing import Any

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext


def reorder(desc: OpDesc) -> PrimitiveSpec | None:
    """A copy that a plan makes between kernels that want different layouts."""
    return copy_spec(desc, tuple(desc.node.attrs["order"])) if desc.output.dims else None


def copy_spec(desc: OpDesc, dims_order: tuple[int, ...] = ()) -> PrimitiveSpec:
    """A copy of the first input in the dtype and layout of the output."""

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        def create(handle: Any, engine: Any, source: Any, target: Any, attr: Any) -> int:
            create_desc = context.lib.dnnl_reorder_primitive_desc_create
            return int(create_desc(handle, source, engine, target, engine, attr))

        return context.primitive(create, [context.source, context.target], context.ends)

    return PrimitiveSpec(desc, create_primitive, dims_order)
