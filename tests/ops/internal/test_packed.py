"""Rows that matter, one behind another: which they are, attention among them, and back."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.errors import InvalidModel
from penstock.core.types import FLOAT32, INT64, ShapeError, TensorType
from penstock.ops.internal.attention import ATTENTION
from penstock.ops.internal.packed import (
    FACTOR,
    INDEX,
    LIVE_ROWS,
    PACKED_ATTENTION,
    PAIRS,
    REPLACED,
    UNPACK_ROWS,
)
from tests.support.native_kernels import expected, node_of

LOW = np.finfo(np.float32).min


def live(guards, groups, batch, rows, first=0):
    """The ranges, rows and positions that LiveRows finds."""
    attrs = {"batch": batch, "rows": rows, "groups": groups, "first": first}
    return expected(node_of(LIVE_ROWS, guards, (), 3, **attrs), guards)


def bias_of(mask, low=LOW):
    """What is added to scores [batch, 1, 1, rows]."""
    return np.where(np.array(mask, bool), 0, low).astype(np.float32)[:, None, None]


def test_rows_that_are_seen_are_packed_one_behind_another():
    ranges, rows, positions = live([bias_of([[1, 1, 0], [1, 0, 0]])], [0], 2, 3)
    assert ranges.tolist() == [[0, 2, 0], [0, 1, 2]]
    assert rows[:3].tolist() == [0, 1, 3]
    assert positions[:3].tolist() == [0, 1, 0]


def test_rows_between_two_that_are_seen_are_packed_and_those_before_are_not():
    ranges, *_ = live([bias_of([[0, 1, 0, 1, 0]])], [0], 1, 5)
    assert ranges.tolist() == [[1, 3, 0]]


@pytest.mark.parametrize("low", [LOW, -np.inf, -1e4])
def test_lowest_numbers_of_all_exporters_hide_a_row(low):
    ranges, *_ = live([bias_of([[1, 1, 0]], low)], [0], 1, 3)
    assert ranges.tolist() == [[0, 2, 0]]


def test_bias_that_is_not_a_number_hides_nothing():
    ranges, *_ = live([bias_of([[1, 1, 0]], np.nan)], [0], 1, 3)
    assert ranges.tolist() == [[0, 3, 0]]


def test_sample_without_a_row_that_is_seen_is_packed_whole():
    ranges, *_ = live([bias_of([[0, 0, 0], [1, 0, 0]])], [0], 2, 3)
    assert ranges.tolist() == [[0, 3, 0], [0, 1, 3]]


def test_sample_of_which_a_packed_row_sees_none_is_packed_whole():
    bias = np.zeros((2, 1, 4, 4), np.float32)
    bias[..., 3] = LOW
    bias[1, 0, 1] = LOW
    ranges, *_ = live([bias], [0], 2, 4)
    assert ranges.tolist() == [[0, 3, 0], [0, 4, 3]]


def test_row_that_sees_none_in_one_head_has_all_of_its_sample_packed():
    bias = np.zeros((2, 2, 4, 4), np.float32)
    bias[..., 3] = LOW
    bias[1, 1, 2] = LOW
    ranges, *_ = live([bias], [0], 2, 4)
    assert ranges.tolist() == [[0, 3, 0], [0, 4, 3]]


def test_row_must_be_seen_by_all_biases_of_one_attention_and_by_any_attention():
    first, second = bias_of([[1, 1, 0, 0]]), bias_of([[1, 0, 1, 0]])
    assert live([first, second], [0, 0], 1, 4)[0].tolist() == [[0, 1, 0]]
    assert live([first, second], [0, 1], 1, 4)[0].tolist() == [[0, 3, 0]]


def test_row_that_a_factor_keeps_is_packed():
    factor = np.zeros((1, 4, 2), np.float32)
    factor[0, 2, 1] = 0.5
    bias = bias_of([[1, 0, 0, 0]])
    assert live([bias, factor], [0, FACTOR], 1, 4)[0].tolist() == [[0, 3, 0]]


@pytest.mark.parametrize(("low", "rows"), [(LOW, [1, 2, 0]), (-np.inf, [0, 3, 0])])
def test_sample_with_a_row_that_is_not_a_number_times_0_is_packed_whole(low, rows):
    causal = np.tril(np.ones((3, 3)))
    bias = np.where(causal * [0, 1, 1], 0, low).astype(np.float32)[None, None]
    factor = np.array([[[0], [1], [1]]], np.float32)
    assert live([bias], [0], 1, 3)[0].tolist() == [[1, 2, 0]]
    assert live([bias, factor], [0, FACTOR], 1, 3)[0].tolist() == [rows]


def test_row_that_a_condition_does_not_replace_is_packed():
    replaced = np.ones((1, 4, 2), bool)
    replaced[0, 2, 1] = False
    bias = bias_of([[1, 0, 0, 0]])
    assert live([bias, replaced], [0, REPLACED], 1, 4)[0].tolist() == [[0, 3, 0]]


def test_first_row_is_packed_where_it_is_read():
    assert live([bias_of([[0, 0, 1]])], [0], 1, 3, first=1)[0].tolist() == [[0, 3, 0]]


def test_rows_that_are_read_by_their_numbers_are_packed():
    bias = bias_of([[1, 0, 0, 0], [1, 0, 0, 0]])
    flat, pairs = np.array([2, -1, 99]), np.array([[0, 1], [-1, -2], [5, 0]])
    assert live([bias, flat], [0, INDEX], 2, 4)[0].tolist() == [[0, 3, 0], [0, 4, 3]]
    assert live([bias, pairs], [0, PAIRS], 2, 4)[0].tolist() == [[0, 2, 0], [0, 3, 2]]


def test_number_of_packed_rows_is_rounded_up_by_an_eighth_at_most():
    rng, seen = np.random.default_rng(0), set()
    for _ in range(200):
        mask = np.arange(64) < rng.integers(1, 65, 40)[:, None]
        _, rows, positions = live([bias_of(mask)], [0], 40, 64)
        assert mask.sum() <= rows.size <= mask.sum() * 1.125
        assert rows.shape == positions.shape
        seen.add(rows.size)
    assert len(seen) < 40


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (2, 3), (0, 2), (0, 3), (3, 1)])
def test_unpacked_rows_are_where_they_were_and_others_are_0(axes):
    rng = np.random.default_rng(0)
    dims = np.full(4, 2)
    dims[[*axes]] = 1, 8
    x = rng.normal(size=dims).astype(np.float32)
    ranges = np.array([[1, 2, 0], [0, 0, 2], [0, 4, 2]])
    dims[[*axes]] = 3, 4
    places = dict(zip(("samples", "rows"), axes, strict=True))
    node = node_of(UNPACK_ROWS, [x, ranges], (), 1, dims=dims.tolist(), **places)
    (y,) = expected(node, [x, ranges])
    rows, packed = np.moveaxis(y, axes, (0, 1)), np.moveaxis(x, axes, (0, 1))[0]
    np.testing.assert_array_equal(rows[0, 1:3], packed[:2])
    np.testing.assert_array_equal(rows[2], packed[2:6])
    assert not rows[0, [0, 3]].any()
    assert not rows[1].any()


@pytest.mark.parametrize("number", [-np.inf, True, 7])
def test_other_rows_hold_the_number_that_is_named(number):
    x = np.zeros((1, 8, 2), np.array(number).dtype)
    attrs = {"dims": [1, 3, 2], "samples": 0, "rows": 1, "number": number}
    ranges = np.array([[0, 1, 0]])
    (y,) = expected(node_of(UNPACK_ROWS, [x, ranges], (), 1, **attrs), [x, ranges])
    assert y[0].tolist() == [[0, 0], [number] * 2, [number] * 2]


def test_packed_attention_is_attention_within_each_sample():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(3, 2, 5, 4)).astype(np.float32) for _ in range(3))
    mask = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1]], bool)
    near = rng.normal(size=(1, 2, 5, 5)).astype(np.float32)
    inputs = [q, k, v, bias_of(mask), near]
    (want,) = expected(node_of(ATTENTION, inputs, scale=0.5), inputs)
    ranges, *_ = live(inputs[3:], [0, 0], 3, 5)
    packed = [
        np.concatenate([x[:, :, r][i] for i, r in enumerate(mask)], 1)[None] for x in (q, k, v)
    ]
    (got,) = expected(
        node_of(PACKED_ATTENTION, [*packed, ranges, *inputs[3:]], scale=0.5),
        [*packed, ranges, *inputs[3:]],
    )
    for i, (start, count, before) in enumerate(ranges.tolist()):
        own = want[i, :, start : start + count]
        np.testing.assert_allclose(got[0, :, before : before + count], own, rtol=1e-6, atol=1e-7)


def test_dims_that_do_not_fit_are_refused():
    attrs = {"batch": 2, "rows": 3, "groups": [0], "first": 0}
    with pytest.raises((ShapeError, InvalidModel)):
        LIVE_ROWS.infer([TensorType(FLOAT32, (2, 1, 1, 4))], attrs, [None])
    with pytest.raises((ShapeError, InvalidModel)):
        LIVE_ROWS.infer([TensorType(FLOAT32, (3, 3))], {**attrs, "groups": [FACTOR]}, [None])
    with pytest.raises((ShapeError, InvalidModel)):
        LIVE_ROWS.infer([TensorType(INT64, (3, 3))], {**attrs, "groups": [PAIRS]}, [None])
    unpack = {"dims": [2, 3, 4], "samples": 0, "rows": 1}
    with pytest.raises((ShapeError, InvalidModel)):
        UNPACK_ROWS.infer(
            [TensorType(FLOAT32, (1, 8, 5)), TensorType(INT64, (2, 3))], unpack, [None] * 2
        )
