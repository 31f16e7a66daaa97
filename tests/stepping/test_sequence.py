"""The rows that a sequence was given."""

from __future__ import annotations

import numpy as np

from penstock.stepping.sequence import RowHistory, SequenceState


def test_history_has_all_rows_in_order() -> None:
    history = RowHistory()
    for begin, end in ((0, 3), (3, 4), (4, 200)):
        history.add({"ids": np.arange(begin, end)[None], "x": np.ones((1, end - begin, 2))})
    assert history.count == 200
    np.testing.assert_array_equal(history.part("ids", 2, 150), np.arange(2, 150))
    assert history.part("x", 0, 7).shape == (7, 2)


def test_history_that_is_cut_takes_other_rows() -> None:
    history = RowHistory()
    history.add({"ids": np.arange(5)[None]})
    history.cut(2)
    history.add({"ids": np.array([[9]])})
    assert history.part("ids", 0, 3).tolist() == [0, 1, 9]


def test_copy_of_a_history_stays_as_it_is() -> None:
    history = RowHistory()
    history.add({"ids": np.arange(5)[None]})
    copy = history.copied()
    history.cut(0)
    history.add({"ids": np.array([[9]])})
    assert copy.part("ids", 0, 5).tolist() == [0, 1, 2, 3, 4]


def test_content_tells_rows_of_all_inputs_apart() -> None:
    a, b = RowHistory(), RowHistory()
    a.add({"ids": np.arange(3)[None], "x": np.zeros((1, 3))})
    b.add({"ids": np.arange(3)[None], "x": np.array([[0, 0, 1.0]])})
    assert a.content(0, 2) == b.content(0, 2)
    assert a.content(0, 3) != b.content(0, 3)


def test_rank_is_by_priority_then_arrival() -> None:
    states = [SequenceState(1), SequenceState(2, 5), SequenceState(3), SequenceState(4, 5)]
    assert [s.number for s in sorted(states, key=lambda s: s.rank)] == [2, 4, 1, 3]
