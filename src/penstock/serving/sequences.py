"""Sequences of requests to a model with state, which a stepper keeps between requests.

::

    {"sequence_id": 7, "sequence_start": true} ──> a new sequence ──┐
    {"sequence_id": "b"}                       ──> its state ───────┼─> a step ──> outputs of each
    {"sequence_id": 8, "sequence_end": true}   ──> its state, freed ┘

The parameters are those of Triton's sequence extension.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from time import perf_counter
from typing import NoReturn

import numpy as np

from penstock.core.errors import Cancelled, InvalidInput, LimitExceeded, PenstockError
from penstock.core.records import replace
from penstock.core.types import JsonObject, NamedValues, RunValue
from penstock.executors.control import CancelToken
from penstock.host.stop_condition import StopCondition
from penstock.ops.common.shape_rules import fits
from penstock.serving.batching import made_up
from penstock.serving.protocol import SequenceControl, datatype_of
from penstock.serving.request_records import ReplicaCounts, ReplicaHistograms, Timed, Told
from penstock.serving.sequence_table import (
    IDLE,
    MOST,
    SequenceConflict,
    SequenceTable,
    TooManySequences,
)
from penstock.session.facts import Port
from penstock.session.future import RunFuture
from penstock.session.saving import has_state
from penstock.stepping.joined import rounded
from penstock.stepping.sequence import Rows
from penstock.stepping.stepper import Stepper, StepSequence


class Sequences:
    """The sequences of a model with state, whose requests ``stepper`` steps together. This is the
    counterpart of ``Replicas``, with the same counters: a step counts as a batch.

    Raises ``ValueError`` for a model with variables that are not states of sequences.

    Args:
        stepper: Runs the steps; it is closed with the sequences.
        most: The maximum number of open sequences; further ones raise ``TooManySequences``.
        idle: Seconds without a request after which a sequence ends.
    """

    max_batch, max_delay, count, runs_here = 1, 0.0, 1, True

    def __init__(self, stepper: Stepper, *, most: int = MOST, idle: float = IDLE) -> None:
        # Variables that runs assign have been converted to states of each sequence.
        if has_state(stepper._engine.runner.session.model):
            raise ValueError(
                "a model with variables cannot serve sequences: they would share its variables"
            )
        self.stepper, self.table = stepper, SequenceTable(most, idle)
        engine = stepper._engine
        self.session = engine.runner.session
        engine.on_step = self._stepped
        self.inputs = [Port(name, type_) for name, type_ in stepper.rows.items()]
        self.outputs = [port for port in self.session.outputs if port.name in stepper.outputs]
        self.states = [port for port in self.session.inputs if port.name in stepper.state]
        self.fixed = [Port(name, type_) for name, type_ in stepper.fixed.items()]
        self._counts, self._histograms = ReplicaCounts(), ReplicaHistograms()
        self._lock = threading.Lock()

    @property
    def values(self) -> list[Port]:
        """Return the values that requests may feed and fetch."""
        return [*self.inputs, *self.fixed, *self.states, *self.outputs]

    @property
    def counts(self) -> ReplicaCounts:
        """Return the counts of requests, and of steps, so far."""
        with self._lock:
            return replace(self._counts, refused=self.table.counts.refused)

    @property
    def histograms(self) -> ReplicaHistograms:
        """Return histograms of the seconds of waits and of steps, and of the rows of steps."""
        with self._lock:
            return self._histograms.copy()

    def configuration(self) -> JsonObject:
        """Return the configuration of sequences in Triton's format."""
        states = [
            {
                "input_name": port.name,
                "output_name": self.stepper.state[port.name],
                "data_type": f"TYPE_{datatype_of(port.dtype)}" if port.dtype else "TYPE_INVALID",
                "dims": [d if isinstance(d, int) else -1 for d in port.shape or ()],
            }
            for port in self.states
        ]
        return {
            "sequence_batching": {
                "max_sequence_idle_microseconds": round(self.table.idle * 1e6),
                "oldest": {"max_candidate_sequences": self.table.most},
                "state": states,
            }
        }

    def of(self, control: SequenceControl | None) -> SequenceRun:
        """Return the runner of a request. Raises ``InvalidInput`` if it has no sequence."""
        if control is None:
            raise InvalidInput(
                'the model has state: requests must have the parameter "sequence_id", and the '
                'first one of a sequence "sequence_start": true'
            )
        return SequenceRun(self, control)

    def stream(self, *arguments: object, **options: object) -> NoReturn:
        """Raise ``InvalidInput``, since all values of a step are computed at once."""
        raise InvalidInput("a model with state does not support streaming; use infer")

    def warm_up(self, shapes: Sequence[Mapping[str, tuple[int, ...]]], *, whole: bool) -> None:
        """Step a sequence of generated frames of some shapes; with ``whole``, also as many
        sequences together as each plan has rows. Raises ``ValueError`` if the model fails on it."""
        rng, engine = np.random.default_rng(0), self.stepper._engine
        engine.on_step = None  # these steps belong to no request, and are not counted
        ports = [*self.inputs, *self.fixed]
        types = {port.name: port.dtype or np.dtype(np.float32) for port in ports}
        for own in shapes:
            frame = {name: made_up(own[name], dtype, rng) for name, dtype in types.items()}
            try:
                self._step_together(frame, 1)
                # It is known from the first frame on whether sequences step together.
                most = engine.runner.most_sequences
                for size in sorted({rounded(n) for n in range(2, most + 1)}) if whole else ():
                    self._step_together(frame, min(size, most))
            except PenstockError as error:
                raise ValueError(
                    f"the model cannot be warmed up, as it fails on generated inputs: {error}"
                ) from error
        engine.on_step = self._stepped

    def _step_together(self, frame: NamedValues, count: int) -> None:
        ended: list[BaseException | None] = []
        rows = {port.name: frame[port.name] for port in self.inputs}
        fixed = {port.name: frame[port.name] for port in self.fixed}
        sequences = [self.stepper.sequence(initial=fixed) for _ in range(count)]
        for one in sequences:
            one.feed(rows, None, lambda _, error: ended.append(error))
        self.stepper._drive(lambda: len(ended) == count)
        for one in sequences:
            one.close()
        if failed := next((error for error in ended if error is not None), None):
            raise failed

    def close(self) -> None:
        """Refuse further requests, wait for running ones, and end all sequences."""
        self.table.close()
        self.stepper.close()

    def _stepped(self, rows: int) -> None:
        with self._lock:
            self._counts.batches += 1
            self._counts.rows += rows
            self._histograms.batch_rows.add(rows)

    def _count_request(self, change: int, error: BaseException | None = None) -> None:
        """Count a request that begins (1) or has ended (-1)."""
        with self._lock:
            self._counts.running += change
            self._counts.succeeded += change < 0 and error is None
            self._counts.failed += error is not None

    def _count_seconds(self, queue: float, run: float) -> None:
        with self._lock:
            self._histograms.queue_seconds.add(queue)
            self._histograms.compute_seconds.add(run)


