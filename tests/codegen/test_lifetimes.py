"""When values that are allocated during the run are released."""

from __future__ import annotations

from penstock.analysis.type_inference import infer_types
from penstock.backends.numpy import NumpyBackend
from penstock.codegen.lifetimes import Lifetimes, local_outputs
from penstock.ir.graph import clone
from penstock.plan.builder import compile_plan
from penstock.plan.plan import Plan, Step
from tests.support.onnx_text import graph_from_text

#   x -- a -+- b -+- y
#           +- c -+       d, which no node reads
DIAMOND = """g (float[4] x) => (float[4] y) {
    a = Exp(x) b = Neg(a) c = Sin(a) d = Abs(b) y = Add(b, c) }"""
LOOP = """g (float[4] x, int64 n) => (float[4] y) {
    a = Exp(x)
    p = Loop (n, , x) <body = l (int64 i, bool c, float[4] v) => (bool d, float[4] w)
        { d = Identity(c) t = Neg(v) w = Mul(t, a) }>
    y = Neg(p) }"""


def planned(text: str) -> tuple[Plan, Lifetimes]:
    graph = clone(graph_from_text(text))
    infer_types(graph)
    plan = compile_plan(graph, [NumpyBackend()], planned=False)
    return plan, Lifetimes(plan, plan.steps)


def released(plan: Plan, lifetimes: Lifetimes) -> dict[str, set[str]]:
    """The names of the values released after each step, by the name of its first output."""

    def name(step: Step) -> str:
        return plan.slots[step.outputs[0]].name

    return {name(s): {plan.slots[i].name for i in slots} for s, slots in lifetimes.after.items()}


def test_lifetimes_end_after_the_last_reader():
    plan, lifetimes = planned(DIAMOND)
    after = {step: names for step, names in released(plan, lifetimes).items() if names}
    assert after["c"] == {"a"}
    assert after["y"] == {"b", "c"}


def test_lifetimes_follow_the_order_of_the_steps():
    plan, _ = planned(DIAMOND)
    by_output = {plan.slots[step.outputs[0]].name: step for step in plan.steps}
    order = [by_output[name] for name in ("a", "c", "b", "d", "y")]
    after = released(plan, Lifetimes(plan, order))
    assert after["b"] == {"a"}


def test_value_without_readers_is_released_after_its_own_step():
    plan, lifetimes = planned(DIAMOND)
    assert released(plan, lifetimes)["d"] == {"d"}


def test_outputs_and_inputs_of_the_run_are_never_released():
    plan, lifetimes = planned(DIAMOND)
    names = set().union(*released(plan, lifetimes).values())
    assert names == {"a", "b", "c", "d"}


def test_value_read_inside_a_loop_lives_until_the_loop_has_ended():
    plan, lifetimes = planned(LOOP)
    after = released(plan, lifetimes)
    assert "a" in after["p"]
    assert all("a" not in names for output, names in after.items() if output != "p")


def test_outputs_of_a_loop_body_are_handed_out():
    plan, lifetimes = planned(LOOP)
    (loop,) = [step for step in plan.steps if step.blocks]
    (body,) = loop.blocks
    names = {plan.slots[i].name for i in lifetimes.handed_out[body]}
    assert names == {"d", "w"}


def test_local_outputs_of_unplanned_steps_are_all_their_outputs():
    plan, _ = planned(DIAMOND)
    for step in plan.steps:
        assert local_outputs(plan.slots, step) == list(step.outputs)
