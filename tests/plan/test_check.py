"""The checker of plans: what it lets pass computes what it should, and each fault has a name."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.compiler import stages
from penstock.core.errors import InvalidModel
from penstock.core.records import replace as changed
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Node, Value, clone
from penstock.ops.registry import standard
from penstock.passes.pipeline import optimize
from penstock.plan.arena_layout import plan_arena, plan_arena_for_tasks
from penstock.plan.arrangement import arrange
from penstock.plan.builder import compile_plan
from penstock.plan.check import check_saved, check_schedule
from penstock.plan.check_places import UnsoundPlanError
from penstock.plan.plan import SlotKind
from penstock.plan.tasks import Grouping
from tests.support.changed_plans import (
    BRANCHES,
    CHAIN,
    FEEDS,
    LOOP,
    compiled,
    in_branches,
    refused,
    replace_plan,
    replaced_offset,
    replaced_slot,
    replaced_step,
    slot,
)
from tests.support.onnx_text import compile_text
from tests.support.random_graphs import graphs
from tests.support.replay import replay
from tests.support.sweeps import examples


@pytest.mark.parametrize("text", [CHAIN, BRANCHES, LOOP])
def test_plans_as_compiled_are_sound_in_order_and_as_tasks(text: str) -> None:
    plan = compiled(text)
    check_schedule(plan, plan_arena(plan))
    tasks = arrange(plan, Grouping())
    check_schedule(plan, plan_arena_for_tasks(plan, tasks), tasks)
    assert len(tasks.tasks) > 1


# One change at a time.


def test_slot_over_one_that_is_read_later_is_refused() -> None:
    plan, arena = in_branches(compiled(CHAIN))
    t = replaced_offset(arena, slot(plan, "t"), arena.offsets[slot(plan, "a")])
    refused(plan, t, "overwrites an input by writing 't'")
    c = replaced_offset(arena, slot(plan, "c"), arena.offsets[slot(plan, "b")])
    refused(plan, c, "reads 'b' .* never written")


def test_slot_over_a_value_that_one_branch_reads_is_refused() -> None:
    plan, arena = in_branches(compiled(BRANCHES))
    refused(
        plan,
        replaced_offset(arena, slot(plan, "k"), arena.offsets[slot(plan, "s")]),
        "never written|before it is written",
    )


def test_slot_over_a_value_that_the_next_iteration_reads_is_refused() -> None:
    plan, arena = in_branches(compiled(LOOP))
    m = slot(plan, "m")
    refused(
        plan, replaced_offset(arena, m, arena.offsets[slot(plan, "a")]), "overwrit|never written"
    )
    (loop,) = [step for step in plan.steps if step.blocks]
    buffers = [i for carry in loop.carries for i in carry.buffers or ()]
    assert buffers
    for i in buffers:
        refused(
            plan,
            replaced_offset(arena, m, arena.offsets[i]),
            "overwrit|never written|carried|buffer",
        )


def test_buffer_over_the_initial_value_of_a_loop_is_refused() -> None:
    # Nothing reads "a" later than the loop does.
    alone = compiled(LOOP.replace("Mul(e, a)", "Sin(e)").replace("Add(m, a)", "Sin(m)"))
    arena = plan_arena(alone, "bump")
    a = slot(alone, "a")
    (loop,) = [step for step in alone.steps if step.blocks]
    for i in (i for carry in loop.carries for i in carry.buffers or ()):
        refused(alone, replaced_offset(arena, i, arena.offsets[a]), "reads 'a' .* never written")


NESTED = """
g (int64 n, bool go, float[8] x) => (float[8] y, float[k, 8] z) {
    y, z = Loop(n, go, x) <body = b (int64 i, bool c, float[8] s) => (bool d, float[8] r, float[8] p) {
        d = Identity(c)
        r = Neg(s)
        q = Loop(n, go, x) <body = e (int64 j, bool f, float[8] t) => (bool h, float[8] r) { h = Identity(f) }>
        p = Exp(q) }>
}
"""


def test_loop_may_carry_what_is_in_a_buffer_of_the_loop_around() -> None:
    plan = compiled(NESTED)
    check_schedule(plan, plan_arena(plan, "bump"))
    (outer,) = [step for step in plan.steps if step.blocks]
    (inner,) = [step for step in outer.blocks[0].steps if step.blocks]
    (carry,), (kept,) = outer.carries, inner.carries
    assert carry.direct and carry.updated == kept.updated and not kept.direct


SCAN = """
g (float[2] s, float[3, 2] x) => (float[2] y, float[3, 2] z) {
    a = Exp(x)
    y, z = Scan(s, a) <num_scan_inputs = 1, body = b (float[2] c, float[2] r) => (float[2] o, float[2] p) {
        o = Add(c, r) p = Neg(r) }>
}
"""


def test_buffer_over_what_a_loop_scans_is_refused() -> None:
    plan, arena = in_branches(compiled(SCAN))
    (scan,) = [step for step in plan.steps if step.blocks]
    buffers = [i for carry in scan.carries for i in carry.buffers or ()]
    assert buffers
    for i in buffers:
        moved = replaced_offset(arena, i, arena.offsets[slot(plan, "a")])
        refused(plan, moved, "reads 'a' .* never written")


def test_order_in_which_a_step_comes_too_early_is_refused() -> None:
    plan, arena = in_branches(compiled(CHAIN))
    refused(plan, changed(arena, order=arena.order[::-1]), "never written|before it is written")
    refused(plan, changed(arena, order=(*arena.order[:-1], 0)), "each step exactly once")


def test_step_with_other_slots_than_its_node_has_values_is_refused() -> None:
    plan, arena = in_branches(compiled(CHAIN))
    for place, step in enumerate(plan.steps):
        for change in ({"inputs": step.inputs[1:]}, {"inputs": (*step.inputs, 0)}):
            steps = (*plan.steps[:place], changed(step, **change), *plan.steps[place + 1 :])
            refused(replace_plan(plan, steps=steps), arena, "another|no slot|do not match")


def test_place_beside_its_input_is_refused_for_a_kernel_that_works_in_place() -> None:
    plan = compiled("g (float[64] x) => (float[64] y) { a = Exp(x) b = Sin(a) y = Mul(b, b) }")
    arena = plan_arena(plan)
    a, b = slot(plan, "a"), slot(plan, "b")
    assert arena.offsets[a] == arena.offsets[b]
    check_schedule(plan, arena)
    shifted = changed(
        arena, offsets={**arena.offsets, b: arena.offsets[a] + 64}, size=arena.size + 64
    )
    refused(plan, shifted, "overwrites an input")


def test_operand_of_another_value_of_the_same_type_is_refused() -> None:
    plan, arena = in_branches(compiled(CHAIN))
    (place,) = [k for k, step in enumerate(plan.steps) if step.node.op.name == "Sin"]
    swapped = replaced_step(plan, place, inputs=(slot(plan, "a"),))
    refused(swapped, arena, "'a' .* another value than its reader")


def test_results_of_two_nodes_in_one_slot_are_refused() -> None:
    plan, arena = in_branches(compiled(CHAIN))
    (place,) = [k for k, step in enumerate(plan.steps) if step.node.op.name == "Sin"]
    shared = replaced_step(plan, place, outputs=(slot(plan, "b"),))
    refused(shared, arena, "'b' .* two different values|overwrites one of its inputs")


def test_slot_of_another_type_than_its_value_is_refused() -> None:
    plan, arena = in_branches(compiled(CHAIN))
    for type_ in (TensorType(FLOAT32, (4,)), TensorType(np.dtype(np.int32), (8,))):
        refused(
            replaced_slot(plan, slot(plan, "a"), type=type_), arena, "the type of 'a' .* differs"
        )


def test_constant_in_the_place_of_another_is_refused() -> None:
    text = """g (float[2] x) => (float[2] y) <float[2] k = {1, 2}, float[2] l = {3, 4}> {
        a = Mul(x, k) y = Add(a, l) }"""
    plan, arena = in_branches(compiled(text))
    i, other = [i for i, s in enumerate(plan.slots) if s.kind is SlotKind.CONSTANT]
    mutant = replaced_slot(plan, i, constant=plan.slots[other].constant)
    refused(mutant, arena, "holds another constant")


def test_graph_that_gives_another_value_is_refused() -> None:
    text = "g (float[8] x) => (float[8] y, float[8] z) { y = Exp(x) z = Sin(x) }"
    plan, arena = in_branches(compiled(text))
    refused(replace_plan(plan, outputs=plan.outputs[::-1]), arena, "another value than its reader")


def test_values_that_loops_carry_from_one_to_another_are_refused() -> None:
    plan, arena = in_branches(compiled(LOOP))
    (place,) = [k for k, step in enumerate(plan.steps) if step.blocks]
    (carry,) = plan.steps[place].carries
    for change in (
        {"initial": 2},
        {"inside": carry.updated},
        {"updated": carry.inside},
        {"result": -1},
        {"direct": not carry.direct},
        {"buffers": None},
        {"buffers": (carry.buffers or (0,))[:1] * 2},
    ):
        mutant = replaced_step(plan, place, carries=(changed(carry, **change),))
        refused(mutant, arena, "carr|buffer|never written")
    refused(replaced_step(plan, place, carries=()), arena, "carried values than its node")


def test_steps_of_other_nodes_than_the_graph_has_are_refused() -> None:
    plan, arena = in_branches(compiled(CHAIN))
    other = compiled(CHAIN.replace("Sin", "Cos"))
    (place,) = [k for k, step in enumerate(plan.steps) if step.node.op.name == "Sin"]
    (cos,) = [step for step in other.steps if step.node.op.name == "Cos"]
    mutant = replaced_step(plan, place, node=cos.node, kernel=cos.kernel)
    refused(mutant, arena, "its steps do not match the")
    for change in ({"copied": (5,)}, {"blocks": other.steps[0].blocks or ((),)}):
        refused(replaced_step(plan, place, **change), arena, "do not exist|do not match")


@pytest.mark.parametrize("through_a_view", [False, True])
def test_node_before_what_it_waits_for_is_refused(through_a_view: bool) -> None:
    x = Value("x", TensorType(FLOAT32, (4,)))
    noisy = changed(standard("Neg"), pure=False)
    outputs = [Value(name, TensorType(FLOAT32, (4,))) for name in "ab"]
    nodes = [Node(noisy, [x], [value], name=value.name) for value in outputs]
    waits = (
        [Node(standard("Identity"), [outputs[0]], [Value("v")])] if through_a_view else nodes[:1]
    )
    nodes[1].control_inputs = waits
    plan = compile_plan(Graph([x], outputs, nodes, "noisy"), [NumpyBackend()])
    arena = plan_arena(plan)
    check_schedule(plan, arena)
    refused(plan, changed(arena, order=(1, 0)), "runs before a control input")


# All changes of places.


@examples(2)
@given(graph=graphs(), number=st.integers(0, 2**32))
def test_places_that_are_let_pass_overwrite_nothing(graph: Graph, number: int) -> None:
    """An independent replay of the plan finds no value written over where the checker finds none."""
    draw, copy = random.Random(number), clone(graph)
    optimize(copy)
    plan = compile_plan(copy, [NumpyBackend()])
    arena = plan_arena(plan)
    check_schedule(plan, arena)
    slots = sorted(arena.offsets)
    if not slots:
        return
    i, j = draw.choice(slots), draw.choice(slots)
    mutant = replaced_offset(arena, i, draw.choice([arena.offsets[j], arena.offsets[i] + 64, 0]))
    try:
        check_schedule(plan, mutant)
    except UnsoundPlanError:
        return
    replay(plan, mutant)


# Where it is asked.


def test_every_plan_of_the_tests_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages.ALWAYS_CHECKED
    monkeypatch.setattr("penstock.plan.check.check_schedule", lambda *_: fail())
    with pytest.raises(UnsoundPlanError, match="as a test says"):
        compile_text(CHAIN, executor="linear").run(FEEDS)


def fail() -> None:
    raise UnsoundPlanError("as a test says")


def test_unsound_plan_of_a_file_is_an_invalid_model() -> None:
    plan, arena = in_branches(compiled(CHAIN))
    with pytest.raises(InvalidModel, match=r"saved session is unsound: .* save the session anew"):
        check_saved(plan, replaced_offset(arena, slot(plan, "a"), arena.size), None)


@pytest.mark.parametrize("executor", ["linear", "dataflow"])
def test_saved_plans_are_checked_outside_of_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, executor: str
) -> None:
    monkeypatch.setattr(stages, "ALWAYS_CHECKED", False)
    feeds = FEEDS
    with compile_text(CHAIN, executor=executor) as session:
        session.run(feeds)
        session.save(tmp_path / "g.penstock")
    monkeypatch.setattr("penstock.plan.check.check_schedule", lambda *_: fail())
    with pytest.raises(InvalidModel, match="as a test says"):
        ps.open(tmp_path / "g.penstock").run(feeds)
