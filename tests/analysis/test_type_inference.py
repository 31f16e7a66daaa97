"""Inference of types goes through nested graphs once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.analysis.type_inference import infer_types
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops import find


def value(name: str, *dims: int) -> Value:
    return Value(name, TensorType(np.dtype(np.float32), dims or (2,)))


def test_inference_in_nested_loops_does_not_grow_with_every_level():
    #  each loop's carried value widens once, and the loop inside reads it: with every level
    #  beginning anew in each round of the one around it, 2**depth rounds
    x = value("x", 1)
    rounds = 0

    def infer(types, attrs, consts):
        nonlocal rounds
        rounds += 1
        return concat.infer(types, attrs, consts)

    concat = find("Concat")
    assert concat is not None
    op = replace(concat, infer=infer)

    def loop(depth: int, outer: Value) -> Node:
        number, proceed, inside, wide = (Value(f"{name}{depth}") for name in "ncvw")
        nodes = [loop(depth - 1, inside)] if depth else []
        read = [inside, outer, *[each.outputs[0] for each in nodes]]
        nodes.append(Node(op, read, [wide], {"axis": 0}))
        body = Graph([number, proceed, inside], [proceed, wide], nodes, f"body{depth}")
        one = Value("one", const=np.ones(1, np.float32))
        trips = Value("trips", const=np.array(1))
        return Node(find("Loop"), [trips, None, one], [Value(f"r{depth}")], {"body": body})

    depth = 30
    outermost = loop(depth, x)
    infer_types(Graph([x], outermost.outputs, [outermost], "nest"))
    assert rounds < 10 * depth**2
    assert outermost.outputs[0].type == TensorType(np.dtype(np.float32), (None,))
