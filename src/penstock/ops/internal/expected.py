"""Expected: asserts the dims of a value in each run.

It is not in the table of operations. Plans with dynamic dims have it after nodes whose result had
the same dims for all shapes that were tried, though shape inference cannot derive them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, returning
from penstock.ir.op import Attrs, Consts, Op, Types
from penstock.ops.common.shape_rules import tensor


class UnexpectedDimsError(ShapeError):
    """The dims of a value differ from those that a plan was compiled for."""


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    own = x.shape or (None,) * len(attrs["dims"])
    dims = [a if b < 0 else b for a, b in zip(own, attrs["dims"], strict=True)]
    return (TensorType(x.dtype, tuple(dims), x.data),)


def _compile(node: Node, types: Types) -> Kernel:
    dims = node.attrs["dims"]
    rank, places = len(dims), [(axis, dim) for axis, dim in enumerate(dims) if dim >= 0]

    def run(x: np.ndarray) -> np.ndarray:
        shape = x.shape
        if len(shape) != rank:
            raise UnexpectedDimsError(f"the value has rank {len(shape)} instead of {rank}")
        for axis, dim in places:
            if shape[axis] != dim:
                raise UnexpectedDimsError(
                    f"the value has dim {shape[axis]} instead of {dim} at axis {axis}"
                )
        return x

    return returning(run, view=True)


EXPECTED = Op("Expected", "penstock", 1, 1, _infer, _compile)
