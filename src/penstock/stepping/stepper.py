"""Steps of many sequences together, for programs and for generation and serving.

A thread that waits for its rows runs the steps of all sequences, so that a single request needs no
other thread. Rows of asynchronous calls, for which no thread waits, are run by a thread of the
stepper.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from sys import maxsize
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np

from penstock.compiler.options import CompileOptions, make
from penstock.core import Closeable
from penstock.core.errors import InvalidInput, RowsStay, check_count
from penstock.core.limits import parse_bytes
from penstock.core.records import NamedTuple
from penstock.core.types import TensorType, Type
from penstock.executors.feeds import check_names, convert
from penstock.host.stop_condition import StopCondition
from penstock.ir.graph import Model
from penstock.stepping.engine import Runner, StepEngine
from penstock.stepping.joined import JoinedRunner
from penstock.stepping.sequence import Done, RowHistory, Rows, SequenceState
from penstock.stepping.step_model import StepSource

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import ArrayLike

    from penstock.executors.control import CancelToken
    from penstock.stepping.batched import BatchedRunner

_IDLE_LOOKS = 20
"""how often the thread of a stepper finds nothing to do before it ends"""


class StepperStats(NamedTuple):
    """Counters of a stepper.

    ``steps`` were run and computed ``rows``; the rows of ``prefixes`` were reused instead of being
    computed. ``preempted`` counts sequences that gave up their state and were computed again.
    ``pages``: the number in use, the number of these only kept for reuse, and the total."""

    steps: int
    rows: int
    prefixes: int
    preempted: int
    pages: tuple[int, int, int]


class StepSequence(Closeable):
    """The rows of one request, whose state is kept between steps. ``Stepper.sequence`` creates it.

    Its steps are computed together with those of other sequences. Only one thread or task may step
    a sequence at a time.

    For a model whose state has a fixed size, a row is a frame: the inputs of one step, with a batch
    dim of 1. To step several frames, concatenate them along the batch axis; each takes a step of
    its own. An input without a batch axis is used for all frames.
    """

    def __init__(self, stepper: Stepper, state: SequenceState) -> None:
        self._stepper, self._state = stepper, state

    def __del__(self) -> None:
        # Without a lock: garbage may be collected while this very thread holds it.
        self._stepper._engine.dropped.append(self._state)

    @property
    def length(self) -> int:
        """The number of rows, or frames, stepped so far."""
        return self._state.rows.count

    def step(
        self,
        rows: Mapping[str, ArrayLike],
        *,
        wanted: int | None = 1,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
    ) -> dict[str, np.ndarray]:
        """Append rows to the sequence, compute them, and return the outputs of the last ones.

        Args:
            rows: Arrays by the names of the inputs that have rows, each [1, rows, ...]; frames are
                [frames, ...].
            wanted: The number of last rows whose outputs are returned, [1, wanted, ...]; frames are
                [wanted, ...]. None for all.
            timeout: Seconds after which the call ends with ``DeadlineExceeded``.
            cancel: A ``CancelToken`` that ends the call with ``Cancelled``.

        If the call raises, rows that were not computed are not part of the sequence.
        """
        ended: list[tuple[Rows | None, BaseException | None]] = []
        stop = StopCondition(timeout, cancel, "the step")
        self._state.returns = True
        self.feed(rows, wanted, lambda *end: ended.append(end), stop)
        self._stepper._drive(lambda: bool(ended))
        ((outputs, error),) = ended
        if error is not None:
            raise error
        return dict(outputs or {})

    async def astep(
        self,
        rows: Mapping[str, ArrayLike],
        *,
        wanted: int | None = 1,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
    ) -> dict[str, np.ndarray]:
        """``step`` for asyncio, with the same arguments. Cancelling the task closes the
        sequence."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[Rows] = loop.create_future()

        def end(outputs: Rows | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(outputs or {})

        def done(outputs: Rows | None, error: BaseException | None) -> None:
            self._stepper._engine.loops.soon(loop, partial(end, outputs, error))

        self._state.returns = True
        self.feed(rows, wanted, done, StopCondition(timeout, cancel, "the step"))
        self._stepper._run_apart()
        try:
            return dict(await future)
        except asyncio.CancelledError:
            self.close()
            raise

    def feed(
        self,
        rows: Mapping[str, ArrayLike],
        wanted: int | None,
        done: Done,
        stop: StopCondition | None = None,
    ) -> None:
        """Enqueue rows. The thread that runs the step calls ``done`` with the outputs, or with the
        error of the call.

        Args:
            rows: As ``step`` takes them.
            wanted: The number of last rows to return outputs of; None for all.
            done: Called with outputs and None, or None and an error. It may feed the next rows.
                Until then, arrays of frames may not be written.
            stop: A condition that ends the wait; by default that of the previous call.
        """
        if self._state.closed:
            raise InvalidInput("the sequence is closed; begin another with Stepper.sequence()")
        self._check_idle()
        checked, wanted = self._checked(rows, wanted)
        self._feed(checked, wanted, done, stop)

    def _feed(self, rows: Rows, wanted: int, done: Done, stop: StopCondition | None) -> None:
        """``feed`` for checked rows of an open sequence that no other call steps."""
        if stop is not None:
            self._state.stop = stop if stop.limited else None
        self._stepper._engine.feed(self._state, rows, wanted, done)

    def _checked(self, rows: Mapping[str, ArrayLike], wanted: int | None) -> tuple[Rows, int]:
        """Return the rows as arrays of the inputs' types, and the number of rows to return outputs
        of. Raises ``InvalidInput``."""
        checked = self._stepper._checked(rows)
        count = self._state.rows.size_of(checked)
        self._check_length(count)
        if wanted is None:
            return checked, count
        check_count("wanted", wanted)
        if wanted > count:
            raise InvalidInput(f"wanted={wanted} of {count} rows")
        return checked, wanted

    def _check_length(self, count: int) -> None:
        """Check that ``count`` rows more are possible. Raises ``InvalidInput``, and
        ``LimitExceeded`` if pages cannot hold them."""
        self._stepper._engine.runner.check_length(self._state, self.length + count)

    def fork(self) -> StepSequence:
        """Return a new sequence with the rows of this one. Both share the full pages of its
        state."""
        engine = self._stepper._engine
        self._check_idle()
        copy = engine.sequence(self._state.priority)

        def change() -> None:
            copy.rows, copy.stop = self._state.rows.copied(), self._state.stop
            copy.fixed = self._state.fixed
            engine.runner.fork(self._state, copy)
            # A preempted sequence is computed again when it is stepped, and so is its copy.
            if self._state in engine.holding:
                engine.holding[copy] = None

        engine.change(change)
        return StepSequence(self._stepper, copy)

    def cut(self, length: int) -> None:
        """Drop all rows but the first ``length``.

        Args:
            length: The number of rows to keep; of frames only 0 or all, since the states after
                earlier frames are not kept.
        """
        if not 0 <= length <= self.length:
            raise InvalidInput(f"length={length} of a sequence of {self.length} rows")
        if length == self.length:
            return
        self._check_idle()
        engine = self._stepper._engine

        def change() -> None:
            # Changed last: if the runner refuses, rows stay as they are.
            engine.runner.cut(self._state, length)
            self._state.rows.cut(length)

        engine.change(change)

    def _check_idle(self) -> None:
        if self._state.done is not None:
            raise InvalidInput("the sequence is being stepped by another call; wait for its end")

    def close(self) -> None:
        """Release the state. A call that waits for rows raises an error."""
        self._stepper._engine.close(self._state)


class Stepper(Closeable):
    """Runs a model whose outputs are fed back to it for many sequences at once (continuous
    batching).

    **Decoders.** A step computes rows of all waiting sequences in one run, whatever their lengths:
    single tokens of some, parts of prompts of others. Sequences may join and leave between steps.
    Caches are stored in pages, at most ``cache_bytes`` in all; sequences with a common prefix
    share its pages. If pages run out, sequences of lower priority give theirs up and are computed
    again later.

    **Decoders of encoder-decoders.** A sequence has inputs that do not change between steps, such
    as the output of the encoder. Property ``fixed`` lists them, and ``sequence(initial=...)`` takes
    them. Keys and values of cross attention are stored in pages, too, and are not shared.

    **Models whose state has a fixed size**, such as an LSTM or a buffer of past frames. A step
    computes one frame of each waiting sequence as a batch. Outputs are matched with the inputs that
    they are fed to by their names, such as ``h`` and ``hn``, or ``cache_in`` and ``cache_out``;
    property ``state`` shows the result. An input without a batch axis must be equal in all
    sequences of a run. No state is ever dropped: a sequence for which ``cache_bytes`` has no room
    ends with ``LimitExceeded``. A trial with random states checks that the samples of a batch are
    independent. If they are not, or if the model takes a single sample, an axis of samples is added
    to the model. Variables that a run assigns are part of the state.

    If rows depend on other rows outside of attention, or an operation cannot compute several
    samples, steps run one sequence at a time, and ``reason`` says why.

    Args:
        model: As ``penstock.compile`` takes it.
        state: The outputs that are fed back as states of fixed size, by the names of the inputs
            that they are fed to. Needed if the names of the model do not match.
        max_rows: The most rows in a step. Longer prompts are divided.
        max_sequences: The most sequences in a step.
        cache_bytes: The most memory of all caches, such as 2**30 or "1GB".
        options: Options of ``penstock.compile``.
    """

    def __init__(
        self,
        model: Model | str | Path,
        *,
        state: Mapping[str, str] | None = None,
        max_rows: int = 512,
        max_sequences: int = 64,
        cache_bytes: int | str = 1 << 30,
        **options: object,
    ) -> None:
        for name, count in (("max_rows", max_rows), ("max_sequences", max_sequences)):
            check_count(name, count)
        nbytes = parse_bytes(cache_bytes) if isinstance(cache_bytes, str) else cache_bytes
        check_count("cache_bytes", nbytes, maxsize)
        settings = make(CompileOptions, "penstock.Stepper", **options)
        settings = settings.filled({"map_weights": True})
        self._source = source = StepSource(model, settings)
        # Rows come first: a decoder's caches are named as states are, and they grow.
        self._of_states: BatchedRunner | None = None
        self._reason: str | None = None
        runner: Runner | None = None
        if state is None:
            runner, self._reason = _runner_of_rows(source, settings, nbytes, max_sequences)
        if runner is None:
            from penstock.stepping.batched import BatchedRunner
            from penstock.stepping.fed_state import FedState

            fed = FedState.of(source.model, state)
            batched = BatchedRunner(fed, settings, nbytes, max_sequences)
            if not batched.state and state is None:
                raise InvalidInput(
                    f"the model has no state that is fed back: {self._reason}; a decoder has "
                    "inputs of rows [batch, rows] and caches [batch, groups, past, size]; other "
                    "states are named, as in "
                    'state={"h_in": "h_out"}'
                )
            runner = self._of_states = batched
        history = RowHistory if self._of_states is None else self._of_states.history
        self._engine = StepEngine(runner, max_rows, history)
        self.path, self.metadata = source.path, runner.session.model.metadata
        self.outputs = [*runner.axes]
        self._inputs, self._fixed = runner.rows, runner.fixed
        self._thread: threading.Thread | None = None
        self._closed = False

    def sequence(
        self, *, priority: int = 0, initial: Mapping[str, ArrayLike] | None = None
    ) -> StepSequence:
        """Return a new, empty sequence.

        Args:
            priority: Rows of sequences of higher priority are computed first.
            initial: Arrays of one sample by the names of inputs: initial states of fixed size
                (default: zeros), or all ``fixed`` inputs of a decoder.
        """
        if self._closed:
            raise InvalidInput("the stepper is closed")
        if self._of_states is not None:
            arrays, fixed = self._of_states.initial(initial or {}), {}
        else:
            arrays, fixed = {}, self._checked_fixed(initial or {})
        state = self._engine.sequence(priority)
        state.arrays, state.fixed = arrays, fixed
        return StepSequence(self, state)

    @property
    def model(self) -> Model:
        """The model. Reads its file if the plans of its steps came from the cache."""
        return self._source.model

    @property
    def reason(self) -> str | None:
        """Why steps run one sequence at a time; None if they do not. For a model with states and
        frames of open shapes, this is known after the first frame."""
        return self._reason if self._of_states is None else self._of_states.reason

    @property
    def state(self) -> dict[str, str]:
        """The outputs that are fed back as states of fixed size, by the names of the inputs that
        they are fed to."""
        return {} if self._of_states is None else {**self._of_states.state}

    @property
    def rows(self) -> dict[str, Type]:
        """The types of the inputs that have rows, by name."""
        return {**self._inputs}

    @property
    def fixed(self) -> dict[str, Type]:
        """The types, by name, of the inputs of a decoder that do not change between the steps of a
        sequence, such as the output of an encoder."""
        return {**self._fixed}

    @property
    def max_length(self) -> int | None:
        """The most rows of a sequence, by the model's table of positions; None if the model has no
        such table, or steps run one sequence at a time."""
        return self._engine.runner.most_rows

    @property
    def stats(self) -> StepperStats:
        """Counters since the stepper was made."""
        engine = self._engine
        pages = engine.runner.pages
        return StepperStats(engine.steps, engine.rows, engine.prefixes, engine.preempted, pages)

    def close(self) -> None:
        """End all sequences, and release their memory."""
        self._closed = True
        engine = self._engine
        with engine.lock:
            sequences = {**engine.waiting, **engine.holding}
        for sequence in sequences:
            engine.close(sequence)
        engine.wake_all()

    def _checked(self, rows: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
        """Return rows as arrays of the inputs' types. Raises ``InvalidInput``."""
        check_names("step", rows, self._inputs)
        checked = {}
        for name, given in rows.items():
            type_ = self._inputs[name]
            assert isinstance(type_, TensorType)
            checked[name] = convert(name, given, type_)
        return checked

    def _checked_fixed(self, given: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
        """Return fixed inputs as arrays of their types. Raises ``InvalidInput``."""
        if {*given} != {*self._fixed}:
            why = "the model has no states of fixed size, or inputs that stay as they are"
            if self._fixed:
                why = f"a sequence of the model begins with {[*self._fixed]}"
            raise InvalidInput(f"initial={[*given]}: {why}")
        checked = {}
        for name, array in given.items():
            type_ = self._fixed[name]
            assert isinstance(type_, TensorType)
            # A copy, since the caller's arrays may change.
            checked[name] = convert(name, array, type_).copy()
            if checked[name].ndim != len(type_.shape or ()) or len(checked[name]) != 1:
                raise InvalidInput(
                    f"initial {name!r} is {checked[name].shape}, of one sample of {type_}"
                )
        self._engine.runner.check_fixed(checked)
        return checked

    def _drive(self, is_done: Callable[[], bool]) -> None:
        """Run steps until ``is_done()``."""
        self._engine.drive(is_done)

    def _run_apart(self) -> None:
        """Let a thread of the stepper run the steps of asynchronous calls."""
        with self._engine.lock:
            if self._thread is None or not self._thread.is_alive():
                arguments = (ref(self),)
                self._thread = threading.Thread(
                    target=_run_steps, args=arguments, name="penstock steps", daemon=True
                )
                self._thread.start()
        self._engine.hand_over()


def _runner_of_rows(
    source: StepSource, options: CompileOptions, most_bytes: int, most_sequences: int
) -> tuple[Runner | None, str | None]:
    """Return the runner of a decoder, or None for another model, and why rows are not joined."""
    try:
        return JoinedRunner(source.joined(), options, most_bytes, most_sequences), None
    except RowsStay as reason:
        why = str(reason)
    # Most decoders need no other runner than the first one.
    from penstock.stepping.separate import SeparateRunner

    try:
        return SeparateRunner(source.model, options, most_bytes), why
    except RowsStay as reason:
        return None, str(reason)


def _run_steps(stepper_of: ref[Stepper]) -> None:
    """Run steps until no rows have come for a while, or the stepper is deleted."""
    idle = 0
    while True:
        stepper = stepper_of()
        if stepper is None:
            return
        engine = stepper._engine
        if stepper._closed:
            engine.loops.wake()  # with the news of the last step, for which no other follows
            return
        if engine.step():
            idle = 0
            continue
        with engine.lock:
            idle = 0 if engine.waiting else idle + 1
            if idle > _IDLE_LOOKS:
                stepper._thread = None  # under the lock: the next call starts another thread
                return
        del stepper
        engine.park(lambda: False)
