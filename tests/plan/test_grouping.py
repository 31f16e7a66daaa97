"""Which steps make a task: as many as are worth a worker, and only where that wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from penstock.analysis.type_inference import infer_types
from penstock.backends.numpy import NumpyBackend
from penstock.core.types import BOOL, FLOAT32, INT64, TensorType
from penstock.host.threads import OVERHEADS
from penstock.ir.graph import Graph, Node, Value, clone
from penstock.ops import find
from penstock.passes.pipeline import optimize
from penstock.plan.arrangement import arrange
from penstock.plan.builder import compile_plan
from penstock.plan.grouping import ClusteredGrouping, trip_count
from penstock.plan.plan import Plan, Step, walk
from penstock.plan.tasks import Grouping, Tasks
from tests.support.random_graphs import seeded

KIND = TensorType(FLOAT32, (4,))

# What the steps of these plans take, by the first letter of their names.
COST = {"H": 1e-3, "M": OVERHEADS.hand_over_s / 2, "T": 1e-6}


def seconds(step: Step) -> float:
    return COST[step.node.name[0]]


Nodes = Mapping[str, str | Callable[[Mapping[str, Value]], Node]]


def add(known: dict[str, Value], drawn: Nodes) -> list[Node]:
    """Nodes by name, each with the names of what it reads; each makes a value of its name."""
    nodes = []
    for name, reads in drawn.items():
        if callable(reads):
            node = reads(known)
        else:
            inputs = [known[read] for read in reads.split()]
            op = find("Neg" if len(inputs) == 1 else "Sum")
            node = Node(op, inputs, [Value(name, KIND)], name=name)
        known[name] = node.outputs[0]
        nodes.append(node)
    return nodes


def inputs() -> dict[str, Value]:
    kinds = {"x": KIND, "n": TensorType(INT64, ()), "c": TensorType(BOOL, ())}
    return {name: Value(name, kind) for name, kind in kinds.items()}


def plan_of(drawn: Nodes) -> Plan:
    """The plan of a graph of these nodes, whose output is the last one's."""
    known = inputs()
    ports = list(known.values())
    nodes = add(known, drawn)
    graph = Graph(ports, nodes[-1].outputs[:1], nodes, "drawn")
    infer_types(graph)
    return compile_plan(graph, [NumpyBackend()])


def loop(drawn: Nodes, trip_count: int | str = "n") -> Callable[[Mapping[str, Value]], Node]:
    """A Loop over x, whose body has these nodes; in it, v is the value it carries."""

    def made(known: Mapping[str, Value]) -> Node:
        i, c = Value("i", TensorType(INT64, ())), Value("go", TensorType(BOOL, ()))
        v = Value("v", KIND)
        nodes = add({**known, "v": v}, drawn)
        body = Graph([i, c, v], [c, nodes[-1].outputs[0]], nodes, "body")
        limit = (
            known[trip_count]
            if isinstance(trip_count, str)
            else Value("limit", const=np.array(trip_count))
        )
        result = Value("r", KIND)
        return Node(find("Loop"), [limit, None, known["x"]], [result], {"body": body}, name="L")

    return made


def branch(then: Nodes, other: Nodes) -> Callable[[Mapping[str, Value]], Node]:
    """An If on c, whose branches have these nodes."""

    def made(known: Mapping[str, Value]) -> Node:
        graphs = []
        for name, drawn in (("then", then), ("else", other)):
            nodes = add(dict(known), drawn)
            graphs.append(Graph([], nodes[-1].outputs[:1], nodes, name))
        attrs = {"then_branch": graphs[0], "else_branch": graphs[1]}
        return Node(find("If"), [known["c"]], [Value("z", KIND)], attrs, name="I")

    return made


def wide(n: int, letter: str, source: str = "x") -> dict[str, str]:
    """
           /-> 0 ------\\
    source +-> ... -----+-> T
           \\-> n - 1 --/
    """
    names = [f"{letter}{i}" for i in range(n)]
    return {**dict.fromkeys(names, source), "T": " ".join(names)}


