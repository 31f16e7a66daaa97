"""Plans and their memory: views, in-place updates, carried values, lifetimes."""

from __future__ import annotations

import pytest
from hypothesis import given

from penstock.backends.numpy import NumpyBackend
from penstock.ir.graph import clone
from penstock.passes.pipeline import optimize
from penstock.plan.arena_layout import ArenaPlan, plan_arena
from penstock.plan.builder import compile_plan
from penstock.plan.plan import Plan, SlotKind
from tests.support.onnx_text import OPSET, compile_text, graph_from_text
from tests.support.random_graphs import graphs
from tests.support.sweeps import examples


def planned(text: str, opset: int = OPSET) -> tuple[Plan, ArenaPlan]:
    graph = clone(graph_from_text(text, opset=opset))
    optimize(graph)
    plan = compile_plan(graph, [NumpyBackend()])
    return plan, plan_arena(plan)


def slot(plan: Plan, name: str) -> int:
    (found,) = [i for i, s in enumerate(plan.slots) if s.name == name]
    return found


def test_a_chain_runs_in_one_buffer():
    chain = "".join(f"v{i + 1} = Add(v{i}, k) " for i in range(50))
    _, arena_plan = planned(
        f"g (float[16] v0) => (float[16] y) <float k = {{1}}> {{ {chain} y = Neg(v50) }}"
    )
    assert arena_plan.size == arena_plan.lower_bound == 64


def test_constants_live_outside_of_the_arena():
    plan, arena_plan = planned(
        "g (float[1000] x) => (float[1000] y) <float k = {2}> { a = Mul(x, k) y = Exp(a) }"
    )
    assert arena_plan.size == 4000
    assert plan.slots[slot(plan, "k")].kind is SlotKind.CONSTANT


LOOP = """g (float[16] x, int64 n) => (float[16] y) <float k = {2}> {
    a = Exp(x)
    r = Loop (n, , a) <body = b (int64 i, bool c, float[16] v) => (bool d, float[16] w) {
        d = Identity(c) t = Mul(v, k) u = Add(t, x) w = Sub(u, v) }>
    y = Neg(r)
}"""


def test_carried_values_alternate_between_two_buffers():
    plan, arena_plan = planned(LOOP)
    (loop,) = [step for step in plan.steps if step.node.op.name == "Loop"]
    (carry,) = loop.carries
    assert carry.direct
    first, second = carry.buffers
    assert arena_plan.offsets[first] != arena_plan.offsets[second]
    # initial value, two buffers, one for what the body computes in between
    assert arena_plan.size == arena_plan.lower_bound == 4 * 64


def test_captured_value_of_a_body_lives_as_long_as_the_loop():
    plan, arena_plan = planned(
        """g (float[16] x, int64 n) => (float[16] y) {
            a = Exp(x) z = Sin(x)
            r = Loop (n, , z) <body = b (int64 i, bool c, float[16] v) => (bool d, float[16] w) {
                d = Identity(c) s = Add(v, a) t = Neg(s) w = Exp(t) }>
            y = Neg(r)
        }"""
    )
    a, t = arena_plan.offsets[slot(plan, "a")], arena_plan.offsets[slot(plan, "t")]
    assert a != t


def test_exclusive_branches_share_memory():
    _, arena_plan = planned(
        """g (float[1000] x, bool c) => (float[1000] y) {
            r = If (c) <then_branch = t () => (float[1000] p) { a = Exp(x) b = MatMul_(a) p = Neg(b) },
                        else_branch = e () => (float[1000] q) { d = Sin(x) f = MatMul_(d) q = Neg(f) }>
            y = Neg(r)
        }""".replace("MatMul_", "Softmax")
    )
    assert arena_plan.size <= 3 * 4000 + 64


def test_plan_chooses_an_order_that_frees_early():
    #  Four wide branches from one input, each reduced to one number: run in the order given, all
    #  four wide values are alive at once; one after the other, one is.
    wide = " ".join(f"w{i} = Tile(x{i}, reps)" for i in range(4))
    narrow = " ".join(f"n{i} = ReduceMax <keepdims = 1> (w{i}, axes)" for i in range(4))
    split = " ".join(f"x{i} = Add(x, k{i})" for i in range(4))
    constants = ", ".join(f"float k{i} = {{{i}}}" for i in range(4))
    _, arena_plan = planned(
        f"""g (float[8] x) => (float[1] y) <int64[1] reps = {{1000}}, int64[1] axes = {{0}}, {constants}> {{
            {split} {wide} {narrow} y = Sum(n0, n1, n2, n3) }}"""
    )
    assert arena_plan.size < 2 * 32_000


@examples(2)
@given(graph=graphs())
def test_arenas_are_close_to_their_lower_bounds(graph):
    copy = clone(graph)
    optimize(copy)
    plan = compile_plan(copy, [NumpyBackend()])
    arena_plan = plan_arena(plan)
    # Every buffer here is smaller than the alignment, which the bound leaves out.
    buffers = len(set(arena_plan.buffer_of.values()))
    assert arena_plan.lower_bound <= arena_plan.size <= arena_plan.lower_bound + 64 * buffers
    assert sorted(arena_plan.order) == list(range(len(plan.steps)))


def test_explain_says_where_everything_lives():
    session = compile_text(LOOP, backends=["numpy"], shapes={})
    text = session.explain()
    assert "arena 256 B (planner quick, lower bound 256 B; best 256 B, " in text
    assert "u @" in text


def test_unknown_planner_names_are_refused():
    plan, _ = planned("g (float[2] x) => (float[2] y) { a = Neg(x) y = Abs(a) }")
    with pytest.raises(ValueError, match="best"):
        plan_arena(plan, "worst")


def test_branches_are_explained_under_their_own_names():
    #  a file may have the else branch first
    text = """g (float[2] x, bool c) => (float[2] y) {
        y = If (c) <else_branch = e () => (float[2] q) { q = Neg(x) },
                    then_branch = t () => (float[2] p) { p = Abs(x) }> }"""
    session = compile_text(text, shapes={})
    lines = [line.strip() for line in session.explain().splitlines()]
    assert "Abs" in lines[lines.index("then_branch:") + 1]
    assert "Neg" in lines[lines.index("else_branch:") + 1]
