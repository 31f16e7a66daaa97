"""Plans as tasks: every step in one of them, in an order that holds, and no value kept without a reader."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.clustering import cluster
from penstock.algorithms.dag import Dag
from penstock.algorithms.ordering import ranks
from penstock.analysis.type_inference import infer_types
from penstock.backends.numpy import NumpyBackend
from penstock.codegen.writer import write_program
from penstock.core.limits import DEFAULT_LIMITS
from penstock.core.types import TensorType
from penstock.executors.base import quiet
from penstock.executors.control import Control
from penstock.executors.parallel import ParallelExecutor, TaskWorkers
from penstock.executors.task_loop import Queue
from penstock.ir.graph import Graph, Node, Value, clone
from penstock.ops import find
from penstock.passes.pipeline import optimize
from penstock.passes.structure.order_effects import order_effects
from penstock.plan.arena_layout import plan_arena_for_tasks
from penstock.plan.arrangement import arrange, touches
from penstock.plan.builder import compile_plan
from penstock.plan.plan import Plan, SlotKind, Step, step_dag, walk
from penstock.plan.tasks import Grouping, Tasks
from tests.executors.conformance import assert_equal
from tests.support.graphs import interpret
from tests.support.onnx_text import graph_from_text
from tests.support.random_graphs import feeds_for, graphs, seeded
from tests.support.sweeps import drawn, examples


def plan_of(graph: Graph, *, planned: bool = True) -> Plan:
    copy = clone(graph)
    optimize(copy)
    return compile_plan(copy, [NumpyBackend()], planned=planned)


def of_text(text: str, *, planned: bool = True) -> Plan:
    return plan_of(graph_from_text(text), planned=planned)


class Whole(Grouping):
    """Each outermost step a task, with all that is in it."""

    def expands(self, step):
        return False


class AllInOne(Whole):
    """One task."""

    def groups(self, dag, steps):
        return [list(range(dag.n))] if dag.n else []


class Clusters(Grouping):
    """Random groups, of which no two wait for each other; some of what can be expanded is."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def expands(self, step):
        return step.control and random.Random(f"{self.seed} {step.node.name}").random() < 0.7

    def groups(self, dag, steps):
        choose = random.Random(self.seed)
        cost = [choose.random() for _ in steps]
        kinds = [-1 - i if self.expands(step) else 0 for i, step in enumerate(steps)]
        return cluster(dag, cost, choose.choice([0.3, 1, 3]), kinds)

    def seconds(self, step):
        return random.Random(f"{self.seed} {step.node.name}").random()


GROUPINGS: dict[str, Callable[[int], Grouping]] = {
    "one by one": lambda seed: Grouping(),
    "whole": lambda seed: Whole(),
    "all in one": lambda seed: AllInOne(),
    "clusters": Clusters,
}


each_grouping = pytest.mark.parametrize("grouping", GROUPINGS)


either_plan = pytest.mark.parametrize("planned", [True, False])


def steps_of(plan: Plan, tasks: Tasks, block: int) -> Sequence[Step]:
    """The steps of block ``block``, by the task that the block belongs to."""
    if not block:
        return plan.steps
    parent = tasks.tasks[tasks.parent[block]]
    (step,) = parent.steps
    return step.blocks[parent.blocks.index(block)].steps


def assert_tasks(plan: Plan, tasks: Tasks, grouping: Grouping) -> None:
    n = len(tasks.tasks)
    # Blocks and tasks name each other.
    assert tasks.parent[0] == -1
    owned = Counter(k for task in tasks.tasks for k in task.blocks)
    assert owned == dict.fromkeys(range(1, len(tasks.blocks)), 1)
    assert sorted(t for block in tasks.blocks for t in block) == list(range(n))
    for t, task in enumerate(tasks.tasks):
        assert t in tasks.blocks[task.block]
        assert all(tasks.parent[k] == t for k in task.blocks)
        expanded = task.steps[0].control and grouping.expands(task.steps[0])
        assert len(task.blocks) == (len(task.steps[0].blocks) if expanded else 0)
        # What is within an expanded task comes after it, and before the next of its own block.
        assert all(tasks.blocks[k][0] > t for k in task.blocks if tasks.blocks[k])
    for k in range(len(tasks.blocks)):
        assert_block(plan, tasks, grouping, k)
    # No step is forgotten, or run twice.
    run = Counter(
        id(step)
        for task in tasks.tasks
        for step in (task.steps if task.blocks else walk(task.steps))
    )
    assert run == {id(step): 1 for step in plan.walk()}


