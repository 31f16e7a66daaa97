"""What stands in the way of leaving out rows that a mask hides, and that it is told."""

from __future__ import annotations

import pytest

from tests.passes.lowering.test_pack_rows import (
    ATTEND,
    BATCH,
    EMBED,
    HEADS,
    MASK,
    MEAN,
    ROWS,
    SIZE,
    model_of,
    reason,
)

LATER = """t2 = Transpose <perm = [0, 2, 1, 3]> (c2) y2 = Reshape (t2, flat) m = Unsqueeze (f, last)
    ym = Mul (y2, m) z = ReduceSum <keepdims = 0> (ym, one)"""
BEHIND = f"""s1 = MatMul (v, k) s2 = Add (s1, b2) p2 = Softmax <axis = -1> (s2) c2 = MatMul (p2, v)
    {LATER}"""


def test_output_with_all_rows_is_computed_as_the_model_says():
    why = reason(model_of(EMBED, MASK, ATTEND, output="y"))
    assert (
        "computes output 'y', which includes padding rows; dead_rows='any' allows these to be 0"
        in why
    )


def test_mean_of_all_rows_reads_those_that_pad():
    mean = "z = ReduceMean <keepdims = 0> (y, one)"
    assert "computes over the axis of rows or samples" in reason(
        model_of(EMBED, MASK, ATTEND, mean)
    )


def test_attention_within_blocks_of_rows_stays():
    blocks = f"""five = Constant <value_ints = [{BATCH}, {HEADS}, {HEADS}, {ROWS // HEADS}, {SIZE}]> ()
        qr = Reshape (x, five) qt = Transpose <perm = [0, 1, 2, 4, 3]> (qr) r0 = MatMul (qr, qt)
        axes = Constant <value_ints = [1, 2, 3]> () h4 = Constant <value_ints = [{BATCH}, 1, {HEADS}, 1, {ROWS // HEADS}]> ()
        b5 = Reshape (j, h4) s = Add (r0, b5) p = Softmax <axis = -1> (s) c = MatMul (p, qr) y = Reshape (c, flat3)
        """
    flat = f"flat3 = Constant <value_ints = [{BATCH}, {ROWS}, {HEADS * SIZE}]> ()"
    why = reason(model_of(EMBED, MASK, flat, blocks, MEAN))
    assert "queries that are not [batch, heads, rows, size]" in why


def test_row_in_the_middle_may_pad():
    cut = "five = Constant <value_ints = [5]> () z = Slice (y, middle, five, one)"
    assert "computes over the axis of rows or samples" in reason(model_of(EMBED, MASK, ATTEND, cut))


def test_window_of_rows_behind_attention_reads_those_that_pad():
    inner = """yt = Transpose <perm = [0, 2, 1]> (y) cv = Conv <pads = [1, 1]> (yt, wide)
        yc = Transpose <perm = [0, 2, 1]> (cv) m = Unsqueeze (f, last) ym = Mul (yc, m)
        z = ReduceSum <keepdims = 0> (ym, one)"""
    assert "computes over the axis of rows or samples" in reason(
        model_of(EMBED, MASK, ATTEND, inner)
    )


def test_product_of_rows_with_rows_is_no_attention_without_a_softmax():
    more = """yt = Transpose <perm = [0, 2, 1]> (y) g = MatMul (y, yt) h = MatMul (g, y)
        m = Unsqueeze (f, last) ym = Mul (h, m) z = ReduceSum <keepdims = 0> (ym, one)"""
    assert "computes over the axis of rows or samples" in reason(
        model_of(EMBED, MASK, ATTEND, more)
    )


def test_scale_of_all_rows_together_depends_on_those_that_pad():
    quantized = """u, sc, zp = DynamicQuantizeLinear (y) d = DequantizeLinear (u, sc, zp)
        m = Unsqueeze (f, last) ym = Mul (d, m) z = ReduceSum <keepdims = 0> (ym, one)"""
    assert "is not known to compute each row separately" in reason(
        model_of(EMBED, MASK, ATTEND, quantized)
    )


@pytest.mark.parametrize("bias", ["", "near"])
def test_one_attention_without_a_mask_sees_rows_that_pad(bias):
    more = f"""s1 = MatMul (v, k) s2 = {f"Add (s1, {bias})" if bias else "Identity (s1)"}
        p2 = Softmax <axis = -1> (s2) yh = Reshape (y, heads) y1 = Transpose <perm = [0, 2, 1, 3]> (yh)
        c2 = MatMul (p2, y1) t2 = Transpose <perm = [0, 2, 1, 3]> (c2) y2 = Reshape (t2, flat)
        m = Unsqueeze (f, last) ym = Mul (y2, m) z = ReduceSum <keepdims = 0> (ym, one)"""
    text = reason(model_of(EMBED, MASK, ATTEND, more))
    assert "its rows see all rows" in text


def test_mask_that_is_computed_of_rows_behind_attention_stays():
    more = "r = ReduceMean <keepdims = 0> (y, last) r2 = Unsqueeze (r, two) b2 = Mul (r2, low)"
    why = reason(model_of(EMBED, MASK, ATTEND, more, BEHIND))
    assert "rows to which no mask is known to be added" in why
