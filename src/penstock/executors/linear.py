"""The linear executor: generated Python code with an order and memory fixed at compile time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from penstock.backends.base import Backend
from penstock.codegen.writer import Program
from penstock.core.checkpoints import THREAD, UNSEEN_RUN_S
from penstock.core.limits import Limits
from penstock.core.types import RunValue, RunValues
from penstock.executors.base import CompiledExecutor, InlineExecutor, silent
from penstock.executors.control import NEVER, Control
from penstock.host.current_run import BudgetError, working_for
from penstock.host.on_demand import imported

if TYPE_CHECKING:
    from penstock.host.admission import Ticket

Run = Callable[..., tuple[Any, ...]]

_place = imported("penstock.host.admission.ticket_for")


def _with_arenas(program: Program, memory: np.ndarray) -> Callable[[], Run]:
    """Return a function that binds a program to an arena and to its device arenas."""
    return partial(_bind_run, program, memory, program.remote_arenas())


def _bind_run(program: Program, memory: np.ndarray, remote: Mapping[str, Any]) -> Run:
    """Bind a program to an arena. The function runs with NumPy's floating-point warnings off."""
    (function,) = program.bind(memory, remote=remote)
    for scope in program.plan.scopes:
        function = scope(function)
    return partial(silent().run, function)


def _only_computes(program: Program, hosts: Sequence[Backend]) -> bool:
    """Whether a run never waits for an accelerator or in user code, which might wait for another
    run. Only such runs may be delayed for others. A step without outputs puts a value on a stream,
    and waits until it is read."""
    plan, names = program.plan, {backend.name for backend in hosts}
    return not (program.observed or plan.inner or plan.remote or plan.scopes) and all(
        step.contract is None
        and bool(step.outputs)
        and (step.kernel is None or (step.kernel.begin is None and step.backend in names))
        for step in plan.walk()
    )


class LinearExecutor(InlineExecutor, CompiledExecutor):
    """Runs a program that consists of one function.

    ``hosts`` are the backends of the host's memory. The first allocates the arenas; all share the
    kernel threads among concurrent runs. ``name`` is the executor's name in events.
    """

    def __init__(
        self,
        program: Program,
        hosts: Sequence[Backend],
        limits: Limits,
        threads: int | None = None,
        name: str = "linear",
        fixed_threads: bool = False,
    ) -> None:
        super().__init__(program, name, hosts, threads, fixed_threads=fixed_threads)
        self._arguments = hosts, limits, threads, name, fixed_threads
        self.fallback: Callable[[RunValues, Control], tuple[Any, ...]] | None = None
        """runs inputs whose dims differ from those of the plan, or that need too much memory"""
        self._observed = program.observed
        self._core_seconds = 0.0
        """core seconds of a run; 0 before the first run, and if runs are never delayed"""
        self._may_wait = not self._share.single and _only_computes(program, hosts)
        bind = partial(_with_arenas, program)
        self._arenas = self._allocate(hosts[0], limits, bind, remote=program.arena_plan.remote)

    def direct(self) -> tuple[Run, Program] | None:
        """Return the function and the program, for callers that turn NumPy's warnings off and
        explain errors. None if runs need an arena, share threads, or count allocations."""
        if self._arenas.bytes_each or not self._share.idle or self._counts:
            return None
        (function,) = self._program.bind(np.empty(0, np.uint8))
        return function, self._program

    def observed(self) -> LinearExecutor:
        executor = LinearExecutor(self._program.with_observers(), *self._arguments)
        executor.fallback = self.fallback
        executor._share.follow(self._share)
        return executor

    @property
    def undecided(self) -> bool:
        """Whether the next run tries a number of threads, which may make it slower."""
        tuner = self._share.tuner
        return tuner is not None and self._share.tries and tuner.undecided

    @property
    def takes_outputs(self) -> bool:
        """Whether ``with_given`` is available, since runs cannot fall back to another plan."""
        return self.fallback is None

    def with_given(self, outputs: Sequence[int]) -> LinearExecutor:
        """Return an executor of the same plan whose runs take an array for each of these outputs
        (given by index) after the inputs, and write the outputs into them."""
        return LinearExecutor(self._program.with_given(outputs), *self._arguments)

    def run(
        self, inputs: RunValues, control: Control, place: Ticket | None = None
    ) -> tuple[RunValue, ...]:
        if control is not NEVER or self._counts or self.sampler is not None:
            control = self._counting(control)
            if THREAD.run is not control:
                sampler = self.sampler
                if sampler is not None:
                    return sampler.run(self, inputs, control.own())
                # Kernels ask ``THREAD.run`` whether to stop, so it is set to this control first.
                return working_for(control, self.run, inputs, control, place)
        if self._core_seconds > UNSEEN_RUN_S and place is None:
            with _place(self._core_seconds, control) as place:
                return self.run(inputs, cast(Control, place.run), place)
        arenas, share = self._arenas, self._share
        try:
            arena = arenas.free.pop()
        except IndexError:
            arena = arenas.take(control)
        try:
            if self._observed:
                control.observer.allocation(control.run, arenas.size)
            if share.single:
                # The number is a setting of the calling thread. The thread may be new, or may have
                # been in another run.
                for set_threads in share.setters:
                    set_threads(1)
                return arena[1](control, *inputs)
            with share as threads:
                run = arena[threads]
                if place is not None:
                    place.share, place.adopted = share, threads
                if control.sink is not None:
                    control.outside = partial(share.waiting, threads)
                start = perf_counter()
                outputs = run(control, *inputs)
                paused = 0.0 if place is None else place.paused
                self._record_time(threads, perf_counter() - start - paused)
                return outputs
        except Exception as error:
            from penstock.executors.errors import explained, throw
            from penstock.ops.internal.expected import UnexpectedDimsError

            unexpected = isinstance(error, UnexpectedDimsError | BudgetError)
            if self.fallback is None or not unexpected:
                throw(explained(error, self._program))
        finally:
            # ``arenas.give`` inlined, which saves short runs a call.
            arenas.free.append(arena)
            if arenas.waiting:
                arenas.serve()
            if self._observed:
                control.observer.allocation(control.run, -arenas.size)
        return self.fallback(inputs, control)

    def _record_time(self, threads: int, seconds: float) -> None:
        """Record that the kernels of a run took ``seconds`` with ``threads`` threads."""
        if self._share.tuner is not None and self._share.tries:
            self._share.tuner.took(threads, seconds)
        if self._may_wait:
            # Longer times enter by a quarter, shorter ones at once: other processes may have slowed
            # the run down.
            seconds *= threads
            longer = seconds - self._core_seconds
            self._core_seconds = self._core_seconds + longer / 4 if longer > 0 else seconds