def clustered(plan: Plan, workers: int = 2, **options) -> ClusteredGrouping:
    return ClusteredGrouping(plan, seconds, [workers, 1], **options)


def members(tasks: Tasks, block: int = 0) -> list[set[str]]:
    return [{step.node.name for step in tasks.tasks[t].steps} for t in tasks.blocks[block]]


# Without blocks.


def test_heavy_branches_are_tasks():
    plan = plan_of(wide(6, "H"))
    grouping = clustered(plan)
    tasks = arrange(plan, grouping)
    assert len(tasks.tasks) >= 6
    assert sum(any(name.startswith("H") for name in each) for each in members(tasks)) == 6
    assert grouping.serial == pytest.approx(6e-3, rel=0.01)
    assert 3e-3 < grouping.makespan < 3.2e-3
    assert grouping.promising


@pytest.mark.parametrize("workers", [2, 3, 4, 6, 8])
def test_more_workers_take_less(workers):
    grouping = clustered(plan_of(wide(24, "H")), workers)
    assert 24e-3 / workers < grouping.makespan < 24e-3 / workers + 0.3e-3 + COST["H"] / 2


@pytest.mark.parametrize("letter", COST)
def test_a_chain_is_one_task(letter):
    #   x -> 0 -> 1 -> ... -> 19
    names = ["x", *(f"{letter}{i}" for i in range(20))]
    plan = plan_of(dict(zip(names[1:], names, strict=False)))
    grouping = clustered(plan, 8)
    assert len(arrange(plan, grouping).tasks) == 1
    assert grouping.makespan == grouping.serial
    assert not grouping.promising


def test_two_chains_that_join_are_two_tasks_and_a_join():
    #        /-> H0 -> H2 --\
    #     x +                +-> T
    #        \-> H1 -> H3 --/
    plan = plan_of({"H0": "x", "H1": "x", "H2": "H0", "H3": "H1", "T": "H2 H3"})
    assert members(arrange(plan, clustered(plan))) == [{"H0", "H2"}, {"H1", "H3"}, {"T"}]


def test_many_tiny_steps_are_one_task():
    plan = plan_of(wide(50, "T"))
    grouping = clustered(plan, 8)
    assert len(arrange(plan, grouping).tasks) == 1
    assert grouping.makespan == grouping.serial
    assert not grouping.promising


def test_many_small_steps_are_as_many_tasks_as_are_worth_it():
    # each half of what it takes to hand it over, all together a hundred times that
    plan = plan_of(wide(200, "M"))
    grouping = clustered(plan)
    tasks = arrange(plan, grouping)
    assert 2 <= len(tasks.tasks) <= 100
    assert grouping.makespan < 0.75 * grouping.serial


def test_a_tiny_step_beside_a_heavy_one_is_no_task():
    #   x -> H -> T0
    #   x -> T1
    plan = plan_of({"H": "x", "T1": "x", "T0": "H T1"})
    assert len(arrange(plan, clustered(plan)).tasks) == 1


@pytest.mark.parametrize("n", [1, 6, 50])
@pytest.mark.parametrize("letter", COST)
def test_one_worker_has_one_task(letter, n):
    plan = plan_of(wide(n, letter))
    grouping = clustered(plan, 1)
    assert len(arrange(plan, grouping).tasks) == 1
    assert grouping.makespan == grouping.serial
    assert not grouping.promising


def test_python_itself_runs_on_one_worker_at_a_time():
    plan = plan_of(wide(400, "H"))
    grouping = ClusteredGrouping(plan, lambda step: 1e-5, [64])
    grouping.grains = [1e-5]
    assert grouping.makespan >= 401 * OVERHEADS.python_s


def test_a_plan_without_steps():
    x = Value("x", KIND)
    plan = compile_plan(Graph([x], [x], [], "empty"), [NumpyBackend()])
    grouping = clustered(plan)
    assert arrange(plan, grouping).tasks == ()
    assert grouping.serial == grouping.makespan == 0
    assert not grouping.promising


# Blocks.


