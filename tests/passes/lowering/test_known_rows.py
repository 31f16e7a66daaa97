"""Padding rows that a mask has replaced by a number may be read."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.passes.lowering.test_pack_rows import (
    ATTEND,
    EMBED,
    MASK,
    feeds_of,
    model_of,
    operations,
    packed,
    reference,
)

HOLDS = "h = Cast <to = 9> (mask) hl = Unsqueeze (h, last) nl = Not (hl)"


@pytest.mark.parametrize(
    "pooling",
    [
        "yc = Where (hl, y, low) z = ReduceMax <keepdims = 0> (yc, one)",
        "yc = Where (nl, low, y) z = ReduceMax <keepdims = 0> (yc, one)",
        "yc = Where (hl, y, zero) z = ReduceSum <keepdims = 0> (yc, one)",
        "yc = Where (hl, y, unit) ye = Exp (yc) z = ReduceSum <keepdims = 0> (ye, one)",
        "yc = Where (hl, y, low) yt = Transpose <perm = [2, 0, 1]> (yc) z = Softmax (yt)",
        # Lengths of rows, as of normalized ones.
        "m = Unsqueeze (f, last) ym = Mul (y, m) n = ReduceL2 (ym, last) d = Max (n, small) z = Div (ym, d)",
        # Gated rows of a layer without a bias.
        "yc = Where (hl, y, zero) yw = MatMul (yc, w) ya, yb = Split <axis = 2, num_outputs = 2> (yw) "
        "ys = Sigmoid (yb) yg = Mul (ya, ys) yt = Transpose <perm = [0, 2, 1]> (yg) z = Conv <pads = [2, 0]> (yt, half)",
        # Windows of rows that a mask has made 0.
        "yc = Where (hl, y, zero) yt = Transpose <perm = [0, 2, 1]> (yc) z = Conv <pads = [1, 1]> (yt, wide)",
    ],
)
@pytest.mark.parametrize("left", [False, True])
def test_rows_that_a_mask_replaces_are_left_out(pooling, left):
    feeds = feeds_of()
    feeds["mask"] = feeds["mask"][:, :: -1 if left else 1].copy()
    model = model_of(EMBED, MASK, "zero = Constant <value_float = 0.0> ()", HOLDS, ATTEND, pooling)
    session = packed(model, feeds)
    assert operations(session)["UnpackRows"] >= 1


def test_infinity_that_a_mask_multiplies_is_not_0():
    least = "least = Constant <value_float = -inf> () yc = Where (hl, y, least)"
    mean = "m = Unsqueeze (f, last) ym = Mul (yc, m) z = ReduceSum <keepdims = 0> (ym, one)"
    model, feeds = model_of(EMBED, MASK, HOLDS, ATTEND, least, mean), feeds_of()
    session = ps.compile(model, cache=False)
    (got,) = session.run(feeds).values()
    np.testing.assert_allclose(got, reference(model, feeds), rtol=1e-5, atol=1e-5)
    assert np.isnan(got[1:]).all()


def test_padding_rows_have_the_same_bits_if_results_are_reproducible():
    pooling = "yc = Where (hl, y, unit) z = Exp (yc)"
    model, feeds = model_of(EMBED, MASK, HOLDS, ATTEND, pooling), feeds_of()
    session = ps.compile(model, cache=False, reproducible=True)
    (got,) = session.run(feeds).values()
    np.testing.assert_allclose(got, reference(model, feeds), rtol=1e-5)
    assert operations(session)["LiveRows"] == 0
