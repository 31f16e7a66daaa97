"""Concat."""

from __future__ import annotations

import math
from typing import Any

from penstock.backends.onednn.kernel import Made, Maker, Recipe
from penstock.backends.onednn.primitive import DST
from penstock.backends.onednn.work import Work
from penstock.ops.infer import normalize_axis

_SRC = 1024  # DNNL_ARG_MULTIPLE_SRC

# Elements of the result up to which one call is faster than a NumPy call for each tensor.
_MOST = 8192


def concat(work: Work) -> Recipe | None:
    """Of small tensors: large ones NumPy copies as fast or faster."""
    y = work.output
    if not y.dims or math.prod(y.dims) > _MOST or len(work.posts) or len(work.inputs) < 2:
        return None
    if any(i < 0 or work.tensors[i] is None for i in work.inputs):
        return None
    axis = normalize_axis(work.node.attrs.get("axis", 1), len(y.dims))

    def make(maker: Maker) -> Made:
        sources = [maker.descriptor(i) for i in work.inputs]
        target = maker.target
        lib = maker.lib

        def create(desc: Any, engine: Any, attr: Any) -> int:
            every = maker.ffi.new("dnnl_memory_desc_t[]", sources)
            count = len(sources)
            return int(
                lib.dnnl_concat_primitive_desc_create(
                    desc, engine, target, count, axis, every, attr
                )
            )

        tensors = {_SRC + i: tensor for i, tensor in enumerate(work.inputs)}
        return maker.primitive(create, [], tensors | {DST: work.outputs[0]})

    return Recipe(work, make)
