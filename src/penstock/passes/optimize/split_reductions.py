"""Splitting of reductions over non-adjacent axes, as kernels are fast over adjacent axes only.

::

    ReduceSum(x; axes 0 and 2)    becomes    ReduceSum(ReduceSum(x; axis 2); axis 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from penstock.core.types import ShapeError, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.common.shape_rules import normalize_axes
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import replace_nodes

# The reduction over the inner axes, then that over the others.
_OPERATIONS = {
    **{x: (x, x) for x in ("L1", "L2", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum")},
    "LogSum": ("Sum", "LogSum"),
    "SumSquare": ("SumSquare", "Sum"),
}
_NAMES = [f"Reduce{name}" for name in _OPERATIONS]
# Reductions with rounded integer results, or that convert integers to floats.
_ROUNDED = frozenset({"L2", "LogSum", "LogSumExp", "Mean"})
_DTYPES = frozenset(map(np.dtype, ("float32", "float64", "int32", "int64", "int8", "uint8")))


class SplitReductions(Pass):
    """Reduce over the innermost axes first, then over the others."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        return replace_nodes(graph, dict.fromkeys(_NAMES, _split))


def _split(node: Node) -> Sequence[Node] | None:
    name = node.op.name.removeprefix("Reduce")
    x, spelled, (y,) = node.inputs[0], node.const(1), node.outputs
    if x is None or spelled is None or y is None or not isinstance(x.type, TensorType):
        return None
    if not x.type.static or x.type.dtype not in _DTYPES or not x.type.elements:
        return None
    if name in _ROUNDED and x.type.dtype.kind != "f":
        return None
    dims = x.type.dims
    try:
        axes = sorted(normalize_axes(spelled.reshape(-1).tolist(), len(dims)))
    except ShapeError:  # raised at run time, if the node runs
        return None
    # Axes of length 1 in between do not prevent adjacency in memory.
    large = [axis for axis in axes if dims[axis] > 1]
    starts = [b for a, b in pairwise(large) if any(dim > 1 for dim in dims[a + 1 : b])]
    if not starts:
        return None
    inner = [axis for axis in large if axis >= starts[-1]]
    left = tuple([1 if axis in inner else dim for axis, dim in enumerate(dims)])
    between = Value(f"{y.name}/inner{starts[-1]}", TensorType(x.type.dtype, left))
    inner_axes = Value(f"{y.name}/axes{starts[-1]}", const=np.array(inner))
    first, last = [standard(f"Reduce{part}") for part in _OPERATIONS[name]]
    return (
        # keepdims preserves the numbering of the remaining axes.
        node.derived([x, inner_axes], [between], {**node.attrs, "keepdims": 1}, op=first),
        node.derived([between, *node.inputs[1:]], [y], op=last),
    )
