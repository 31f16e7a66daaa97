"""Orders and releases of tasks that the checker of plans refuses."""

from __future__ import annotations

from penstock.core.records import replace as changed
from penstock.plan import check_tasks
from penstock.plan.check import check_schedule
from penstock.plan.check_tasks import TaskOrder
from penstock.plan.plan import Step
from penstock.plan.tasks import Signals
from tests.support.changed_plans import (
    CHAIN,
    as_tasks,
    refused,
    replaced_entry,
    replaced_offset,
    slot,
)


def test_task_that_does_not_wait_for_what_it_reads_is_refused() -> None:
    plan, arena, tasks = as_tasks(CHAIN)
    for t, consumers in enumerate(tasks.consumers):
        if consumers:
            without = (*tasks.consumers[:t], (), *tasks.consumers[t + 1 :])
            refused(
                plan, arena, "before|never written|wait counts", changed(tasks, consumers=without)
            )


def test_tasks_that_wait_for_one_another_are_refused() -> None:
    plan, arena, tasks = as_tasks(CHAIN)
    circle = tuple([tuple({*c, 0}) for c in tasks.consumers])
    refused(plan, arena, "the wait counts of tasks differ", changed(tasks, consumers=circle))
    waits = tuple([sum(t in consumers for consumers in circle) for t in range(len(circle))])
    refused(plan, arena, "form a cycle", changed(tasks, consumers=circle, waits=waits))


def test_signal_that_never_comes_is_refused() -> None:
    plan, arena, tasks = as_tasks(CHAIN)
    signals = Signals({plan.steps[1]: (0,)}, {}, ((0, 1),))
    refused(plan, arena, "signal that no step emits", changed(tasks, signals=signals))


def test_tasks_without_an_order_that_share_memory_are_refused() -> None:
    text = "g (float[8] x, float[8, 8] w) => (float[8] y) { a = MatMul(w, x) b = MatMul(a, w) c = MatMul(w, a) y = Add(b, c) }"
    plan, arena, tasks = as_tasks(text)
    check_schedule(plan, arena, tasks)
    b, c = slot(plan, "b"), slot(plan, "c")
    refused(
        plan, replaced_offset(arena, c, arena.offsets[b]), "share arena memory|never written", tasks
    )


def test_check_of_deep_plans_asks_for_orders_in_proportion_to_steps(monkeypatch) -> None:
    asked: list[object] = []

    class Counted(TaskOrder):
        def precedes(self, a: Step, b: Step) -> bool:
            asked.append(a)
            return super().precedes(a, b)

    monkeypatch.setattr(check_tasks, "TaskOrder", Counted)
    counts = []
    for depth in (50, 100):
        body = " ".join(f"v{i + 1} = MatMul(v{i}, v{i})" for i in range(depth))
        text = f"g (float[8, 8] v0) => (float[8, 8] v{depth}) {{ {body} }}"
        plan, arena, tasks = as_tasks(text)
        check_schedule(plan, arena, tasks)
        counts.append(len(asked))
        asked.clear()
        first, last = slot(plan, "v2"), slot(plan, f"v{depth - 2}")
        assert arena.offsets[first] == arena.offsets[last]
    assert 0 < counts[1] < 2.5 * counts[0]


def test_tasks_that_say_other_than_they_do_are_refused() -> None:
    plan, arena, tasks = as_tasks(CHAIN)
    assert tasks.waits[1]
    for reason, change in {
        "the wait counts of tasks differ": {
            "waits": replaced_entry(tasks.waits, 1, tasks.waits[1] + 1)
        },
        "not in exactly one block": {"blocks": (tasks.blocks[0][1:],)},
        "names a parent task": {"parent": (0,)},
        "tasks use other shared slots": {"shared": tasks.shared ^ {plan.inputs[0]}},
    }.items():
        refused(plan, arena, reason, changed(tasks, **change))


def test_value_that_is_released_before_its_last_reader_is_refused() -> None:
    text = """g (string[4] s) => (string[4] y, string[4] z) {
        a = StringConcat(s, s) b = StringConcat(a, s) y = StringConcat(a, b) z = StringConcat(b, b) }"""
    plan, arena, tasks = as_tasks(text)
    check_schedule(plan, arena, tasks)
    (i, count) = next(iter(tasks.readers.items()))
    refused(
        plan, arena, "not released exactly once", changed(tasks, readers={**tasks.readers, i: 1})
    )
    refused(plan, arena, "not released exactly once", changed(tasks, readers={}))
    t = next(t for t, slots in enumerate(tasks.counted) if i in slots)
    early = replaced_entry(tasks.counted, t, tuple([k for k in tasks.counted[t] if k != i]))
    refused(plan, arena, "not released exactly once|before", changed(tasks, counted=early))
    (first, *_) = tasks.blocks[0]
    given_back = replaced_entry(tasks.releases, first, (plan.outputs[0],))
    refused(plan, arena, "not released exactly once", changed(tasks, releases=given_back))
    assert count > 1
