"""MatMul in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.backends.onednn.kernel import Made, Recipe, Tensors, with_weights
from penstock.backends.onednn.library import Library
from penstock.backends.onednn.primitive import DST, SRC, WEIGHTS, Descriptor, Primitive
from penstock.ir import Node
from penstock.types import FLOAT32


def matmul(library: Library, node: Node, inputs: Tensors, outputs: Tensors) -> Recipe | None:
    """MatMul of two tensors of the same rank, 2 or more; dims of 1 are repeated."""
    a, b = inputs
    (y,) = outputs
    if a is None or b is None or y is None or not 2 <= len(a.dims) == len(b.dims) <= 6:
        return None
    lib, ffi = library.lib, library.ffi
    value = node.inputs[1]
    constant = None if value is None else value.const
    constants = {} if constant is None else {WEIGHTS: (constant, constant.shape)}
    tensors = {SRC: 0, DST: 2} if constants else {SRC: 0, WEIGHTS: 1, DST: 2}

    def make(descriptors: Sequence[Descriptor | None]) -> Made:
        source, weights, target = descriptors
        assert source is not None and weights is not None and target is not None
        if constants:
            weights = Descriptor(library, b.dims, FLOAT32)

        def create(desc: Any, engine: Any, attr: Any) -> Any:
            return lib.dnnl_matmul_primitive_desc_create(
                desc, engine, source.handle, weights.handle, ffi.NULL, target.handle, attr
            )

        return with_weights(library, Primitive(library, create), tensors, constants)

    return Recipe(library, inputs, outputs, make)