def assert_block(plan: Plan, tasks: Tasks, grouping: Grouping, k: int) -> None:
    block, steps = tasks.blocks[k], steps_of(plan, tasks, k)
    place = {id(step): i for i, step in enumerate(steps)}
    members = {t: [place[id(step)] for step in tasks.tasks[t].steps] for t in block}
    assert sorted(i for each in members.values() for i in each) == list(range(len(steps)))
    task_of = {i: t for t, each in members.items() for i in each}
    dag = step_dag(plan.slots, steps)
    for each in members.values():
        rank = {i: at for at, i in enumerate(each)}
        assert all(rank[a] < rank[b] for a, b in dag.edges if a in rank and b in rank)
    # Who waits for whom.
    edges = {(task_of[a], task_of[b]) for a, b in dag.edges if task_of[a] != task_of[b]}
    assert edges == {(t, c) for t in block for c in tasks.consumers[t]}
    assert all(len(set(tasks.consumers[t])) == len(tasks.consumers[t]) for t in block)
    assert [tasks.waits[t] for t in block] == [sum(b == t for _, b in edges) for t in block]
    # Numbers: what a task waits for has a lower one; of those that could be next, the one with which
    # the longest chain begins is.
    assert list(block) == sorted(block)
    assert all(a < b for a, b in edges)
    local = {t: i for i, t in enumerate(block)}
    over = Dag(len(block), [(local[a], local[b]) for a, b in edges])
    seconds = [tasks.tasks[t].seconds for t in block]
    chain = [own + rest for own, rest in zip(seconds, ranks(over, seconds), strict=True)]
    for i in range(over.n):
        ready = [j for j in range(i, over.n) if all(p < i for p in over.pred[j])]
        assert chain[i] >= max(chain[j] for j in ready) * (1 - 1e-9)
    for t in block:
        task = tasks.tasks[t]
        assert task.seconds == pytest.approx(sum(map(grouping.seconds, task.steps)))
        assert task.queue == grouping.queue(task.steps[0])


@either_plan
@each_grouping
@pytest.mark.parametrize("seed", drawn(range(25), 8))
def test_every_step_is_in_one_task_and_tasks_in_an_order(seed, grouping, planned):
    plan, way = plan_of(seeded(seed, 40), planned=planned), GROUPINGS[grouping](seed)
    assert_tasks(plan, arrange(plan, way), way)


@examples(2)
@given(graph=graphs(), seed=st.integers(0, 3), planned=st.booleans())
def test_tasks_of_any_random_graph_keep_all_orders(graph, seed, planned):
    plan = plan_of(graph, planned=planned)
    for make in GROUPINGS.values():
        grouping = make(seed)
        assert_tasks(plan, arrange(plan, grouping), grouping)


class Values(list):
    """``V``, which sees who reads what has been released."""

    def __getitem__(self, slot):
        value = super().__getitem__(slot)
        assert value is not None, f"slot {slot} is read after it was released, or before it is made"
        return value

    def holds(self, slot: int) -> bool:
        return super().__getitem__(slot) is not None