class SequenceRun:
    """A request of a sequence, whose rows follow those of previous requests. It can run once. Its
    outputs are those of all rows, or of the last ``wanted`` rows."""

    def __init__(self, sequences: Sequences, control: SequenceControl) -> None:
        self._sequences, self._control = sequences, control
        self._stepper, self._table = sequences.stepper, sequences.table
        self._future: Future[dict[str, RunValue]] = RunFuture()
        self._names: Sequence[str] = ()
        self._timed: Timed | None = None
        self._since = perf_counter()
        self._length = 0

    def submit(
        self,
        feeds: NamedValues,
        fetches: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        priority: int | None = None,
        timed: Timed | None = None,
    ) -> Future[dict[str, RunValue]]:
        """Queue the rows and return a future of their outputs. Raises ``UnknownSequence``,
        ``SequenceConflict``, ``TooManySequences`` and ``InvalidInput`` at once.

        Args:
            feeds: Rows, or frames, by input; at the start of a sequence, also its initial states,
                and inputs that are fixed over all of its steps.
            fetches: Names of outputs, by default all.
            timeout: Seconds after which the request ends.
            priority: The priority of a new sequence: rows of higher priority are computed first.
            timed: Called with the seconds that the request waited, and those of its steps.

        Cancelling the future ends the sequence.
        """
        stop = StopCondition(timeout, None, "the request")
        self._begin(feeds, fetches, stop, priority, timed)
        self._future.add_done_callback(self._end_if_cancelled)
        self._stepper._run_apart()
        return self._future

    def run_here(
        self,
        feeds: NamedValues,
        fetches: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        priority: int | None = None,
        told: Told | None = None,
    ) -> dict[str, RunValue]:
        """Compute the rows as ``submit`` does, and return the outputs. The calling thread runs
        steps, of all sequences, until these are computed. ``cancel`` ends the sequence."""
        stop = StopCondition(timeout, cancel, "the request")
        self._begin(feeds, fetches, stop, priority, None if told is None else told.timed)
        self._stepper._drive(self._future.done)
        return self._future.result()

    def _begin(
        self,
        feeds: NamedValues,
        fetches: Sequence[str] | None,
        stop: StopCondition,
        priority: int | None,
        timed: Timed | None,
    ) -> None:
        rows, initial = self._checked(feeds, fetches)
        self._names, self._timed = fetches or self._stepper.outputs, timed
        if self._control.start:
            sequence = self._new_sequence(initial, priority or 0)
            # Checked before an old sequence of the same id ends: invalid requests change nothing.
            sequence._checked(rows, self._control.wanted)
            self._own = self._table.start(self._control.id, sequence)
        else:
            self._own = self._table.resume(self._control.id)
        self._length = self._own.sequence.length
        self._sequences._count_request(1)
        try:
            self._own.sequence.feed(rows, self._control.wanted, self._done, stop)
        except BaseException as error:
            told = self._released(error)
            if told is error or told is None:
                raise
            raise told from error

    def _checked(
        self, feeds: NamedValues, fetches: Sequence[str] | None
    ) -> tuple[NamedValues, NamedValues]:
        """Return the rows of a request and its initial inputs. Raises ``InvalidInput``."""
        have, stepper = self._stepper.outputs, self._stepper
        if unknown := [name for name in fetches or () if name not in have]:
            raise InvalidInput(f"unknown outputs {unknown}; available are {have}")
        of_begin = {**stepper.state, **stepper.fixed}
        rows = {name: x for name, x in feeds.items() if name not in of_begin}
        initial = {name: x for name, x in feeds.items() if name in of_begin}
        if initial and not self._control.start:
            raise InvalidInput(f"inputs {[*initial]} may only be fed at the start of a sequence")
        # For a decoder, the number of rows need not match the model's.
        for port in self._sequences.inputs if stepper.state else ():
            shape = np.shape(rows[port.name]) if port.name in rows else None
            if not fits(shape, port.shape):
                raise InvalidInput(
                    f"input {port.name!r} has shape {shape}, but the model expects {port}"
                )
        return rows, initial

    def _new_sequence(self, initial: NamedValues, priority: int) -> StepSequence:
        try:
            return self._stepper.sequence(priority=priority, initial=initial)
        except InvalidInput:
            self._table.check_open()  # the stepper may have been closed
            raise

    # Called at the end of the request, on the thread that ran the step.

    def _done(self, outputs: Rows | None, error: BaseException | None) -> None:
        now = perf_counter()
        begun = self._own.sequence._state.begun or now
        queue, run = begun - self._since, now - begun
        self._sequences._count_seconds(queue, run)
        error = self._released(error)
        if self._timed is not None:
            self._timed(queue, run)
        with suppress(InvalidStateError):  # the future was cancelled
            if outputs is None:
                self._future.set_exception(error)
            else:
                self._future.set_result({name: outputs[name] for name in self._names})

    def _released(self, error: BaseException | None) -> BaseException | None:
        """Let the sequence wait for its next request, or end. Return the error for the client."""
        control = self._control
        if error is None:
            ends = control.end
        else:
            ends = control.start or isinstance(error, Cancelled) or not self._is_taken_back()
        self._sequences._count_request(-1, error)
        is_open = self._table.release(control.id, self._own, ends=ends)
        if error is not None and not is_open:
            return SequenceConflict(f"sequence {control.id!r} was restarted by another request")
        if isinstance(error, LimitExceeded) and control.start and self._sequences.states:
            return TooManySequences(str(error))
        return error

    def _is_taken_back(self) -> bool:
        """Whether the sequence's state from before a failed request is restored."""
        sequence = self._own.sequence
        if sequence.length != self._length:
            # A decoder's rows can be rolled back; for computed frames, no earlier state is kept.
            try:
                sequence.cut(self._length)
            except InvalidInput:
                return False
        return True

    def _end_if_cancelled(self, future: Future[dict[str, RunValue]]) -> None:
        if future.cancelled():
            self._table.end(self._control.id, self._own)
