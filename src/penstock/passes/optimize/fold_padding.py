"""Folding of Pad nodes into the Conv, MaxPool and AveragePool nodes that read them.

Exporters write a Pad where a framework pads asymmetrically, or with another value than ONNX.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import lt

from penstock.ir.graph import Graph, Node
from penstock.passes.context import Pass, PassContext


class FoldPadding(Pass):
    """Fold Pad nodes into the convolutions and poolings that read them."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        changed = False
        for node in graph.walk():
            windowed = node.op.full_name in ("Conv", "MaxPool", "AveragePool")
            if not windowed or node.inputs[0] is None:
                continue
            pad = node.inputs[0].producer
            borders = None if pad is None or pad.op.full_name != "Pad" else _borders(pad)
            if pad is not None and borders and _can_pad(node, pad, borders):
                own = _own_pads(node, len(borders) // 2)
                # ONNX does not allow pads together with another auto_pad, such as VALID.
                node.attrs |= {
                    "auto_pad": "NOTSET",
                    "pads": [a + b for a, b in zip(own, borders, strict=True)],
                }
                # The Pad's elements were part of the input, so the mean counted them.
                if node.op.name == "AveragePool":
                    node.attrs["count_include_pad"] = 1
                node.inputs[0] = pad.inputs[0]
                changed = True
        return changed


def _borders(pad: Node) -> list[int] | None:
    """Return the pads before each spatial axis, then those after each; None if a Pad pads other
    axes, crops, or has unknown pads."""
    if pad.control_inputs:
        return None
    x, pads, axes = pad.inputs[0], pad.const(1), pad.const(3)
    if pad.attrs.get("mode", "constant") != "constant" or pads is None:
        return None
    if x is None or x.rank is None or (pad.input(3) is not None and axes is None):
        return None
    padded = range(x.rank) if axes is None else [int(axis) for axis in axes.reshape(-1)]
    amounts = [int(amount) for amount in pads.reshape(-1)]
    if len(amounts) != 2 * len(padded) or not all(-x.rank <= axis < x.rank for axis in padded):
        return None  # invalid, which is an error only if the node runs
    before, behind = [0] * x.rank, [0] * x.rank
    for i, axis in enumerate(padded):
        before[axis], behind[axis] = amounts[i], amounts[len(padded) + i]
    # Convolutions and poolings only have non-negative pads of spatial axes.
    if any(before[:2] + behind[:2]) or min(before + behind, default=0) < 0:
        return None
    return before[2:] + behind[2:]


def _can_pad(node: Node, pad: Node, borders: Sequence[int]) -> bool:
    """Whether ``node`` with larger pads gives the same result as after this Pad."""
    if node.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return False  # its pads depend on the size of its input
    x, own = pad.inputs[0], _own_pads(node, len(borders) // 2)
    if x is None or x.dtype is None or x.dtype.kind != "f" or len(own) != len(borders):
        return False
    value = _value(pad)
    if node.op.name == "Conv":
        return value == 0
    if node.op.name == "AveragePool":
        # Its own padding must be counted as well; with ceil_mode, windows may exceed the padding.
        counted = not any(own) or bool(node.attrs.get("count_include_pad", 0))
        return value == 0 and counted and not node.attrs.get("ceil_mode", 0)
    # No input element may be less than the padding value.
    positive = x.producer is not None and "nonnegative" in x.producer.op.traits
    least = value == -inf or (value == 0 and positive)
    return least and len(node.outputs) == 1 and _has_no_empty_window(node, own, borders)


def _own_pads(node: Node, axes: int) -> list[int]:
    if node.attrs.get("auto_pad", "NOTSET") == "VALID" or not node.attrs.get("pads"):
        return [0] * (2 * axes)
    return list(node.attrs["pads"])


def _value(pad: Node) -> float | None:
    """Return the padding value; None if unknown."""
    const = pad.const(2)
    if const is None:
        return 0.0 if pad.input(2) is None else None
    return float(const.reshape(-1)[0])


def _has_no_empty_window(node: Node, own: Sequence[int], borders: Sequence[int]) -> bool:
    """Whether each window contains an input element: the maximum of padding alone is -inf."""
    kernel = [*node.attrs.get("kernel_shape", ())] * 2
    plain = all(n == 1 for n in node.attrs.get("dilations") or ())
    total = [a + b for a, b in zip(own, borders, strict=True)]
    narrow = len(kernel) == len(total) and all(map(lt, total, kernel))
    return plain and narrow and not node.attrs.get("ceil_mode", 0)
