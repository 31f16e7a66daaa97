"""Plans of small graphs, and changes of these, for tests of the checker of plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backends.numpy import NumpyBackend
from penstock.core.records import replace as changed
from penstock.ir.graph import clone
from penstock.passes.pipeline import optimize
from penstock.plan.arena_layout import ArenaPlan, plan_arena, plan_arena_for_tasks
from penstock.plan.arrangement import arrange
from penstock.plan.builder import compile_plan
from penstock.plan.check import check_schedule
from penstock.plan.check_places import UnsoundPlanError
from penstock.plan.plan import Plan
from penstock.plan.tasks import Grouping, Tasks
from tests.support.onnx_text import graph_from_text

CHAIN = """
g (float[8] x, float[8, 8] w) => (float[8] y) {
    a = Exp(x)
    t = MatMul(w, a)
    b = Add(t, a)
    c = Sin(b)
    y = Mul(c, b)
}
"""
BRANCHES = """
g (float[8] x, float[8, 8] w, bool p) => (float[8] y) {
    a = Exp(x)
    s = Sin(a)
    r = If(p) <then_branch = th () => (float[8] u) { u = MatMul(w, s) },
               else_branch = el () => (float[8] v) { k = Cos(a) v = MatMul(w, k) }>
    q = MatMul(w, r)
    y = Add(q, s)
}
"""
LOOP = """
g (int64 n, bool go, float[8] x, float[8, 8] w) => (float[8] y) {
    a = Exp(x)
    e, o = Loop(n, go, a) <body = b (int64 i, bool c, float[8] s) =>
        (bool d, float[8] f, float[8] z) { d = Identity(c) m = MatMul(w, s) f = Add(m, a) z = Sin(f) }>
    y = Mul(e, a)
}
"""
FEEDS = {"x": np.ones(8, np.float32), "w": np.eye(8, dtype=np.float32)}


def compiled(text: str) -> Plan:
    graph = clone(graph_from_text(text))
    optimize(graph)
    return compile_plan(graph, [NumpyBackend()])


def in_branches(plan: Plan) -> tuple[Plan, ArenaPlan]:
    return plan, plan_arena(plan, "bump")


def as_tasks(text: str) -> tuple[Plan, ArenaPlan, Tasks]:
    plan = compiled(text)
    tasks = arrange(plan, Grouping())
    return plan, plan_arena_for_tasks(plan, tasks), tasks


def slot(plan: Plan, name: str) -> int:
    (found,) = [i for i, s in enumerate(plan.slots) if s.name == name]
    return found


def refused(plan: Plan, arena: ArenaPlan, reason: str, tasks: Tasks | None = None) -> None:
    with pytest.raises(UnsoundPlanError, match=reason):
        check_schedule(plan, arena, tasks)


def replace_plan(plan: Plan, **changes: Any) -> Plan:
    return changed(plan, **changes)


def replaced_offset(arena: ArenaPlan, i: int, at: int) -> ArenaPlan:
    return changed(arena, offsets={**arena.offsets, i: at})


def replaced_slot(plan: Plan, i: int, **changes: Any) -> Plan:
    slots = (*plan.slots[:i], changed(plan.slots[i], **changes), *plan.slots[i + 1 :])
    return replace_plan(plan, slots=slots)


def replaced_step(plan: Plan, place: int, **changes: Any) -> Plan:
    step = changed(plan.steps[place], **changes)
    return replace_plan(plan, steps=(*plan.steps[:place], step, *plan.steps[place + 1 :]))


def replaced_entry(entries: tuple[Any, ...], at: int, entry: Any) -> tuple[Any, ...]:
    return (*entries[:at], entry, *entries[at + 1 :])
