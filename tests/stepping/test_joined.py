"""Numbers of rows of joined steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.stepping.joined import piece_of, rounded

ROWS = st.integers(1, 5000)


@given(ROWS)
def test_rounded_rows_are_few_numbers_at_most_twice_as_large(rows: int) -> None:
    assert rows <= rounded(rows) < 2 * rows + 1
    assert rounded(rounded(rows)) == rounded(rows)


def test_rounded_rows_are_few_numbers() -> None:
    assert len({rounded(rows) for rows in range(1, 513)}) == 19
    assert len({rounded(rows) for rows in range(1, 8193)}) == 35


@given(ROWS, ROWS)
def test_piece_fits_and_is_not_rounded_up_by_much(waiting: int, room: int) -> None:
    rows = piece_of(waiting, room)
    assert 1 <= rows <= min(waiting, room)
    assert rows <= 64 or rounded(rows) <= 1.34 * rows
