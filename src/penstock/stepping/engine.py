"""Which rows are computed in the next step: of all sequences that wait, by priority and arrival.

::

    feed(a, 1 row)  ─┐
    feed(b, 1 row)  ─┼─> step: rows of a, b and some of c ──> outputs of a and b
    feed(c, prompt) ─┘   step: more rows of a, b, c       ──> ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from penstock.core.errors import InvalidInput, LimitExceeded, PenstockError
from penstock.stepping.joined import Piece, piece_of
from penstock.stepping.sequence import Done, RowHistory, Rows, SequenceState

if TYPE_CHECKING:
    from penstock.session.session import Session

_Results: TypeAlias = "list[tuple[Done, Rows | None, BaseException | None]]"
"""what to tell those who wait, once the step has ended"""

_TURN = 8
"""of so many steps, one asks for no priority, so that each sequence goes on"""


class Runner(Protocol):
    """Computes pieces of sequences, and has their state."""

    session: Session
    axes: Mapping[str, int]
    rows: Sequence[str]
    most_sequences: int

    @property
    def pages(self) -> tuple[int, int, int]: ...

    def begin(self, sequence: SequenceState) -> None: ...
    def reserve(self, sequence: SequenceState, rows: int) -> bool: ...
    def release(self, sequence: SequenceState) -> None: ...
    def cut(self, sequence: SequenceState, rows: int) -> None: ...
    def fork(self, sequence: SequenceState, copy: SequenceState) -> None: ...
    def run(self, pieces: Sequence[Piece]) -> list[Rows]: ...
    def advance(self, piece: Piece) -> None: ...


class StepEngine:
    """Chooses the rows of each step. One thread at a time calls ``step``; all else may be called by
    any. ``history`` makes what holds the rows of a new sequence."""

    def __init__(
        self, runner: Runner, max_rows: int, history: Callable[[], RowHistory] = RowHistory
    ) -> None:
        self.runner, self.max_rows, self._history = runner, max_rows, history
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.waiting: dict[SequenceState, None] = {}
        self.holding: dict[SequenceState, None] = {}
        self.steps = self.rows = self.prefixes = self.preempted = 0
        self._count = 0
        self._running = False

    def sequence(self, priority: int) -> SequenceState:
        """A new sequence."""
        with self.lock:
            self._count += 1
            return SequenceState(self._count, priority, self._history())

    def feed(self, sequence: SequenceState, rows: Rows, wanted: int, done: Done) -> None:
        """Let rows be computed behind those of a sequence."""
        with self.lock:
            sequence.rows.add(rows)
            sequence.wanted, sequence.done = wanted, done
            self.waiting[sequence] = None
            self.changed.notify_all()

    def close(self, sequence: SequenceState, error: BaseException | None = None) -> None:
        """Forget a sequence; whoever waits for its rows gets an error."""
        with self.lock:
            if sequence.closed:
                return
            sequence.closed = True
            self.waiting.pop(sequence, None)
            # A step that runs writes to the pages: they are released behind it.
            if not self._running:
                self._release(sequence)
            done, sequence.done = sequence.done, None
            self.changed.notify_all()
        if done is not None:
            done(None, error or InvalidInput("the sequence was closed"))

    def _release(self, sequence: SequenceState) -> None:
        self.holding.pop(sequence, None)
        self.runner.release(sequence)

    def step(self) -> bool:
        """Compute some rows that wait; False if there are none, or another thread does."""
        with self.lock:
            if self._running or not self.waiting:
                return False
            self._running = True
        results: _Results = []
        try:
            pieces = self._chosen(results)
            if pieces:
                self._computed(pieces, self._run(pieces), results)
        finally:
            with self.lock:
                self._running = False
                for sequence in [s for s in self.holding if s.closed]:
                    self._release(sequence)
                self.changed.notify_all()
        for done, outputs, error in results:
            done(outputs, error)
        return True

    # The rows of a step.

    def _chosen(self, results: _Results) -> list[Piece]:
        """The pieces of the next step, whose pages are reserved."""
        with self.lock:
            for sequence in [*self.waiting]:
                self._stop_late(sequence, results)
            pieces: list[Piece] = []
            room = self.max_rows
            # Lower priorities get their turn, too, if seldom.
            by_priority = self.steps % _TURN > 0
            # Single rows first: they cost least, and somebody reads along.
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
        """The sequences that wait, in the order in which they get rows: of single rows those first
        that have waited longest, of prompts those that came first."""
        return sorted(
            self.waiting, key=lambda s: (-s.priority * by_priority, s.served * single, s.number)
        )

    def _begun(self, sequence: SequenceState) -> bool:
        """Whether a step has one row of a sequence. A new one begins, perhaps behind a known
        prefix."""
        if sequence not in self.holding:
            self.holding[sequence] = None
            before = sequence.computed
            self.runner.begin(sequence)
            self.prefixes += sequence.computed - before
        return min(sequence.waiting, sequence.rows.together) == 1

    def _stop_late(self, sequence: SequenceState, results: _Results) -> None:
        """End the wait for rows whose deadline has passed, or which were cancelled."""
        if sequence.stop is None:
            return
        try:
            sequence.stop.check()
        except PenstockError as error:
            self._fail(sequence, error, results)

    def _fail(self, sequence: SequenceState, error: BaseException, results: _Results) -> None:
        """Let a sequence wait no more: rows that were not computed are forgotten."""
        self.waiting.pop(sequence, None)
        sequence.rows.cut(sequence.computed)
        done, sequence.done = sequence.done, None
        sequence.outputs.clear()
        if done is not None:
            results.append((done, None, error))

    def _reserved(
        self, sequence: SequenceState, rows: int, pieces: list[Piece], results: _Results
    ) -> bool:
        """Take pages for rows of a sequence, of those of lower rank if there are no others."""
        try:
            while not self.runner.reserve(sequence, rows):
                chosen = {p.sequence for p in pieces}
                others = [s for s in self.holding if s is not sequence and s not in chosen]
                victim = max(others, key=lambda s: s.rank, default=None)
                if victim is None or victim.rank < sequence.rank:
                    return False
                self.preempted += 1
                del self.holding[victim]
                self.runner.release(victim)
                victim.outputs.clear()  # they are computed again
        except LimitExceeded as error:
            self._fail(sequence, error, results)
            return False
        return True

    def _run(self, pieces: list[Piece]) -> list[Rows | BaseException]:
        """The outputs of pieces, or the errors that they end with: of several, each by itself."""
        try:
            return [*self.runner.run(pieces)]
        except Exception as error:
            if len(pieces) == 1:
                return [error]
        return [result for one in pieces for result in self._run([one])]

    def _computed(
        self, pieces: list[Piece], outputs: list[Rows | BaseException], results: _Results
    ) -> None:
        """Note what a step has computed; ``results`` are told outside of the lock."""
        with self.lock:
            self.steps += 1
            self.rows += sum(p.rows for p in pieces)
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
                    if done is not None:
                        results.append((done, whole, None))

    def _joined(self, outputs: list[Rows]) -> Rows:
        """The outputs of all steps of the wanted rows."""
        # The axes of outputs need not be known then.
        if len(outputs) == 1:
            return outputs[0]
        axes = self.runner.axes
        own = [rows for rows in outputs if all(rows[n].shape[axis] for n, axis in axes.items())]
        if len(own) < 2:
            return (own or outputs)[0]
        return {n: np.concatenate([rows[n] for rows in own], axis) for n, axis in axes.items()}

    def change(self, work: Callable[[], None]) -> None:
        """Call a function that changes the state of sequences of which no rows are computed."""
        with self.lock:
            work()