def test_a_loop_with_a_heavy_parallel_body_has_tasks_of_its_own():
    #   L { v -> H0 ... H5 -> T } -> T
    plan = plan_of({"L": loop(wide(6, "H", "v")), "T": "L"})
    grouping = clustered(plan)
    tasks = arrange(plan, grouping)
    assert grouping.expands(plan.steps[0])
    assert len(tasks.blocks) == 2
    assert len(tasks.blocks[1]) >= 6


@pytest.mark.parametrize("letter", COST)
def test_a_loop_with_a_body_that_is_a_chain_has_none(letter):
    body = {f"{letter}0": "v", f"{letter}1": f"{letter}0"}
    plan = plan_of({"L": loop(body), "T": "L"})
    tasks = arrange(plan, clustered(plan, 8))
    assert not any(task.blocks for task in tasks.tasks)


def test_a_loop_with_a_tiny_body_has_none():
    plan = plan_of({"L": loop(wide(20, "T", "v")), "T": "L"})
    tasks = arrange(plan, clustered(plan, 8))
    assert not any(task.blocks for task in tasks.tasks)


def test_a_loop_that_turns_a_thousand_times_is_heavy():
    #        /-> L { T0 } --\
    #     x +                +-> T
    #        \-> H ---------/
    plan = plan_of({"L": loop({"T0": "v"}, trip_count=1000), "H": "x", "T": "L H"})
    grouping = clustered(plan)
    assert grouping.seconds(plan.steps[0]) == pytest.approx(1e-3)
    assert trip_count(plan, plan.steps[0]) == 1000
    assert members(arrange(plan, grouping)) == [{"L"}, {"H"}, {"T"}]


def test_cost_of_an_if_is_that_of_its_longer_branch():
    plan = plan_of({"I": branch({"H0": "x", "H1": "H0"}, {"T0": "x"}), "T": "I"})
    grouping = clustered(plan)
    assert grouping.seconds(plan.steps[0]) == pytest.approx(2e-3)
    assert len(arrange(plan, grouping).tasks) == 1


def test_if_with_one_heavy_parallel_branch_has_tasks_of_its_own():
    plan = plan_of({"I": branch({"T0": "x"}, wide(6, "H")), "T": "I"})
    tasks = arrange(plan, clustered(plan))
    (expanded,) = [task for task in tasks.tasks if task.blocks]
    assert [len(tasks.blocks[k]) >= 6 for k in expanded.blocks] == [False, True]


WINS = {
    "a loop": {"L": loop(wide(6, "H", "v")), "T": "L"},
    "a loop alone": {"L": loop(wide(6, "H", "v"))},
    "a branch": {"I": branch(wide(6, "H"), wide(6, "H")), "T": "I"},
    "a branch alone": {"I": branch(wide(6, "H"), wide(6, "H"))},
    "a loop in a loop": {"L": loop({"L": loop(wide(6, "H", "v"))}), "T": "L"},
    "a branch in a loop": {"L": loop({"I": branch(wide(6, "H", "v"), {"T": "v"})}), "T": "L"},
}


@pytest.mark.parametrize("drawn", WINS.values(), ids=list(WINS))
def test_grouping_counts_the_gain_of_blocks_for_the_plan(drawn):
    grouping = clustered(plan_of(drawn))
    assert grouping.makespan < 0.6 * grouping.serial
    assert grouping.promising


@pytest.mark.parametrize("drawn", list(WINS.values())[-2:], ids=list(WINS)[-2:])
def test_grouping_expands_the_blocks_around_a_block_that_gains(drawn):
    plan = plan_of(drawn)
    tasks = arrange(plan, clustered(plan))
    assert max(len(block) for block in tasks.blocks) >= 6


