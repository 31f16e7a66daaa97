"""Steps of one sequence at a time, by the unchanged model, for models whose rows cannot be joined.

Each sequence has the caches that the model returned, which grow in place. A model without caches
reads all rows of a sequence in each step. Exporters trace an encoder-decoder's step with one row,
and the graph may be correct only for a single row: the first step of several rows checks that.

Some models compute texts beyond a length in another way (``LONG_FROM``). A sequence that grows
beyond it is computed again from its first row, in one run::

    short ........|          rows until there, by caches of a short text
    long  ........|....      all rows, with caches of a long text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

import numpy as np

from penstock.compiler.options import CompileOptions
from penstock.core.errors import InvalidInput, LimitExceeded, PenstockError
from penstock.core.types import TensorType, Type
from penstock.ir.graph import LONG_FROM, Model
from penstock.passes.lowering.step_probes import (
    Roles,
    is_of_encoder,
    present_of,
    roles_of,
    with_sizes_of_heads,
)
from penstock.session.session import Session
from penstock.stepping.joined import Piece
from penstock.stepping.sequence import Rows, SequenceState, same_but_for_rounding

_Result: TypeAlias = "tuple[Rows, dict[str, np.ndarray]]"
"""outputs of rows, and the caches after them"""


class SeparateRunner:
    """Runs pieces one by one. ``axes``: the axis of rows of each output. Raises ``RowsStay`` if the
    model is not a decoder."""

    most_sequences = 1
    most_rows: int | None = None

    def __init__(self, model: Model, options: CompileOptions, most_bytes: int) -> None:
        graph = with_sizes_of_heads(model.graph)
        self._roles: Roles = roles_of(graph)
        self.session = Session(model, options)
        types = {value.name: value.type for value in model.graph.inputs}
        self.rows: Mapping[str, Type] = {name: types[name] for name in self._roles.rows}
        self.fixed: Mapping[str, Type] = {name: types[name] for name in self._roles.fixed}
        self._most_bytes = most_bytes
        self._held = 0
        self._one_row: bool | None = None if self.fixed else False
        """whether a step of several rows differs from steps of one row each"""
        self._continues = True
        """whether the model may compute several rows after past ones"""
        names = [value.name for value in model.graph.outputs]
        presents = [n for n in names if n.lower().startswith(("present", "past", "updated"))]
        self.axes: Mapping[str, int] = {name: 1 for name in names if name not in presents}
        grown = [name for name in presents if not is_of_encoder(name)]
        caches = self._roles.caches
        if caches and len(grown) != len(caches):
            raise InvalidInput(
                f"which of the outputs {names} are fed back to {[*caches]} is not known"
            )
        named = {present_of(name): name for name in caches}
        if {*named} == {*grown}:  # otherwise both are in the same order
            self._presents = {named[name]: name for name in grown}
        else:
            self._presents = dict(zip(caches, grown, strict=False))
        self._types = {value.name: value.type for value in graph.inputs}
        self._most_short = int(model.metadata.get(LONG_FROM, 0)) if caches else 0
        """the most positions of a short text, or 0 if the model makes no difference"""

    @property
    def pages(self) -> tuple[int, int, int]:
        """Return zeros, since there are no pages."""
        return 0, 0, 0

    def check_fixed(self, fixed: Rows) -> None:
        """Accept all; the run raises an error for wrong inputs."""

    def check_length(self, sequence: SequenceState, rows: int) -> None:
        """Accept any length; the run raises an error for one that is too long."""

    def begin(self, sequence: SequenceState) -> None:
        """Give a new sequence caches without positions."""
        if sequence.arrays:
            return
        for name in self._roles.caches:
            type_ = self._type(name)
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
        if self._turns_long(rows, sequence.computed):
            self.release(sequence)
            self.begin(sequence)
        elif rows < sequence.computed:
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
        """Compute a piece and return the outputs of its wanted rows."""
        ((sequence, count),) = pieces
        past = sequence.computed if self._roles.caches else 0
        count += sequence.computed - past
        begin = max(sequence.rows.count - sequence.wanted, sequence.computed)
        if self._turns_long(past, past + count):
            outputs = self._long(sequence, past, count, begin)
        else:
            outputs = self._continued(sequence, past, count)
            outputs = {name: outputs[name][:, begin - past : count] for name in self.axes}
        return [outputs]

    def _turns_long(self, rows: int, more: int) -> bool:
        """Whether a text of ``rows`` is short and one of ``more`` is not."""
        return rows <= self._most_short < more

    def _long(self, sequence: SequenceState, past: int, count: int, begin: int) -> Rows:
        """Return the outputs of rows from ``begin`` on of a text that becomes long."""
        parts = []
        short = self._most_short - past
        # For a text that is continued, such as by a draft; a prompt is long from its first row on.
        if past and begin < self._most_short:
            outputs = self._continued(sequence, past, short)
            parts.append({name: outputs[name][:, begin - past :] for name in self.axes})
            begin = self._most_short
        if past:
            self._held -= _bytes_of(sequence)
            sequence.arrays = {}
            self.begin(sequence)
        outputs = self._continued(sequence, 0, past + count)
        parts.append({name: outputs[name][:, begin:] for name in self.axes})
        return {n: np.concatenate([p[n] for p in parts], axis) for n, axis in self.axes.items()}

    def _continued(self, sequence: SequenceState, past: int, count: int) -> Rows:
        """Compute rows after ``past`` ones, and store the caches in the sequence. Return the
        outputs."""
        step = self._several if self._roles.caches and count > 1 else self._step
        outputs, caches = step(sequence, sequence.arrays, past, count)
        self._held -= _bytes_of(sequence)
        sequence.arrays = caches
        self._held += _bytes_of(sequence)
        return outputs

    def _step(self, sequence: SequenceState, caches: Rows, past: int, count: int) -> _Result:
        """Return the outputs of some rows, and the caches after them."""
        feeds = {n: sequence.rows.part(n, past, past + count)[None] for n in self._roles.rows}
        for name in self._roles.positions:
            positions = np.arange(past, past + count, dtype=self._type(name).dtype)
            feeds[name] = positions if len(self._type(name).shape or ()) == 1 else positions[None]
        for name in self._roles.masks:
            feeds[name] = np.ones((1, past + count), self._type(name).dtype)
        outputs = self.session.run({**feeds, **caches, **sequence.fixed})
        return outputs, {name: outputs[y] for name, y in self._presents.items()}

    def _several(self, sequence: SequenceState, caches: Rows, past: int, count: int) -> _Result:
        """``_step`` for several rows, one by one if the model is not correct for more."""
        if self._one_row is False and (self._continues or not past):
            try:
                return self._step(sequence, caches, past, count)
            except InvalidInput:
                if not past:
                    raise
            # If single rows fail as well, they raise the error.
            self._continues = False
        # Both ways begin with the same caches, as forks of a sequence do.
        parts: list[Rows] = []
        behind = {**caches}
        for row in range(past, past + count):
            outputs, behind = self._step(sequence, behind, row, 1)
            parts.append({name: outputs[name].copy() for name in self.axes})
        alone = {n: np.concatenate([p[n] for p in parts], axis) for n, axis in self.axes.items()}
        if self._one_row is None:
            self._one_row = True
            with suppress(PenstockError):
                together, of_together = self._step(sequence, caches, past, count)
                pairs = [(array, together[name]) for name, array in alone.items()]
                pairs += [(array, of_together[name]) for name, array in behind.items()]
                self._one_row = not all(same_but_for_rounding(one, other) for one, other in pairs)
        return alone, behind

    def advance(self, piece: Piece) -> None:
        """Record that a piece is computed."""
        piece.sequence.computed += piece.rows

    def _type(self, name: str) -> TensorType:
        type_ = self._types[name]
        assert isinstance(type_, TensorType)
        return type_


def _bytes_of(sequence: SequenceState) -> int:
    return sum(array.nbytes for array in sequence.arrays.values())
