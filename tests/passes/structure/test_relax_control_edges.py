"""Control edges to nodes without side effects go; the order of side effects stays."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.analysis.verify import verify
from penstock.core.types import BOOL, FLOAT32, TensorType
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ops.registry import TENSORFLOW, find, standard
from penstock.passes.structure.relax_control_edges import relax_control_edges
from tests.support.tf_graphs import Builder, Type

EXECUTORS = ("linear", "dataflow", "parallel", "streams", "frames", "interpret")

VECTOR = TensorType(FLOAT32, (2,))


def node(op: str, name: str, *inputs: Value, after: tuple[Node, ...] = (), **attrs: object) -> Node:
    outputs = [Value(name, VECTOR)]
    return Node(standard(op), inputs, outputs, attrs, name=name, control_inputs=after)


def value(of: Node) -> Value:
    output = of.outputs[0]
    assert output is not None
    return output


def test_control_edge_to_a_pure_node_becomes_one_to_the_effect_behind_it() -> None:
    x = Value("x", VECTOR)
    effect = node("RandomNormalLike", "effect", x)
    pure = node("Neg", "pure", value(effect))
    last = node("Abs", "last", x, after=(pure,))
    assert relax_control_edges(Graph([x], [value(last)], [effect, pure, last]))
    assert last.control_inputs == [effect]


def test_control_edge_to_a_node_that_does_nothing_is_dropped() -> None:
    x = Value("x", VECTOR)
    no_op = find("NoOp", TENSORFLOW)
    assert no_op is not None
    nothing = Node(no_op, [], [], name="nothing")
    last = node("Abs", "last", x, after=(nothing,))
    graph = Graph([x], [value(last)], [nothing, last])
    assert relax_control_edges(graph)
    assert last.control_inputs == []
    assert not relax_control_edges(graph)


def test_node_of_a_branch_does_not_wait_for_an_effect_outside_of_the_branch() -> None:
    x, condition = Value("x", VECTOR), Value("condition", TensorType(BOOL, ()))
    effect = node("RandomNormalLike", "effect", x)
    inner = node("Neg", "inner", value(effect))
    last = node("Abs", "last", x, after=(inner,))
    other = Value("other", const=np.zeros(2, np.float32))
    choice = node(
        "If",
        "choice",
        condition,
        then_branch=Graph([], [value(last)], [inner, last], "then"),
        else_branch=Graph([], [other], [], "else"),
    )
    graph = Graph([x, condition], [value(choice)], [effect, choice], "g")
    assert relax_control_edges(graph)
    assert last.control_inputs == []
    verify(Model({"g": graph}, "g"))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_node_without_side_effects_that_others_only_wait_for_does_not_run(executor: str) -> None:
    builder = Builder()
    builder.placeholder("n", "int32")
    builder.const(np.int32(0), "zero")
    builder.const(np.int32(1), "one")
    whole = {"T": Type("int32")}
    loop = {**whole, "frame_name": "loop", "parallel_iterations": 10}
    for name, is_constant in (("zero", False), ("one", True), ("n", True)):
        enter = name if is_constant else "start"
        builder.node("Enter", name, name=f"{enter}_in", is_constant=is_constant, **loop)
    builder.node("Merge", "start_in", "next", name="i", N=2, **whole)
    builder.node("Less", "i", "n_in", name="less", **whole)
    builder.node("LoopCond", "less", name="go")
    builder.node("Switch", "i", "go", name="s", **whole)
    builder.node("Exit", "s", name="y", **whole)
    builder.node("Sub", "one_in", "one_in", name="nothing", **whole)
    builder.node("FloorMod", "s:1", "nothing", name="fails", **whole)
    builder.node("AddV2", "s:1", "one_in", "^fails", name="more", **whole)
    builder.node("NextIteration", "more", name="next", **whole)
    session = ps.compile(builder.bytes(), executor=executor)
    assert session.run({"n": np.int32(3)}, ["y"])["y"] == 3
    if executor == "frames":
        with pytest.raises(ps.RunError, match="fails"):
            session.run({"n": np.int32(3)}, targets=["fails"])
