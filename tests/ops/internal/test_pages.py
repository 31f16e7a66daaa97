"""Attention over pages: what is refused, and where new rows are written."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.errors import PenstockError
from penstock.core.types import FLOAT32, INT64, ShapeError, TensorType
from penstock.ops.internal.pages import PAGED_ATTENTION
from tests.support.native_kernels import expected, node_of

ATTRS = {"scale": 1.0, "positions": 2, "keys_at": 0, "values_at": 4}


def attended(runs: list[list[int]], pages: list[int], rows: int = 3) -> tuple[np.ndarray, ...]:
    """The result for ones as queries and new rows, and the pool, which was zeros."""
    ones, pool = np.ones((1, 1, rows, 2), np.float32), np.zeros((3, 8), np.float32)
    inputs = [ones, ones, ones, pool, np.array(runs), np.array(pages)]
    (y,) = expected(node_of(PAGED_ATTENTION, inputs, (), **ATTRS), inputs)
    return y, pool


def test_rows_are_written_behind_the_past_of_their_request() -> None:
    _, pool = attended([[0, 1, 1, 0], [1, 2, 1, 1]], [2, 0, 1])
    keys, values = pool[:, :4].reshape(3, 2, 2)[:, 0], pool[:, 4:].reshape(3, 2, 2)[:, :, 0]
    # Page 2 has position 1 of the first request, pages 0 and 1 positions 1 and 2 of the other.
    assert keys.tolist() == [[0, 1], [1, 0], [0, 1]]
    np.testing.assert_array_equal(values, keys)


def test_rows_of_no_request_are_zeros() -> None:
    y, _ = attended([[1, 1, 0, 0]], [0])
    assert y[0, 0, :, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "runs, pages",
    [
        ([[2, 2, 0, 0]], [0]),  # rows beyond the last
        ([[0, 3, 0, 0]], [0]),  # too few pages
        ([[0, 1, 0, 1]], [0]),
        ([[-1, 1, 0, 0]], [0]),
        ([[0, 1, -2, 0]], [0]),
        ([[0, 1, 0, 0]], [3]),  # no such page
        ([[0, 1, 0, 0]], [-1]),
    ],
)
def test_rows_or_pages_that_are_not_there_are_refused(
    runs: list[list[int]], pages: list[int]
) -> None:
    with pytest.raises((ValueError, PenstockError)):
        attended(runs, pages)


def test_numbers_by_distance_are_added_to_scores() -> None:
    # Scores of equal keys are the numbers alone: 3 at distance 0, 1 at 1, then 2 less for each.
    table = np.array([[3.0, 1.0, -2.0]], np.float32)
    ones, pool = np.ones((1, 1, 4, 2), np.float32), np.zeros((2, 8), np.float32)
    values = np.repeat(np.eye(4, 2, dtype=np.float32)[None, None], 1, 0)
    inputs = [ones, ones, values, pool, np.array([[0, 4, 0, 0]]), np.array([0, 1]), table]
    (y,) = expected(node_of(PAGED_ATTENTION, inputs, (), **ATTRS), inputs)
    powers = np.exp([3.0, 1.0, -1.0, -3.0])
    for row in range(4):
        weights = powers[row::-1] / powers[: row + 1].sum()
        np.testing.assert_allclose(y[0, 0, row], np.append(weights, 0)[:2], rtol=1e-6)


@pytest.mark.parametrize("seen", [1, 3, 4])
def test_rows_without_new_keys_see_all_positions(seen: int) -> None:
    pool = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    q = np.zeros((1, 1, 2, 2), np.float32)  # so that all have the same weight
    inputs = [q, None, None, pool, np.array([[0, 2, seen, 1]]), np.array([1, 2, 0])]
    attrs = ATTRS | {"groups": 1, "value_size": 2}
    before = pool.copy()
    (y,) = expected(node_of(PAGED_ATTENTION, inputs, (), **attrs), inputs)
    values = pool[[2, 0], 4:].reshape(4, 2)[:seen]
    np.testing.assert_allclose(y[0, 0], [values.mean(0)] * 2, rtol=1e-6)
    np.testing.assert_array_equal(pool, before)


def types_of(**changes: tuple[object, ...]) -> list[TensorType]:
    shapes = {
        "q": (1, 4, "rows", 8),
        "k": (1, 2, "rows", 8),
        "v": (1, 2, "rows", 6),
        "pool": (3, 1000),
        "runs": ("requests", 4),
        "pages": ("used",),
    }
    dtypes = {"runs": INT64, "pages": INT64}
    return [TensorType(dtypes.get(n, FLOAT32), s) for n, s in (shapes | changes).items()]


def test_result_has_the_heads_of_queries_and_the_size_of_values() -> None:
    (y,) = PAGED_ATTENTION.infer(types_of(), ATTRS, [None] * 6)
    assert y == TensorType(FLOAT32, (1, 4, "rows", 6))


@pytest.mark.parametrize(
    "changes",
    [
        {"k": (1, 3, "rows", 8)},
        {"k": (1, 2, "rows", 7)},
        {"v": (1, 1, "rows", 6)},
        {"q": (2, 4, "rows", 8)},
        {"runs": ("requests", 3)},
        {"pages": ("used", 1)},
        {"pool": (3, 20)},
        {"q": (1, "heads", "rows", 8)},
        {"by_distance": (2, 5)},
        {"by_distance": (4, 1)},
        {"by_distance": (4, 2, 2)},
    ],
)
def test_wrong_shapes_are_refused(changes: dict[str, tuple[object, ...]]) -> None:
    with pytest.raises(ShapeError):
        PAGED_ATTENTION.infer(types_of(**changes), ATTRS, [None] * 6)


def test_distances_to_no_keys_are_refused() -> None:
    types = [t if i not in (1, 2) else None for i, t in enumerate(types_of(by_distance=(4, 5)))]
    attrs = ATTRS | {"groups": 2, "value_size": 6}
    (y,) = PAGED_ATTENTION.infer(types[:6], attrs, [None] * 6)
    assert y == TensorType(FLOAT32, (1, 4, "rows", 6))
    with pytest.raises(ShapeError, match="by_distance requires new keys"):
        PAGED_ATTENTION.infer(types, attrs, [None] * 7)


@pytest.mark.parametrize("changed", [{"positions": 0}, {"keys_at": -4}, {"values_at": -1}])
def test_places_that_no_page_has_are_refused(changed: dict[str, int]) -> None:
    ones, pool = np.ones((1, 1, 1, 2), np.float32), np.zeros((3, 8), np.float32)
    inputs = [ones, ones, ones, pool, np.array([[0, 1, 0, 0]]), np.array([0])]
    with pytest.raises(ShapeError, match="and keys_at and values_at not negative"):
        node_of(PAGED_ATTENTION, inputs, (), **{**ATTRS, **changed})
