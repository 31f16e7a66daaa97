"""Joined steps: the rows of all sequences in one run, and their caches in pages of one pool.

::

    sequences    a: 1 row      b: 1 row      c: 45 rows of a prompt
    run          a b c c c c c c ... c       64 rows, the last ones unused
    read         a b c                       outputs of the wanted rows

Numbers of rows are rounded up to a few sizes, and the session has a plan for each.

Keys and values of the cross attention of an encoder-decoder are written into pages of the same pool
when a sequence begins, or continues after preemption. Their positions have no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from penstock.compiler.options import CompileOptions
from penstock.core.errors import InvalidInput, LimitExceeded
from penstock.core.records import NamedTuple
from penstock.ir.graph import Model
from penstock.ops.internal.joined_steps import (
    FIXED_PAGES,
    FIXED_RUNS,
    PAGE,
    PAGES,
    POOL,
    POSITIONS,
    READ,
    RUNS,
)
from penstock.ops.internal.pages import RUN
from penstock.session.opening import DerivedModel
from penstock.session.session import Session
from penstock.stepping.pages import PagePool, digests
from penstock.stepping.sequence import Rows, SequenceState
from penstock.stepping.step_model import joined_steps_of

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""numbers of rows of a step; beyond the last, multiples of it and of an eighth of the number"""
_PAGES = 4096
"""numbers of pages for which the table of a step initially has room"""


