"""Concat: tensors joined along one axis."""

from __future__ import annotations

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import DST, SOURCES
from penstock.backends.onednn.spec import BoundPrimitive, PrimitiveSpec, SpecContext


def concat(desc: OpDesc) -> PrimitiveSpec | None:
    """None for constant inputs, which NumPy copies as fast."""
    rank = len(desc.output.dims)
    has_constants = any(constant is not None for constant in desc.constants)
    if has_constants or not rank or desc.post_ops or -1 in desc.inputs:
        return None
    axis = desc.node.attrs.get("axis", 1) % rank  # only the first version has a default
    tensors = {SOURCES + i: tensor for i, tensor in enumerate(desc.inputs)}
    tensors[DST] = desc.outputs[0]

    def create(context: SpecContext) -> BoundPrimitive:
        sources = [context.descriptor(tensor) for tensor in desc.inputs]
        arguments = [context.target, len(sources), axis, sources]
        return context.primitive("concat", arguments, tensors)

    return PrimitiveSpec(desc, create)
