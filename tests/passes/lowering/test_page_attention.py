"""Attention over pages in the place of attention over caches, in all forms."""

from __future__ import annotations

from collections import Counter

import pytest

import penstock as ps
from penstock.ops.internal.joined_steps import PAGE
from penstock.passes.lowering.join_steps import join_steps
from tests.support.decoders import (
    CAUSAL,
    DEFAULTS,
    LAYERS,
    PLAIN,
    SPELLINGS,
    decoder_model,
    why_steps_stay,
)
from tests.support.onnx_text import model_from_text


@pytest.mark.parametrize("kind", SPELLINGS)
def test_attention_of_each_spelling_reads_pages(kind: str) -> None:
    graph, steps = join_steps(ps.load(decoder_model(kind)).graph)
    ops = Counter(node.op.full_name for node in graph.nodes)
    assert ops["penstock.PagedAttention"] == LAYERS
    assert ops["Softmax"] == ops["Attention"] == ops["com.microsoft.GroupQueryAttention"] == 0
    assert len(steps.caches) == 2 * LAYERS
    assert [*steps.rows] == ["ids"]
    assert steps.outputs == {"logits": 1}
    windows = {n.attrs.get("window") for n in graph.nodes if "window" in n.attrs}
    assert windows == {9 if kind in ("window", "groups", "packed") else 0}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_nothing_of_masks_is_left(kind: str) -> None:
    graph, _ = join_steps(ps.load(decoder_model(kind)).graph)
    names = {node.op.name for node in graph.nodes}
    assert names.isdisjoint({"Range", "Greater", "Where", "Shape", "ReduceSum", "Expand"})


def test_cache_of_keys_that_are_values_lies_in_pages_in_both_orders() -> None:
    _, steps = join_steps(ps.load(model_from_text(PLAIN.format(**DEFAULTS))).graph)
    assert steps.page_size == 2 * PAGE * 4
    assert [(cache.past, cache.keys) for cache in steps.caches] == [("past", True), ("past", False)]


def test_rows_that_see_those_behind_them_stay() -> None:
    assert "attend to later rows" in why_steps_stay(mask="m = Identity (s)")


def test_masks_of_other_positions_stay() -> None:
    assert "that is neither causal nor a sliding window" in why_steps_stay(
        mask=CAUSAL.replace("Greater", "Less")
    )


def test_numbers_by_more_than_distances_stay() -> None:
    text = CAUSAL.replace("Where (hidden, low, s)", "Where (hidden, low, squares)")
    text = f"{text.replace('m = Where', 'bb = Where')} m = Add (s, bb)".replace(
        "low = ", "float_all = Cast <to = 1> (all) squares = Mul (float_all, float_all) low = "
    )
    assert "depends on more than distance" in why_steps_stay(mask=text)


def test_caches_that_are_changed_stay() -> None:
    assert "reads caches through" in why_steps_stay(
        values="changed", mask=CAUSAL + " changed = Exp (present)"
    )
