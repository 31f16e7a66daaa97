"""ZeroNaN: 0 where an element is not a number.

It is not in the table of operations. Passes create it for ``Where(IsNaN(x), 0, x)``, by which
exporters guard a Softmax against rows that are masked entirely.
"""

from __future__ import annotations

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Op, Types
from penstock.ops.common.shape_rules import same_type


def _compile(node: Node, types: Types) -> Kernel:
    def function(x: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(x), x.dtype.type(0), x)

    def into(x: np.ndarray, out: np.ndarray) -> None:
        if out is not x:
            np.copyto(out, x)
        np.copyto(out, 0, where=np.isnan(x))

    return Kernel(function, into, inplace=(0,))


ZERO_NAN = Op("ZeroNaN", "penstock", 1, 1, same_type, _compile, elementwise=True)
