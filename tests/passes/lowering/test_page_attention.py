"""Attention over pages in the place of attention over caches, in all forms."""

from __future__ import annotations

from collections import Counter

import pytest

import penstock as ps
from penstock.core.errors import RowsStay
from penstock.passes.lowering.join_steps import join_steps
from penstock.passes.lowering.page_attention import PAGE
from tests.support.decoders import LAYERS, SPELLINGS, decoder_model
from tests.support.onnx_text import model_from_text

PLAIN = """g (float[b, s, 4] x, float[b, 1, p, 4] past{more}) => (float[b, s, 4] y,
    float[b, 1, t, 4] present) <int64[1] one = {{1}}, int64 first = {{1}}, float half = {{0.5}}> {{
    r = Unsqueeze (x, one) present = Concat <axis = 2> (past, r)
    k = Transpose <perm = [0, 1, 3, 2]> (present) s = MatMul (r, k) {mask} w = Softmax (m)
    a = MatMul (w, {values}) z = Squeeze (a, one) {behind} }}"""
CAUSAL = """i = Shape <start = 1, end = 2> (x) n = Squeeze (i) o = Shape <start = 2, end = 3> (past)
    p = Squeeze (o) t = Add (p, n) zero = Sub (p, p) own = Range (p, t, first)
    all = Range (zero, t, first) c = Unsqueeze (own, one) hidden = Greater (all, c)
    low = Constant <value_float = -3e38> () m = Where (hidden, low, s)"""
DEFAULTS = {"more": "", "mask": CAUSAL, "values": "present", "behind": "y = Identity (z)"}


def stays(**changes: str) -> str:
    """Why the steps of a changed decoder cannot be joined."""
    model = ps.load(model_from_text(PLAIN.format(**DEFAULTS | changes)))
    with pytest.raises(RowsStay) as error:
        join_steps(model.graph)
    return str(error.value)


@pytest.mark.parametrize("kind", SPELLINGS)
def test_attention_of_each_spelling_reads_pages(kind: str) -> None:
    steps = join_steps(ps.load(decoder_model(kind)).graph)
    ops = Counter(node.op.full_name for node in steps.graph.nodes)
    assert ops["penstock.PagedAttention"] == LAYERS
    assert ops["Softmax"] == ops["Attention"] == ops["com.microsoft.GroupQueryAttention"] == 0
    assert len(steps.caches) == 2 * LAYERS
    assert [*steps.rows] == ["ids"]
    assert steps.outputs == {"logits": 1}
    windows = {n.attrs.get("window") for n in steps.graph.nodes if "window" in n.attrs}
    assert windows == {9 if kind in ("window", "groups", "packed") else 0}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_nothing_of_masks_is_left(kind: str) -> None:
    steps = join_steps(ps.load(decoder_model(kind)).graph)
    names = {node.op.name for node in steps.graph.nodes}
    assert names.isdisjoint({"Range", "Greater", "Where", "Shape", "ReduceSum", "Expand"})


def test_cache_of_keys_that_are_values_lies_in_pages_once() -> None:
    steps = join_steps(ps.load(model_from_text(PLAIN.format(**DEFAULTS))).graph)
    assert steps.page_size == PAGE * 4  # keys are values as well


def test_rows_that_see_those_behind_them_stay() -> None:
    assert "see those behind it" in stays(mask="m = Identity (s)")


def test_scores_that_a_mask_changes_stay() -> None:
    bias = CAUSAL.replace("Where (hidden, low, s)", "Where (hidden, low, half)")
    text = bias.replace("m = Where", "bb = Where") + " m = Add (s, bb)"
    assert "hides other positions" in stays(mask=text)


def test_caches_that_are_changed_stay() -> None:
    assert "makes of caches" in stays(values="changed", mask=CAUSAL + " changed = Exp (present)")
