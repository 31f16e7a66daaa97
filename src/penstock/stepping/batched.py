"""Steps of models whose state is of fixed size: the state of each sequence is a row of a batch.

::

    sequences    a: a frame     b: a frame     c: 3 frames
    run          a b c          [3, 512] frames, [2, 3, 64] states
    run              c          and once more, since a step has one frame of a sequence

A trial checks that the samples of a batch are independent. If they are not, or if the model takes
a single sample, an axis of samples is added to the model (``add_samples``)::

    run          a b c          [3, 1, 512] frames, [3, 2, 1, 64] states

If an operation does not support that, steps run one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from penstock.compiler.options import CompileOptions
from penstock.core.errors import InvalidInput, LimitExceeded, PenstockError, RowsStay
from penstock.core.types import NamedValues, RunValue, Type
from penstock.executors.feeds import convert
from penstock.session.ahead import run_ahead
from penstock.session.facts import Port
from penstock.session.session import Session
from penstock.stepping.fed_state import FedState
from penstock.stepping.frames import FrameQueue, InputFrame
from penstock.stepping.joined import Piece, rounded
from penstock.stepping.sample_axis import session_of_samples
from penstock.stepping.sequence import Rows, SequenceState, same_but_for_rounding
from penstock.stepping.state_pairs import batch_axes
from penstock.stepping.state_rows import StateBatch, StateRows

_SAMPLES = 2
_LARGE = 64.0  # the factor by which large values exceed numbers of a normal distribution


class BatchedRunner:
    """Runs one frame each of several sequences together. ``state`` names the outputs that are fed
    back, by inputs; ``axes`` are the batch axes of the other outputs. ``reason``: why sequences run
    one at a time, once that is known."""

    pages = 0, 0, 0
    fixed: Mapping[str, Type] = {}
    most_rows: int | None = None

    def __init__(
        self, fed: FedState, options: CompileOptions, most_bytes: int, most_sequences: int
    ) -> None:
        self._fed, self.session = fed, Session(fed.model, options)
        self._stacked: Session | None = None
        """runs samples along an axis that was added to the model"""
        self._unproven: str | None = None
        """why the axis was added; None after a trial has shown that samples are independent"""
        self.most_sequences, self._most_bytes = most_sequences, most_bytes
        inputs, outputs = self.session.inputs, self.session.outputs
        self.state = fed.pairs(inputs, outputs)
        self.rows: Mapping[str, Type] = {
            port.name: port.type for port in inputs if port.name not in self.state
        }
        self._ports = {port.name: port for port in inputs}
        self._axes = {p.name: 0 for p in outputs if p.name not in self.state.values()}
        self.axes: Mapping[str, int] = self._axes
        self.reason: str | None = None
        self._tried = False
        self._batch_axes, single = self._found_axes(inputs)
        # Each sequence provides the initial arrays of states with open dims.
        initial = {name: self._first_of(self._ports[name]) for name in self.state}
        self._unknown = [name for name, array in initial.items() if array is None]
        self._initial = {name: array for name, array in initial.items() if array is not None}
        self.states = StateRows(self._initial, self._batch_axes)
        self._held: dict[SequenceState, int] = {}
        self._next: dict[SequenceState, StateBatch] = {}
        if single is not None:
            self._stack_or_run_alone(single)
        elif not self._unknown:
            self._try_made_up()

    def _found_axes(self, inputs: Sequence[Port]) -> tuple[dict[str, int], str | None]:
        """Return the batch axes of inputs, or the reason why there are none."""
        # States in a loop may have other shapes for each run, and the body may combine samples.
        if self._fed.grows:
            return {}, "the body of a loop has no axis of runs"
        # Outputs of a model of one sample have no known batch axis, and are returned unchanged.
        try:
            return batch_axes(inputs, self.state), None
        except RowsStay as reason:
            return {}, str(reason)

    def history(self) -> FrameQueue:
        """Return the history of frames for a new sequence."""
        axes = {n: axis for n, axis in self._batch_axes.items() if n in self.rows}
        return FrameQueue(axes, self._stacked is not None)

    def _stack_or_run_alone(self, reason: str) -> None:
        """Add an axis of samples to the model; or run sequences one at a time from now on."""
        self._tried = True
        try:
            self._stacked = session_of_samples(self._fed.model, self.session.options)
        except RowsStay as error:
            return self._run_alone(f"{reason}; {error}")
        self._unproven, self.states.stacked = reason, True
        return None

    def _run_alone(self, reason: str) -> None:
        """Run sequences one at a time from now on."""
        self.reason, self._tried, self.most_sequences = reason, True, 1
        self._stacked, self._unproven, self.states.stacked = None, None, False

    def _axis(self, port: Port) -> int | None:
        """Return the batch axis of an input, even if other inputs have none."""
        if self._fed.grows:
            return None
        free = [i for i, dim in enumerate(port.shape or ()) if not isinstance(dim, int)]
        return self._batch_axes.get(port.name, free[0] if free else None)

    def _first_of(self, port: Port) -> np.ndarray | None:
        """Return the default initial state of a sequence; None if its dims are open."""
        # Variables begin with their initial values.
        if port.name in self._fed.variables:
            return self._fed.initial.get(port.name)
        axis = self._axis(port)
        dims = [1 if i == axis else n for i, n in enumerate(port.shape or ())]
        if not all(isinstance(n, int) for n in dims):
            return None
        return np.zeros([n for n in dims if isinstance(n, int)], port.dtype)

    def initial(self, given: Mapping[str, RunValue]) -> dict[str, np.ndarray]:
        """Return the arrays that a sequence begins with. Raises ``InvalidInput``."""
        if unknown := {*given} - {*self.state}:
            raise InvalidInput(f"initial={sorted(unknown)}: states are {[*self.state]}")
        if missing := [name for name in self._unknown if name not in given]:
            types = ", ".join(str(self._ports[name]) for name in missing)
            raise InvalidInput(
                f"how large states are is not known: {types}; give arrays of one sample with "
                f"initial={{{missing[0]!r}: ...}}. Caches that grow are not states of fixed size"
            )
        arrays = {**self._initial}
        for name, value in given.items():
            port = self._ports[name]
            array, axis = convert(name, value, port.type), self._axis(port)
            sizes = array.shape if array.ndim == len(port.shape or ()) else None
            wanted = [1 if i == axis else n for i, n in enumerate(port.shape or ())]
            if sizes is None or not all(
                n == size or not isinstance(n, int) for n, size in zip(wanted, sizes, strict=True)
            ):
                raise InvalidInput(f"initial {name!r} is {array.shape}, of one sample of {port}")
            arrays[name] = array.copy()
        return arrays

    # Methods for sequences.

    def check_fixed(self, fixed: Rows) -> None:
        """Accept all, since there are no fixed inputs."""

    def check_length(self, sequence: SequenceState, rows: int) -> None:
        """Accept any length, since frames are not kept."""

    def begin(self, sequence: SequenceState) -> None:
        """Do nothing, since sequences share no prefixes."""

    def reserve(self, sequence: SequenceState, rows: int) -> bool:
        """Raise unless the states of all sequences fit into memory, since none is ever dropped."""
        # Called under the engine's lock and before the step, so no run reads batches meanwhile.
        self.states.shrink()
        self._hold(sequence)
        return True

    def _hold(self, sequence: SequenceState) -> None:
        # In a loop, states may grow with each step.
        if sequence in self._held and not self._fed.grows:
            return
        # Counted one by one, since initial states of sequences may have different sizes.
        batch = self.states.batch_of(sequence)
        nbytes = sum(x.nbytes for x in batch.arrays.values()) // batch.size
        total = sum({**self._held, sequence: nbytes}.values())
        if total > self._most_bytes:
            raise LimitExceeded(
                f"the states of {len({*self._held, sequence})} sequences take {total} bytes, of "
                f"{self._most_bytes}; close sequences, or raise cache_bytes"
            )
        self._held[sequence] = nbytes

    def release(self, sequence: SequenceState) -> None:
        """Forget the state of a sequence."""
        self.states.drop(sequence)
        self._held.pop(sequence, None)
        self._next.pop(sequence, None)

    def cut(self, sequence: SequenceState, rows: int) -> None:
        """Reset a sequence. Raises ``InvalidInput`` unless ``rows`` is 0 or all: the states after
        earlier frames are not kept."""
        if rows and rows < sequence.computed:
            raise InvalidInput(
                f"length={rows}: states of earlier frames are not kept; cut to 0, or fork the "
                "sequence before frames that may be taken back"
            )
        if not rows:
            self.states.drop(sequence)
            sequence.computed = 0

    def fork(self, sequence: SequenceState, copy: SequenceState) -> None:
        """Give ``copy`` the state of a sequence."""
        try:
            self.states.fork(sequence, copy)
            self._hold(copy)
        except LimitExceeded:
            self.release(copy)
            raise
        copy.computed = sequence.computed

    def state_of(self, sequence: SequenceState) -> dict[str, np.ndarray]:
        """Return the state of a sequence that has stepped, by inputs."""
        batch = self.states.batch_of(sequence)
        if not self.states.stacked:
            return {**batch.arrays}
        row = batch.rows.get(sequence, 0)
        return {name: array[row].copy() for name, array in batch.arrays.items()}

    # Methods for steps.

    def run(self, pieces: Sequence[Piece]) -> list[Rows]:
        """Compute a frame of each piece. Return its outputs, with no rows if none is wanted."""
        sequences = [piece.sequence for piece in pieces]
        # New states are stored after all groups have run: if one fails, the engine runs each piece
        # again, in a separate call.
        for sequence in sequences:
            self._next.pop(sequence, None)
        if not self._tried:
            self._try(_first(sequences[0]).inputs, self.states.batch_of(sequences[0]).arrays)
        if self._unproven is not None:
            self._prove(_first(sequences[0]).inputs, sequences[0].arrays or self._initial)
        groups: dict[object, list[SequenceState]] = {}
        for sequence in sequences:
            groups.setdefault(self._kind(sequence), []).append(sequence)
        results: dict[SequenceState, Rows] = {}
        for group in groups.values():
            if self.reason is not None:
                results |= self._alone(group[0])
            else:
                results |= self._step(group)
        return [results[sequence] for sequence in sequences]

    def advance(self, piece: Piece) -> None:
        """Record that a frame is computed."""
        sequence = piece.sequence
        self.states.place(sequence, self._next.pop(sequence))
        sequence.computed += 1
        assert isinstance(sequence.rows, FrameQueue)
        sequence.rows.drop()

    def _kind(self, sequence: SequenceState) -> object:
        """Return a key that is equal for sequences that may share a run."""
        if self.reason is not None:
            return sequence.number
        shapes: tuple[object, ...] = ()
        if self._unknown or self._fed.grows:
            batch = self.states.batch_of(sequence)
            shapes = tuple([array.shape[1:] for array in batch.arrays.values()])
        return _first(sequence).kind, shapes

    def _step(self, sequences: Sequence[SequenceState]) -> dict[SequenceState, Rows]:
        """Compute one frame of each of some sequences of one kind."""
        # Rounded, so that a few plans serve all numbers of sequences.
        batch = self.states.together(sequences, rounded(len(sequences)))
        # Unused rows repeat a frame: zeros may be invalid inputs of the model.
        frames = [_first(sequences[0]).inputs] * batch.size
        for sequence, row in batch.rows.items():
            frames[row] = _first(sequence).inputs
        session = self._stacked or self.session
        outputs = session.run({**self._joined(frames), **batch.arrays})
        new = {name: outputs[y] for name, y in self.state.items()}
        for name, array in new.items():
            self._check_size(name, array.shape, batch.arrays[name].shape)
        after = StateBatch(new, batch.size, batch.rows)
        self._next.update(dict.fromkeys(sequences, after))
        results: dict[SequenceState, Rows] = {}
        for sequence, row in batch.rows.items():
            wanted = _is_wanted(sequence)
            own = {}
            for name, axis in self.axes.items():
                # Copied: an output may be the state itself, and would keep the whole batch.
                if self._stacked is not None:
                    own[name] = _alone_or_none(outputs[name][row], wanted).copy()
                    continue
                rows = slice(row, row + wanted)
                own[name] = outputs[name][(slice(None),) * axis + (rows,)].copy()
            results[sequence] = own
        return results

    def _joined(self, frames: Sequence[Rows]) -> dict[str, np.ndarray]:
        """Join frames to the feeds of one run."""
        feeds = {}
        for name in self.rows:
            axis, parts = self._batch_axes.get(name), [frame[name] for frame in frames]
            if self._stacked is not None:
                feeds[name] = np.stack(parts)
                continue
            alone = axis is None or len(parts) == 1
            feeds[name] = parts[0] if alone else np.concatenate(parts, axis)
        return feeds

    def _alone(self, sequence: SequenceState) -> dict[SequenceState, Rows]:
        """Compute one frame of a sequence with the unchanged model."""
        arrays = self.states.batch_of(sequence).arrays
        outputs = self.session.run({**_first(sequence).inputs, **arrays})
        # States are never written, so the returned ones need no copy.
        new = {name: outputs[y] for name, y in self.state.items()}
        for name, array in new.items():
            self._check_size(name, array.shape, arrays[name].shape)
        self._next[sequence] = StateBatch(new, 1, {sequence: 0})
        wanted = _is_wanted(sequence)
        own = {name: _alone_or_none(outputs[name], wanted).copy() for name in self.axes}
        return {sequence: own}

    def _check_size(self, name: str, new: tuple[int, ...], old: tuple[int, ...]) -> None:
        if new != old and not self._fed.grows:
            raise InvalidInput(
                f"state {name!r} {old} came back as {new}, and states are of fixed size; caches "
                "that grow are those of a decoder, [batch, groups, past, size]"
            )

    # Whether samples depend on one another.

    def _try_made_up(self) -> None:
        """Try generated samples, if the shapes of frames are known."""
        rng, frame = np.random.default_rng(0), {}
        for name in self.rows:
            port = self._ports[name]
            dims = [1 if i == self._axis(port) else n for i, n in enumerate(port.shape or ())]
            if port.dtype is None or not all(isinstance(n, int) for n in dims):
                return  # the trial uses the first frame
            shape = tuple([n for n in dims if isinstance(n, int)])
            frame[name] = _random(np.empty(shape, port.dtype), rng)
        with suppress(PenstockError):  # the model may not accept this frame
            self._try_samples(frame, self._initial)

    def _try(self, frame: Rows, initial: Rows) -> None:
        """Try samples like a frame of a sequence. Raises the error of a run with that frame."""
        run_ahead(self.session, {**frame, **initial})
        try:
            self._try_samples(frame, initial)
        except PenstockError as error:
            self._stack_or_run_alone(
                f"the model does not run on samples like the first frame: {error}"
            )

    def _try_samples(self, frame: Rows, initial: Rows) -> None:
        """Try samples of similar magnitude, and then one sample with large values."""
        self._compare(*self._samples(frame, initial))
        if self.reason is None:
            # Only this shows dependencies by the maximum of a batch, or by clipping.
            with suppress(PenstockError):  # the model may not accept large values
                self._compare(*self._samples(frame, initial, _LARGE))

    def _samples(
        self, frame: Rows, initial: Rows, scale: float = 1.0
    ) -> tuple[list[Rows], list[NamedValues]]:
        """Return a frame and others like it, with random states, and the outputs of each alone. The
        last sample is multiplied by ``scale``."""
        rng = np.random.default_rng(0)
        samples: list[Rows] = []
        for i in range(_SAMPLES):
            own = {n: _shuffled(x, rng) for n, x in frame.items() if i and n in self._batch_axes}
            states = {name: _random(x, rng) for name, x in initial.items()}
            if scale != 1 and i == _SAMPLES - 1:
                own, states = ({n: _scaled(x, scale) for n, x in y.items()} for y in (own, states))
            samples.append({**frame, **own, **states})
        return samples, [run_ahead(self.session, sample) for sample in samples]

    def _prove(self, frame: Rows, initial: Rows) -> None:
        """Check that samples along the added axis are independent."""
        reason, self._unproven = self._unproven, None
        assert reason is not None
        assert self._stacked is not None
        try:
            samples, alone = self._samples(frame, initial)
        except PenstockError:  # the model does not accept the random states
            samples = [{**frame, **initial}] * _SAMPLES
            alone = [run_ahead(self.session, samples[0])] * _SAMPLES
        try:
            feeds = {name: np.stack([s[name] for s in samples]) for name in samples[0]}
            outputs = run_ahead(self._stacked, feeds)
        except (PenstockError, ValueError) as error:
            return self._run_alone(f"{reason}; the model does not run on two samples: {error}")
        for name, array in outputs.items():
            parts = [values[name] for values in alone]
            if not same_but_for_rounding(np.stack(parts), array):
                return self._run_alone(f"{reason}; two samples differ from each alone in {name!r}")
        return None

    def _compare(self, samples: Sequence[Rows], alone: Sequence[NamedValues]) -> None:
        """Compare results of a batch of samples with the results of each sample alone."""
        feeds = {**samples[0]}
        for name, place in self._batch_axes.items():
            feeds[name] = np.concatenate([sample[name] for sample in samples], place)
        # The trial is decided from here on.
        self._tried = True
        try:
            outputs = run_ahead(self.session, feeds)
        except PenstockError as error:
            return self._stack_or_run_alone(f"the model does not run on two samples: {error}")
        # Check states, too: the states of samples must be independent.
        for name in outputs:
            parts = [values[name] for values in alone]
            axis = _axis_of_samples(parts[0].shape, outputs[name].shape)
            if axis is None:
                return self._stack_or_run_alone(f"output {name!r} has no axis of samples")
            if not same_but_for_rounding(np.concatenate(parts, axis), outputs[name]):
                return self._stack_or_run_alone(f"samples depend on one another in output {name!r}")
            if name in self._axes:
                self._axes[name] = axis
        return None


# Helpers for frames and samples.


def _first(sequence: SequenceState) -> InputFrame:
    assert isinstance(sequence.rows, FrameQueue)
    return sequence.rows.first


def _is_wanted(sequence: SequenceState) -> bool:
    """Whether the outputs of the first waiting frame are wanted."""
    return sequence.waiting <= sequence.wanted


def _alone_or_none(array: np.ndarray, wanted: bool) -> np.ndarray:
    """Return the outputs of a frame of one sample, with no rows unless they are wanted."""
    return array if wanted or not array.ndim else array[:0]


def _random(like: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return random values; integers are 0 and 1, which are valid indices of most tables."""
    if like.dtype.kind in "iub":
        return rng.integers(0, 2, like.shape).astype(like.dtype)
    return rng.standard_normal(like.shape).astype(like.dtype)


def _scaled(array: np.ndarray, scale: float) -> np.ndarray:
    return array * array.dtype.type(scale) if array.dtype.kind == "f" else array


def _shuffled(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the values of a frame in another order; floating-point values are halved."""
    # No new values: the model may only accept certain indices or levels.
    other = rng.permuted(array.reshape(-1)).reshape(array.shape)
    return (other / 2).astype(array.dtype) if array.dtype.kind == "f" else other


def _axis_of_samples(one: tuple[int, ...], several: tuple[int, ...]) -> int | None:
    """Return the axis on which a result has one row for each sample, or None."""
    if len(one) != len(several):
        return None
    # The result of one sample has one row, the result of several has one row per sample.
    axes = [i for i, (m, n) in enumerate(zip(one, several, strict=True)) if m != n]
    return (
        axes[0]
        if len(axes) == 1 and one[axes[0]] * _SAMPLES == several[axes[0]] == _SAMPLES
        else None
    )
