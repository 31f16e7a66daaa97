"""Tasks built by hand from plain functions, and points where they meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.algorithms.dag import Dag
from penstock.executors.control import Control
from penstock.executors.task_loop import Flow, Queue, TaskRun
from penstock.host.threads import Workers
from penstock.ir.graph import Node
from penstock.ops import find
from penstock.plan.plan import Step
from penstock.plan.tasks import Task, Tasks
from tests.support.timing import SOON, wait_until


def drawn(
    n: int,
    edges: Iterable[tuple[int, int]] = (),
    *,
    blocks: Mapping[int, Sequence[Sequence[int]]] | None = None,
    queues: Mapping[int, int] | None = None,
    reads: Mapping[int, Sequence[int]] | None = None,
) -> Tasks:
    """Tasks 0 to n - 1, with ``edges`` between those of one block.

    ``blocks[t]`` are the tasks of each block of the expanded task t, ``queues[t]`` is the queue of
    task t, if not 0, and ``reads[slot]`` are the tasks that read a slot.
    """
    parent, members, of = [-1], [list(range(n))], [0] * n
    owned: dict[int, tuple[int, ...]] = {}
    for t, inner in (blocks or {}).items():
        owned[t] = tuple(range(len(parent), len(parent) + len(inner)))
        for each in inner:
            for i in each:
                members[of[i]].remove(i)
                of[i] = len(parent)
            parent.append(t)
            members.append(list(each))
    dag = Dag(n, edges)
    counted: list[list[int]] = [[] for _ in range(n)]
    for slot, readers in (reads or {}).items():
        for t in readers:
            counted[t].append(slot)
    steps = [Step(Node(find("Neg"), [], [], name=f"n{t}"), None, (), ()) for t in range(n)]
    return Tasks(
        tuple(
            Task((steps[t],), of[t], owned.get(t, ()), (queues or {}).get(t, 0), 1.0)
            for t in range(n)
        ),
        tuple(len(before) for before in dag.pred),
        dag.succ,
        tuple(map(tuple, members)),
        tuple(parent),
        frozenset(reads or ()),
        ((),) * n,
        tuple(map(tuple, counted)),
        {slot: len(readers) for slot, readers in (reads or {}).items()},
    )


def begin(
    tasks: Tasks,
    functions: Mapping[int, Callable[..., Any]],
    queues: Sequence[Queue] = (Queue(1, None),),
    *,
    worthwhile: Iterable[int] | None = None,
    control: Control | None = None,
    values: list[Any] | None = None,
    on_end: Callable[[], None] | None = None,
    **options: Any,
) -> TaskRun:
    """A run of ``tasks``: those without a function do nothing; all are worth a worker by default."""
    n = len(tasks.tasks)
    worth = range(n) if worthwhile is None else set(worthwhile)
    values = [None] * 8 if values is None else values
    flow = Flow(tasks, queues, [t in worth for t in range(n)], len(values))
    given = [functions.get(t, lambda control, V: None) for t in range(n)]
    run = TaskRun(flow, given, values, control or Control(), **options)
    run.on_end = on_end
    return run


def on(thread: threading.Thread) -> threading.Thread:
    thread.start()
    return thread


def ended(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in threads)


def idle(*pools: Workers) -> None:
    """Return when all jobs are done and all threads idle."""
    wait_until(lambda: all(pool._free == pool.threads for pool in pools))


class Log:
    """The order in which tasks ran."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def of(self, *tasks: int) -> dict[int, Callable[..., None]]:
        """Functions for these tasks, which note that they ran."""
        return {t: partial(self.note, t) for t in tasks}

    def note(self, t: int, control: Control, V: list[Any]) -> None:
        self.order.append(t)


class Meeting:
    """A point that ``parties`` tasks must reach at once; ``threads`` are the names of theirs."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties)
        self.threads: set[str] = set()

    def __call__(self, control: Control, V: list[Any]) -> None:
        self.threads.add(threading.current_thread().name)
        self.barrier.wait(SOON)


def turning(times: int, block: int = 1) -> Callable[..., Iterator[int]]:
    def generate(control: Control, V: list[Any]) -> Iterator[int]:
        for _ in range(times):
            if control.stopped:
                control.stop()
            yield block

    return generate


class BrokenError(Exception):
    """The error of a failing task."""


def failing(error: BaseException, after: threading.Event | None = None) -> Callable[..., None]:
    def fail(control: Control, V: list[Any]) -> None:
        assert after is None or after.wait(SOON)
        raise error

    return fail
