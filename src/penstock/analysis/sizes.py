"""Check that tensors fit into memory, as far as their sizes are known before a run."""

from __future__ import annotations

import math
from typing import Any

from penstock.core.errors import LimitExceeded
from penstock.core.limits import Limits
from penstock.core.types import TensorType
from penstock.ir.describe import describe_node
from penstock.ir.graph import Graph, Value


def check_sizes(graph: Graph, limits: Limits) -> None:
    """Raise ``LimitExceeded`` for a tensor that a node reads or produces and that is above
    ``limits``. A constant with strides of 0 counts in full, since kernels iterate over all of it or
    copy it. Nodes of nested graphs count too: a plan reserves memory even if they never run."""
    most_bytes = 2**63 - 1 if limits.max_bytes is None else min(limits.max_bytes, 2**63 - 1)
    for node in graph.walk():
        produced = len(node.outputs)
        for i, value in enumerate((*node.outputs, *node.inputs)):
            if value is None or (i >= produced and not value.is_constant):
                continue
            # Most tensors are far below the limits, which needs no call of ``_problem``.
            type_: Any = value.type
            fits = type_.__class__ is TensorType and 0 < type_.elements <= limits.max_elements
            if fits and type_.nbytes <= most_bytes and len(type_.dims) <= limits.max_dims:
                continue
            if (problem := _problem(value, limits)) is not None:
                raise LimitExceeded(f"{describe_node(node)}: {problem}")
    for value in graph.outputs:
        if (problem := _problem(value, limits)) is not None:
            raise LimitExceeded(problem)


def _problem(value: Value, limits: Limits) -> str | None:
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.shape is None:
        return None
    if len(type_.shape) > limits.max_dims:
        dims = f"{len(type_.shape)} dims, more than Limits.max_dims = {limits.max_dims}"
        return f"{value.name!r}, {type_}, has {dims}"
    if not type_.static:
        return None
    assert type_.dtype is not None
    # A dim of 0 counts as 1: strides are products of the others, and kernels have tables by dim.
    extent = math.prod([dim or 1 for dim in type_.dims])
    nbytes = extent * type_.dtype.itemsize
    if extent > limits.max_elements or nbytes >= 2**63:
        return f"the dims of {value.name!r}, {type_}, multiply to more than memory can hold"
    excess = limits.beyond("max_bytes", nbytes)
    return f"{value.name!r}, {type_}, takes {nbytes} bytes, more {excess}" if excess else None
