"""The parallel executor: tasks run when they are ready, on a pool of workers for each backend.

Steps too short to be worth a hand-over share a task. The memory plan is valid for every order in
which tasks may run. With one task per stream this is the ``streams`` executor; with one task per
step, one worker and no memory plan it is the ``dataflow`` executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import isgeneratorfunction
from itertools import product
from typing import Any

import numpy as np

from penstock.backends.base import Backend, Device, DeviceStream
from penstock.codegen.writer import Program
from penstock.core.checkpoints import THREAD
from penstock.core.limits import Limits
from penstock.core.records import dataclass, field
from penstock.core.types import RunValue, RunValues
from penstock.executors.base import CompiledExecutor, Done, PerThreadCount, outputs_of
from penstock.executors.control import Control
from penstock.executors.errors import explained, throw
from penstock.executors.task_loop import Flow, Queue, TaskRun
from penstock.host.fork import refuse_reentry
from penstock.plan.plan import Step


class _Functions(list[Callable[..., RunValue]]):
    """The functions of a program's tasks, bound to one arena, followed by the function that returns
    the outputs. ``streams``: the device streams of the tasks."""

    streams: Sequence[DeviceStream] = ()


def _with_streams(
    program: Program, devices: Sequence[Device], memory: np.ndarray
) -> Callable[[], _Functions]:
    """Return a function that binds the tasks of a program to an arena and to streams of its own.
    The kernels on a stream share a workspace."""
    assert program.tasks is not None
    signals = program.tasks.signals
    # Created once per arena, for any number of kernel threads: a run has exclusive use of its
    # streams and workspaces, which ``session.memory`` counts with the arena (decision 27).
    streams: list[Any] = [device.stream() for device in devices]
    kept = [s.allocate(n) if n else None for s, n in zip(streams, signals.workspaces, strict=True)]
    workspaces = {}
    for step, on in signals.on.items():
        if step.kernel is not None and step.kernel.workspace and not step.into:
            workspaces[step] = kept[on[0]] if len(on) == 1 else tuple([kept[s] for s in on])
    return partial(_bind_tasks, program, streams, workspaces, memory, program.remote_arenas())


def _bind_tasks(
    program: Program,
    streams: Sequence[DeviceStream],
    workspaces: Mapping[Step, Any],
    memory: np.ndarray,
    remote: Mapping[str, Any],
) -> _Functions:
    names = {f"d{s}": stream for s, stream in enumerate(streams)}
    bound: Sequence[Callable[..., RunValue]] = program.bind(memory, names, workspaces, remote)
    for scope in program.plan.scopes:
        bound = [_scoped(scope, function) for function in bound]
    functions = _Functions(bound)
    functions.streams = streams
    return functions


def _scoped(
    scope: Callable[..., RunValue], function: Callable[..., RunValue]
) -> Callable[..., RunValue]:
    """Return the function of a task with a thread-local setting of a backend applied
    (``Backend.in_runs``). A task leaves the setting while it is suspended."""
    if not isgeneratorfunction(function):
        return scope(function)
    # The setting is entered for each step of the generator: in between, other tasks run on this
    # thread, and the next step may run on another thread.
    advance = scope(next)

    def steps(*arguments: object) -> Iterator[Any]:
        rest = function(*arguments)
        while (needed := advance(rest, None)) is not None:
            yield needed

    return steps


@dataclass(frozen=True, eq=False)
class TaskWorkers:
    """The workers of tasks. ``queues[i]`` has the workers for the tasks of queue i; queue 0 is the
    host's, where the caller is one of the workers. A ready task justifies another worker if it
    takes at least ``worthwhile`` seconds. ``devices``: the devices of the tasks' streams, by name.
    """

    queues: Sequence[Queue]
    worthwhile: float
    devices: Mapping[str, Device] = field(default_factory=dict)


class ParallelExecutor(CompiledExecutor):
    """Runs the tasks of a program, with independent tasks in parallel.

    ``hosts`` are the backends of the host's memory. The first allocates the arenas; all share the
    kernel threads among concurrent tasks. ``name`` is the executor's name in events.
    """

    def __init__(
        self,
        program: Program,
        hosts: Sequence[Backend],
        limits: Limits,
        workers: TaskWorkers,
        threads: int | None = None,
        name: str = "parallel",
    ) -> None:
        super().__init__(program, name, hosts, threads, workers.queues[0].workers)
        self._arguments = hosts, limits, workers, threads, name
        tasks = program.tasks
        assert tasks is not None
        worth = [task.seconds >= workers.worthwhile for task in tasks.tasks]
        self._flow = Flow(tasks, workers.queues, worth, len(program.plan.slots))
        self.hands_over = bool(self._flow.devices)
        of_streams = [workers.devices[name] for name in tasks.signals.devices]
        bind = partial(_with_streams, program, of_streams)
        memories = {backend.name: memory for memory, backend in program.plan.remote.items()}
        remote = Counter(program.arena_plan.remote)
        for device, nbytes in zip(tasks.signals.devices, tasks.signals.workspaces, strict=True):
            remote[memories.get(device, device)] += nbytes
        # Without these, functions refer to no memory of a single run, and all runs can share them.
        writes = self.arena_plan.size or any(step.into for step in program.plan.walk())
        shared = not (of_streams or writes)
        self._arenas = self._allocate(hosts[0], limits, bind, shared, remote)

    def observed(self) -> ParallelExecutor:
        return ParallelExecutor(self._program.with_observers(), *self._arguments)

    def run(self, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        # ``NEVER`` is shared by all runs: the loop sets the control of a run that fails.
        control = self._counting(control.own())
        if self.sampler is not None and THREAD.run is not control:
            return self.sampler.run(self, inputs, control)
        arenas = self._arenas
        if any(queue.pool is not None for queue in self._flow.queues):
            refuse_reentry()
        # ``pop`` is atomic and needs no lock; only a run that finds no free arena takes the lock.
        try:
            arena = arenas.free.pop()
        except IndexError:
            arena = arenas.take(control)
        try:
            try:
                V = self._values(inputs)
                self._allocated(control, arenas.bytes_each)
                with self._share as threads:
                    functions = arena[threads]
                    self._task_run(functions, V, control, threads).run()
                outputs = outputs_of(functions[-1], V, control)
            except Exception as error:
                throw(explained(error, self._program))
            finally:
                self._allocated(control, -arenas.bytes_each)
        except Exception:
            arenas.give(arena)
            raise
        except BaseException:
            # After an interrupt, other workers may still write to the arena: it cannot be reused.
            arenas.drop()
            raise
        arenas.give(arena)
        return outputs

    def _task_run(
        self, functions: _Functions, V: list[RunValue], control: Control, threads: int
    ) -> TaskRun:
        adopt, observe = partial(self._share.adopt, threads), self._program.observed
        control.outside = partial(self._share.waiting, threads)
        return TaskRun(self._flow, functions, V, control, observe=observe, adopt=adopt)

    def run_async(self, inputs: RunValues, control: Control, done: Done) -> None:
        _ArenaRequest(self, inputs, self._counting(control.own()), done).begin()

    def _start(
        self, arena: PerThreadCount[_Functions], inputs: RunValues, control: Control, done: Done
    ) -> None:
        """Begin a run in ``arena``, and return when no task is ready for the calling thread."""
        arenas, share = self._arenas, self._share
        V = self._values(inputs)

        # Called on the thread that ends the run, without locks: ``done`` may start the next run.
        def end(run: TaskRun | None = None, error: BaseException | None = None) -> None:
            outputs = None
            try:
                if run is not None:
                    share.leave()
                    # Removed from the run: the error's traceback refers to the run.
                    error, run.error = run.error, None
                if error is None:
                    outputs = outputs_of(functions[-1], V, control)
                self._allocated(control, -arenas.bytes_each)
            except BaseException as raised:
                outputs, error = None, raised
            if isinstance(error, Exception):
                error = explained(error, self._program)
            # Given back before ``done``, since the caller's next run may need the arena.
            arenas.give(arena)
            try:
                done(outputs, error)
            finally:
                del error  # it holds this frame

        try:
            self._allocated(control, arenas.bytes_each)
            threads = share.enter()
            try:
                functions = arena[threads]
            except BaseException:
                share.leave()
                raise
        except BaseException as error:
            end(error=error)
            return
        run = self._task_run(functions, V, control, threads)
        run.on_end = partial(end, run)
        # The previous run may have handed over its turn: wait for it on the device, not the host.
        if control.turn is not None:
            for event, stream in product(control.turn.behind, functions.streams):
                stream.wait(event)
        run.start()

    def _values(self, inputs: RunValues) -> list[RunValue]:
        V: list[Any] = [None] * self._flow.slots
        for slot, value in zip(self.plan.inputs, inputs, strict=True):
            V[slot] = value
        return V

    def _allocated(self, control: Control, nbytes: int) -> None:
        if nbytes and self._program.observed:
            control.observer.allocation(control.run, nbytes)


class _ArenaRequest:
    """An asynchronous run that waits for an arena. A class rather than closures, which would form a
    reference cycle that keeps the feeds alive until the next garbage collection."""

    __slots__ = ("_control", "_done", "_executor", "_inputs")

    def __init__(
        self, executor: ParallelExecutor, inputs: RunValues, control: Control, done: Done
    ) -> None:
        self._executor = executor
        self._inputs = inputs
        self._control = control
        self._done = done

    def begin(self) -> None:
        """Start the run now if there is an arena for it, else when another run returns one."""
        # Added first, so that a stop between the request for an arena and the wait is not missed.
        control = self._control
        control.add_listener(self._stop)
        try:
            arena = self._executor._arenas.ask(self._receive)
        except Exception as error:
            control.remove_listener(self._stop)
            self._done(None, error)
            return
        if arena is not None:
            control.remove_listener(self._stop)
            self._executor._start(arena, self._inputs, control, self._done)
        elif control.stopped and control.error is not None:
            self._stop(control.error)  # ``set`` may have called it before the arena was asked for

    def _receive(self, received: PerThreadCount[_Functions] | None) -> None:
        # On a worker, not on the thread of the run that returned the arena.
        pool = self._executor._flow.queues[0].pool
        assert pool is not None
        pool.submit(partial(self._accept, received))

    def _accept(self, received: PerThreadCount[_Functions] | None) -> None:
        self._control.remove_listener(self._stop)
        try:
            arena = self._executor._arenas.accept(received)
        except BaseException as error:
            self._done(None, error)
        else:
            self._executor._start(arena, self._inputs, self._control, self._done)

    def _stop(self, error: Exception) -> None:
        if self._executor._arenas.forget(self._receive):
            self._control.remove_listener(self._stop)
            self._done(None, error)
