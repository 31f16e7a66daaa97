"""Nodes that NumPy computes to the same bits on all processors, for ``reproducible=True``.

IEEE 754 rounds sums, products, quotients and roots of two numbers in one way. Of functions such as
``exp``, and of sums of many numbers, NumPy has several forms, and takes one by the processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.core.errors import Unsupported
from penstock.core.types import TensorType, Type
from penstock.ir.graph import Node

_REASON = "NumPy computes it, in a form that depends on the processor (reproducible=True)"

_ROUNDED = frozenset(
    {
        *(np.add, np.subtract, np.multiply, np.divide, np.negative, np.absolute, np.reciprocal),
        *(np.sqrt, np.floor, np.ceil, np.sign, np.trunc, np.rint, np.where),
    }
)


def check_exact(nodes: Iterable[Node]) -> None:
    """Raise ``Unsupported`` for those of the nodes that NumPy computes by the processor."""
    faults = [
        (node.op.full_name, _REASON, node.label)
        for node in nodes
        if not is_exact(node, [None if value is None else value.type for value in node.outputs])
    ]
    if faults:
        raise Unsupported.of(faults)


def is_exact(node: Node, types: Sequence[Type | None]) -> bool:
    """Whether NumPy gives the same results for a node everywhere, which have these ``types``."""
    op = node.op
    if op.moves or op.view or ("exact" in op.traits and not _compares(node)):
        return True
    given = [None if v is None else v.type for v in node.inputs]
    # Of integers, NumPy computes floats by sums and quotients.
    if not any(map(_has_floats, given)) or not any(map(_has_floats, types)):
        return True
    try:
        kernel = op.compile(node, given)
    except Exception:  # a run of the node raises it
        return False
    return kernel.function in _ROUNDED


def _compares(node: Node) -> bool:
    """Whether a scatter takes maxima or minima, of 0 and -0 either, with updates of floats."""
    if node.attrs.get("reduction", "none") not in ("max", "min"):
        return False
    updates = node.input(2)
    return updates is not None and _has_floats(updates.type)


def _has_floats(type_: Type | None) -> bool:
    """Whether an input or output may have elements of a float dtype."""
    if type_ is None or (isinstance(type_, TensorType) and 0 in (type_.shape or ())):
        return False
    if not isinstance(type_, TensorType) or type_.dtype is None:
        return True
    return type_.dtype.kind in "fcV"
