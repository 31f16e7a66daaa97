"""Bounds of results, which kernels apply as they store them: Relu, Clip, and Max and Min of a
constant behind a product or a convolution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.backends.native.kernel import Site
from penstock.ir.graph import Node, Value


def bounds_of(
    site: Site, place: Mapping[Value | None, int], nodes: Sequence[Node]
) -> tuple[float, float] | None:
    """Return the bounds of the result, as floats; None if they are not constant."""
    low, high = -math.inf, math.inf
    for node in nodes:
        least, most = -math.inf, math.inf
        if node.op.name == "Relu":
            least = 0.0
        elif node.op.name in ("Max", "Min"):
            bound = scalar_operand(site, place, node)
            if bound is None or math.isnan(bound):
                return None
            least, most = (bound, most) if node.op.name == "Max" else (least, bound)
        elif node.op.name == "Clip":
            ends = [
                None if v is None else site.constant(place[v])
                for v in [*node.inputs, None, None][1:3]
            ]
            for value, end in zip([*node.inputs, None, None][1:3], ends, strict=True):
                if value is not None and (end is None or end.size != 1 or np.isnan(end).any()):
                    return None
            least, most = [
                default if end is None else float(end.item())
                for end, default in zip(ends, (least, most), strict=True)
            ]
        else:
            return None
        low, high = min(max(low, least), most), min(max(high, least), most)
    return low, high


def scalar_operand(site: Site, place: Mapping[Value | None, int], node: Node) -> float | None:
    """Return the scalar constant operand of a binary operation; None if it has none."""
    ends = [site.constant(place[v]) for v in node.inputs if v in place]
    if len(node.inputs) != 2 or len(ends) != 1 or ends[0] is None or ends[0].size != 1:
        return None
    return float(ends[0].item())
