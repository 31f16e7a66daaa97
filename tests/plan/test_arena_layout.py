"""Layouts: no value is overwritten while somebody still reads it, as an independent replay sees."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx.backend.test.loader import load_model_tests

import penstock as ps
from penstock.algorithms.ordering import topological_order
from penstock.backends.numpy import NumpyBackend
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, clone
from penstock.ops import find
from penstock.passes.pipeline import optimize
from penstock.passes.structure.order_effects import order_effects
from penstock.plan.arena_layout import (
    ArenaPlan,
    plan_arena,
    plan_arena_for_tasks,
    plan_arena_in_order,
)
from penstock.plan.arrangement import arrange
from penstock.plan.builder import compile_plan
from penstock.plan.plan import Plan, SlotKind, memory_of, step_dag, walk
from penstock.plan.tasks import Grouping
from tests.support.onnx_text import compile_text, graph_from_text
from tests.support.random_graphs import graphs, seeded
from tests.support.replay import OverwrittenError, replay
from tests.support.sweeps import examples, sweep


def plan_of(graph: Graph) -> Plan:
    copy = clone(graph)
    optimize(copy)
    return compile_plan(copy, [NumpyBackend()])


def planned(text: str) -> tuple[Plan, ArenaPlan]:
    plan = plan_of(graph_from_text(text))
    return plan, plan_arena(plan)


def slot(plan: Plan, name: str) -> int:
    (found,) = [i for i, s in enumerate(plan.slots) if s.name == name]
    return found


# Random graphs.


@examples(2)
@given(graph=graphs(), planner=st.sampled_from(["best", "first_fit", "wic", "bump"]))
def test_nothing_is_overwritten_while_it_is_read(graph, planner):
    plan = plan_of(graph)
    replay(plan, plan_arena(plan, planner))


@pytest.mark.parametrize("seed", range(100))
def test_arena_layout_overwrites_no_live_value_in_larger_graphs_and_other_orders(seed):
    plan = plan_of(seeded(seed, 40))
    replay(plan, plan_arena(plan))
    choose = random.Random(seed)
    dag = step_dag(plan.slots, plan.steps)
    order = topological_order(dag, [choose.random() for _ in range(dag.n)])
    replay(plan, plan_arena_in_order(plan, order, "wic"))


# Any order, and several steps at once.


class Whole(Grouping):
    """Each outermost step a task, with all that is in it."""

    def expands(self, step):
        return False


def together(plan: Plan, arena_plan: ArenaPlan) -> None:
    """Steps that may run at the same time write nothing that the other one touches."""
    dag = step_dag(plan.slots, plan.steps)
    before = [{i} for i in range(dag.n)]
    for i in topological_order(dag):
        for j in dag.succ[i]:
            before[j] |= before[i]

    def spans(slots) -> list[tuple[int, int]]:
        roots = {root for slot in slots if slot >= 0 for root in memory_of(plan.slots, slot)}
        return [
            (arena_plan.offsets[root], arena_plan.offsets[root] + plan.slots[root].type.nbytes)
            for root in roots
        ]

    touched, written = [], []
    for step in plan.steps:
        inside = list(walk((step,)))
        own = [c for each in inside for carry in each.carries for c in carry.buffers or ()]
        made = [i for each in inside for i in (*each.outputs, each.workspace) if i >= 0]
        made = [
            i for i in made if plan.slots[i].kind is SlotKind.ARENA
        ]  # others name what is there
        written.append(spans([*made, *own]))
        touched.append(spans([*made, *own, *(i for each in inside for i in each.inputs)]))
    for i in range(dag.n):
        for j in range(dag.n):
            if i in before[j] or j in before[i]:
                continue
            for low, high in written[i]:
                assert all(high <= a or b <= low for a, b in touched[j]), (i, j)


@pytest.mark.parametrize("planner", ["best", "reuse"])
@pytest.mark.parametrize("seed", sweep(range(60), 15))
def test_arena_layout_overwrites_no_live_value_in_any_order_of_tasks(seed, planner):
    plan = plan_of(seeded(seed, 40))
    arena_plan = plan_arena_for_tasks(plan, arrange(plan, Whole()), planner)
    together(plan, arena_plan)
    choose = random.Random(seed)
    dag = step_dag(plan.slots, plan.steps)
    for _ in range(4):
        order = topological_order(dag, [choose.random() for _ in range(dag.n)])
        replay(plan, replace(arena_plan, order=tuple(order)))


@pytest.mark.parametrize("seed", range(30))
def test_arena_layout_overwrites_no_live_value_with_loops_and_branches_as_tasks(seed):
    plan = plan_of(seeded(seed, 40))
    arena_plan = plan_arena_for_tasks(plan, arrange(plan, Grouping()))
    together(plan, arena_plan)
    replay(plan, arena_plan)


def test_memory_of_one_branch_serves_the_other():
    plan, _ = planned(
        """g (float[1000] x, bool c) => (float[1] y) {
            z = If (c) <then_branch = t () => (float[1] p) { a = Exp(x) b = Sin(x) d = Add(a, b) p = ReduceSum(d) },
                        else_branch = e () => (float[1] q) { f = Cos(x) g = Sin(x) h = Mul(f, g) q = ReduceMax(h) }>
            y = Neg(z) }"""
    )
    arena_plan = plan_arena_for_tasks(plan, arrange(plan, Grouping()))
    assert arena_plan.size < 3 * 4096


def test_replay_reports_an_overwritten_value():
    plan, arena_plan = planned(
        "g (float[16] x) => (float[16] y) { a = Exp(x) b = Sin(a) c = Mul(a, b) y = Add(c, a) }"
    )
    a, b = slot(plan, "a"), slot(plan, "b")
    assert arena_plan.buffer_of[a] != arena_plan.buffer_of[b]
    replay(plan, arena_plan)
    with pytest.raises(AssertionError):
        replay(plan, replace(arena_plan, offsets={**arena_plan.offsets, b: arena_plan.offsets[a]}))
    # An order in which a step runs before what it reads:
    with pytest.raises(KeyError):
        replay(plan, replace(arena_plan, order=arena_plan.order[::-1]))


def test_replay_reports_a_value_that_a_loop_overwrites():
    plan, arena_plan = planned(
        """g (float[16] x, int64 n) => (float[16] y) {
            a = Exp(x)
            r = Loop (n, , x) <body = b (int64 i, bool c, float[16] v) => (bool d, float[16] w) {
                d = Identity(c) s = Add(v, a) w = Mul(s, v) }>
            y = Neg(r) }"""
    )
    replay(plan, arena_plan)
    a, s = slot(plan, "a"), slot(plan, "s")
    with pytest.raises(OverwrittenError, match=r"^a "):
        replay(plan, replace(arena_plan, offsets={**arena_plan.offsets, s: arena_plan.offsets[a]}))


# Real graphs.

LIGHT = sorted(Path(onnx.__path__[0], "backend/test/data/light").glob("*.onnx"))


@pytest.mark.costly
@pytest.mark.parametrize("path", sweep(LIGHT, 3), ids=lambda path: path.stem)
def test_nothing_is_overwritten_in_networks(path):
    graph = ps.load(path).graph
    for value in graph.inputs:
        assert isinstance(value.type, TensorType)
        dims = tuple(dim if isinstance(dim, int) else 1 for dim in value.type.shape or ())
        value.type = TensorType(value.type.dtype, dims)
    plan = plan_of(graph)
    replay(plan, plan_arena(plan), seeds=1)


@cache
def suite() -> list[Path]:
    kinds = ("simple", "pytorch-operator", "pytorch-converted")
    cases = [case for kind in kinds for case in load_model_tests(kind=kind)]
    return [Path(case.model_dir, "model.onnx") for case in cases if case.model_dir]


def test_nothing_is_overwritten_in_the_models_of_the_suite():
    assert len(suite()) > 100
    for path in suite():
        try:
            plan = plan_of(ps.load(path).graph)
        except ps.Unsupported:
            continue
        replay(plan, plan_arena(plan), seeds=2)


# What a lifetime is.


def test_buffers_of_a_carried_value_without_readers_behind_the_loop_live_through_it():
    #  x is copied into w's buffer at the end of each iteration, when p is still to be read
    graph = graph_from_text("""g (float[16] x, int64 n) => (float[16] y) {
                y, unread = Loop (n, , x, x) <body = b (int64 i, bool c, float[16] v, float[16] w)
                    => (bool d, float[16] p, float[16] x)
                    { d = Identity(c) q = Exp(v) r = Sub(q, w) p = Transpose(r) }> }""")
    (node,) = graph.nodes
    node.outputs[1] = None
    plan = plan_of(graph)
    (loop,) = plan.steps
    dead = loop.carries[1]
    assert dead.buffers is not None
    assert dead.result == -1
    arena_plan = plan_arena(plan)
    assert arena_plan.offsets[slot(plan, "q")] not in {arena_plan.offsets[b] for b in dead.buffers}
    replay(plan, arena_plan, seeds=20)


def test_a_result_of_a_loop_lets_go_of_its_initial_value():
    #  each loop needs its two buffers and the result of the one before, however many there are
    loops = " ".join(
        f"""v{k + 1} = Loop (n, , v{k}) <body = b{k} (int64 i{k}, bool c{k}, float[16] a{k})
            => (bool d{k}, float[16] e{k}) {{ d{k} = Identity(c{k}) e{k} = Neg(a{k}) }}>"""
        for k in range(30)
    )
    _, arena_plan = planned(
        f"g (float[16] v0, int64 n) => (float[16] y) {{ {loops} y = Exp(v30) }}"
    )
    assert arena_plan.size <= 4 * 64


def test_a_result_of_many_branches_is_in_few_places():
    #  v0 or its negative, or the negative of that, ...: v40 could be in any of 40 places
    ifs = " ".join(
        f"""v{k + 1} = If (c) <then_branch = t{k} () => (float[16] a{k}) {{ a{k} = Neg(v{k}) }},
            else_branch = e{k} () => (float[16] b{k}) {{ b{k} = Identity(v{k}) }}>"""
        for k in range(40)
    )
    text = f"g (float[16] x, bool c) => (float[16] y) {{ v0 = Exp(x) {ifs} y = Exp(v40) }}"
    plan, arena_plan = planned(text)
    assert arena_plan.size <= 12 * 64
    assert max(len(slot.roots) for slot in plan.slots) <= 9
    session = compile_text(text)
    for condition in (True, False):
        y = session(np.zeros(16, np.float32), np.array(condition))
        np.testing.assert_allclose(y, np.full(16, np.exp(np.float32(1))), rtol=1e-6)


# Orders.


def noisy(*, inner: bool = False) -> Graph:
    """x -> A, B: two nodes that read nothing of each other; B in a branch where ``inner``."""
    x = ps.ir.graph.Value("x", TensorType(np.dtype(np.float32), (4,)))
    c = ps.ir.graph.Value("c", TensorType(np.dtype(bool), ()))
    op = replace(find("Neg"), pure=False)
    a, b = (ps.ir.graph.Value(name) for name in "ab")
    nodes = [ps.ir.graph.Node(op, [x], [a], name="A"), ps.ir.graph.Node(op, [x], [b], name="B")]
    outputs = [a, b]
    if inner:
        branch = ps.ir.graph.Graph([], [b], [nodes.pop()], "then")
        y = ps.ir.graph.Value("y")
        other = ps.ir.graph.Graph([], [x], [], "else")
        attrs = {"then_branch": branch, "else_branch": other}
        nodes.append(ps.ir.graph.Node(find("If"), [c], [y], attrs))
        outputs = [a, y]
    return ps.ir.graph.Graph([x, c], outputs, nodes, "noisy")


@pytest.mark.parametrize("inner", [False, True])
def test_effects_keep_their_order(inner):
    graph = noisy(inner=inner)
    order_effects(graph)
    plan = plan_of(graph)
    assert step_dag(plan.slots, plan.steps).edges == ((0, 1),)


def test_control_inputs_are_waited_for_through_views():
    #  V, a view of P, waits for A; B waits for U, a view of V, and for W, a view of A that is no
    #  step: B must not run before A and P, although it reads neither
    x = ps.ir.graph.Value("x", TensorType(np.dtype(np.float32), (4,)))
    axes = ps.ir.graph.Value("axes", const=np.array([0]))
    a, p, v, u, w, b, y = (ps.ir.graph.Value(name) for name in "apvuwby")
    node_a = ps.ir.graph.Node(find("Exp"), [x], [a], name="A")
    node_p = ps.ir.graph.Node(find("Sin"), [x], [p], name="P")
    node_v = ps.ir.graph.Node(find("Unsqueeze"), [p, axes], [v], name="V", control_inputs=[node_a])
    node_u = ps.ir.graph.Node(find("Squeeze"), [v, axes], [u], name="U")
    node_w = ps.ir.graph.Node(find("Unsqueeze"), [a, axes], [w], name="W")
    node_b = ps.ir.graph.Node(find("Abs"), [x], [b], name="B", control_inputs=[node_u, node_w])
    node_y = ps.ir.graph.Node(find("Neg"), [u], [y], name="Y")
    nodes = [node_a, node_p, node_v, node_u, node_w, node_b, node_y]
    plan = plan_of(ps.ir.graph.Graph([x], [b, y], nodes, "g"))
    names = [step.node.name for step in plan.steps]
    dag = step_dag(plan.slots, plan.steps)

    def before(name: str) -> set[str]:
        found, stack = set(), [names.index(name)]
        while stack:
            for i in dag.pred[stack.pop()]:
                found.add(names[i])
                stack.append(i)
        return found

    assert {"A", "P"} <= before("B")
    assert {"A", "P"} <= before("Y")
    assert "W" not in names
