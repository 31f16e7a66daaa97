"""Tensors one behind the other, along one axis."""

from __future__ import annotations

from typing import Any

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import DST, SOURCES
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext


def concat(work: OpDesc) -> PrimitiveSpec | None:
    """Of what is computed: constants NumPy copies as well."""
    rank = len(work.output.dims)
    known = any(constant is not None for constant in work.constants)
    if known or not rank or len(work.posts) or -1 in work.inputs:
        return None
    axis = work.node.attrs.get("axis", 1) % rank  # only the first version has a default

    def make(maker: SpecContext) -> BoundPrimitive:
        def create(desc: Any, engine: Any, target: Any, attr: Any) -> int:
            read = [maker.descriptor(tensor) for tensor in work.inputs]
            sources = maker.ffi.new("dnnl_memory_desc_t[]", read)
            joining = maker.lib.dnnl_concat_primitive_desc_create
            return int(joining(desc, engine, target, len(read), axis, sources, attr))

        tensors = {SOURCES + i: tensor for i, tensor in enumerate(work.inputs)}
        return maker.primitive(create, [maker.target], {**tensors, DST: work.outputs[0]})

    return PrimitiveSpec(work, make)
