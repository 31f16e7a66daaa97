"""Tasks in an arena: memory that none writes while another reads it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from penstock.backends.numpy import NumpyBackend
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops import find
from penstock.plan import arena_layout
from penstock.plan.arena_layout import ArenaPlan, plan_arena_for_tasks
from penstock.plan.arrangement import arrange, touches
from penstock.plan.builder import compile_plan
from penstock.plan.plan import Plan, memory_of, walk
from penstock.plan.tasks import Grouping, Tasks
from tests.plan.test_tasks import GROUPINGS, Clusters, named, of_text, plan_of, run_alone
from tests.support.random_graphs import seeded


def test_arrange_takes_ten_thousand_tasks():
    x = value = Value("x", TensorType(np.dtype(np.float32), (4,)))
    nodes = []
    for i in range(10_000):
        made = Value(f"v{i}", x.type)
        nodes.append(Node(find("Neg"), [value], [made], name=f"n{i}"))
        value = made
    plan = compile_plan(Graph([x], [value], nodes, "chain"), [NumpyBackend()], planned=False)
    tasks = arrange(plan, Grouping())
    assert tasks.waits == (0, *[1] * 9_999)
    assert len(tasks.shared) == 10_001


def overlaps(plan: Plan, tasks: Tasks, arena_plan: ArenaPlan) -> Iterator[tuple[int, int]]:
    """Pairs of tasks that may run at the same time, where one writes what the other touches."""
    n = len(tasks.tasks)
    before: list[set[int]] = [set() for _ in range(n)]
    paths: list[tuple[int, ...]] = []
    for t in range(n):
        for c in tasks.consumers[t]:
            before[c] |= before[t] | {t}
        parent = tasks.parent[tasks.tasks[t].block]
        paths.append((*(paths[parent] if parent >= 0 else ()), t))

    def together(a: int, b: int) -> bool:
        for x, y in zip(paths[a], paths[b], strict=False):
            if x != y:
                same = tasks.tasks[x].block == tasks.tasks[y].block
                return same and x not in before[y] and y not in before[x]
        return False  # one is within the other, which waits meanwhile

    def spans(slots: set[int]) -> set[tuple[int, int]]:
        roots = {root for slot in slots if slot >= 0 for root in memory_of(plan.slots, slot)}
        sizes = {root: plan.slots[root].type.nbytes for root in roots}
        return {(arena_plan.offsets[r], arena_plan.offsets[r] + size) for r, size in sizes.items()}

    touched, written = [], []
    for task in tasks.tasks:
        all_of: set[int] = set()
        made: set[int] = set()
        for step in task.steps if task.blocks else walk(task.steps):
            made.update(slot for carry in step.carries for slot in carry.buffers or ())
            made.add(step.workspace)
            made.update(i for i in step.outputs if i >= 0 and step.into)
            all_of.update(touches(step, inside=False))
        touched.append(spans(all_of | made))
        written.append(spans(made))
    for a in range(n):
        for b in range(n):
            if (
                a != b
                and together(a, b)
                and any(low < y and x < high for low, high in written[a] for x, y in touched[b])
            ):
                yield a, b


@pytest.mark.parametrize("grouping", ["one by one", "clusters"])
@pytest.mark.parametrize("seed", range(25))
def test_tasks_that_run_at_the_same_time_share_no_memory_that_one_writes(seed, grouping):
    plan = plan_of(seeded(seed, 80))
    tasks = arrange(plan, GROUPINGS[grouping](seed))
    for planner in ("best", "first_fit", "wic"):
        assert not list(overlaps(plan, tasks, plan_arena_for_tasks(plan, tasks, planner)))


def test_tasks_overwrite_nothing_with_too_many_buffers_to_compare(monkeypatch):
    monkeypatch.setattr(arena_layout, "_MOST_BUFFERS", -1)
    found = {}
    for seed in range(100):
        plan = plan_of(seeded(seed, 80))
        tasks = arrange(plan, Clusters(seed))
        pairs = list(overlaps(plan, tasks, plan_arena_for_tasks(plan, tasks)))
        if pairs:
            found[seed] = pairs
    assert not found


@pytest.mark.parametrize("n", [1, 2])
def test_a_branch_at_the_end_leaves_the_outputs_of_the_plan_alone(n):
    #   Loop -> r (an output, in a buffer of the loop)
    #     \-> If { ... | ... } -> y
    plan = of_text(
        """g (float[64] x, int64 n, bool c) => (float[64] r, float[1] y) {
            r = Loop (n, , x) <body = b (int64 i, bool k, float[64] v) => (bool d, float[64] w)
                { d = Identity(k) w = Add(v, v) }>
            y = If (c) <then_branch = t () => (float[1] p)
                    { a1 = Exp(r) a2 = Sin(a1) a3 = Add(a1, a2) p = ReduceSum(a3) },
                else_branch = e () => (float[1] q)
                    { b1 = Cos(r) b2 = Sin(b1) b3 = Mul(b1, b2) q = ReduceSum(b3) }>
        }"""
    )
    tasks = arrange(plan, Grouping())
    arena_plan = plan_arena_for_tasks(plan, tasks)
    (output,) = [i for i in plan.outputs if plan.slots[i].name == "r"]
    kept = [arena_plan.offsets[root] for root in plan.slots[output].roots]
    inner = {arena_plan.offsets[named(plan, name)] for name in ("a1", "a2", "a3", "b1", "b2", "b3")}
    x = np.linspace(0, 1, 64, dtype=np.float32)
    for c in (True, False):
        r, _ = run_alone(plan, tasks, x, np.array(n), np.array(c))
        np.testing.assert_array_equal(r, x * 2**n)
    assert inner.isdisjoint(kept)
