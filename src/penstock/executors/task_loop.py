"""The loop behind every executor that decides at run time: tasks run as they become ready.

Each queue of ready tasks has workers that take the most urgent task, run it, and decrement the
counters of the tasks that depend on it. The caller of a run is one of the workers of queue 0, the
host's; the others come from process-wide pools. A worker leaves when no task is ready: workers
never wait for each other, and only the caller, outside of the queue, waits for the end.
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
    """The immutable part of the loop's state, shared by all runs of a plan. ``tasks`` has the
    dependencies; ``worthwhile[t]``: whether task t is worth another worker."""

    def __init__(
        self, tasks: Tasks, queues: Sequence[Queue], worthwhile: Sequence[bool], slots: int
    ) -> None:
        self.tasks = tasks
        self.queues = tuple(queues)
        self.worthwhile = tuple(worthwhile)
        self.slots = slots
        # Whether only one worker runs at a time, so that it need not check whether another would
        # help. The dataflow executor is this case: a step takes 0.7 us, and checking the queues
        # for each task would add considerably to that (decision 16).
        self.alone = len(queues) == 1 and not any(worthwhile)
        self.devices = _device_tasks(tasks)
        self.block = tuple([task.block for task in tasks.tasks])
        self.queue = tuple([task.queue for task in tasks.tasks])
        signals = tasks.signals
        # Tasks that may be suspended: their functions are generators. All others are plain
        # functions, which cost one call and no state between steps.
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
    """For each task, whether its function may wait."""
    signals, overlap = tasks.signals, tasks.signals.overlap
    waits = {step for step, events in overlap.awaited.items() if any(s < 0 for s, _ in events)}
    waits.update(signals.waits)
    asynchronous = any(are_asynchronous(task.steps) for task in with_checkpoints(tasks.tasks))
    return tuple(
        [
            bool(task.blocks)
            # The host waits for its streams at the end, unless events mark the end of iterations.
            or not overlap.ends.keys() >= set(signals.of_task.get(t, ()))
            or not waits.isdisjoint(task.steps)
            or (asynchronous and are_asynchronous(task.steps))
            for t, task in enumerate(tasks.tasks)
        ]
    )


def _device_tasks(tasks: Tasks) -> frozenset[int]:
    """The tasks that enqueue work on devices. Empty if further work may follow, as in a loop, or if
    the plan has effects that later runs must not overtake."""
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
# continuation. Rejected alternatives (decision 16): a worker that waits for the nested tasks
# deadlocks on a pool of one thread; asyncio, with a coroutine for each task, needs a pool for
# kernels anyway; an interpreter of step objects is slower, and a second definition of control flow.
#
# Workers leave when no task is ready, instead of waiting for the next one. All runs of the process
# share the pool: a worker that waits for one run is a thread that other runs lack.


class _QueueState:
    """A queue in one run: a heap of ``ready`` task numbers, the most urgent first (the plan sorts
    tasks by urgency); the number of its ``workers``, and of its ready tasks that are
    ``worthwhile``, i.e. worth another worker."""

    __slots__ = ("ready", "workers", "worthwhile")

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.workers = 0
        self.worthwhile = 0


class _Continuations:
    """The suspended tasks of a run: their ``generators``; tasks ``parked`` until a signal is
    emitted, by signal; tasks ``in_flight``, which wait for an asynchronous kernel or a device; and
    tasks that have ``enqueued`` all of their work on a device."""

    __slots__ = ("enqueued", "generators", "in_flight", "parked")

    def __init__(self) -> None:
        self.generators: dict[int, Generator[Any, None, None]] = {}
        self.parked: dict[int, list[int]] = {}
        self.in_flight: dict[int, Outcome | Event] = {}
        self.enqueued: set[int] = set()


class TaskRun:
    """One run of a flow: all that changes while it goes on, under ``lock``.

    ``running`` counts workers between a look at the queues and the next; when it falls to 0 and the
    plan's block is done, or the run has failed, the run has ended and ``on_end`` is called.
    Workers of a pool call ``adopt`` before they begin.
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
        # Observers are called with the lock held, and may stop the run: ``_abort`` takes the lock
        # again. So does ``_resume``, for a kernel that has ended before it was asked.
        self.lock = threading.RLock()
        self.queues = [_QueueState() for _ in flow.queues]
        self.waits = list(flow.tasks.waits)
        self.remaining = list(flow.counts)
        self.uses: dict[int, int] = {}
        self.aside = _Continuations()
        # Whether each signal has been emitted.
        self.S: list[Any] = [False] * flow.signals
        self.running = 0
        self.failed = False
        self.error: BaseException | None = None
        self.caller_waits = False
        # A lock is the cheapest event: a Condition would be a second lock and a list of waiters.
        self.signal = threading.Lock()
        self.signal.acquire()
        self.ended = False

    # For the caller that starts a run.

    def run(self) -> None:
        """Run to the end, as the first worker; raises the error of the run, if any."""
        try:
            self._begin(True)
            while not self.ended:
                await_release(self.signal)
                # Woken for the end, or as a worker: ``_wake`` has counted it as one already.
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
                del failure  # it holds this frame

    def start(self) -> None:
        """Work until no task is ready, then return; ``on_end`` is called when the run ends."""
        self._begin(False)

    def _begin(self, caller: bool) -> None:
        try:
            with self.lock:
                # Counted here and not in ``_work``: between the two, a worker that is woken here
                # could end all that is ready, and must not find that nobody else runs.
                self.queues[0].workers += 1
                self.running += 1
                self._activate(0)
                self._wake_others(0)
            # From here on, a stop ends the run even if it has no worker.
            self.control.add_listener(self._abort)
            if self.control.stopped:
                self._stop(-1)
        except BaseException as error:
            self._failed(error, 0, caller)
        else:
            quiet(self._work, 0, caller)

    # Workers.

    def _join(self, queue: int) -> None:
        """The job of a worker that was asked to help."""
        with self.lock:
            # The pool may start the job late. The run may have ended by then, since ``running``
            # only counts workers that have begun.
            if self.failed or self.ended:
                self.queues[queue].workers -= 1
                return
            self.running += 1
        # Not under the lock: it calls the libraries of kernels.
        if self.adopt is not None:
            self.adopt()
        quiet(self._work, queue)

    # On a thread of the pool, or on the caller's. Attributes are read once: this loop is the
    # overhead of a small task. Kernels ask ``THREAD.run`` whether to stop: a run inside another
    # run's kernel must restore the outer one. A worker wakes one other worker, which wakes the
    # next, so that no task waits while its worker starts threads for all.

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
                # Ending one task and choosing the next take the lock once.
                with lock:
                    if task >= 0:
                        # Tasks that waited for this one may run now, and values may be freed.
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
                    # The last look and the leave are one step: a task pushed in between would find
                    # this worker still counted, ask for no other, and wait for ever.
                    if self.failed or not ready:
                        ended = self._leave(queue, caller)
                        break
                    task = heappop(ready)
                    if not alone:
                        own.worthwhile -= flow.worthwhile[task]
                        if own.worthwhile:
                            self._wake(queue)
                # A flag, read without the lock: a stale look costs one more task.
                if control.stopped:
                    self._stop(task)
                if not expanded[task]:
                    functions[task](*arguments)
                elif not self._advance(task):
                    task = -1  # it has not ended; another worker may have it by now
        except BaseException as error:
            THREAD.run = outer
            self._failed(error, queue, caller)
        else:
            THREAD.run = outer
            # Outside of the lock: ``on_end`` calls users' code, which may start the next run.
            if ended:
                self._end()
            elif control.turn is not None:
                self._hand_over(control.turn)

    def _hand_over(self, turn: Turn) -> None:
        """Let the next run begin if all that is left of this one comes after events of devices."""
        devices, aside = self.flow.devices, self.aside
        with self.lock:
            events = list(aside.in_flight.values())
            left = self.running or self.ended or not devices or not devices <= aside.enqueued
            if left or any(isinstance(event, Outcome) for event in events):
                return
        turn.hand_over([event for event in events if not isinstance(event, Outcome)])

    def _failed(self, error: BaseException, queue: int, caller: bool) -> None:
        """A worker leaves with an error, which only an interrupted caller raises."""
        self._fail(error)
        with self.lock:
            ended = self._leave(queue, caller)
        if ended:
            self._end()
        if caller and not isinstance(error, Exception):
            raise error

    def _end(self) -> None:
        """The run has ended, and no worker is left."""
        self.control.remove_listener(self._abort)
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    def _advance(self, task: int) -> bool:
        """Run a task until it needs a block or a signal; return whether it is done."""
        # A task is on one worker at a time, so its generator needs no lock.
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
            # The generator yields a block (>= 0), ~signal (< 0), or the Outcome or Event to wait
            # for. What it needs may come at once and on any thread: the task is noted as waiting
            # under the lock, before anything can make it ready again.
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
                # Emitted since the generator looked: it goes on, since nobody would wake it.
                if not self.S[~needed]:
                    aside.parked.setdefault(~needed, []).append(task)
                    return False

    def _resume(self, task: int) -> None:
        """The asynchronous kernel or the event that a task waits for has come; on any thread."""
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
        """The arguments of the functions of tasks."""
        if self.flow.signals:
            return self.control, self.V, self.S, self._emit
        return self.control, self.V

    def _emit(self, signal: int, event: Any = True) -> None:
        """Tasks that wait for ``signal`` go on."""
        with self.lock:
            self.S[signal] = event
            for task in self.aside.parked.pop(signal, ()):
                self._push(task)
            # Streams are tasks of the host's queue. The worker that emits goes on with its own
            # stream: cheap ones that it has made ready wait until it looks for its next task.
            if self.queues[0].worthwhile:
                self._wake(0)

    # Under the lock.

    def _push(self, task: int) -> None:
        """A task is ready."""
        flow = self.flow
        queue = self.queues[flow.queue[task]]
        heappush(queue.ready, task)
        queue.worthwhile += flow.worthwhile[task]
        if self.observe and task not in self.aside.generators:
            self.control.observer.step_ready(self.control.run, flow.tasks.tasks[task].steps[0])

    def _activate(self, block: int) -> None:
        """Begin with the tasks of a block."""
        flow = self.flow
        tasks = flow.tasks
        # A block runs once for each iteration, and never twice at a time, so that counts, signals
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
        if not flow.counts[block]:  # an empty block has no last task that would end it
            self._finished(block)

    def _finished(self, block: int) -> None:
        """All tasks of a block have run: the task that the block belongs to goes on."""
        parent = self.flow.tasks.parent[block]
        if parent >= 0:
            self._push(parent)

    def _count_down(self, slots: Sequence[int]) -> None:
        """Release values after their last reader has ended."""
        for slot in slots:
            left = self.uses[slot] - 1
            self.uses[slot] = left
            if not left:
                # ``V`` lives as long as the run: a value in it would keep its memory until then.
                value, self.V[slot] = self.V[slot], None
                run = self.control.run
                if self.observe and (owner := run.table.slots[slot]).owned and owner.base < 0:
                    freed(self.control, value)

    def _wake(self, queue: int) -> None:
        """Ask for another worker of a queue, unless it has all that it may have."""
        where, own = self.flow.queues[queue], self.queues[queue]
        if own.workers >= where.workers:
            return
        # The caller's thread first: it has nothing else to do, and no pool has to start one.
        if queue == 0 and self.caller_waits:
            self.caller_waits = False
            own.workers += 1
            self.running += 1
            self.signal.release()
        elif where.pool is not None:
            job = partial(self._join, queue)
            # The first worker of a queue is queued if none is idle: without it the tasks would
            # never run. Further ones only help, and must not be stale jobs in the pool later.
            if not own.workers:
                where.pool.submit(job)
                own.workers += 1
            elif where.pool.offer(job):
                own.workers += 1

    def _wake_others(self, queue: int) -> None:
        """Ask for a worker of each other queue that has something to do."""
        for number, other in enumerate(self.queues):
            if number != queue and other.ready and (not other.workers or other.worthwhile):
                self._wake(number)

    def _leave(self, queue: int, caller: bool) -> bool:
        """A worker has nothing to do; whether it was the last and the run has ended."""
        pool = self.flow.queues[queue].pool
        if not caller and self.on_end is None and pool is not None:
            # Return the worker before signalling completion: the caller may start the next run.
            pool.finishing()
        self.queues[queue].workers -= 1
        self.running -= 1
        if self.running:
            self.caller_waits |= caller
            return False
        # Nobody runs, and tasks are left. Either someone will come back, for an event, or as a
        # worker that was asked and has not begun; or the plan is wrong, and the run would hang.
        if self.remaining[0] and not self.failed:
            if self.control.stopped:  # since we looked, and no other worker will
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
        """The run has ended."""
        self.ended = True
        self.aside.generators.clear()  # generators that will not continue refer to this run
        if self.caller_waits:
            self.caller_waits = False
            self.signal.release()

    def _fail(self, error: BaseException) -> None:
        """The run ends with ``error``, unless it has ended with another before."""
        with self.lock:
            if self.failed or self.ended:
                return
            self.failed = True
            self.error = error
            self._clear()
        # Workers within a loop check the control. It is set outside of the lock, since it calls
        # listeners of users, which may wait for a thread that needs the lock.
        self.control.set(Cancelled("another task of the run has failed"))

    def _abort(self, error: Exception) -> None:
        """End a stopped run that has no running worker."""
        # Called on the watchdog's thread or on the thread that calls ``CancelToken.cancel``.
        with self.lock:
            if self.failed or self.ended or self.running:
                return
            self._stopped()
            self._over()
        self._end()

    def _stopped(self) -> None:
        """Fail with the error of the control; no worker is running."""
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
        """The node of a task in the model, and the loops and branches around it."""
        tasks = self.flow.tasks
        names = []
        while task >= 0:
            node = tasks.tasks[task].steps[0].node
            names.append(f"{node.op.name} ({node.label})")
            task = tasks.parent[tasks.tasks[task].block]
        return ", in ".join(names)
