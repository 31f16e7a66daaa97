"""Numbers by distance that are told by the values of a bias."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.passes.lowering.distance_bias import numbers_by_distance
from penstock.passes.lowering.row_rules import Stays
from penstock.passes.lowering.step_probes import Probe

SLOPES = 2.0 ** -np.arange(1, 9)[:, None, None]
LEARNED = np.random.default_rng(2).normal(size=(8, 1, 33))

Bias = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Of the positions of keys and of queries [rows, 1]"""


def table_of(bias: Bias, window: int = 0, total: int = 40000) -> np.ndarray | None:
    cases = []
    for rows, past in ((7, 11), (13, 5), (3, total - 3)):
        probe = Probe(rows, past, {})
        keys, queries = np.arange(past + rows), probe.positions[:, None]
        hidden = (keys > queries) | ((queries - keys >= window) if window else False)
        numbers = np.asarray(bias(keys, queries), np.float32)
        cases.append((probe, np.where(hidden, np.float32(-3e38), numbers)))
    return numbers_by_distance(cases, window, -1e30, "bias")


def buckets(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    return LEARNED[:, 0, np.clip(queries - keys, 0, 32)]


@pytest.mark.parametrize(
    "bias",
    [
        lambda keys, queries: SLOPES * (keys - queries),
        lambda keys, queries: SLOPES * keys,
        lambda keys, queries: SLOPES * (keys - keys[-1]) + 7,
        lambda keys, queries: SLOPES * keys + np.sin(queries),
    ],
)
def test_slopes_are_found_in_each_form(bias: Bias) -> None:
    table = table_of(bias)
    assert table is not None
    np.testing.assert_array_equal(table[:, 0], 0)
    np.testing.assert_allclose(table[:, 1], -SLOPES[:, 0, 0], rtol=3e-7)
    assert table.shape == (8, 2)


def test_numbers_of_buckets_end_where_they_stay_the_same() -> None:
    table = table_of(buckets)
    assert table is not None
    learned = LEARNED[:, 0].astype(np.float32)
    np.testing.assert_array_equal(table[:, :-1], learned - learned[:, :1])
    np.testing.assert_array_equal(table[:, -1], 0)


def test_numbers_that_grow_evenly_behind_some_distances_are_found() -> None:
    table = table_of(lambda keys, queries: buckets(keys, queries) + SLOPES * (keys - queries))
    assert table is not None
    assert table.shape == (8, 34)
    np.testing.assert_allclose(table[:, -1], -SLOPES[:, 0, 0], rtol=1e-6)


def test_one_number_that_is_off_a_line_is_in_the_table() -> None:
    table = table_of(
        lambda keys, queries: SLOPES * (keys - queries) + 0.01 * (queries - keys == 50)
    )
    assert table is not None
    assert table.shape == (8, 53)
    np.testing.assert_allclose(table[:, 50], 0.01 - 50 * SLOPES[:, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(table[:, 49], -49 * SLOPES[:, 0, 0], rtol=1e-6)


def test_numbers_within_a_window_need_not_grow_evenly() -> None:
    table = table_of(lambda keys, queries: np.sqrt(np.abs(queries - keys))[None], window=40)
    assert table is not None
    np.testing.assert_allclose(table[0, :40], np.sqrt(np.arange(40)), rtol=1e-6)


@pytest.mark.parametrize("number", [0.0, 0.5])
def test_the_same_number_for_all_is_nothing(number: float) -> None:
    assert table_of(lambda keys, queries: np.full((1, *(keys - queries).shape), number)) is None


@pytest.mark.parametrize(
    "bias",
    [
        lambda keys, queries: SLOPES * keys**2,
        lambda keys, queries: SLOPES * (keys - queries) ** 2,
        lambda keys, queries: SLOPES * (keys - queries) * (queries > 12),
        lambda keys, queries: np.sqrt(np.abs(queries - keys))[None],
        lambda keys, queries: SLOPES * (keys - queries) + 0.1 * (keys == 20),
        lambda keys, queries: (
            SLOPES * (keys - queries) + 1e-4 * (queries - keys == 5) * (queries > 20)
        ),
        lambda keys, queries: (keys[None] == 4) * np.ones_like(queries)[None] * 1.0,
        lambda keys, queries: np.where(keys == 3, np.nan, 0.0) * np.ones_like(queries)[None],
    ],
)
def test_numbers_by_more_than_distances_are_refused(bias: Bias) -> None:
    with pytest.raises(Stays, match="which depends on more than distance"):
        table_of(bias)


def test_numbers_rounded_to_bfloat16_are_refused() -> None:
    """As some models compute ALiBi: the number of a distance then depends on the position."""

    def rounded(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
        exact = np.float32(SLOPES * 0.7 * keys)
        return (exact.view(np.int32) & -65536).view(np.float32) + 0 * queries

    with pytest.raises(Stays, match="which depends on more than distance"):
        table_of(rounded)
