"""Attention over pages: the same bits for a row, whatever rows are computed with it."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ir.graph import Node
from penstock.ops.internal.pages import PAGED_ATTENTION
from tests.support.native_kernels import LIBRARIES, kernel_of, node_of, pytestmark  # noqa: F401

RNG = np.random.default_rng(4)
POSITIONS, GROUPS, SIZE = 32, 2, 40


def attended(
    library: object, share: int, window: int, total: int, sizes: list[int], distances: int = 0
) -> np.ndarray:
    """The results of all rows of a request, in pieces of some sizes, with numbers for so many
    distances added to scores."""
    rng = np.random.default_rng(7)
    q = rng.standard_normal((1, GROUPS * share, total, SIZE)).astype(np.float32)
    k, v = rng.standard_normal((2, 1, GROUPS, total, SIZE)).astype(np.float32)
    count = -(-total // POSITIONS)
    pool = np.zeros((count, 2 * GROUPS * POSITIONS * SIZE), np.float32)
    attrs = {"scale": 0.3, "window": window, "positions": POSITIONS}
    attrs |= {"keys_at": 0, "values_at": GROUPS * POSITIONS * SIZE}
    pages, results, at = np.arange(count)[::-1].copy(), [], 0
    added = rng.standard_normal((GROUPS * share, distances + 1)).astype(np.float32)
    added[:, -1] *= 0.02  # for each position beyond
    more = [added] if distances else []
    for size in sizes:
        part = slice(at, at + size)
        runs = np.array([[0, size, at, 0]])
        inputs = [np.ascontiguousarray(x[:, :, part]) for x in (q, k, v)]
        inputs += [pool, runs, pages, *more]
        node = node_of(PAGED_ATTENTION, inputs, (), **attrs)
        kernel = kernel_of(node, library)
        assert kernel is not None
        results.append(kernel.function(*inputs))
        at += size
    return np.concatenate(results, axis=2)


@pytest.mark.parametrize("distances", [0, 1, 90])
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("share", [1, 2, 3, 5])
@pytest.mark.parametrize("library", LIBRARIES)
def test_bits_of_a_row_do_not_depend_on_rows_beside_it(
    library: object, share: int, window: int, distances: int
) -> None:
    whole = attended(library, share, window, 330, [330], distances)
    for sizes in ([1] * 330, [7, 100, 1, 1, 221], [64] * 5 + [10]):
        pieces = attended(library, share, window, 330, sizes, distances)
        np.testing.assert_array_equal(pieces, whole)


@pytest.mark.parametrize("share", [1, 2, 3, 5])
@pytest.mark.parametrize("library", LIBRARIES)
def test_bits_of_a_row_that_sees_all_do_not_depend_on_rows_beside_it(
    library: object, share: int
) -> None:
    rng = np.random.default_rng(8)
    q = rng.standard_normal((1, GROUPS * share, 45, SIZE)).astype(np.float32)
    pages = rng.permutation(11)
    pool = rng.standard_normal((11, 2 * GROUPS * POSITIONS * SIZE)).astype(np.float32)
    attrs = {"scale": 0.3, "positions": POSITIONS, "groups": GROUPS, "value_size": SIZE}
    attrs |= {"keys_at": 0, "values_at": GROUPS * POSITIONS * SIZE}

    def attended(part: np.ndarray) -> np.ndarray:
        inputs = [part, None, None, pool, np.array([[0, part.shape[2], 330, 0]]), pages]
        kernel = kernel_of(node_of(PAGED_ATTENTION, inputs, (), **attrs), library)
        assert kernel is not None
        return np.asarray(kernel.function(*inputs))

    whole = attended(q)
    for i in range(45):
        alone = attended(np.ascontiguousarray(q[:, :, i : i + 1]))
        np.testing.assert_array_equal(alone, whole[:, :, i : i + 1])


@pytest.mark.parametrize("changed", [{"positions": 0}, {"keys_at": -4096}, {"values_at": -4096}])
@pytest.mark.parametrize("library", LIBRARIES)
def test_compiled_code_reads_no_page_at_places_that_none_has(
    library: object, changed: dict[str, int]
) -> None:
    rows, pool = np.ones((3, 1, 1, 1, 8), np.float32), np.ones((2, 512), np.float32)
    inputs = [*rows, pool, np.array([[0, 1, 0, 0]]), np.array([0])]
    attrs = {"scale": 0.3, "positions": POSITIONS, "keys_at": 0, "values_at": 256}
    node = node_of(PAGED_ATTENTION, inputs, (), **attrs)
    # Types are inferred before: attributes of a file may be others.
    changed_node = Node(node.op, node.inputs, node.outputs, {**attrs, **changed})
    kernel = kernel_of(changed_node, library)
    assert kernel is not None
    with pytest.raises((ValueError, IndexError, ArithmeticError, RuntimeWarning)):
        kernel.function(*inputs)
