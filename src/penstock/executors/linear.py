"""The linear executor: order and memory fixed at compile time, run as generated Python.

Every run has an arena to itself, taken from a pool; one that finds the pool empty makes another, so
that the pool grows to as many arenas as there were runs at once, and ``Limits.max_bytes`` allows.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock import codegen
from penstock.backends.base import Backend
from penstock.binding import Binder
from penstock.errors import InternalError, LimitExceeded, PenstockError, RunError
from penstock.executors.base import Control
from penstock.limits import Limits
from penstock.liveness import lay_out
from penstock.plan import Plan, Step
from penstock.types import ShapeError, TensorType

Run = Callable[..., tuple[Any, ...]]

# What a line of a program takes in memory, with its step, its slots and its graph.
_STEP_BYTES = 1500
# Runs at once that are not counted: no process has as many threads.
_MANY_RUNS = 1000
# How often a run that waits for an arena looks at its control.
_PATIENCE_S = 0.02


class LinearExecutor:
    """Runs a plan as one generated function, ``source``."""

    def __init__(self, plan: Plan, host: Backend, limits: Limits) -> None:
        self.plan = plan
        self.layout = lay_out(plan)
        self._host = host
        self._lock = threading.Lock()
        # How many runs may go on at once; None for any number.
        self._room: threading.Semaphore | None = None
        size, most = self.layout.size, limits.max_bytes
        if most is not None and size:
            if size > most:
                raise LimitExceeded(
                    f"the plan needs an arena of {size} bytes, above the limit of {most} "
                    "(Limits.max_bytes)"
                )
            if most // size < _MANY_RUNS:
                self._room = threading.Semaphore(most // size)
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
        """Bytes of all arenas."""
        return self._arenas * self.layout.size

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas, and about what plan and program take."""
        return self.arena_bytes + _STEP_BYTES * len(self._program.steps)

    def run(self, inputs: Sequence[Any], control: Control) -> tuple[Any, ...]:
        room = self._room
        if room is not None:
            while not room.acquire(timeout=_PATIENCE_S):
                if control.stopped:
                    control.stop()
        try:
            run = self._pool.pop()
        except IndexError:
            run = self._another()
        try:
            return run(control, *inputs)
        except PenstockError as error:
            step, _ = self._where(error)
            if step is not None:
                error.add_note(f"The run had come to {step.node.op.name} ({step.node.label}).")
            raise
        except Exception as error:
            raise self._explained(error) from error
        finally:
            self._pool.append(run)
            if room is not None:
                room.release()

    def trim(self) -> None:
        """Give up the arenas that no run holds."""
        while True:
            try:
                self._pool.pop()
            except IndexError:
                return
            with self._lock:
                self._arenas -= 1

    def _another(self) -> Run:
        run = self._enter(self._binder())
        with self._lock:
            self._arenas += 1
        return run

    def _binder(self) -> Binder:
        size = self.layout.size
        try:
            return Binder(self.plan, self.layout, self._host.allocate(size))
        except MemoryError as error:
            raise RunError(f"there is no memory for an arena of {size} bytes") from error

    def _enter(self, binder: Binder) -> Run:
        """The program in an arena, with NumPy's floating-point warnings off.

        NumPy keeps that setting in a context variable. Entering a context made once costs a
        twentieth of ``np.errstate``, and leaves the caller's setting alone.
        """
        function = codegen.instantiate(self._program, binder)
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        return partial(context.run, function)

    def _explained(self, error: Exception) -> PenstockError:
        """The error with the node at fault: its origin and the shapes of its inputs."""
        step, names = self._where(error)
        if step is None and isinstance(error, MemoryError):
            return RunError(f"there is no memory for the outputs: {error}")
        if step is None:
            return InternalError(f"the run failed outside of any node: {error!r}")
        inputs = ", ".join(
            "none"
            if i < 0
            else f"{self.plan.slots[i].name}: {names.get(i, self.plan.slots[i].type)}"
            for i in step.inputs
        )
        what = f"{error}" if isinstance(error, ShapeError | MemoryError) else f"{error!r}"
        message = f"{step.node.op.name} ({step.node.label}) with inputs ({inputs}): {what}"
        # No values make correct code meet a name that it does not know, or fail an assertion.
        if isinstance(error, AssertionError | NameError):
            return InternalError(f"{message}. This is a bug in Penstock: please report it")
        return RunError(message)

    def _where(self, error: Exception) -> tuple[Step | None, dict[int, str]]:
        """The step that raised, and what its inputs were as far as they are variables."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != self._program.filename:
            trace = trace.tb_next
        step = None if trace is None else self._program.steps[trace.tb_lineno - 1]
        if step is None or trace is None:
            return None, {}
        names = {}
        for i in step.inputs:
            value = trace.tb_frame.f_locals.get(f"v{i}")
            if isinstance(value, np.ndarray):
                names[i] = str(TensorType(value.dtype, value.shape))
        return step, names
