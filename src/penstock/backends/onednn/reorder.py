"""Copies with dims in another order in memory, or of another dtype."""

from __future__ import annotations

from typing import Any

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext


def reorder(work: OpDesc) -> PrimitiveSpec | None:
    """What plans put between kernels that want different layouts."""
    return copying(work, tuple(work.node.attrs["order"])) if work.output.dims else None


def copying(work: OpDesc, layout: tuple[int, ...] = ()) -> PrimitiveSpec:
    """The first input as it is, but for its dtype and where it lies."""

    def make(maker: SpecContext) -> BoundPrimitive:
        def create(desc: Any, engine: Any, source: Any, target: Any, attr: Any) -> int:
            reordering = maker.lib.dnnl_reorder_primitive_desc_create
            return int(reordering(desc, source, engine, target, engine, attr))

        return maker.primitive(create, [maker.source, maker.target], maker.ends)

    return PrimitiveSpec(work, make, layout)
