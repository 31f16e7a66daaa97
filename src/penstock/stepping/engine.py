"""Scheduling of steps: rows of all sequences that wait, by priority and arrival.

::

    feed(a, 1 row)  ─┐
    feed(b, 1 row)  ─┼─> step: rows of a, b and some of c ──> outputs of a and b
    feed(c, prompt) ─┘   step: more rows of a, b, c       ──> ...
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import numpy as np

from penstock.core.checkpoints import LOOK_S
from penstock.core.errors import InvalidInput, LimitExceeded, PenstockError
from penstock.core.types import Type
from penstock.stepping.joined import Piece, piece_of
from penstock.stepping.loop_calls import PATIENCE, LoopCalls
from penstock.stepping.sequence import Done, RowHistory, Rows, SequenceState

if TYPE_CHECKING:
    from penstock.session.session import Session

_Results: TypeAlias = "list[tuple[Done, Rows | None, BaseException | None]]"
"""callbacks with their arguments, called once the step has ended"""

_T = TypeVar("_T")
_TURN = 8
"""one of this many steps ignores priorities, so that no sequence starves"""


class Runner(Protocol):
    """Computes pieces of sequences, and stores their state. ``rows`` has the types, by name, of the
    inputs with rows, and ``fixed`` the types of inputs that do not change between steps.
    ``most_rows`` is the maximum length of a sequence, given by the model's position tables."""

    session: Session
    axes: Mapping[str, int]
    rows: Mapping[str, Type]
    fixed: Mapping[str, Type]
    most_sequences: int
    most_rows: int | None

    @property
    def pages(self) -> tuple[int, int, int]: ...

    def check_fixed(self, fixed: Rows) -> None: ...
    def check_length(self, sequence: SequenceState, rows: int) -> None: ...
    def begin(self, sequence: SequenceState) -> None: ...
    def reserve(self, sequence: SequenceState, rows: int) -> bool: ...
    def release(self, sequence: SequenceState) -> None: ...
    def cut(self, sequence: SequenceState, rows: int) -> None: ...
    def fork(self, sequence: SequenceState, copy: SequenceState) -> None: ...
    def run(self, pieces: Sequence[Piece]) -> list[Rows]: ...
    def advance(self, piece: Piece) -> None: ...