class Walk:
    """Runs the tasks of a plan, one at a time, in a random order among those that are legal.

    Written from what ``Tasks`` says its fields mean, and independent of the loop that obeys them.
    """

    def __init__(self, plan: Plan, tasks: Tasks, seed: int) -> None:
        self.plan = plan
        self.tasks = tasks
        self.choose = random.Random(seed)
        self.arena_plan = plan_arena_for_tasks(plan, tasks)
        program = write_program(plan, self.arena_plan, tasks=tasks)
        self.memory = NumpyBackend().allocate(self.arena_plan.size)
        self.memory[:] = 0xAB
        *self.functions, self.results = program.bind(self.memory)
        self.source = program.source
        # By slot, the tasks of the block where it is made that read it.
        self.made_by: dict[int, int] = {}
        for t, task in enumerate(tasks.tasks):
            for step in task.steps:
                self.made_by.update((i, t) for i in step.outputs if i in tasks.shared)
        self.reads: dict[int, set[int]] = {i: set() for i in self.made_by}
        for t, task in enumerate(tasks.tasks):
            for i in {i for step in task.steps for i in touches(step)} & self.made_by.keys():
                if tasks.tasks[self.made_by[i]].block == task.block and self.made_by[i] != t:
                    self.reads[i].add(t)

    def run(self, inputs: Sequence[object]) -> tuple[object, ...]:
        self.values = Values([None] * len(self.plan.slots))
        for slot, value in zip(self.plan.inputs, inputs, strict=True):
            self.values[slot] = value
        self.control = Control()
        quiet(self.block, 0)
        kept = {*self.plan.inputs, *self.plan.outputs}
        for step in self.plan.walk():
            if step.node.op.name == "Loop":  # the numbers of its iterations are too small to matter
                kept.update(step.blocks[0].inputs[:2])
        held = [i for i in range(len(self.values)) if self.values.holds(i) and i not in kept]
        # Buffers of a loop stand in it under the names of its values.
        own = [i for i in held if not np.shares_memory(self.values[i], self.memory)]
        assert not own, f"slots {own} are held when the last task has ended"
        return self.results(self.values)

    def block(self, k: int) -> None:
        tasks = self.tasks
        waits = {t: tasks.waits[t] for t in tasks.blocks[k]}
        left = {i: tasks.readers[i] for t in tasks.blocks[k] for i in tasks.counted[t]}
        ready = [t for t, count in waits.items() if not count]
        done: set[int] = set()
        while ready:
            t = ready.pop(self.choose.randrange(len(ready)))
            if tasks.tasks[t].blocks:
                for inner in self.functions[t](self.control, self.values):
                    assert inner in tasks.tasks[t].blocks
                    self.block(inner)
            else:
                self.functions[t](self.control, self.values)
            for i in tasks.counted[t]:
                left[i] -= 1
                if not left[i]:
                    self.values[i] = None
            for c in tasks.consumers[t]:
                waits[c] -= 1
                if not waits[c]:
                    ready.append(c)
            done.add(t)
            self.assert_every_held_value_has_a_reader(k, done)
        assert done == set(tasks.blocks[k])
        assert not any(left.values())

    def assert_every_held_value_has_a_reader(self, k: int, done: set[int]) -> None:
        if k:
            parent = self.tasks.tasks[self.tasks.parent[k]]
            kept = set(parent.steps[0].blocks[parent.blocks.index(k)].outputs)
        else:
            kept = set(self.plan.outputs)
        for i, t in self.made_by.items():
            if self.tasks.tasks[t].block == k and i not in kept and self.values.holds(i):
                assert t in done
                assert self.reads[i] - done, f"slot {i} is held, though all have read it"


@either_plan
@each_grouping
@pytest.mark.parametrize("seed", drawn(range(40), 10))
def test_values_are_held_as_long_as_somebody_reads_them_in_any_order(seed, grouping, planned):
    graph = seeded(seed, 30)
    given = feeds_for(seed % 4)
    feeds = [given[value.name] for value in graph.inputs]
    plain = clone(graph)
    infer_types(plain)
    with np.errstate(all="ignore"):
        wanted = interpret(plain, feeds)
    plan = plan_of(graph, planned=planned)
    walk = Walk(plan, arrange(plan, GROUPINGS[grouping](seed)), seed)
    for _ in range(3):
        assert_equal(list(walk.run(feeds)), list(wanted))


