"""The graph of joined steps: what is proven, and what stands in its way."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.core.errors import RowsStay
from penstock.passes.lowering.join_steps import READ, join_steps
from tests.support.decoders import decoder_model
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


def test_rows_that_are_read_are_gathered_before_the_last_product() -> None:
    steps = join_steps(ps.load(decoder_model("spelled")).graph)
    names = [node.op.name for node in steps.graph.nodes]
    read = next(n for n in steps.graph.nodes if any(v and v.name == READ for v in n.inputs))
    assert names.index("LayerNormalization") > steps.graph.nodes.index(read)


def test_rows_that_depend_on_their_number_stay() -> None:
    behind = """n2 = Cast <to = 1> (i) y = Add (z, n2)"""
    assert "'n2' may depend on the number of rows" in stays(behind=behind)


def test_rows_that_depend_on_a_length_far_away_stay() -> None:
    behind = """many = Greater (t, limit) one0 = Cast <to = 1> (many) y = Add (z, one0)"""
    text = PLAIN.replace("float half", "int64 limit = {{4096}}, float half")
    model = ps.load(model_from_text(text.format(**DEFAULTS | {"behind": behind})))
    with pytest.raises(RowsStay, match="'one0' may depend"):
        join_steps(model.graph)


def test_rows_that_are_added_up_stay() -> None:
    behind = "q = ReduceSum <keepdims = 1> (z, one) y = Add (z, q)"
    assert "several rows" in stays(behind=behind)


def test_inputs_of_unknown_meaning_stay() -> None:
    behind = "y = Add (z, other)"
    assert "'other'" in stays(more=", float[4] other", behind=behind)
