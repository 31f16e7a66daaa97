"""The linear executor: order and memory fixed at compile time, run as generated Python.

Every run has an arena to itself, taken from a pool; one that finds the pool empty makes another, so
that the pool grows to as many arenas as there were runs at once.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock import codegen
from penstock.backends.base import Backend
from penstock.binding import Binder
from penstock.errors import InternalError, PenstockError, RunError
from penstock.executors.base import Control
from penstock.limits import Limits
from penstock.liveness import lay_out
from penstock.plan import Plan, Step
from penstock.types import ShapeError

Run = Callable[..., tuple[Any, ...]]


class LinearExecutor:
    """Runs a plan as one generated function, ``source``."""

    def __init__(self, plan: Plan, host: Backend, limits: Limits) -> None:
        self.plan = plan
        self.layout = lay_out(plan)
        self._host = host
        binder = self._binder()
        self._program = codegen.generate(plan, self.layout, binder, limits.max_iterations)
        self._pool: list[Run] = [self._enter(binder)]
        self._arenas = 1

    @property
    def source(self) -> str:
        """The generated program."""
        return self._program.source

    @property
    def arena_bytes(self) -> int:
        """Bytes of one arena."""
        return self.layout.size

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        return self._arenas * self.layout.size

    def run(self, inputs: Sequence[Any], control: Control) -> tuple[Any, ...]:
        try:
            run = self._pool.pop()
        except IndexError:
            run = self._another()
        try:
            return run(control, *inputs)
        except Exception as error:
            raise self._explained(error) from error
        finally:
            self._pool.append(run)

    def trim(self) -> None:
        """Give up the arenas that no run holds."""
        while self._pool:
            self._pool.pop()
            self._arenas -= 1

    def _binder(self) -> Binder:
        return Binder(self.plan, self.layout, self._host.allocate(self.layout.size))

    def _another(self) -> Run:
        self._arenas += 1
        return self._enter(self._binder())

    def _enter(self, binder: Binder) -> Run:
        """The program in an arena, with NumPy's floating-point warnings off.

        NumPy keeps that setting in a context variable. Entering a context made once costs a
        twentieth of ``np.errstate``, and leaves the caller's setting alone.
        """
        function = codegen.instantiate(self._program, binder)
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        enter = context.run

        def run(*arguments: Any) -> tuple[Any, ...]:
            return enter(function, *arguments)

        return run

    def _explained(self, error: Exception) -> Exception:
        """The error with the node at fault: its origin and the shapes of its inputs."""
        if isinstance(error, PenstockError):
            return error
        step, names = self._where(error)
        if step is None:
            return InternalError(f"the run failed outside of any node: {error!r}")
        node = step.node
        shapes = ", ".join(
            "none"
            if i < 0
            else f"{self.plan.slots[i].name}: {names.get(i, self.plan.slots[i].type)}"
            for i in step.inputs
        )
        where = f"{node.op.name} ({node.origin or node.name}) with inputs ({shapes})"
        known = isinstance(error, ShapeError | MemoryError | ValueError | IndexError | TypeError)
        kind = RunError if known or not isinstance(error, AssertionError) else InternalError
        return kind(f"{where}: {error}" if isinstance(error, ShapeError) else f"{where}: {error!r}")

    def _where(self, error: Exception) -> tuple[Step | None, dict[int, str]]:
        """The step that raised, and what its inputs were."""
        trace = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            if frame.f_code.co_filename == self._program.filename:
                step = self._program.steps[trace.tb_lineno - 1]
                found = {}
                for i in step.inputs if step is not None else ():
                    value = frame.f_locals.get(f"v{i}")
                    if isinstance(value, np.ndarray):
                        found[i] = f"{value.dtype}{list(value.shape)}"
                return step, found
            trace = trace.tb_next
        return None, {}
