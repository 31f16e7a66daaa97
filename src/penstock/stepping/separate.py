"""Steps one sequence at a time, by the model as it is, for models whose rows cannot be joined.

Each sequence has the caches that the model returned, which grow where they lie. A model without
caches reads all rows of a sequence in each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.compiler.options import CompileOptions
from penstock.core.errors import InvalidInput, LimitExceeded
from penstock.core.types import TensorType
from penstock.ir.graph import Model
from penstock.passes.lowering.step_probes import Roles, roles_of, with_sizes_of_heads
from penstock.session.session import Session
from penstock.stepping.joined import Piece
from penstock.stepping.sequence import Rows, SequenceState

_CACHES = 2
"""the axis of positions of a cache"""


class SeparateRunner:
    """Runs pieces one by one. ``axes`` are those of rows of the model's outputs. Raises
    ``RowsStay`` if the model is no decoder."""

    most_sequences = 1

    def __init__(self, model: Model, options: CompileOptions, most_bytes: int) -> None:
        graph = with_sizes_of_heads(model.graph)
        self._roles: Roles = roles_of(graph)
        self.session = Session(model, options)
        self.rows, self._most_bytes = self._roles.rows, most_bytes
        self._held = 0
        names = [value.name for value in model.graph.outputs]
        presents = [n for n in names if n.lower().startswith(("present", "past", "updated"))]
        if len(presents) != len(self._roles.caches):
            raise InvalidInput(
                f"which of the outputs {names} are fed back to {[*self._roles.caches]} is not known"
            )
        self._presents = dict(zip(self._roles.caches, presents, strict=True))
        self.axes: Mapping[str, int] = {name: 1 for name in names if name not in presents}
        self._types = {value.name: value.type for value in graph.inputs}

    @property
    def pages(self) -> tuple[int, int, int]:
        """There are none."""
        return 0, 0, 0

    def begin(self, sequence: SequenceState) -> None:
        """Give a new sequence caches without positions."""
        if sequence.arrays:
            return
        for name in self._roles.caches:
            type_ = self._types[name]
            assert isinstance(type_, TensorType)
            dims = [n if isinstance(n, int) else 0 for n in (type_.shape or ())[1:]]
            sequence.arrays[name] = np.zeros((1, *dims), type_.dtype)

    def reserve(self, sequence: SequenceState, rows: int) -> bool:
        """Whether the caches of all sequences fit into memory."""
        if not sequence.computed:
            return True
        own = _bytes_of(sequence)
        needed = own * (sequence.computed + rows) // sequence.computed
        if needed > self._most_bytes:
            raise LimitExceeded(
                f"a sequence of {sequence.computed + rows} rows has caches of {needed} bytes, of "
                f"{self._most_bytes}; raise cache_bytes"
            )
        return self._held - own + needed <= self._most_bytes

    def release(self, sequence: SequenceState) -> None:
        """Drop the caches of a sequence."""
        self._held -= _bytes_of(sequence)
        sequence.arrays.clear()
        sequence.computed = 0

    def cut(self, sequence: SequenceState, rows: int) -> None:
        """Drop the state of all rows from ``rows`` on."""
        if rows < sequence.computed:
            self._held -= _bytes_of(sequence)
            for name, array in sequence.arrays.items():
                sequence.arrays[name] = array[:, :, :rows]
            self._held += _bytes_of(sequence)
            sequence.computed = rows

    def fork(self, sequence: SequenceState, copy: SequenceState) -> None:
        """Give ``copy`` the state of a sequence."""
        copy.arrays, copy.computed = {**sequence.arrays}, sequence.computed
        self._held += _bytes_of(copy)

    def run(self, pieces: Sequence[Piece]) -> list[Rows]:
        """Compute a piece; the outputs of its wanted rows."""
        ((sequence, count),) = pieces
        past = sequence.computed if self._roles.caches else 0
        count += sequence.computed - past
        feeds = {n: sequence.rows.part(n, past, past + count)[None] for n in self._roles.rows}
        for name in self._roles.positions:
            feeds[name] = np.arange(past, past + count, dtype=self._dtype(name))[None]
        for name in self._roles.masks:
            feeds[name] = np.ones((1, past + count), self._dtype(name))
        outputs = self.session.run({**feeds, **sequence.arrays})
        self._held -= _bytes_of(sequence)
        sequence.arrays = {name: outputs[y] for name, y in self._presents.items()}
        self._held += _bytes_of(sequence)
        begin = max(sequence.rows.count - sequence.wanted, sequence.computed) - past
        return [{name: outputs[name][:, begin:count] for name in self.axes}]

    def advance(self, piece: Piece) -> None:
        """Note that a piece is computed."""
        piece.sequence.computed += piece.rows

    def _dtype(self, name: str) -> np.dtype | None:
        type_ = self._types[name]
        return type_.dtype if isinstance(type_, TensorType) else None


def _bytes_of(sequence: SequenceState) -> int:
    return sum(array.nbytes for array in sequence.arrays.values())
