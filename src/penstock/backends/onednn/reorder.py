"""Copies with dims in another order in memory, or of another dtype."""

from __future__ import annotations

from typing import Any

from penstock.backends.onednn.op_desc import Work
from penstock.backends.onednn.primitive_spec import Made, Maker, Recipe


def reorder(work: Work) -> Recipe | None:
    """What plans put between kernels that want different layouts."""
    return copying(work, tuple(work.node.attrs["order"])) if work.output.dims else None


def copying(work: Work, layout: tuple[int, ...] = ()) -> Recipe:
    """The first input as it is, but for its dtype and where it lies."""

    def make(maker: Maker) -> Made:
        def create(desc: Any, engine: Any, source: Any, target: Any, attr: Any) -> int:
            reordering = maker.lib.dnnl_reorder_primitive_desc_create
            return int(reordering(desc, source, engine, target, engine, attr))

        return maker.primitive(create, [maker.source, maker.target], maker.ends)

    return Recipe(work, make, layout)