def assert_shared(plan: Plan, tasks: Tasks, source: str) -> None:
    """What more than one task names is in ``V``, what one alone names is a variable of its own."""
    named: dict[str, set[int]] = {}
    for number, body in enumerate(source.split("\ndef ")):
        for name in re.findall(r"\bV\[\d+\]|\bv\d+\b", body):
            named.setdefault(name, set()).add(number)
    ports = {f"V[{i}]" for i in (*plan.inputs, *plan.outputs)}
    for name, where in named.items():
        if name.startswith("v"):
            assert len(where) == 1, name
        else:
            assert len(where) > 1 or name in ports, name
    assert {f"V[{i}]" for i in tasks.shared} >= {name for name in named if name.startswith("V")}
    assert all(plan.slots[i].kind is SlotKind.DYNAMIC for i in tasks.shared)


@either_plan
@each_grouping
@pytest.mark.parametrize("seed", drawn(range(25), 8))
def test_tasks_share_only_values_that_several_of_them_touch(seed, grouping, planned):
    plan = plan_of(seeded(seed, 30), planned=planned)
    tasks = arrange(plan, GROUPINGS[grouping](seed))
    assert_shared(plan, tasks, Walk(plan, tasks, seed).source)


def named(plan: Plan, name: str) -> int:
    (found,) = [i for i, slot in enumerate(plan.slots) if slot.name == name]
    return found


def test_tasks_release_a_shared_value_with_its_last_reader():
    #              /-> b --\
    #   x -> a ---+         +-> y        c is read by one task, a by two
    #              \-> c --/
    text = "g (float[N] x) => (float[N] y) { a = Exp(x) b = Sin(a) c = Neg(a) y = Add(b, c) }"
    plan = of_text(text)
    tasks = arrange(plan, Grouping())
    a, b, c = (named(plan, name) for name in "abc")
    assert tasks.readers == {a: 2}
    assert [slots for slots in tasks.counted if slots] == [(a,), (a,)]
    assert sorted(i for slots in tasks.releases for i in slots) == sorted([b, c])


def test_values_of_one_task_alone_are_its_own():
    text = "g (float[N] x) => (float[N] y) { a = Exp(x) b = Sin(a) y = Neg(b) }"
    plan = of_text(text)
    tasks = arrange(plan, AllInOne())
    assert tasks.shared == {*plan.inputs, *plan.outputs}
    assert not any(tasks.releases)
    assert not any(tasks.counted)


def test_tasks_never_release_an_output_of_the_plan():
    text = "g (float[N] x) => (float[N] a, float[N] y) { a = Exp(x) b = Sin(a) y = Add(a, b) }"
    plan = of_text(text)
    tasks = arrange(plan, Grouping())
    released = {i for slots in (*tasks.releases, *tasks.counted) for i in slots}
    assert released == {named(plan, "b")}


LOOP = """g (float[N] x, int64 n) => (float[N] y) {
    a = Exp(x)
    r = Loop (n, , x) <body = l (int64 i, bool c, float[N] v) => (bool d, float[N] w)
        { d = Identity(c) s = Add(v, a) w = Neg(s) }>
    y = Add(r, a) }"""


def test_captured_value_of_a_body_is_read_by_the_task_of_the_loop():
    #   a -> Loop(a) -> y(a)   the tasks of the body do not count: they run again and again
    plan = of_text(LOOP)
    tasks = arrange(plan, Grouping())
    a = named(plan, "a")
    assert tasks.readers[a] == 2
    (loop,) = [t for t, task in enumerate(tasks.tasks) if task.blocks]
    assert a in tasks.counted[loop]
    assert all(a not in tasks.counted[t] for k in tasks.tasks[loop].blocks for t in tasks.blocks[k])


def test_a_loop_that_is_not_expanded_is_one_task():
    plan = of_text(LOOP)
    tasks = arrange(plan, Whole())
    assert len(tasks.tasks) == 3
    assert len(tasks.blocks) == 1
    assert sorted(step.node.op.name for task in tasks.tasks for step in task.steps) == [
        "Add",
        "Exp",
        "Loop",
    ]


