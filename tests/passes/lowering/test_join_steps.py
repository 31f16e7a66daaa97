"""The graph of joined steps: what is proven, and what stands in its way."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.core.errors import RowsStay
from penstock.ops.internal.joined_steps import READ
from penstock.passes.lowering.join_steps import join_steps
from tests.support.decoders import DEFAULTS, PLAIN, decoder_model, why_steps_stay
from tests.support.onnx_text import model_from_text


def test_rows_that_are_read_are_gathered_before_the_last_product() -> None:
    graph, _ = join_steps(ps.load(decoder_model("spelled")).graph)
    names = [node.op.name for node in graph.nodes]
    read = next(n for n in graph.nodes if any(v and v.name == READ for v in n.inputs))
    assert names.index("LayerNormalization") > graph.nodes.index(read)


def test_rows_that_depend_on_their_number_stay() -> None:
    behind = """n2 = Cast <to = 1> (i) y = Add (z, n2)"""
    assert "'n2' may depend on the number of rows" in why_steps_stay(behind=behind)


def test_rows_that_depend_on_a_length_far_away_stay() -> None:
    behind = """many = Greater (t, limit) one0 = Cast <to = 1> (many) y = Add (z, one0)"""
    text = PLAIN.replace("float half", "int64 limit = {{4096}}, float half")
    model = ps.load(model_from_text(text.format(**DEFAULTS | {"behind": behind})))
    with pytest.raises(RowsStay, match="'one0' may depend"):
        join_steps(model.graph)


def test_rows_that_are_added_up_stay() -> None:
    behind = "q = ReduceSum <keepdims = 1> (z, one) y = Add (z, q)"
    assert "over the axis of rows" in why_steps_stay(behind=behind)


def test_inputs_of_unknown_meaning_stay() -> None:
    behind = "y = Add (z, other)"
    assert "'other'" in why_steps_stay(more=", float[4] other", behind=behind)
