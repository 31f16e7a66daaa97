"""Hashes, words, paths and repeated n-grams: sizes beyond those of the draws of all kernels."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.support.native_kernels import (
    LIBRARIES,
    check,
    expected,
    kernel_of,
    node_of,
    pytestmark,  # noqa: F401
)

MICROSOFT = partial(node_of, domain="com.microsoft", version=1)


@pytest.mark.parametrize("size", [1, 2, 3, 1 << 31, (1 << 53) + 1, (1 << 62) + 3, (1 << 63) - 1])
def test_hashes_of_all_numbers_are_exact_modulo_any_size(size: int) -> None:
    ends = np.iinfo(np.int64)
    numbers = [ends.min, ends.min + 1, -size, -1, 0, 1, size - 1, size, ends.max - 1, ends.max]
    inputs = [np.array([numbers]), np.array([1, 0]), np.array([size])]
    node = MICROSOFT(
        "NGramHashMapping", inputs, outputs=2, pad_id=0, max_ngram_size=2, n_head_per_ngram=1
    )
    check(node, inputs)
    assert expected(node, inputs)[0].reshape(-1).tolist() == [n % size for n in numbers]


@pytest.mark.parametrize("shape", [(3000, 1001), (2, 70_000)])
def test_path_through_a_large_matrix_is_numpys(shape: tuple[int, int]) -> None:
    costs = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    node = MICROSOFT("DynamicTimeWarping", [costs])
    result = kernel_of(node, LIBRARIES[-1]).function(costs)
    np.testing.assert_array_equal(result, expected(node, [costs])[0])


@pytest.mark.parametrize("place", [0, 31, 32, 33, 63, 64, 500, 996, 997])
def test_ngram_is_found_at_any_place(place: int) -> None:
    source = np.arange(1000)
    current = source[place : place + 3].copy()
    start = np.array([0])
    inputs = [source, current, start, np.append(source, 7)]
    inputs[3][place] = 5000
    for count in (3, 4):
        node = MICROSOFT("BifurcationDetector", inputs[:count], outputs=2)
        for library in LIBRARIES:
            results = kernel_of(node, library).function(*inputs[:count])
            for got, want in zip(results, expected(node, inputs[:count]), strict=True):
                np.testing.assert_array_equal(got, want)