class StepEngine:
    """Chooses the rows of each step. One thread at a time runs ``step``; all other methods may be
    called concurrently. ``history`` creates the object that holds the rows of a new sequence."""

    def __init__(
        self, runner: Runner, max_rows: int, history: Callable[[], RowHistory] = RowHistory
    ) -> None:
        self.runner, self.max_rows, self._history = runner, max_rows, history
        self.lock = threading.RLock()
        self._parked: dict[threading.Lock, Callable[[], bool]] = {}
        self._gates: dict[threading.Lock, int] = {}
        self._expected = self._patient_from = 0
        self._took = 0.0
        self.waiting: dict[SequenceState, None] = {}
        self.holding: dict[SequenceState, None] = {}
        self.steps = self.rows = self.prefixes = self.preempted = 0
        self.on_step: Callable[[int], object] | None = None
        """called with the number of rows of each step, on the thread that ran it"""
        self.loops = LoopCalls()
        self._count = 0
        self._running = False
        self.dropped: deque[SequenceState] = deque()
        """sequences without references; the garbage collector appends them at any time"""

    def sequence(self, priority: int) -> SequenceState:
        """Return a new sequence."""
        with self.lock:
            while self.dropped:
                self.close(self.dropped.popleft())
            self._count += 1
            return SequenceState(self._count, priority, self._history())

    def feed(self, sequence: SequenceState, rows: Rows, wanted: int, done: Done) -> None:
        """Append rows to a sequence and enqueue them."""
        sequence.rows.add(rows)
        sequence.wanted, sequence.done, sequence.begun = wanted, done, 0.0
        # Without the lock, for which many threads would contend: this step or the next sees it.
        self.waiting[sequence] = None
        for gate, count in [*self._gates.items()]:
            if len(self.waiting) >= count:
                _release_one(self._gates, gate)
        if sequence.closed:
            self._end_closed(sequence, None)

    def close(self, sequence: SequenceState, error: BaseException | None = None) -> None:
        """Drop a sequence; a call that waits for its rows raises an error."""
        with self.lock:
            if sequence.closed:
                return
            sequence.closed = True
            # A running step writes to the pages: they are released after it.
            if not self._running:
                self._release(sequence)
        self._end_closed(sequence, error)

    def _end_closed(self, sequence: SequenceState, error: BaseException | None) -> None:
        with self.lock:
            self.waiting.pop(sequence, None)
            done, sequence.done = sequence.done, None
        if done is not None:
            done(None, error or InvalidInput("the sequence was closed"))
            self._wake()

    def _release(self, sequence: SequenceState) -> None:
        self.holding.pop(sequence, None)
        self.runner.release(sequence)

    def step(self) -> bool:
        """Run a step. Returns False if no rows wait, or another thread runs a step."""
        if self._running or not self.waiting:
            return False
        with self.lock:
            if self._running or not self.waiting:
                return False
            self._running = True
        results: _Results = []
        try:
            self._await_others()
            begin = perf_counter()
            pieces = self._chosen(results)
            if pieces:
                if any(piece.rows > 1 for piece in pieces):
                    self.loops.wake()  # a step with parts of prompts may take long
                for piece in pieces:
                    piece.sequence.begun = piece.sequence.begun or begin
                self._computed(pieces, self._run(pieces), results)
                if self.on_step is not None:
                    self.on_step(sum(piece.rows for piece in pieces))
                # A decaying maximum: a step with few sequences says little about others.
                self._took = max(perf_counter() - begin, 0.9 * self._took)
            # Before other threads may run a step: the callbacks make clients feed their next rows,
            # and a step that began meanwhile would have the rows of only some of them.
            with self.loops.together(patient=self._took < PATIENCE):
                for done, outputs, error in results:
                    done(outputs, error)
        finally:
            with self.lock:
                self._running = False
                for sequence in [s for s in self.holding if s.closed]:
                    self._release(sequence)
        self._wake()
        return True

    # Waiting threads: one of them runs steps, and the others are woken one by one.

    def drive(self, is_done: Callable[[], bool]) -> None:
        """Run steps, or wait for another thread's steps, until ``is_done()``."""
        try:
            while not is_done():
                if not self.step():
                    self.park(is_done)
        finally:
            self.loops.wake()
            self.hand_over()

    def park(self, is_done: Callable[[], bool]) -> None:
        """Wait until ``is_done`` may be true, this thread must run steps, or a time has passed."""
        self.loops.wake()
        wake = threading.Lock()
        wake.acquire()
        # Registered before the check: a change either wakes this thread or is seen by it.
        self._parked[wake] = is_done
        if not is_done() and (self._running or not self.waiting) and wake.acquire(timeout=LOOK_S):
            return
        self._parked.pop(wake, None)

    def hand_over(self) -> None:
        """Wake one of the waiting threads to run steps, if rows wait and no thread runs a step."""
        if self.waiting and not self._running:
            for wake in [*self._parked]:
                if _release_one(self._parked, wake):
                    return

    def _wake(self) -> None:
        """Wake the threads that are done."""
        for wake, is_done in [*self._parked.items()]:
            if is_done():
                _release_one(self._parked, wake)

    def wake_all(self) -> None:
        """Wake all waiting threads, to check whether they are done."""
        for wake in [*self._parked]:
            _release_one(self._parked, wake)

    def _await_others(self) -> None:
        """Wait for the next rows of the sequences that got results of the previous step, at most
        for the duration of a step. Most clients feed them at once; without the wait, sequences
        would split into two halves that take turns."""
        count, self._expected = self._expected, 0
        if self.steps < self._patient_from:
            return
        gate = threading.Lock()
        gate.acquire()
        self._gates[gate] = count
        if len(self.waiting) < count and not gate.acquire(timeout=self._took):
            self._patient_from = self.steps + _TURN
        self._gates.pop(gate, None)

    # The rows of a step.

    def _chosen(self, results: _Results) -> list[Piece]:
        """Choose the pieces of the next step, and reserve their pages."""
        while self.dropped:
            self.close(self.dropped.popleft())
        with self.lock:
            for sequence in [*self.waiting]:
                self._stop_late(sequence, results)
            pieces: list[Piece] = []
            room = self.max_rows
            # Every ``_TURN``-th step ignores priorities.
            by_priority = self.steps % _TURN > 0
            # Single rows first: they cost least, and a user may be reading them.
            for single in (True, False):
                for sequence in self._ranked(single, by_priority):
                    if not room or sequence.closed or len(pieces) == self.runner.most_sequences:
                        break
                    if self._begun(sequence) != single:
                        continue
                    rows = min(piece_of(sequence.waiting, room), sequence.rows.together)
                    if self._reserved(sequence, rows, pieces, results):
                        pieces.append(Piece(sequence, rows))
                        room -= rows
            return pieces

    def _ranked(self, single: bool, by_priority: bool) -> list[SequenceState]:
        """The waiting sequences in the order in which they get rows: single rows by the time since
        they were last served, prompts by their arrival."""
        return sorted(
            self.waiting, key=lambda s: (-s.priority * by_priority, s.served * single, s.number)
        )

    def _begun(self, sequence: SequenceState) -> bool:
        """Begin a sequence if it is new, perhaps after a known prefix. Return whether the next step
        has a single row of it."""
        if sequence not in self.holding:
            self.holding[sequence] = None
            before = sequence.computed
            self.runner.begin(sequence)
            self.prefixes += sequence.computed - before
        return min(sequence.waiting, sequence.rows.together) == 1

    def _stop_late(self, sequence: SequenceState, results: _Results) -> None:
        """Fail the call of a sequence if its deadline has passed or it was cancelled."""
        if sequence.stop is None:
            return
        try:
            sequence.stop.check()
        except PenstockError as error:
            self._fail(sequence, error, results)

    def _fail(self, sequence: SequenceState, error: BaseException, results: _Results) -> None:
        """End the call of a sequence with an error, and drop the rows that were not computed."""
        self.waiting.pop(sequence, None)
        sequence.rows.cut(sequence.computed)
        done, sequence.done = sequence.done, None
        sequence.outputs.clear()
        if done is not None:
            results.append((done, None, error))

    def _reserved(
        self, sequence: SequenceState, rows: int, pieces: list[Piece], results: _Results
    ) -> bool:
        """Reserve pages for rows of a sequence; preempt sequences of lower rank if none is free."""
        try:
            while not self.runner.reserve(sequence, rows):
                victim = self._victim(sequence, {p.sequence for p in pieces})
                if victim is None:
                    return False
                self.preempted += 1
                del self.holding[victim]
                self.runner.release(victim)
                victim.outputs.clear()  # they are computed again
        except LimitExceeded as error:
            self._fail(sequence, error, results)
            return False
        return True

    def _victim(
        self, sequence: SequenceState, chosen: Collection[SequenceState]
    ) -> SequenceState | None:
        """Return the sequence to preempt for another one: the least recently stepped idle sequence,
        else the last one of lower rank."""
        others = [s for s in self.holding if s is not sequence and s not in chosen and s.has_state]
        # The owner of an idle sequence may wait for ``sequence``, as a beam search does.
        idle = [s for s in others if s not in self.waiting]
        if idle:
            return min(idle, key=lambda s: (s.priority, s.served))
        victim = max(others, key=lambda s: s.rank, default=None)
        return None if victim is None or victim.rank < sequence.rank else victim

    def _run(self, pieces: list[Piece]) -> list[Rows | BaseException]:
        """Return the outputs or errors of pieces. If a run of several fails, run each alone."""
        try:
            return [*self.runner.run(pieces)]
        except Exception as error:
            if len(pieces) == 1:
                return [error]
        return [result for one in pieces for result in self._run([one])]

    def _computed(
        self, pieces: list[Piece], outputs: list[Rows | BaseException], results: _Results
    ) -> None:
        """Record the outputs of a step; ``results`` are delivered outside of the lock."""
        with self.lock:
            self.steps += 1
            self.rows += sum(p.rows for p in pieces)
            returning = 0
            for piece, output in zip(pieces, outputs, strict=True):
                sequence = piece.sequence
                if isinstance(output, BaseException):
                    self._fail(sequence, output, results)
                    continue
                self.runner.advance(piece)
                sequence.served = self.steps
                if sequence.closed:
                    continue
                sequence.outputs.append(output)
                if not sequence.waiting:
                    self.waiting.pop(sequence, None)
                    done, sequence.done = sequence.done, None
                    whole = self._joined(sequence.outputs)
                    sequence.outputs = []
                    returning += sequence.returns
                    if done is not None:
                        results.append((done, whole, None))
            self._expected = len(self.waiting) + returning

    def _joined(self, outputs: list[Rows]) -> Rows:
        """Concatenate the outputs of wanted rows from several steps."""
        # A single step needs no axes, which may be unknown.
        if len(outputs) == 1:
            return outputs[0]
        axes = self.runner.axes
        own = [rows for rows in outputs if all(rows[n].shape[axis] for n, axis in axes.items())]
        if len(own) < 2:
            return (own or outputs)[0]
        return {n: np.concatenate([rows[n] for rows in own], axis) for n, axis in axes.items()}

    def change(self, work: Callable[[], None]) -> None:
        """Call a function that changes the state of sequences, none of which is in a step."""
        with self.lock:
            work()


def _release_one(threads: dict[threading.Lock, _T], lock: threading.Lock) -> bool:
    """Wake one of the threads that wait for locks, unless another has done so."""
    if threads.pop(lock, None) is None:
        return False
    lock.release()
    return True
