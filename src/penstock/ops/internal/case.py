"""One of several branches by a number: If inside of If, halving what is left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Op
from penstock.ops.registry import find
from penstock.types import BOOL, TensorType


def case_of(
    index: Value, branches: Sequence[Graph], bypass: Sequence[Value], name: str = "case"
) -> list[Node]:
    """Nodes of which the last gives what ``branches[index]`` gives; ``bypass`` for any other index.

    ``index`` is one integer; each branch is a graph without inputs, with as many outputs as there
    are values in ``bypass``. It is the "case..of" of NNC (libnnc), whose branches are passed by
    where the number is negative.
    """
    if not branches:
        raise ValueError("there is no branch to take")
    if any(len(branch.outputs) != len(bypass) for branch in branches):
        raise ValueError("a branch gives as many values as there are to go by it with")
    past = Graph([], bypass, [], f"{name}_past")
    inside = Graph([], *_chosen(index, branches, 0, len(branches), name), f"{name}_taken")
    low, low_value = _node("GreaterOrEqual", index, 0, f"{name}_low")
    high, high_value = _node("Less", index, len(branches), f"{name}_high")
    both = Value(f"{name}_is", TensorType(BOOL))
    is_one = Node(_op("And"), [low_value, high_value], [both], name=f"{name}_is")
    return [low, high, is_one, _if(both, inside, past, name)]


def _chosen(
    index: Value, branches: Sequence[Graph], first: int, end: int, name: str
) -> tuple[list[Value], list[Node]]:
    """The outputs, and the nodes, of the branches from ``first`` to ``end``."""
    if end - first == 1:
        return list(branches[first].outputs), list(branches[first].nodes)
    middle = (first + end) // 2
    here = f"{name}_{first}_{end}"
    less, is_less = _node("Less", index, middle, f"{here}_less")
    halves = [
        Graph([], *_chosen(index, branches, a, b, name), f"{name}_{a}_{b}")
        for a, b in ((first, middle), (middle, end))
    ]
    node = _if(is_less, halves[0], halves[1], here)
    return [value for value in node.outputs if value is not None], [less, node]


def _node(op: str, index: Value, bound: int, name: str) -> tuple[Node, Value]:
    kind = index.type
    dtype = kind.dtype if isinstance(kind, TensorType) and kind.dtype is not None else np.int64
    made = Value(name, TensorType(BOOL))
    known = Value(f"{name}_bound", const=np.array(bound, dtype))
    return Node(_op(op), [index, known], [made], name=name), made


def _if(condition: Value, one: Graph, other: Graph, name: str) -> Node:
    made = [Value(f"{name}_{i}") for i in range(len(one.outputs))]
    attrs = {"then_branch": one, "else_branch": other}
    return Node(_op("If"), [condition], made, attrs, name=name)


def _op(name: str) -> Op:
    op = find(name)
    assert op is not None
    return op
