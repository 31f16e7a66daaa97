"""States as rows of batches: what is copied, and when."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.stepping.sequence import SequenceState
from penstock.stepping.state_rows import StateBatch, StateRows


def states() -> StateRows:
    initial = {"h": np.zeros((2, 1, 3)), "count": np.zeros(1, np.int64)}
    return StateRows(initial, {"h": 1, "count": 0})


def step(rows: StateRows, sequences: list[SequenceState], size: int) -> None:
    """Add 1 to each count, and what a count is to each element of h."""
    batch = rows.together(sequences, size)
    count = batch.arrays["count"] + 1
    new = {"h": batch.arrays["h"] + count[:, None], "count": count}
    after = StateBatch(new, size, batch.rows)
    for sequence in sequences:
        rows.place(sequence, after)


def count_of(rows: StateRows, sequence: SequenceState) -> int:
    batch = rows.batch_of(sequence)
    row = batch.rows.get(sequence, 0)
    count = int(batch.arrays["count"][row])
    np.testing.assert_array_equal(batch.arrays["h"][:, row], count * (count + 1) / 2)
    return count


def test_states_of_the_same_sequences_are_not_copied() -> None:
    rows, sequences = states(), [SequenceState(i) for i in range(3)]
    step(rows, sequences, 4)
    copied = rows.copied
    for i in range(5):
        rows.shrink()
        before = rows.batch_of(sequences[0]).arrays
        batch = rows.together([*reversed(sequences)] if i % 2 else sequences, 4)
        assert all(batch.arrays[name] is before[name] for name in before)
        step(rows, sequences, 4)
    assert rows.copied == copied
    assert [count_of(rows, sequence) for sequence in sequences] == [6, 6, 6]


def test_sequences_that_step_without_others_leave_these_where_they_are() -> None:
    rows, sequences = states(), [SequenceState(i) for i in range(4)]
    step(rows, sequences, 4)
    kept = rows.batch_of(sequences[0])
    step(rows, sequences[2:], 2)
    assert rows.copied == 6
    assert rows.batch_of(sequences[1]) is kept
    assert [count_of(rows, sequence) for sequence in sequences] == [1, 1, 2, 2]


def test_batch_that_most_have_left_is_copied() -> None:
    rows, sequences = states(), [SequenceState(i) for i in range(8)]
    step(rows, sequences, 8)
    for sequence in sequences[:5]:
        rows.drop(sequence)
    rows.shrink()
    assert rows.batch_of(sequences[7]).size == 3
    assert [count_of(rows, sequence) for sequence in sequences] == [0] * 5 + [1] * 3


def test_fork_has_the_state_and_goes_on_by_itself() -> None:
    rows, first, other, copy = states(), *[SequenceState(i) for i in range(3)]
    step(rows, [first, other], 2)
    rows.fork(first, copy)
    step(rows, [copy, other], 2)
    assert [count_of(rows, sequence) for sequence in (first, other, copy)] == [1, 2, 2]


def test_initial_state_of_a_sequence_is_its_own() -> None:
    rows, own = states(), SequenceState(0)
    own.arrays = {"h": np.full((2, 1, 3), 3.0), "count": np.array([2])}
    step(rows, [SequenceState(1), own], 2)
    assert count_of(rows, own) == 3
    rows.drop(own)
    assert count_of(rows, own) == 2


@given(st.lists(st.tuples(st.sampled_from("ssssdf"), st.integers(0, 255)), max_size=40))
def test_counts_are_those_of_the_steps_whatever_is_done(actions: list[tuple[str, int]]) -> None:
    rows, sequences, counts = states(), [SequenceState(i) for i in range(8)], [0] * 8
    for action, bits in actions:
        chosen = [i for i in range(8) if bits >> i & 1]
        rows.shrink()
        if action == "s" and chosen:
            step(rows, [sequences[i] for i in chosen], len(chosen) + bits % 3)
            counts = [n + (i in chosen) for i, n in enumerate(counts)]
        for i in chosen:
            if action == "d":
                rows.drop(sequences[i])
                counts[i] = 0
            elif action == "f":
                target = (i + 1) % 8
                rows.drop(sequences[target])
                rows.fork(sequences[i], sequences[target])
                counts[target] = counts[i]
        assert [count_of(rows, sequence) for sequence in sequences] == counts
