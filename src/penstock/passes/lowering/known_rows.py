"""Values whose padding rows are known: a mask has replaced them by one number.

Such a value may be read together with its padding rows, which are restored from the number::

    y * mask                           0
    Where(mask, y, -1e9)               -1e9
    Exp(Where(mask, y, -1e9))          0
    ReduceL2(y * mask, features)       0

The number is followed through elementwise operations, views, and reductions over features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from penstock.core.records import NamedTuple
from penstock.ir.graph import Node, Value
from penstock.ops.internal.packed import FACTOR, REPLACED
from penstock.passes.lowering.row_rules import Axes


class KnownRows(NamedTuple):
    """The ``number`` that a value holds in its padding rows: all rows but those that ``guards``,
    values with their numbers in the ``groups`` of LiveRows, make live."""

    guards: tuple[tuple[Value, int], ...]
    number: np.ndarray


def known_result(
    node: Node,
    axes: Mapping[Value, Axes],
    known: Mapping[Value, KnownRows],
    is_mask: Callable[[Value], bool],
    *,
    exact: bool,
) -> KnownRows | None:
    """Return what is known of the padding rows of a packed node's result, or None.

    Args:
        node: The node.
        axes: The axes of packed values.
        known: The known padding rows of its inputs.
        is_mask: Whether an input is a mask of rows that is computed in the run.
        exact: Whether the number must have the same bits as the node's kernel computes.
    """
    name = node.op.full_name
    inputs = [value for value in node.inputs if value is not None]
    own = [known[value] for value in inputs if value in known]
    masks = [value for value in inputs if is_mask(value)]
    if name == "Mul" and (found := _product(node, masks, own)):
        return found
    if name == "Where" and masks == inputs[:1] and (found := _choice(*inputs)):
        return found
    # Products of 0 with weights are 0, apart from a bias.
    linear = name in ("MatMul", "Conv", "Gemm") and node.input(2) is None
    linear = linear and inputs[0] in known and not own[0].number
    if not own or node.op.view or linear or name in ("Expand", "Split"):
        return own[0] if own else None
    computes = node.op.elementwise or node.op.name.startswith("Reduce")
    return _computed(node, axes, known, exact) if computes else None


def _product(node: Node, masks: list[Value], own: list[KnownRows]) -> KnownRows | None:
    """Return the padding rows of a product if one of its factors is 0 there."""
    y = node.outputs[0]
    zeros = [((masks[0], FACTOR),)] if masks else [x.guards for x in own if not x.number]
    if y is None or not zeros or not all(np.isfinite(x.number) for x in own):
        return None
    return KnownRows(zeros[0], np.zeros((), y.dtype))


def _choice(mask: Value, yes: Value, no: Value) -> KnownRows | None:
    """Return the padding rows of a Where that selects a number instead of rows by a mask."""
    for value, group in ((yes, REPLACED), (no, FACTOR)):
        const = value.const
        if const is not None and const.size == 1 and const.dtype.kind in "biuf":
            return KnownRows(((mask, group),), const.reshape(()))
    return None


def _computed(
    node: Node, axes: Mapping[Value, Axes], known: Mapping[Value, KnownRows], exact: bool
) -> KnownRows | None:
    """Return the padding rows of a result, if those of all operands are known."""
    from penstock.analysis.interpreter import evaluate
    from penstock.ops.exactness import is_exact

    if exact and not is_exact(node, [None if v is None else v.type for v in node.outputs]):
        return None
    reduces = not node.op.elementwise
    numbers: list[np.ndarray | None] = []
    guards: tuple[tuple[Value, int], ...] = ()
    for value in node.inputs:
        const = None if value is None else value.const
        if value is not None and value in known:
            guards += known[value].guards
            sizes = [prod(n for name, n in axis if not name) for axis in axes[value]]
            number = known[value].number
            numbers.append(np.full(sizes, number) if reduces else number)
        elif value is None or (const is not None and (const.size == 1 or reduces)):
            numbers.append(const if const is None or reduces else const.reshape(()))
        else:
            return None
    result = np.asarray(evaluate(node, numbers)[0])
    return KnownRows(guards, result.reshape(-1)[0]) if result.size else None
