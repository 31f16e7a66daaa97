"""Whether tensors fit into memory, as far as their sizes are known before a run."""

from __future__ import annotations

import math

from penstock.errors import LimitExceeded
from penstock.ir.describe import describe_node
from penstock.ir.graph import Graph, Value
from penstock.limits import Limits
from penstock.types import TensorType


def check_sizes(graph: Graph, limits: Limits) -> None:
    """Raise ``LimitExceeded`` for a tensor above ``limits`` that a node reads or makes.

    A constant seen through strides of 0 counts in full: kernels walk through all of it, and some
    copy it. Nodes of nested graphs count too: a plan sets memory aside for them, run or not.
    """
    for node in graph.walk():
        for value in node.outputs:
            if value is not None and (found := _problem(value, limits)) is not None:
                raise LimitExceeded(f"{describe_node(node)}: {found}")
        for value in node.inputs:
            if value is None or value.const is None:
                continue
            if (found := _problem(value, limits)) is not None:
                raise LimitExceeded(f"{describe_node(node)}: {found}")
    for value in graph.outputs:
        if (found := _problem(value, limits)) is not None:
            raise LimitExceeded(found)


def _problem(value: Value, limits: Limits) -> str | None:
    kind = value.type
    if not isinstance(kind, TensorType) or not kind.static:
        return None
    assert kind.dtype is not None
    # A dim of 0 does not help: strides are products of the others.
    extent = math.prod([dim or 1 for dim in kind.dims])
    if extent > limits.max_elements or extent * kind.dtype.itemsize >= 2**63:
        return f"the dims of {value.name!r}, {kind}, multiply to more than memory can hold"
    most = limits.max_bytes
    if most is not None and extent * kind.dtype.itemsize > most and kind.nbytes > most:
        return (
            f"{value.name!r}, {kind}, takes {kind.nbytes} bytes, more than Limits.max_bytes = "
            f"{most}; raise the limit if you trust the model and have the memory"
        )
    return None
