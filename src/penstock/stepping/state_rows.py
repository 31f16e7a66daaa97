"""States of fixed size of many sequences, as rows of batches.

::

    step of a, b, c       one batch of 3 rows, returned by the run
    step of a, b, c       the same arrays are fed, nothing is copied
    step of a, c, d       rows of a, c and d are copied into another batch; b stays in the old one

A batch is immutable. If most sequences have left a batch, its remaining rows are copied, so memory
is at most twice the size of the states, apart from the rounding of numbers of sequences.
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
    """The states of sequences. ``initial``: the states of a new sequence, for one sample; ``axes``:
    their batch axes. ``copied`` counts copied rows."""

    def __init__(self, initial: Mapping[str, np.ndarray], axes: Mapping[str, int]) -> None:
        self._first = StateBatch(initial, 1)
        self.axes = axes
        self.copied = 0
        self.stacked = False
        """whether the arrays of sequences are stacked along an additional leading axis"""
        self._batches: dict[SequenceState, StateBatch] = {}
        self._left: list[StateBatch] = []

    def together(self, sequences: Sequence[SequenceState], size: int) -> StateBatch:
        """Return a batch of ``size`` rows with the states of sequences. Unused rows repeat one."""
        batch = self._batches.get(sequences[0])
        # The batch has exactly these sequences and this size: feed its arrays again.
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
        """Return the states of sequences in their order."""
        # Rows of one batch are copied by one call of NumPy for each state.
        parts: dict[int, tuple[StateBatch, list[int], list[int]]] = {}
        for i, sequence in enumerate(sequences):
            batch = self.batch_of(sequence)
            _, sources, targets = parts.setdefault(id(batch), (batch, [], []))
            # An initial state is row 0 of its batch.
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
        """Return the batch with the state of a sequence; if new, a batch of its initial state."""
        batch = self._batches.get(sequence)
        if batch is None:
            arrays = sequence.arrays or self._first.arrays
            if self.stacked:
                arrays = {name: array[None] for name, array in arrays.items()}
            return StateBatch(arrays, 1)
        return batch

    def place(self, sequence: SequenceState, batch: StateBatch) -> None:
        """Set the state of a sequence to its row of a batch."""
        self.drop(sequence)
        self._batches[sequence] = batch

    def drop(self, sequence: SequenceState) -> None:
        """Reset a sequence to its initial state."""
        batch = self._batches.pop(sequence, None)
        if batch is not None:
            del batch.rows[sequence]
            # Shrink later: if the others leave as well, nothing must be copied.
            self._left.append(batch)

    def fork(self, sequence: SequenceState, copy: SequenceState) -> None:
        """Give ``copy`` the state of a sequence."""
        copy.arrays = sequence.arrays
        batch = self._batches.get(sequence)
        if batch is None:
            return
        # Batches are immutable, so both can share a batch of one row.
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
                # The list may contain the batch again.
                batch.rows = {}