@pytest.mark.parametrize("drawn", list(WINS.values())[:4], ids=list(WINS)[:4])
def test_a_plan_never_takes_longer_than_one_step_after_the_other(drawn):
    grouping = clustered(plan_of(drawn))
    assert grouping.makespan <= grouping.serial


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("seed", range(60))
def test_random_plan_without_blocks_that_gain_is_not_expanded(seed, workers):
    graph = clone(seeded(seed, 40))
    optimize(graph)
    plan = compile_plan(graph, [NumpyBackend()])
    cost = {step: 10.0 ** -(3 + i * 7919 % 4) for i, step in enumerate(plan.walk())}
    grouping = ClusteredGrouping(plan, lambda step: cost[step], [workers])
    tasks = arrange(plan, grouping)
    assert sorted(id(s) for t in tasks.tasks for s in (t.steps if t.blocks else walk(t.steps))) == (
        sorted(map(id, plan.walk()))
    )
    if not any(task.blocks for task in tasks.tasks):
        assert grouping.makespan <= grouping.serial


def test_a_loop_that_never_begins_takes_no_time():
    plan = plan_of({"L": loop({"H": "v"}, trip_count=-5), "H0": "x", "H1": "x", "T": "L H0 H1"})
    grouping = clustered(plan)
    arrange(plan, grouping)
    assert grouping.seconds(plan.steps[0]) >= 0


def test_a_loop_of_no_end_is_no_more_than_very_long():
    plan = plan_of({"L": loop({"H": "v"}, trip_count=2**62), "H0": "x", "H1": "x", "T": "L H0 H1"})
    assert arrange(plan, clustered(plan)).tasks


# Other backends.


def on(plan: Plan, away: Sequence[str]) -> dict[str, int]:
    """Queues such that the steps of these names are on another backend."""
    for step in plan.walk():
        if step.node.name in away:
            object.__setattr__(step, "backend", "far")
    return {"far": 1}


def test_steps_of_two_backends_share_no_task():
    #   x -> T0 => T1 -> T2 => T3
    plan = plan_of({"T0": "x", "T1": "T0", "T2": "T1", "T3": "T2"})
    grouping = clustered(plan, queues=on(plan, ["T1", "T2"]))
    tasks = arrange(plan, grouping)
    assert members(tasks) == [{"T0"}, {"T1", "T2"}, {"T3"}]
    assert [task.queue for task in tasks.tasks] == [0, 1, 0]
    assert grouping.promising


def test_a_plan_of_another_backend_alone_is_one_task_of_its_queue():
    plan = plan_of({"T0": "x", "T1": "T0"})
    tasks = arrange(plan, clustered(plan, queues=on(plan, ["T0", "T1"])))
    assert [task.queue for task in tasks.tasks] == [1]


def test_a_block_with_a_step_of_another_backend_has_tasks_of_its_own():
    #   L { v -> T0 => T1 } -> T
    plan = plan_of({"L": loop({"T0": "v", "T1": "T0"}), "T": "L"})
    grouping = clustered(plan, queues=on(plan, ["T1"]))
    tasks = arrange(plan, grouping)
    (expanded,) = [task for task in tasks.tasks if task.blocks]
    assert expanded.queue == 0
    assert [tasks.tasks[t].queue for t in tasks.blocks[1]] == [0, 1]


def test_block_around_a_block_with_tasks_has_tasks_of_its_own():
    #   L { L { v -> T0 => T1 } } -> T
    inner = {"L": loop({"T0": "v", "T1": "T0"})}
    plan = plan_of({"L": loop(inner), "T": "L"})
    tasks = arrange(plan, clustered(plan, queues=on(plan, ["T1"])))
    assert [tasks.tasks[t].queue for t in tasks.blocks[2]] == [0, 1]


# One by one.


def test_one_by_one_every_step_is_a_task_and_all_blocks_have_their_own():
    plan = plan_of(
        {"L": loop(wide(3, "T", "v")), "I": branch({"T0": "x"}, {"T1": "x"}), "T": "L I"}
    )
    tasks = arrange(plan, Grouping())
    assert [len(task.steps) for task in tasks.tasks] == [1] * 9
    assert sorted(len(block) for block in tasks.blocks) == [1, 1, 3, 4]


def test_grouping_constants_are_in_the_order_that_the_rules_need():
    assert 0 < OVERHEADS.dispatch_s < OVERHEADS.hand_over_s
    assert 0 < OVERHEADS.python_s < OVERHEADS.hand_over_s