def test_a_branch_without_steps_is_a_block_without_tasks():
    text = """g (float[2] x, bool c) => (float[2] y) {
        y = If (c) <then_branch = t () => (float[2] p) { p = Exp(x) },
                    else_branch = e () => (float[2] q) { q = Identity(x) }> }"""
    plan = of_text(text)
    tasks = arrange(plan, Grouping())
    assert tasks.blocks == ((0,), (1,), ())
    assert tasks.parent == (-1, 0, 0)


def test_a_plan_without_steps_has_no_tasks():
    plan = of_text("g (float[2] x) => (float[2] y) { y = Identity(x) }")
    tasks = arrange(plan, Grouping())
    assert tasks.tasks == ()
    assert tasks.blocks == ((),)
    assert Walk(plan, tasks, 0).run([np.ones(2, np.float32)])[0].tolist() == [1, 1]


def test_tasks_of_nested_blocks_have_their_own_block():
    #   Loop { If { Neg | Loop { Add } } }
    text = """g (float[2] x, int64 n, bool z) => (float[2] y) {
        y = Loop (n, , x) <body = l (int64 i, bool c, float[2] v) => (bool d, float[2] w) {
            d = Identity(c)
            w = If (z) <then_branch = t () => (float[2] p) { p = Neg(v) },
                else_branch = e () => (float[2] q)
                { q = Loop (n, , v) <body = m (int64 j, bool f, float[2] a) => (bool h, float[2] b)
                    { h = Identity(f) b = Add(a, a) }> }> }> }"""
    plan = of_text(text)
    tasks = arrange(plan, Grouping())
    names = [task.steps[0].node.op.name for task in tasks.tasks]
    around = [tasks.parent[task.block] for task in tasks.tasks]
    path = {name: names[around[i]] if around[i] >= 0 else "" for i, name in enumerate(names)}
    assert path["Neg"] == "If"
    assert path["Add"] == "Loop"
    walk = Walk(plan, tasks, 0)
    x = np.array([1, 2], np.float32)
    for n in range(4):
        up = x * np.float32(2) ** (n * n)
        assert_equal(walk.run([x, np.array(n), np.array(False)])[0], up)
        assert_equal(walk.run([x, np.array(n), np.array(True)])[0], -x if n % 2 else x)


def test_effects_run_in_the_order_of_the_graph_in_whatever_tasks():
    #   A, B and C read nothing of each other, but each has an effect
    x = Value("x", TensorType(np.dtype(np.float32), (4,)))
    op = replace(find("Neg"), pure=False)
    outputs = [Value(name) for name in "abc"]
    nodes = [Node(op, [x], [value], name=value.name.upper()) for value in outputs]
    graph = Graph([x], outputs, nodes, "noisy")
    order_effects(graph)
    tasks = arrange(plan_of(graph), Grouping())
    assert [task.steps[0].node.name for task in tasks.tasks] == ["A", "B", "C"]
    assert tasks.waits == (0, 1, 1)


def run_alone(plan: Plan, tasks: Tasks, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
    host = NumpyBackend()
    program = write_program(plan, plan_arena_for_tasks(plan, tasks), tasks=tasks)
    executor = ParallelExecutor(program, [host], DEFAULT_LIMITS, TaskWorkers([Queue(1, None)], 0.0))
    return executor.run(inputs, Control())


class Shuffled(Grouping):
    """All steps a task, in an order in which they can run, but not the plan's."""

    def groups(self, dag, steps):
        return [[0, 2, 1, 3]]


def test_steps_of_a_task_may_run_in_any_order_in_which_they_can():
    #   x -> a -> b --\
    #    \           +-> y      c may take the memory of a, where it runs after b
    #     \-> c -----/
    plan = of_text(
        "g (float[64] x) => (float[64] y) { a = Exp(x) b = ReduceMax(a) c = Sin(x) y = Add(b, c) }"
    )
    x = np.linspace(0, 1, 64, dtype=np.float32)
    wanted = np.exp(x).max() + np.sin(x)
    for grouping in (AllInOne(), Shuffled()):
        (y,) = run_alone(plan, arrange(plan, grouping), x)
        np.testing.assert_array_equal(y, wanted)
