"""Concat: tensors joined along one axis."""

from __future__ import annotations

from typing import Any

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import DST, SOURCES
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext


def concat(desc: OpDesc) -> PrimitiveSpec | None:
    """None for constant inputs, which NumPy copies as fast."""
    rank = len(desc.output.dims)
    known = any(constant is not None for constant in desc.constants)
    if known or not rank or len(desc.post_ops) or -1 in desc.inputs:
        return None
    axis = desc.node.attrs.get("axis", 1) % rank  # only the first version has a default

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        def create(handle: Any, engine: Any, target: Any, attr: Any) -> int:
            read = [context.descriptor(tensor) for tensor in desc.inputs]
            sources = context.ffi.new("dnnl_memory_desc_t[]", read)
            create_desc = context.lib.dnnl_concat_primitive_desc_create
            return int(create_desc(handle, engine, target, len(read), axis, sources, attr))

        tensors = {SOURCES + i: tensor for i, tensor in enumerate(desc.inputs)}
        return context.primitive(create, [context.target], {**tensors, DST: desc.outputs[0]})

    return PrimitiveSpec(desc, create_primitive)
