"""The dataflow executor: what runs next is decided during the run, one step at a time.

Nothing is planned: each value is allocated by its step and goes with its last reader. So it runs
graphs of which nothing is known before, and each step by itself can be watched and measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.backends.base import Backend
from penstock.codegen.writer import write_program
from penstock.executors.base import CompiledExecutor, Done, PerThreadCount, run_inline, share_of
from penstock.executors.control import Control
from penstock.executors.errors import raise_explained
from penstock.executors.task_loop import Flow, Queue, TaskRun
from penstock.limits import Limits
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.grouping import OneByOne
from penstock.plan.plan import Plan
from penstock.plan.tasks import arrange


class DataflowExecutor(CompiledExecutor):
    """Runs a plan of dynamic values step by step, the most urgent of those that are ready."""

    name = "dataflow"

    def __init__(
        self,
        plan: Plan,
        hosts: Sequence[Backend],
        limits: Limits,
        *,
        threads: int | None = None,
        observed: bool = False,
    ) -> None:
        self.plan = plan
        self.watched = observed
        self._make = partial(DataflowExecutor, plan, hosts, limits, threads=threads)
        self._share = share_of(plan, hosts, threads=threads)
        self.arena_plan = ArenaPlan(tuple(range(len(plan.steps))), {}, {}, 0, 0)
        self.tasks = tasks = arrange(plan, OneByOne())
        worthwhile = [False] * len(tasks.tasks)
        self._flow = Flow(tasks, [Queue(1, None)], worthwhile, len(plan.slots))
        self._program = write_program(
            plan, self.arena_plan, limits.max_iterations, tasks=tasks, observed=observed
        )
        # Without an arena, all runs can share the functions.
        self._bound = PerThreadCount(self._program.bind, np.empty(0, np.uint8))
        with self._share as now:
            self._bound[now]

    def observed(self) -> DataflowExecutor:
        return self._make(observed=True)

    def run(self, inputs: Sequence[Any], control: Control) -> tuple[Any, ...]:
        V = [None] * self._flow.slots
        for slot, value in zip(self.plan.inputs, inputs, strict=True):
            V[slot] = value
        control = control.own()
        try:
            with self._share as threads:
                *functions, results = self._bound[threads]
                TaskRun(self._flow, functions, V, control, observe=self.watched).run()
            return results(V)
        except Exception as error:
            raise_explained(error, self._program, self.plan)

    def run_async(self, inputs: Sequence[Any], control: Control, done: Done) -> None:
        run_inline(self, inputs, control, done)
