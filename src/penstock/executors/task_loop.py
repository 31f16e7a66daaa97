"""The loop of every executor that schedules at run time: tasks run when they are ready.

Each queue of ready tasks has workers that take the most urgent task, run it, and decrement the
counters of the tasks that depend on it. The caller of a run is one of the workers of queue 0, the
host's; the others come from process-wide pools. A worker leaves when no task is ready: workers
never wait for each other. Only the caller, once it has left its queue, waits for the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

from penstock.backends.base import Event
from penstock.codegen.helpers import freed
from penstock.core.checkpoints import THREAD, await_release, with_checkpoints
from penstock.core.errors import Cancelled, InternalError
from penstock.core.records import dataclass
from penstock.core.types import RunValue
from penstock.executors.base import quiet
from penstock.executors.control import Control
from penstock.executors.turn import Turn
from penstock.host.event_watch import EVENTS
from penstock.host.threads import Workers
from penstock.ir.kernel import Outcome
from penstock.plan.plan import has_effect, walk
from penstock.plan.tasks import Tasks, are_asynchronous


@dataclass(frozen=True, slots=True)
class Queue:
    """Ready tasks of one kind. At most ``workers`` run at once; ``pool`` provides the workers."""

    workers: int
    pool: Workers | None


class Flow:
    """The immutable part of the loop's state, shared by all runs of a plan. ``tasks`` states the
    dependencies; ``worthwhile[t]``: whether task t is long enough for another worker."""

    def __init__(
        self, tasks: Tasks, queues: Sequence[Queue], worthwhile: Sequence[bool], slots: int
    ) -> None:
        self.tasks = tasks
        self.queues = tuple(queues)
        self.worthwhile = tuple(worthwhile)
        self.slots = slots
        # Whether only one worker runs at a time, so that it need not check whether to wake another.
        # This holds for the dataflow executor: a step takes 0.7 us, to which a check of the queues
        # for each task would add considerably (decision 16).
        self.alone = len(queues) == 1 and not any(worthwhile)
        self.devices = _device_tasks(tasks)
        self.block = tuple([task.block for task in tasks.tasks])
        self.queue = tuple([task.queue for task in tasks.tasks])
        signals = tasks.signals
        # Whether each task may be suspended, so that its function is a generator. The other tasks
        # are plain functions, which take one call and keep no state between steps.
        self.expanded = _generators(tasks)
        self.signals = signals.count
        self.of_block = signals.of_block or ((0, 0),) * len(tasks.blocks)
        self.counts = tuple([len(block) for block in tasks.blocks])
        # The signal that a task needs before its first step. The task is parked when its block
        # begins, instead of being started only to wait, which saves one visit to a worker.
        needed = [signals.waits.get(task.steps[0], ())[:1] for task in tasks.tasks]
        self.sources = [
            [t for t in block if not tasks.waits[t] and not needed[t]] for block in tasks.blocks
        ]
        self.parked = [[(t, needed[t][0]) for t in block if needed[t]] for block in tasks.blocks]
        # The initial counts of the slots that the tasks of a block count down.
        self.resets = [
            {slot: tasks.readers[slot] for t in block for slot in tasks.counted[t]}
            for block in tasks.blocks
        ]


def _generators(tasks: Tasks) -> tuple[bool, ...]:
    """Return whether each task may be suspended."""
    signals, overlap = tasks.signals, tasks.signals.overlap
    waits = {step for step, events in overlap.awaited.items() if any(s < 0 for s, _ in events)}
    waits.update(signals.waits)
    asynchronous = any(are_asynchronous(task.steps) for task in with_checkpoints(tasks.tasks))
    return tuple(
        [
            bool(task.blocks)
            # The host waits for a task's streams at the end, unless events end its iterations.
            or not overlap.ends.keys() >= set(signals.of_task.get(t, ()))
            or not waits.isdisjoint(task.steps)
            or (asynchronous and are_asynchronous(task.steps))
            for t, task in enumerate(tasks.tasks)
        ]
    )


def _device_tasks(tasks: Tasks) -> frozenset[int]:
    """Return the tasks that enqueue work on devices, or no tasks if one of them may run several
    times, as in a loop, or if the plan has effects that later runs must not overtake."""
    devices = tasks.signals.of_task.keys()
    if not devices:
        return frozenset()
    steps = [step for task in tasks.tasks for step in task.steps]
    # A run hands over its turn once these tasks have enqueued all of their work. Only tasks of
    # block 0 are known before the run to run exactly once.
    if any(tasks.tasks[t].block for t in devices) or any(map(has_effect, walk(steps))):
        return frozenset()
    return frozenset(devices)


# One lock guards all state of a run. Finer locks (one for each queue, atomic counters) would all be
# taken whenever a task ends, since that decrements counters in several queues, frees values, and
# may end the block and the run. Kernels run outside of the lock, and under the GIL, Python code
# gains nothing from finer locks.
#
# A task that needs a block, a signal or an event leaves its worker; its generator is the
# continuation. Rejected alternatives (decision 16): a worker that waits for nested tasks, which
# deadlocks on a pool of one thread; asyncio, with a coroutine for each task, which needs a pool for
# kernels anyway; an interpreter of step objects, which is slower, and would define control flow a
# second time.
#
# Workers leave when no task is ready, instead of waiting for the next one. All runs of the process
# share the pool: a worker that waits for one run is a thread that other runs lack.


class _QueueState:
    """A queue in one run: a heap of the numbers of ``ready`` tasks, the most urgent first (the plan
    sorts tasks by urgency); the number of its ``workers``; and the number of its ready tasks that
    are ``worthwhile``, that is, long enough for another worker."""

    __slots__ = ("ready", "workers", "worthwhile")

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.workers = 0
        self.worthwhile = 0


class _Continuations:
    """The suspended tasks of a run: the ``generators`` of tasks; the tasks ``parked`` until a
    signal is emitted, by signal; the tasks ``in_flight``, with the asynchronous kernel or the event
    that each waits for; and the tasks that have ``enqueued`` all of their work on a device."""

    __slots__ = ("enqueued", "generators", "in_flight", "parked")

    def __init__(self) -> None:
        self.generators: dict[int, Generator[Any, None, None]] = {}
        self.parked: dict[int, list[int]] = {}
        self.in_flight: dict[int, Outcome | Event] = {}
        self.enqueued: set[int] = set()


class TaskRun:
    """One run of a flow: its mutable state, guarded by ``lock``.

    ``running`` counts the workers that have begun and not left. The run has ended when it falls to
    0 and the plan's block is done, or the run has failed; then ``on_end`` is called. Workers of a
    pool call ``adopt`` before they begin.
    """

    __slots__ = (
        *("S", "V", "adopt", "aside", "caller_waits", "control", "ended", "error", "failed"),
        *("flow", "functions", "lock", "observe", "on_end", "queues", "remaining", "running"),
        *("signal", "uses", "waits"),
    )

    def __init__(
        self,
        flow: Flow,
        functions: Sequence[Callable[..., RunValue]],
        V: list[RunValue],
        control: Control,
        *,
        observe: bool = False,
        adopt: Callable[[], None] | None = None,
    ) -> None:
        self.flow = flow
        self.functions = functions
        self.V = V
        self.control = control
        self.observe = observe
        self.adopt = adopt
        self.on_end: Callable[[], None] | None = None
        # Re-entrant: observers are called with the lock held and may stop the run, and ``_abort``
        # takes the lock. So does ``_resume``, for a kernel that ended before ``notify``.
        self.lock = threading.RLock()
        self.queues = [_QueueState() for _ in flow.queues]
        self.waits = list(flow.tasks.waits)
        self.remaining = list(flow.counts)
        self.uses: dict[int, int] = {}
        self.aside = _Continuations()
        # For each signal, False until it is emitted, then its event or True.
        self.S: list[Any] = [False] * flow.signals
        self.running = 0
        self.failed = False
        self.error: BaseException | None = None
        self.caller_waits = False
        # A lock is the cheapest event: a Condition has a second lock and a list of waiters.
        self.signal = threading.Lock()
        self.signal.acquire()
        self.ended = False

    # For the caller that starts a run.

    def run(self) -> None:
        """Run to the end, as the first worker. Raises the error of the run, if any."""
        try:
            self._begin(True)
            while not self.ended:
                await_release(self.signal)
                # Woken for the end, or as a worker, which ``_wake`` has already counted.
                if not self.ended:
                    quiet(self._work, 0, True)
        except BaseException as error:
            self._fail(error)  # an interrupt; other workers stop at their next check
            raise
        failure, self.error = self.error, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback refers to this frame

    def start(self) -> None:
        """Work until no task is ready, then return; ``on_end`` is called when the run ends."""
        self._begin(False)

    def _begin(self, caller: bool) -> None:
        try:
            with self.lock:
                # Counted here and not in ``_work``: a worker that is woken here could run all
                # ready tasks before ``_work`` begins, and must not find that no worker is left.
                self.queues[0].workers += 1
                self.running += 1
                self._activate(0)
                self._wake_others(0)
            # From now on, a stop ends the run even if it has no worker.
            self.control.add_listener(self._abort)
            if self.control.stopped:
                self._stop(-1)
        except BaseException as error:
            self._failed(error, 0, caller)
        else:
            quiet(self._work, 0, caller)

    # Workers.

    def _join(self, queue: int) -> None:
        """Work on a queue, as a worker of the pool that ``_wake`` has asked for."""
        with self.lock:
            # The pool may start the job late. The run may have ended by then, since ``running``
            # only counts workers that have begun.
            if self.failed or self.ended:
                self.queues[queue].workers -= 1
                return
            self.running += 1
        # Called without the lock, since it calls kernel libraries.
        if self.adopt is not None:
            self.adopt()
        quiet(self._work, queue)

    # Runs on a thread of the pool, or on the caller's. Attributes are read once, since this loop is
    # the overhead of a small task. Kernels ask ``THREAD.run`` whether to stop: a run inside another
    # run's kernel must restore the outer one. A worker wakes one other worker, which wakes the
    # next, so that no worker delays its own task to start threads for all ready tasks.

    def _work(self, queue: int, caller: bool = False) -> None:
        """Run tasks of one queue until none is ready. ``running`` already counts this worker."""
        flow, functions, control = self.flow, self.functions, self.control
        lock, own, expanded = self.lock, self.queues[queue], flow.expanded
        ready = own.ready
        consumers, counted, block = flow.tasks.consumers, flow.tasks.counted, flow.block
        waits, remaining = self.waits, self.remaining
        alone = flow.alone and not self.observe
        others = len(flow.queues) > 1
        arguments = self._arguments()
        task = -1
        outer, THREAD.run = THREAD.run, control
        try:
            while True:
                # The lock is taken once, both to end a task and to choose the next.
                with lock:
                    if task >= 0:
                        # Dependent tasks may become ready, and values may be freed.
                        for other in consumers[task]:
                            left = waits[other] - 1
                            waits[other] = left
                            if not left:
                                if alone:  # ``_push`` inlined, without support for other workers
                                    heappush(ready, other)
                                else:
                                    self._push(other)
                        if counted[task]:
                            self._count_down(counted[task])
                        left = remaining[block[task]] - 1
                        remaining[block[task]] = left
                        if not left:
                            self._finished(block[task])
                    if others:
                        self._wake_others(queue)
                    # Check and leave under one lock: for a task pushed in between, no other worker
                    # would be woken, since this one is still counted, and the run would hang.
                    if self.failed or not ready:
                        ended = self._leave(queue, caller)
                        break
                    task = heappop(ready)
                    if not alone:
                        own.worthwhile -= flow.worthwhile[task]
                        if own.worthwhile:
                            self._wake(queue)
                # Read without the lock: a stale value costs one more task.
                if control.stopped:
                    self._stop(task)
                if not expanded[task]:
                    functions[task](*arguments)
                elif not self._advance(task):
                    task = -1  # suspended; another worker may have resumed it by now
        except BaseException as error:
            THREAD.run = outer
            self._failed(error, queue, caller)
        else:
            THREAD.run = outer
            # Called without the lock: ``on_end`` calls user code, which may start the next run.
            if ended:
                self._end()
            elif control.turn is not None:
                self._hand_over(control.turn)

    def _hand_over(self, turn: Turn) -> None:
        """Let the next run begin if all remaining work of this run waits for device events."""
        devices, aside = self.flow.devices, self.aside
        with self.lock:
            events = list(aside.in_flight.values())
            left = self.running or self.ended or not devices or not devices <= aside.enqueued
            if left or any(isinstance(event, Outcome) for event in events):
                return
        turn.hand_over([event for event in events if not isinstance(event, Outcome)])

    def _failed(self, error: BaseException, queue: int, caller: bool) -> None:
        """Leave as a worker whose task has raised ``error``; re-raise the caller's interrupts."""
        self._fail(error)
        with self.lock:
            ended = self._leave(queue, caller)
        if ended:
            self._end()
        if caller and not isinstance(error, Exception):
            raise error

    def _end(self) -> None:
        """Call ``on_end`` after the run has ended and the last worker has left."""
        self.control.remove_listener(self._abort)
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    def _advance(self, task: int) -> bool:
        """Run a task until it ends or is suspended; return whether it has ended."""
        # Only one worker at a time runs a task, so its generator needs no lock.
        aside = self.aside
        generator = aside.generators.get(task)
        if generator is None:
            generator = self.functions[task](*self._arguments())
            aside.generators[task] = generator
        while True:
            needed = next(generator, None)
            if needed is None:
                del aside.generators[task]
                aside.enqueued.add(task)
                return True
            # The generator yields the block (>= 0), ~signal (< 0), Outcome or Event that it needs.
            # This may come at once and on any thread: the task is recorded as waiting under the
            # lock, before anything can make it ready again.
            with self.lock:
                if needed.__class__ is not int:
                    aside.in_flight[task] = needed
                    aside.enqueued.add(task)
                    resume = partial(self._resume, task)
                    if isinstance(needed, Outcome):
                        needed.notify(resume)
                    else:
                        EVENTS.add(needed.query, resume)
                    return False
                if needed >= 0:
                    self._activate(needed)
                    return False
                # If the signal was emitted meanwhile, continue: nothing would wake the task.
                if not self.S[~needed]:
                    aside.parked.setdefault(~needed, []).append(task)
                    return False

    def _resume(self, task: int) -> None:
        """Make a task ready whose asynchronous kernel or event is complete; on any thread."""
        with self.lock:
            self.aside.in_flight.pop(task, None)
            if self.failed or self.ended:
                return
            self._push(task)
            queue = self.flow.queue[task]
            own = self.queues[queue]
            if not own.workers or own.worthwhile:
                self._wake(queue)

    def _arguments(self) -> tuple[RunValue, ...]:
        """The arguments of the tasks' functions."""
        if self.flow.signals:
            return self.control, self.V, self.S, self._emit
        return self.control, self.V

    def _emit(self, signal: int, event: Any = True) -> None:
        """Record a signal and its device event, and make the tasks that wait for it ready."""
        with self.lock:
            self.S[signal] = event
            for task in self.aside.parked.pop(signal, ()):
                self._push(task)
            # Streams are tasks of the host's queue. This worker continues with its own stream;
            # short streams that it has made ready wait until it takes its next task.
            if self.queues[0].worthwhile:
                self._wake(0)

    # The caller of the following methods must hold the lock.

    def _push(self, task: int) -> None:
        """Add a ready task to its queue."""
        flow = self.flow
        queue = self.queues[flow.queue[task]]
        heappush(queue.ready, task)
        queue.worthwhile += flow.worthwhile[task]
        if self.observe and task not in self.aside.generators:
            self.control.observer.step_ready(self.control.run, flow.tasks.tasks[task].steps[0])

    def _activate(self, block: int) -> None:
        """Begin the tasks of a block."""
        flow = self.flow
        tasks = flow.tasks
        # A block runs once for each iteration, and never twice at the same time: counts, signals
        # and values have one place each, which is reset here (decision 16).
        for task in tasks.blocks[block]:
            self.waits[task] = tasks.waits[task]
        self.uses.update(flow.resets[block])
        first, end = flow.of_block[block]
        self.S[first:end] = [False] * (end - first)
        for task, signal in flow.parked[block]:
            self.aside.parked.setdefault(signal, []).append(task)
        self.remaining[block] = flow.counts[block]
        for task in flow.sources[block]:
            self._push(task)
        if not flow.counts[block]:  # an empty block has no last task, whose end would end it
            self._finished(block)

    def _finished(self, block: int) -> None:
        """Resume the task that owns a block, whose tasks have all run."""
        parent = self.flow.tasks.parent[block]
        if parent >= 0:
            self._push(parent)

    def _count_down(self, slots: Sequence[int]) -> None:
        """Decrement the use counts of slots, and release the values that have no more readers."""
        for slot in slots:
            left = self.uses[slot] - 1
            self.uses[slot] = left
            if not left:
                # ``V`` lives as long as the run, and would keep the value's memory until then.
                value, self.V[slot] = self.V[slot], None
                run = self.control.run
                if self.observe and (owner := run.table.slots[slot]).owned and owner.base < 0:
                    freed(self.control, value)

    def _wake(self, queue: int) -> None:
        """Ask for another worker of a queue, up to its limit."""
        where, own = self.flow.queues[queue], self.queues[queue]
        if own.workers >= where.workers:
            return
        # Prefer the caller's thread, which is idle, to one that the pool has to start.
        if queue == 0 and self.caller_waits:
            self.caller_waits = False
            own.workers += 1
            self.running += 1
            self.signal.release()
        elif where.pool is not None:
            job = partial(self._join, queue)
            # Without an idle thread, the first worker of a queue waits in the pool, since the tasks
            # need it. Further workers are optional, and must not be left in the pool as stale jobs.
            if not own.workers:
                where.pool.submit(job)
                own.workers += 1
            elif where.pool.offer(job):
                own.workers += 1

    def _wake_others(self, queue: int) -> None:
        """Ask for a worker of each other queue that has ready tasks for one."""
        for number, other in enumerate(self.queues):
            if number != queue and other.ready and (not other.workers or other.worthwhile):
                self._wake(number)

    def _leave(self, queue: int, caller: bool) -> bool:
        """Leave as a worker that has no task. Return whether the run has ended with it."""
        pool = self.flow.queues[queue].pool
        if not caller and self.on_end is None and pool is not None:
            # Return the worker before signalling completion: the caller may start the next run.
            pool.finishing()
        self.queues[queue].workers -= 1
        self.running -= 1
        if self.running:
            self.caller_waits |= caller
            return False
        # No worker runs, but tasks are left. Either an event will resume one, or a worker was asked
        # for and has not begun; otherwise the plan is wrong, and the run would hang.
        if self.remaining[0] and not self.failed:
            if self.control.stopped:  # after the last check, and no other worker will check
                self._stopped()
            elif self.aside.in_flight or any(queue.workers for queue in self.queues):
                self.caller_waits |= caller
                return False
            else:
                self.failed = True
                self.error = InternalError(
                    "tasks wait for each other. This is a bug in Penstock: please report it"
                )
        self._over()
        return True

    def _over(self) -> None:
        """Mark the run as ended, and wake the caller if it waits."""
        self.ended = True
        self.aside.generators.clear()  # suspended generators refer to this run
        if self.caller_waits:
            self.caller_waits = False
            self.signal.release()

    def _fail(self, error: BaseException) -> None:
        """Let the run end with ``error``, unless it has already failed or ended."""
        with self.lock:
            if self.failed or self.ended:
                return
            self.failed = True
            self.error = error
            self._clear()
        # Set the control, which workers in loops check. Without the lock, since it calls users'
        # listeners, which may wait for a thread that needs the lock.
        self.control.set(Cancelled("another task of the run has failed"))

    def _abort(self, error: Exception) -> None:
        """End a stopped run that has no running worker."""
        # Called on the watchdog's thread, or on the thread that calls ``CancelToken.cancel``.
        with self.lock:
            if self.failed or self.ended or self.running:
                return
            self._stopped()
            self._over()
        self._end()

    def _stopped(self) -> None:
        """Fail with the error of the control, when no worker is running."""
        self.failed = True
        self.error = self.control.error
        heads = [queue.ready[0] for queue in self.queues if queue.ready]
        waiting = heads or self.aside.in_flight
        if waiting and self.error is not None:
            self.error.add_note(f"The run had reached {self._place(min(waiting))}.")
        self._clear()

    def _clear(self) -> None:
        """Drop all ready and parked tasks."""
        for queue in self.queues:
            queue.ready.clear()
            queue.worthwhile = 0
        self.aside.parked.clear()

    def _stop(self, task: int) -> None:
        """Raise the error of the stopped run, with a note that names the current task."""
        if task >= 0 and self.control.error is not None:
            self.control.error.add_note(f"The run had reached {self._place(task)}.")
        self.control.stop()

    def _place(self, task: int) -> str:
        """Describe the node of a task, and the loops and branches around it."""
        tasks = self.flow.tasks
        names = []
        while task >= 0:
            node = tasks.tasks[task].steps[0].node
            names.append(f"{node.op.name} ({node.label})")
            task = tasks.parent[tasks.tasks[task].block]
        return ", in ".join(names)
