"""States of fixed size of many sequences, as rows of batches.

::

    step of a, b, c       one batch of 3 rows: what the run returned
    step of a, b, c       the same arrays are fed, nothing is copied
    step of a, c, d       rows of a, c and d are copied into another batch; b stays where it is

A batch is never written once it is there. One of which most sequences have left is copied, so that
memory is at most twice that of the states, but for what numbers of sequences are rounded up by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.core.records import dataclass, field
from penstock.stepping.sequence import SequenceState


@dataclass(eq=False)
class StateBatch:
    """The states of ``size`` rows by the names of inputs, and the ``rows`` that sequences have."""

    arrays: Mapping[str, np.ndarray]
    size: int
    rows: dict[SequenceState, int] = field(default_factory=dict)


class StateRows:
    """The states of sequences. ``initial`` are those of new ones, for one sample; ``axes`` the
    batch axes. ``copied`` counts rows."""

    def __init__(self, initial: Mapping[str, np.ndarray], axes: Mapping[str, int]) -> None:
        self._first = StateBatch(initial, 1)
        self.axes = axes
        self.copied = 0
        self.stacked = False
        """whether rows are whole arrays of sequences, along an axis in front of theirs"""
        self._batches: dict[SequenceState, StateBatch] = {}
        self._left: list[StateBatch] = []

    def together(self, sequences: Sequence[SequenceState], size: int) -> StateBatch:
        """A batch of ``size`` rows of the states of sequences. Rows of none repeat the first."""
        batch = self._batches.get(sequences[0])
        # Nobody has left, and the number of rows has a plan: the arrays are fed as they came back.
        if (
            batch is not None
            and batch.size == size
            and len(batch.rows) == len(sequences)
            and all(self._batches.get(sequence) is batch for sequence in sequences)
        ):
            return StateBatch(batch.arrays, size, {**batch.rows})
        filled = [*sequences, *[sequences[0]] * (size - len(sequences))]
        rows = {sequence: i for i, sequence in enumerate(sequences)}
        return StateBatch(self._copied(filled), size, rows)

    def _copied(self, sequences: Sequence[SequenceState]) -> dict[str, np.ndarray]:
        """The states of sequences in their order."""
        # Rows of one batch are copied by one call of NumPy for each state.
        parts: dict[int, tuple[StateBatch, list[int], list[int]]] = {}
        for i, sequence in enumerate(sequences):
            batch = self.batch_of(sequence)
            _, sources, targets = parts.setdefault(id(batch), (batch, [], []))
            # An initial state is row 0 of a batch of its own, or of that which all begin with.
            sources.append(batch.rows.get(sequence, 0))
            targets.append(i)
        self.copied += len(sequences)
        arrays = {}
        for name, one in next(iter(parts.values()))[0].arrays.items():
            axis = 0 if self.stacked else self.axes[name]
            array = np.empty((*one.shape[:axis], len(sequences), *one.shape[axis + 1 :]), one.dtype)
            rows_of_array = np.moveaxis(array, axis, 0)
            for batch, sources, targets in parts.values():
                rows_of_array[targets] = np.moveaxis(batch.arrays[name], axis, 0)[sources]
            arrays[name] = array
        return arrays

    def batch_of(self, sequence: SequenceState) -> StateBatch:
        """The batch with the state of a sequence: of a new one, that of its initial state."""
        batch = self._batches.get(sequence)
        if batch is None:
            arrays = sequence.arrays or self._first.arrays
            if self.stacked:
                arrays = {name: array[None] for name, array in arrays.items()}
            return StateBatch(arrays, 1)
        return batch

    def place(self, sequence: SequenceState, batch: StateBatch) -> None:
        """Let the state of a sequence be its row of a batch."""
        self.drop(sequence)
        self._batches[sequence] = batch

    def drop(self, sequence: SequenceState) -> None:
        """Forget the state of a sequence: it is its initial state again."""
        batch = self._batches.pop(sequence, None)
        if batch is not None:
            del batch.rows[sequence]
            # Not now: the others may leave as well, and then there is nothing to copy.
            self._left.append(batch)

    def fork(self, sequence: SequenceState, copy: SequenceState) -> None:
        """Give ``copy`` the state of a sequence."""
        copy.arrays = sequence.arrays
        batch = self._batches.get(sequence)
        if batch is None:
            return
        # The only row of a batch is never written, and may be that of both.
        arrays = batch.arrays if batch.size == 1 else self._copied([sequence])
        self._batches[copy] = StateBatch(arrays, 1, {copy: 0})

    def shrink(self) -> None:
        """Copy the rows of batches that most of their sequences have left."""
        left, self._left = self._left, []
        for batch in left:
            if batch.rows and 2 * len(batch.rows) < batch.size:
                sequences = [*batch.rows]
                rows = {sequence: i for i, sequence in enumerate(sequences)}
                new = StateBatch(self._copied(sequences), len(sequences), rows)
                self._batches.update(dict.fromkeys(sequences, new))
                # It may stand in the list again.
                batch.rows = {}
