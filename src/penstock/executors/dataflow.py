"""The dataflow executor: what runs next is decided during the run, one step at a time.

Nothing is planned: each value is allocated by its step and goes with its last reader. So it runs
graphs of which nothing is known before, and each step by itself can be watched and measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.backends.base import Backend
from penstock.codegen.writer import Program
from penstock.executors.base import CompiledExecutor, InlineExecutor, PerThreadCount, outputs_of
from penstock.executors.control import Control
from penstock.executors.errors import raise_explained
from penstock.executors.task_loop import Flow, Queue, TaskRun


class DataflowExecutor(InlineExecutor, CompiledExecutor):
    """Runs a program of dynamic values task by task, the most urgent of those that are ready."""

    arena_bytes = 0

    def __init__(
        self, program: Program, hosts: Sequence[Backend], threads: int | None = None
    ) -> None:
        super().__init__(program, "dataflow", hosts, threads)
        self._arguments = hosts, threads
        tasks = program.tasks
        assert tasks is not None
        worthwhile = [False] * len(tasks.tasks)
        self._flow = Flow(tasks, [Queue(1, None)], worthwhile, len(program.plan.slots))
        # Without an arena, all runs can share the functions.
        self._bound = PerThreadCount(program.bind, np.empty(0, np.uint8))
        with self._share as now:
            self._bound[now]

    def observed(self) -> DataflowExecutor:
        return DataflowExecutor(self._program.with_observers(), *self._arguments)

    def trim(self) -> None:
        """Do nothing: there are no arenas to give up."""

    def run(self, inputs: Sequence[Any], control: Control) -> tuple[Any, ...]:
        V = [None] * self._flow.slots
        for slot, value in zip(self.plan.inputs, inputs, strict=True):
            V[slot] = value
        control = self._counting(control.own())
        try:
            with self._share as threads:
                functions = self._bound[threads]
                TaskRun(self._flow, functions, V, control, observe=self._program.observed).run()
            return outputs_of(functions[-1], V, control)
        except Exception as error:
            raise_explained(error, self._program)
