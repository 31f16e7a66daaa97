"""Attention that is not one node, computed for all rows between packed ones, if it is proven."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from tests.passes.lowering.test_pack_rows import (
    ATTEND,
    BACK,
    BATCH,
    EMBED,
    HEADS,
    MASK,
    MEAN,
    PARTS,
    ROWS,
    SIZE,
    WEIGH,
    feeds_of,
    model_of,
    operations,
    packed,
    reason,
    reference,
)
from tests.passes.lowering.test_row_packing import BEHIND, LATER
from tests.support.native_kernels import needs_reproducible


def test_bias_that_is_computed_of_rows_is_added_to_that_of_the_mask():
    more = """r = ReduceMean <keepdims = 0> (y, last) b1 = Unsqueeze (r, two)
        b2 = Add (b1, bias)"""
    session = packed(model_of(EMBED, MASK, ATTEND, more, BEHIND))
    assert operations(session)["PackedAttention"] == 1
    assert operations(session)["UnpackRows"] > 1


# Scores as DeBERTa has them: of queries with keys, of queries with what the place of a key is, and
# the other way round.
RELATIVE = f"""{PARTS} rel = MatMul (q, places_t) c2p = GatherElements <axis = -1> (rel, index)
    k1 = Transpose <perm = [0, 1, 3, 2]> (k) rel2 = MatMul (k1, places_t)
    g2 = GatherElements <axis = -1> (rel2, index) p2c = Transpose <perm = [0, 1, 3, 2]> (g2)
    both = Add (c2p, p2c) s9 = Add (s0, both)"""
RNG = np.random.default_rng(2)
TABLES = {
    "places_t": RNG.normal(size=(1, HEADS, SIZE, 8)).astype(np.float32) * 0.5,
    "index": RNG.integers(0, 8, (1, 1, ROWS, ROWS)) + np.zeros((BATCH, HEADS, 1, 1), np.int64),
}


def related(*parts: str, behind: str = MEAN, output: str = "z") -> bytes:
    """A model with tables of what positions are."""
    model = onnx.load_model_from_string(model_of(EMBED, MASK, *parts, behind, output=output))
    for name, table in TABLES.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(table, name))
    return model.SerializeToString()


@cache
def _session(model: bytes) -> ps.Session:
    return ps.compile(model, cache=False)


@cache
def _onnxruntime(model: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    "scores",
    [
        "s = Add (s9, bias)",
        "s = Where (hides, lowest, s9)",
        "s8 = Add (both, bias) s = Add (s8, s0)",
        "s8 = Add (s9, bias) s = Cast <to = 1> (s8)",
        "s8 = Tanh (s9) s7 = Add (s8, near) s = Add (s7, bias)",
    ],
)
def test_scores_that_are_sums_are_computed_in_their_places(scores):
    masks = """yes = Cast <to = 9> (mask) no = Not (yes) hides = Unsqueeze (no, two)
        lowest = Constant <value_float = -3.0e38> ()"""
    model, feeds = related(masks, RELATIVE, scores, WEIGH), feeds_of()
    session = packed(model)
    assert operations(session)["PackedAttention"] == 0
    left = feeds["mask"][:, ::-1].copy()
    for mask in (left, (RNG.random((BATCH, ROWS)) < 0.3).astype(np.int64)):
        (got,) = session.run({**feeds, "mask": mask}).values()
        want = reference(model, {**feeds, "mask": mask})
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@needs_reproducible
def test_reproducible_attention_of_all_rows_stays():
    model, feeds = related(RELATIVE, "s = Add (s9, bias)", WEIGH), feeds_of()
    session = ps.compile(model, cache=False, reproducible=True)
    (got,) = session.run(feeds).values()
    np.testing.assert_allclose(got, reference(model, feeds), rtol=1e-5, atol=1e-5)
    assert operations(session)["LiveRows"] == 0
    assert "attention that was not fused into one node (reproducible=True)" in session.explain(
        reasons=True
    )


@given(
    bits=st.one_of(
        st.lists(st.booleans(), min_size=BATCH * ROWS, max_size=BATCH * ROWS),
        st.tuples(*[st.integers(0, ROWS)] * BATCH, st.booleans()),
    )
)
def test_any_mask_gives_the_answers_of_all_rows(bits):
    model, feeds = related(RELATIVE, "s = Add (s9, bias)", WEIGH), feeds_of()
    mask = np.array(bits) if len(bits) > BATCH + 1 else feeds_of(*bits[:-1])["mask"]
    mask = mask.astype(np.int64).reshape(BATCH, ROWS)
    feeds["mask"] = mask[:, ::-1].copy() if bits[-1] else mask
    (got,) = _session(model).run(feeds).values()
    np.testing.assert_allclose(got, _onnxruntime(model).run(None, feeds)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "weights",
    [
        "p1 = Mul (p0, f4) c = MatMul (p1, v)",
        "p1 = Where (held, p0, nought) c = MatMul (p1, v)",
        "pt = Transpose <perm = [2, 3, 0, 1]> (p0) p1 = Transpose <perm = [2, 3, 0, 1]> (pt) c = MatMul (p1, v)",
    ],
)
def test_weights_may_be_changed_where_0_stays_0(weights):
    masks = """f4 = Unsqueeze (f, two) held = Cast <to = 9> (f4)
        nought = Constant <value_float = 0.0> ()"""
    tail = f"s = Add (s9, bias) p0 = Softmax <axis = -1> (s) {weights} {BACK}"
    packed(related(masks, RELATIVE, tail))


def test_one_query_for_all_rows_weighs_those_of_the_mask():
    tail = """qs = Constant <value_floats = [0.5, -0.25, 1.0, 0.75]> ()
        shape = Constant <value_ints = [1, 1, 1, 4]> () q1 = Reshape (qs, shape)
        yw = MatMul (y, w) yh = Reshape (yw, heads) yk = Transpose <perm = [0, 2, 3, 1]> (yh)
        yv = Transpose <perm = [0, 2, 1, 3]> (yh) t0 = MatMul (q1, yk) t = Add (t0, bias)
        w1 = Softmax <axis = -1> (t) z = MatMul (w1, yv)"""
    packed(related(RELATIVE, "s = Add (s9, bias)", WEIGH, tail, behind=""))


# Another attention behind, which stands in the way: its scores are ``t``, of ``t1`` mostly.
SECOND = """yw = MatMul (y, w) yh = Reshape (yw, heads) k2 = Transpose <perm = [0, 2, 3, 1]> (yh)
    v2 = Transpose <perm = [0, 2, 1, 3]> (yh) t0 = MatMul (v2, k2) u0 = MatMul (v2, places_t)
    u1 = GatherElements <axis = -1> (u0, index) t1 = Add (t0, u1)"""
WEIGH_SECOND = "p2 = Softmax <axis = -1> (t) c2 = MatMul (p2, v2)"
NO_BIAS, NOT_0 = "to which no mask is known to be added", "may change attention weights of 0"
NOT_FINITE = "applies attention weights to rows that may not be finite"


@pytest.mark.parametrize("factor", [1e-3, 1e-4])
def test_rows_that_a_scaled_bias_does_not_hide_are_computed(factor):
    scores = f"t3 = Add (t1, bias) t = Mul (t3, small) {WEIGH_SECOND}"
    model = onnx.load_model_from_string(
        related(RELATIVE, "s = Add (s9, bias)", WEIGH, f"{SECOND} {scores}", behind=LATER)
    )
    (small,) = [tensor for tensor in model.graph.initializer if tensor.name == "small"]
    small.CopyFrom(onnx.numpy_helper.from_array(np.array(factor, np.float32), "small"))
    data, feeds = model.SerializeToString(), feeds_of()
    other = {**feeds, "ids": np.where(feeds["mask"] == 0, 1, feeds["ids"])}
    wanted, others = reference(data, feeds), reference(data, other)
    assert np.abs(wanted - others).max() > 1e-4  # rows that pad act on the result
    session = ps.compile(data, cache=False)
    for own, want in ((feeds, wanted), (other, others)):
        (got,) = session.run(own).values()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(
    ("scores", "weighs", "why"),
    [
        ("t = Tanh (t1)", "", NO_BIAS),
        ("t3 = Add (t1, bias) t = Max (t3, small)", "", NO_BIAS),
        ("t3 = Add (t1, bias) t = Transpose <perm = [0, 1, 3, 2]> (t3)", "", NO_BIAS),
        ("t3 = Div (u1, t0) t = Add (t3, bias)", "", "divides by rows"),
        ("t3 = Exp (t1) t = Add (t3, bias)", "", "attention that was not fused into one node"),
        ("t = Add (t1, bias)", "p3 = Add (p2, small)", NOT_0),
        ("t = Add (t1, bias)", "p3 = Where (low_w, p2, small)", NOT_0),
        ("t = Add (t1, bias)", "p3 = Transpose <perm = [0, 1, 3, 2]> (p2)", "no mask hides"),
        ("t = Add (t1, bias)", "p3 = MatMul (p2, p2)", NOT_FINITE),
        ("t3 = Add (t1, bias) t4 = Softmax <axis = -1> (t3) t = Add (t4, bias)", "", NOT_0),
        ("t3 = Add (t1, bias) t4 = Softmax <axis = -1> (t3) t = Mul (t4, small)", "", NOT_FINITE),
        ("t3 = MatMul (t1, t1) t = Add (t3, bias)", "", "no mask hides"),
    ],
)
def test_scores_and_weights_of_rows_that_no_mask_hides_stay(scores, weighs, why):
    condition = "low_m = Cast <to = 9> (f) low_w = Unsqueeze (low_m, two)"
    weights = f"p2 = Softmax <axis = -1> (t) {weighs} c2 = MatMul ({'p3' if weighs else 'p2'}, v2)"
    more = f"{condition} {SECOND} {scores} {weights}"
    assert why in reason(related(RELATIVE, "s = Add (s9, bias)", WEIGH, more, behind=LATER))


def test_scores_that_are_an_output_have_rows_that_pad():
    model = onnx.load_model_from_string(related(RELATIVE, "s = Add (s9, bias)", WEIGH))
    model.graph.output.append(onnx.helper.make_tensor_value_info("p", 1, None))
    session, feeds = ps.compile(model, cache=False, dead_rows="any"), feeds_of()
    (_, p), want = session.run(feeds).values(), reference(model.SerializeToString(), feeds, 1)
    np.testing.assert_allclose(p, want, rtol=1e-5, atol=1e-5)
    assert (
        "computes output 'p', attention scores or weights that include padding rows"
        in session.explain(reasons=True)
    )
