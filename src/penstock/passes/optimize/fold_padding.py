"""Folding of Pad nodes into the Conv, MaxPool and AveragePool nodes that read them.

Exporters write a Pad where a framework pads unevenly, or with another value than ONNX does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import lt

from penstock.ir.graph import Graph, Node, Value
from penstock.passes.context import Pass, PassContext, Property
from penstock.types import TensorType


class FoldPadding(Pass):
    """Fold Pad nodes into the convolutions and poolings that read them. A Pad without other readers
    is dead afterwards."""

    name = "fold_padding"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        changed = False
        for node in graph.walk():
            if node.op.name not in _WINDOWED or node.op.domain or node.inputs[0] is None:
                continue
            pad = node.inputs[0].producer
            borders = None if pad is None else _borders(pad)
            if pad is not None and borders and _can_pad(node, pad, borders):
                own = _own_pads(node, len(borders) // 2)
                node.attrs |= {
                    "auto_pad": "NOTSET",
                    "pads": [a + b for a, b in zip(own, borders, strict=True)],
                }
                if node.op.name == "AveragePool":
                    node.attrs["count_include_pad"] = 1
                node.inputs[0] = pad.inputs[0]
                changed = True
        return changed


_WINDOWED = {"Conv", "MaxPool", "AveragePool"}

# Operations whose results are never below 0, unless they are NaN.
_NEVER_NEGATIVE = {"Abs", "Exp", "HardSigmoid", "Relu", "Sigmoid"}


def _borders(pad: Node) -> list[int] | None:
    """The elements that a Pad adds before each spatial axis, then those after each; None if it pads
    other axes or crops, or if the amounts are unknown."""
    if pad.op.name != "Pad" or pad.op.domain or pad.control_inputs:
        return None
    x, amounts, _, axes = [*pad.inputs, None, None][:4]
    if pad.attrs.get("mode", "constant") != "constant" or amounts is None or amounts.const is None:
        return None
    if x is None or not isinstance(x.type, TensorType) or x.type.rank is None:
        return None
    if axes is not None and axes.const is None:
        return None
    rank = x.type.rank
    named = range(rank) if axes is None else _ints(axes)
    before, behind = [0] * rank, [0] * rank
    pads = _ints(amounts)
    if len(pads) != 2 * len(named) or not all(-rank <= axis < rank for axis in named):
        return None  # invalid, which is an error only if the node runs
    for i, axis in enumerate(named):
        before[axis], behind[axis] = pads[i], pads[len(named) + i]
    if any(before[:2] + behind[:2]) or min(before + behind, default=0) < 0:
        return None
    return before[2:] + behind[2:]


def _ints(value: Value) -> Sequence[int]:
    assert value.const is not None
    return [int(n) for n in value.const.reshape(-1)]


def _can_pad(node: Node, pad: Node, borders: Sequence[int]) -> bool:
    """Whether ``node`` with wider pads of its own gives the same result as after this Pad."""
    if node.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return False  # its pads depend on the size of its input
    type_ = pad.inputs[0].type if pad.inputs[0] is not None else None
    if not isinstance(type_, TensorType) or type_.dtype is None or type_.dtype.kind != "f":
        return False
    value, own = _value(pad), _own_pads(node, len(borders) // 2)
    if len(own) != len(borders):
        return False
    if node.op.name == "Conv":
        return value == 0
    if node.op.name == "AveragePool":
        # Its own padding must count as well; with ceil_mode, windows may reach beyond any padding.
        counted = not any(own) or bool(node.attrs.get("count_include_pad", 0))
        return value == 0 and counted and not node.attrs.get("ceil_mode", 0)
    return (
        _is_least(value, pad)
        and len(node.outputs) == 1
        and _has_no_empty_window(node, own, borders)
    )


def _own_pads(node: Node, axes: int) -> list[int]:
    if node.attrs.get("auto_pad", "NOTSET") == "VALID" or not node.attrs.get("pads"):
        return [0] * (2 * axes)
    return list(node.attrs["pads"])


def _value(pad: Node) -> float | None:
    """The value of the padding; None if it is unknown."""
    value = pad.inputs[2] if len(pad.inputs) > 2 else None
    if value is None:
        return 0.0
    return None if value.const is None else float(value.const.reshape(-1)[0])


def _is_least(value: float | None, pad: Node) -> bool:
    """Whether no element of the input can be less than the value of the padding."""
    source = pad.inputs[0].producer if pad.inputs[0] is not None else None
    positive = source is not None and source.op.name in _NEVER_NEGATIVE and not source.op.domain
    return value == -inf or (value == 0 and positive)


def _has_no_empty_window(node: Node, own: Sequence[int], borders: Sequence[int]) -> bool:
    """Whether every window has an element of the input. The maximum of padding alone would be -inf
    instead of the value of the Pad."""
    kernel = [*node.attrs.get("kernel_shape", ())] * 2
    plain = all(n == 1 for n in node.attrs.get("dilations") or ())
    total = [a + b for a, b in zip(own, borders, strict=True)]
    narrow = len(kernel) == len(total) and all(map(lt, total, kernel))
    return plain and narrow and not node.attrs.get("ceil_mode", 0)