def rounded(rows: int) -> int:
    """Return the number of rows that a step for ``rows`` computes."""
    for size in _SIZES:
        if rows <= size:
            return size
    step = max(_SIZES[-1], 1 << (rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def piece_of(waiting: int, room: int) -> int:
    """Return how many of the ``waiting`` rows to compute in a step that has ``room``: a number that
    the sizes of steps round up by little."""
    rows, last = min(waiting, room), _SIZES[-1]
    # Another step reads all weights again, which takes as long as some tens of rows.
    few = rows % last
    return rows - few if rows > last and few < last // 2 else rows


class Piece(NamedTuple):
    """Some rows of a sequence that are computed in a step."""

    sequence: SequenceState
    rows: int


class _PageTable:
    """Table of the pages of each sequence's rows in a step, as ``ops.internal.pages`` reads it."""

    def __init__(self, most_sequences: int) -> None:
        self._runs = np.zeros((most_sequences, RUN), np.int64)
        self._pages = np.zeros(_PAGES, np.int64)

    def filled(
        self, runs: Sequence[tuple[int, int, int, Sequence[int]]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Create the table from the first rows of sequences, their numbers of rows and of previous
        positions, and their pages."""
        used = sum(len(pages) for *_, pages in runs)
        if used > len(self._pages):
            self._pages = np.zeros(2 * used, np.int64)
        self._runs.fill(0)
        begin = 0
        for i, (first, count, past, pages) in enumerate(runs):
            self._runs[i] = first, count, past, begin
            self._pages[begin : begin + len(pages)] = pages
            begin += len(pages)
        return self._runs, self._pages


class JoinedRunner:
    """Runs pieces of sequences together, by a ``model`` of joined steps. ``axes``: the axis of rows
    of each output. Raises ``RowsStay`` if rows cannot be joined."""

    def __init__(
        self,
        model: Model | DerivedModel,
        options: CompileOptions,
        most_bytes: int,
        most_sequences: int,
    ) -> None:
        self.session = Session(model, options)
        self.session._subgraphs.fix_shapes()
        self.steps = steps = joined_steps_of(self.session.model)
        self.axes, self.most_sequences = steps.outputs, most_sequences
        self.pool, self.rows = PagePool(steps.page_size, most_bytes), steps.rows
        self.fixed, self.most_rows = steps.fed, steps.most
        self._inputs = {*self.session._subgraphs.main.names}
        self._table, self._fixed_table = _PageTable(most_sequences), _PageTable(most_sequences)

    @property
    def pages(self) -> tuple[int, int, int]:
        """The number of pages held, of pages among them kept for later sequences, and of all."""
        return self.pool.count - self.pool.free, self.pool.kept, self.pool.count

    def check_fixed(self, fixed: Rows) -> None:
        """Check that a sequence can begin with these inputs. Raises ``InvalidInput``."""
        counts = {cache.past: fixed[cache.past].shape[2] for cache in self.steps.fixed}
        if (name := self.steps.mask) is not None:
            counts[name] = fixed[name].shape[1]
            if not np.isin(fixed[name], (0, 1)).all():
                raise InvalidInput(f"initial {name!r} has other elements than 0 and 1")
        if len({*counts.values()}) > 1:
            raise InvalidInput(f"initial has different numbers of positions: {counts}")
        if counts and not self._places(fixed).size:
            raise InvalidInput(f"initial has no positions to attend to: {counts}")

    def check_length(self, sequence: SequenceState, rows: int) -> None:
        """Check that a sequence may have this number of ``rows``. Raises ``InvalidInput`` if the
        model has no positions for them, and ``LimitExceeded`` if pages cannot hold them."""
        if self.most_rows is not None and rows > self.most_rows:
            raise InvalidInput(
                f"a sequence of {rows} rows is longer than the model's table of positions: "
                f"{self.steps.table!r} has {self.most_rows} for them"
            )
        self._check_pages(sequence, rows)

    def _check_pages(self, sequence: SequenceState, rows: int) -> None:
        # Masks are copied and never change, so this is counted once.
        if self.steps.fixed and not sequence.present:
            sequence.present = self._places(sequence.fixed).size
        needed, of_fixed = ceil(rows / PAGE), ceil(sequence.present / PAGE)
        if needed + of_fixed > self.pool.count:
            more = f" and {sequence.present} positions of an encoder" if of_fixed else ""
            raise LimitExceeded(
                f"a sequence of {rows} rows{more} needs {needed + of_fixed} pages of "
                f"{self.pool.nbytes_of_page} bytes, and all caches may have {self.pool.count}; "
                "raise cache_bytes"
            )

    def _places(self, fixed: Rows) -> np.ndarray:
        """Return the positions of the encoder's output that are not masked."""
        if self.steps.mask is not None:
            return np.flatnonzero(fixed[self.steps.mask])
        return np.arange(fixed[self.steps.fixed[0].past].shape[2] if self.steps.fixed else 0)

    def begin(self, sequence: SequenceState) -> None:
        """Share the pages of sequences with the same prefix; the last waiting row is computed in
        any case."""
        # Pages of an encoder's outputs are not part of the digests.
        if sequence.computed or sequence.pages or self.steps.fixed:
            return
        full = (sequence.rows.count - max(sequence.wanted, 1)) // PAGE
        contents = (sequence.rows.content(i * PAGE, (i + 1) * PAGE) for i in range(full))
        for digest in digests(contents):
            page = self.pool.find(digest)
            if page is None:
                break
            sequence.pages.append(page)
            sequence.digests.append(digest)
        sequence.computed = len(sequence.pages) * PAGE

    def reserve(self, sequence: SequenceState, rows: int) -> bool:
        """Allocate pages for further rows of a sequence. Return False if too few are free."""
        self._check_pages(sequence, sequence.computed + rows)
        needed, fixed = ceil((sequence.computed + rows) / PAGE), sequence.fixed_pages
        of_fixed = ceil(sequence.present / PAGE)
        while len(fixed) < of_fixed:
            page = self.pool.take()
            if page is None:
                return False
            self._write(page, sequence.fixed, len(fixed) * PAGE)
            fixed.append(page)
        while len(sequence.pages) < needed:
            page = self.pool.take()
            if page is None:
                return False
            sequence.pages.append(page)
        return True

    def _write(self, page: int, fixed: Rows, begin: int) -> None:
        """Write keys and values that do not change, from position ``begin`` on, into a page."""
        places = self._places(fixed)[begin : begin + PAGE]
        for name, _, groups, size, begins, keys in self.steps.fixed:
            memory = self.pool.array[page, begins : begins + groups * PAGE * size]
            turned = memory.reshape(groups, size, PAGE).swapaxes(1, 2)
            memory = turned if keys else memory.reshape(groups, PAGE, size)
            memory[:, : places.size] = fixed[name][0].take(places, axis=1)

    def release(self, sequence: SequenceState) -> None:
        """Release the pages of a sequence; if it continues, its rows are computed again."""
        for page in (*sequence.pages, *sequence.fixed_pages):
            self.pool.drop(page)
        sequence.pages.clear()
        sequence.fixed_pages.clear()
        sequence.digests.clear()
        sequence.computed = 0

    def cut(self, sequence: SequenceState, rows: int) -> None:
        """Drop the state of all rows from ``rows`` on."""
        kept = ceil(rows / PAGE)
        while len(sequence.pages) > kept:
            self.pool.drop(sequence.pages.pop())
        del sequence.digests[rows // PAGE :]
        sequence.computed = min(sequence.computed, rows)
        self._own_last(sequence)

    def fork(self, sequence: SequenceState, copy: SequenceState) -> None:
        """Give ``copy`` the state of a sequence: full pages are shared."""
        copy.pages, copy.digests = [*sequence.pages], [*sequence.digests]
        copy.fixed_pages, copy.present = [*sequence.fixed_pages], sequence.present
        copy.computed = sequence.computed
        for page in (*copy.pages, *copy.fixed_pages):
            self.pool.hold(page)
        self._own_last(copy)

    def _own_last(self, sequence: SequenceState) -> None:
        """Give a sequence its own copy of its last page if rows are still to be written there."""
        if not sequence.computed % PAGE or not self.pool.is_shared(sequence.pages[-1]):
            return
        shared = sequence.pages.pop()
        page = self.pool.take()
        if page is None:  # its rows are computed again
            sequence.computed = len(sequence.pages) * PAGE
        else:
            self.pool.array[page] = self.pool.array[shared]
            sequence.pages.append(page)
        self.pool.drop(shared)

    def run(self, pieces: Sequence[Piece]) -> list[Rows]:
        """Compute pieces with reserved pages. Return the outputs of the wanted rows of each."""
        feeds, counts = self._feeds(pieces)
        outputs = self.session.run(feeds)
        results: list[Rows] = []
        end = 0
        for count in counts:
            begin, end = end, end + count
            own = {}
            for name, array in outputs.items():
                axis = self.axes[name]
                own[name] = array[(slice(None),) * axis + (slice(begin, end),)]
            results.append(own)
        return results

    def advance(self, piece: Piece) -> None:
        """Record that a piece is computed."""
        piece.sequence.computed += piece.rows
        self._keep_full(piece.sequence)

    def _feeds(self, pieces: Sequence[Piece]) -> tuple[dict[str, np.ndarray], list[int]]:
        """Return the feeds of a step, and how many rows of each piece are read."""
        total = sum(piece.rows for piece in pieces)
        rows = rounded(total)
        counts, read = [], list[int]()
        runs, fixed = [], []
        positions = np.zeros((1, rows), np.int64)
        first = 0
        for sequence, count in pieces:
            past = sequence.computed
            runs.append((first, count, past, sequence.pages))
            fixed.append((first, count, sequence.present, sequence.fixed_pages))
            positions[0, first : first + count] = range(past, past + count)
            # The wanted rows among those that are computed now.
            begin = max(sequence.rows.count - sequence.wanted - past, 0)
            read += range(first + begin, first + count)
            counts.append(max(count - begin, 0))
            first += count
        feeds = {name: self._rows_of(name, pieces, rows) for name in self.steps.rows}
        size = min(rounded(max(len(read), 1)), max(rows, len(read)))
        reads = np.zeros(size, np.int64)
        reads[: len(read)] = read
        feeds |= {POSITIONS: positions, POOL: self.pool.array, READ: reads}
        feeds[RUNS], feeds[PAGES] = self._table.filled(runs)
        if self.steps.fixed:
            feeds[FIXED_RUNS], feeds[FIXED_PAGES] = self._fixed_table.filled(fixed)
        return {name: array for name, array in feeds.items() if name in self._inputs}, counts

    def _rows_of(self, name: str, pieces: Sequence[Piece], rows: int) -> np.ndarray:
        """Concatenate the rows of all pieces for an input."""
        parts = [
            sequence.rows.part(name, sequence.computed, sequence.computed + count)
            for sequence, count in pieces
        ]
        array = np.zeros((1, rows, *parts[0].shape[1:]), parts[0].dtype)
        array[0, : sum(map(len, parts))] = np.concatenate(parts)
        return array

    def _keep_full(self, sequence: SequenceState) -> None:
        """Keep pages that have become full for sequences with the same prefix."""
        if self.steps.fixed:  # sequences with fixed inputs share no pages
            return
        for i in range(len(sequence.digests), sequence.computed // PAGE):
            before = sequence.digests[-1] if sequence.digests else b""
            content = sequence.rows.content(i * PAGE, (i + 1) * PAGE)
            (digest,) = digests([content], before)
            sequence.digests.append(digest)
            self.pool.keep(sequence.pages[i], digest, before)
