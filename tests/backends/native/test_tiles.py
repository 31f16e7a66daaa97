"""Tiles of elementwise programs."""

from __future__ import annotations

import pytest

from penstock.backends.native.kernel import UnsupportedError
from penstock.backends.native.tiles import (
    DIRECT,
    GATHERED,
    ONCE,
    check_strides,
    dense_steps,
    merged_dims,
    modes_of_rows,
    tiles_of,
    with_rows,
)


def test_merged_dims_of_contiguous_operands_are_one():
    dense = [12, 4, 1]
    assert merged_dims((2, 3, 4), [dense, dense], dense) == ([24], [[1], [1]])


def test_merged_dims_keep_axes_along_which_an_operand_is_broadcast():
    assert merged_dims((2, 3, 4), [[12, 4, 1], [0, 0, 1]], [12, 4, 1]) == ([6, 4], [[4, 1], [0, 1]])


def test_merged_dims_follow_the_memory_order_of_the_result():
    # The result has channels last: axis 1 is innermost.
    assert merged_dims((2, 3, 4), [[12, 1, 3]], [12, 1, 3]) == ([24], [[1]])
    assert merged_dims((2, 3, 4), [[0, 1, 0]], [12, 1, 3]) == ([8, 3], [[0, 1]])


def test_merged_dims_refuse_a_result_with_gaps():
    with pytest.raises(UnsupportedError):
        merged_dims((2, 3), [[3, 1]], [8, 1])


def test_tile_is_a_multiple_of_the_period_of_a_repeated_operand():
    tile, modes, row, items = tiles_of([100, 12], [[12, 1], [0, 1]], 512, 40)
    assert (tile, modes, row) == (504, [DIRECT, ONCE], 0)
    assert items == 3  # 1,200 elements


def test_tiles_end_with_rows_where_an_operand_has_one_element_for_each():
    tile, modes, row, items = tiles_of([40, 2000], [[2000, 1], [1, 0]], 512, 1)
    assert (row, items) == (2000, 160)
    assert (tile, modes) == (500, [DIRECT, GATHERED])


def test_rows_become_the_last_dim():
    assert with_rows([60], [[1]], 20) == ([60], [[1]])
    assert with_rows([2, 60], [[0, 1]], 20) == ([2, 3, 20], [[0, 20, 1]])
    with pytest.raises(UnsupportedError):
        with_rows([2, 50], [[0, 1]], 20)


def test_modes_of_rows_tell_scalars_from_operands_with_strides():
    assert modes_of_rows([2, 3], [[3, 1], [0, 0], [1, 0]]) == [DIRECT, ONCE, GATHERED]


def test_large_results_refuse_operands_with_a_stride_along_the_last_dim():
    check_strides([[3, 1]], 10**6)
    check_strides([[1, 2]], 100)
    with pytest.raises(UnsupportedError):
        check_strides([[1, 2]], 10**6)


def test_dense_strides_are_in_elements():
    assert dense_steps((2, 3, 4)) == [12, 4, 1]
