"""The linear executor: order and memory fixed at compile time, run as generated Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from penstock.backends.base import Backend
from penstock.codegen.writer import Program, write_program
from penstock.executors.arenas import Arenas
from penstock.executors.base import (
    CompiledExecutor,
    Done,
    PerThreadCount,
    run_inline,
    share_of,
    silent,
)
from penstock.executors.control import Control
from penstock.executors.errors import raise_explained
from penstock.limits import Limits
from penstock.plan.arena_layout import ArenaPlan, plan_arena
from penstock.plan.plan import Plan

Run = Callable[..., tuple[Any, ...]]


def _bind_run(program: Program, memory: np.ndarray) -> Run:
    """The program in an arena, with NumPy's floating-point warnings off."""
    (function,) = program.bind(memory)
    return partial(silent().run, function)


class LinearExecutor(CompiledExecutor):
    """Runs a plan as one generated function. Arenas are of the first of ``hosts``, the backends of
    the host's memory, and runs at the same time share the threads of their kernels. Observers know
    it by its ``name``."""

    tasks = None

    def __init__(
        self,
        plan: Plan,
        hosts: Sequence[Backend],
        limits: Limits,
        *,
        threads: int | None = None,
        arena_plan: ArenaPlan | None = None,
        name: str = "linear",
        observed: bool = False,
    ) -> None:
        self.name = name
        self.plan = plan
        self.watched = observed
        self.arena_plan = arena_plan or plan_arena(plan)
        self._make = partial(LinearExecutor, plan, hosts, limits, threads=threads, name=name)
        self._share = share_of(plan, hosts, threads=threads)
        self._program = write_program(
            plan, self.arena_plan, limits.max_iterations, observed=observed
        )
        self._arenas: Arenas[PerThreadCount[Run]] = Arenas(
            self.arena_plan.size,
            hosts[0],
            limits,
            partial(PerThreadCount, partial(_bind_run, self._program)),
        )
        # The first arena is made now, so that errors show when the plan is compiled.
        arena = self._arenas.make()
        with self._share as now:
            arena[now]
        self._arenas.give(arena)

    def observed(self) -> LinearExecutor:
        return self._make(arena_plan=self.arena_plan, observed=True)

    def run(self, inputs: Sequence[Any], control: Control) -> tuple[Any, ...]:
        arenas = self._arenas
        try:
            arena = arenas.free.pop()
        except IndexError:
            arena = arenas.take(control)
        try:
            if self.watched:
                control.observer.allocation(control.run, arenas.size)
            if self._share.idle:
                return arena[1](control, *inputs)
            with self._share as threads:
                run, pace = arena[threads], self._share.tuner
                if pace is None:
                    return run(control, *inputs)
                start = perf_counter()
                outputs = run(control, *inputs)
                pace.took(threads, perf_counter() - start)
                return outputs
        except Exception as error:
            raise_explained(error, self._program, self.plan)
        finally:
            arenas.give(arena)
            if self.watched:
                control.observer.allocation(control.run, -arenas.size)

    def run_async(self, inputs: Sequence[Any], control: Control, done: Done) -> None:
        run_inline(self, inputs, control, done)
