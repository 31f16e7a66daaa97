"""Runs on a cluster, as the driver tracks them: runs in flight, and the answers of workers.

A run is a *step* of each worker that has a part of the graph. Each attempt has a new step number;
messages with an old number are dropped, so that no run ends twice. A run ends with the first error,
or when all parts have ended, or when no part can continue: all parts wait, and every value that was
sent has been received. (Values are counted for each pair of workers, and links preserve the order
of messages, so equal counts mean that no value is in flight.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from penstock.cluster.links import Message
from penstock.cluster.parts import RemotePart
from penstock.cluster.waits import DOUBT_S
from penstock.core.errors import Aborted, Cancelled, RunError, WorkerLost
from penstock.core.types import RunValue, RunValues
from penstock.executors.base import Done
from penstock.executors.control import NEVER, Control

if TYPE_CHECKING:
    from penstock.cluster.members import Members


_Counts = tuple[dict[int, int], dict[int, int]]
"""values sent to, and received from, each worker"""


class ClusterRun:
    """A run in flight. ``parts``: the parts that have not ended, by worker. ``reports``: the counts
    of values that workers have reported. ``attempts``: how often the run may be repeated."""

    def __init__(
        self,
        handle: int,
        parts: Sequence[RemotePart],
        inputs: RunValues,
        control: Control,
        done: Done,
        attempts: int,
    ) -> None:
        self.handle = handle
        self.all_parts = parts
        self.inputs = inputs
        self.control = control
        self.attempts = attempts
        self._dones = [done]  # empty after the end: ``pop`` is atomic
        self.reset()

    def reset(self) -> None:
        """Reset the state of an attempt."""
        self.parts = {part.worker: part for part in self.all_parts}
        self.outputs: dict[int, Any] = {}
        self.reports: dict[int, _Counts] = {}
        self.doubt: BaseException | None = None
        self.since = 0.0
        self.number = -1

    @property
    def still(self) -> bool:
        """Whether no part can continue: all have ended or wait, and no value is in flight."""
        # A passive part that has received no value yet reports nothing.
        reports: dict[int, _Counts] = {p.worker: ({}, {}) for p in self.all_parts if p.passive}
        reports |= self.reports
        if reports.keys() < {part.worker for part in self.all_parts}:
            return False
        return all(
            reports[target][1].get(source, 0) == count
            for source, (sent, _) in reports.items()
            for target, count in sent.items()
            if target in self.parts
        )

    def end(self, outputs: tuple[RunValue, ...] | None, error: BaseException | None) -> None:
        """End the run with its outputs or an error, unless it has already ended."""
        try:
            done = self._dones.pop()
        except IndexError:
            return
        done(outputs, error)


class Runs:
    """The runs of one cluster. ``members`` is None until it has started."""

    def __init__(self) -> None:
        self.members: Members | None = None
        self._lock = threading.Lock()
        self._steps: dict[int, ClusterRun] = {}
        self._next = 0
        self._held: list[ClusterRun] = []
        self._lost: set[int] = set()
        self._gone: str | None = None

    # The course of a run.

    def begin(self, run: ClusterRun) -> None:
        """Send the feeds of a run, or hold them until a lost worker that it needs is replaced."""
        with self._lock:
            if run.control.stopped:  # its listener ends the run, which is not in flight
                return
            if any(part.worker in self._lost for part in run.all_parts):
                self._held.append(run)
                return
            gone = self._gone
            if gone is None:
                number = run.number = self._next
                self._next += 1
                self._steps[number] = run
                oldest = next(iter(self._steps))
        if gone is None:
            self._send(run, number, oldest)
        else:
            run.end(None, WorkerLost(gone))

    def _send(self, run: ClusterRun, number: int, oldest: int) -> None:
        assert self.members is not None
        timeout = run.control.seconds_left
        for part in run.all_parts:
            if part.passive:
                continue
            feeds = [run.inputs[i] for i in part.inputs]
            message = ("run", run.handle, number, oldest, feeds, timeout)
            failed = partial(self._not_sent, run, part.worker)
            try:
                self.members.members[part.worker].link.post(message, failed)
            except Exception as error:  # a feed cannot be pickled
                failed(error)

    def _not_sent(self, run: ClusterRun, worker: int, error: Exception) -> None:
        self.stop(run, RunError(f"a feed cannot be sent to worker {worker}: {error!r}"))

    def stop(self, run: ClusterRun, error: BaseException) -> None:
        """End a run with an error, and tell its workers."""
        try:
            if self._take(run):
                self._stop_workers(run, error)
        finally:
            run.end(None, error)

    def _take(self, run: ClusterRun) -> bool:
        """Remove a run from the runs in flight or held. Return whether it was in flight."""
        with self._lock:
            if run in self._held:
                self._held.remove(run)
            return self._steps.pop(run.number, None) is run

    def _stop_workers(self, run: ClusterRun, error: BaseException) -> None:
        reason = error if isinstance(error, Cancelled) else Cancelled(f"the run failed: {error!r}")
        for worker in list(run.parts):
            self._order(worker, ("stop", run.number, reason))

    def _order(self, worker: int, message: Message) -> None:
        assert self.members is not None
        self.members.members[worker].link.post(message)

    # Messages of workers.

    def take(self, worker: int, message: Message) -> None:
        """Process a message of a worker."""
        kind, number, *rest = message
        if kind == "ended":  # the ends of silent parts
            for each, sent, received in number:
                with self._lock:
                    run = self._steps.get(each)
                if run is not None:
                    self._ended(run, each, worker, (), None, (sent, received))
            return
        with self._lock:
            run = self._steps.get(number)
        if run is None:
            if kind == "waits":  # the part began after the run had ended
                stop = ("stop", number, Cancelled("the run has ended"))
                self._order(worker, stop)
        elif kind == "done":
            outputs, error, sent, received = rest
            self._ended(run, number, worker, outputs, error, (sent, received))
        elif kind == "waits":
            run.reports[worker] = rest[0], rest[1]
            self._look(run)

    def _ended(
        self,
        run: ClusterRun,
        number: int,
        worker: int,
        outputs: tuple[RunValue, ...] | None,
        error: BaseException | None,
        counts: _Counts,
    ) -> None:
        """Record that a part has ended, and end the run if it was the last."""
        with self._lock:
            if run.number != number:  # the end of an earlier attempt
                return
            if isinstance(error, Aborted):  # another worker is lost, which Ray will report
                run.doubt, run.since = error, monotonic()
                return
            part = run.parts.pop(worker, None)
            if part is None:
                return
            if error is None and outputs is not None:
                # Under the same lock: once a part is removed, the end of another may end the run.
                run.outputs.update(zip(part.outputs, outputs, strict=True))
                run.reports[worker] = counts
            left = any(not part.silent for part in run.parts.values())
        if error is not None or outputs is None:
            self.stop(run, error or RunError(f"worker {worker} gave no outputs"))
        elif not left:
            self._take(run)
            run.end(tuple([run.outputs[i] for i in sorted(run.outputs)]), None)
        else:
            self._look(run)

    def _look(self, run: ClusterRun) -> None:
        """Let the remaining parts of a run end if no more values will be sent."""
        if run.still:
            run.reports.clear()  # parts report again if the message is late
            for worker in list(run.parts):
                self._order(worker, ("end", run.number, run.handle))

    # The loss of a worker.

    def hold(self, worker: int, reason: Callable[[RemotePart], str]) -> None:
        """Remove the runs that have an unfinished part on a lost worker: they are repeated if they
        have attempts left, and else end with ``WorkerLost``. New runs that need the worker wait
        until ``resume``."""
        with self._lock:
            self._lost.add(worker)
            lost = [run for run in self._steps.values() if worker in run.parts]
            for run in lost:
                del self._steps[run.number]
            parts = [run.parts.pop(worker) for run in lost]
        for run, part in zip(lost, parts, strict=True):
            error = WorkerLost(reason(part))
            self._stop_workers(run, error)
            if run.attempts < 1 or run.control.stopped:
                run.end(None, error)
                continue
            run.attempts -= 1
            with self._lock:
                run.reset()
                self._held.append(run)

    def resume(self, gone: str | None = None) -> None:
        """Begin the waiting runs; or end them and all later runs with ``WorkerLost``, if ``gone``
        states why workers cannot be replaced."""
        with self._lock:
            self._gone = gone
            held, self._held = self._held, []
            self._lost.clear()
        for run in held:
            self.begin(run)

    def end_doubtful(self) -> None:
        """End runs whose part could not send a value more than ``DOUBT_S`` seconds ago."""
        now = monotonic()
        with self._lock:
            runs = [run for run in self._steps.values() if run.doubt is not None]
        for run in runs:
            if run.doubt is not None and now - run.since > DOUBT_S:
                self.stop(run, run.doubt)

    def end_all(self, error: Exception) -> None:
        """End all runs, and all later ones, with an error."""
        with self._lock:
            runs = [*self._steps.values(), *self._held]
            self._steps.clear()
            self._held = []
            self._gone = str(error)
        for run in runs:
            run.end(None, error)

    def forked(self, reason: str) -> None:
        """Forget the parent's runs in a forked child, whose own runs end with ``WorkerLost``."""
        self._lock = threading.Lock()
        self._steps.clear()
        self._held = []
        self._gone = reason


def listen(runs: Runs, run: ClusterRun) -> None:
    """Let the deadline or the token of a run stop it."""
    if run.control is not NEVER:
        run.control.add_listener(lambda error: runs.stop(run, error))
