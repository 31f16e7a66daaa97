"""Cross attention over pages: what joins, and what stands in its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

import penstock as ps
from penstock.core.errors import RowsStay
from penstock.ops.internal.joined_steps import FIXED_PAGES, FIXED_RUNS, PAGE
from penstock.passes.lowering.join_steps import join_steps
from tests.support.cross_decoders import (
    CROSS,
    HEADS,
    KINDS,
    LAYERS,
    MASK,
    MASKED,
    SIZE,
    WIDTH,
    cross_decoder,
)


def why_steps_stay(kind: str, changes: dict[str, str], more: Sequence[str] = ()) -> str:
    model = ps.load(cross_decoder(kind, changes, more))
    with pytest.raises(RowsStay) as error:
        join_steps(model.graph)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_both_attentions_of_each_layer_read_pages(kind: str) -> None:
    graph, steps = join_steps(ps.load(cross_decoder(kind)).graph)
    ops = Counter(node.op.full_name for node in graph.nodes)
    assert ops["penstock.PagedAttention"] == 2 * LAYERS
    assert ops["Softmax"] == ops["Attention"] == 0
    paged = [node for node in graph.nodes if node.op.name == "PagedAttention"]
    assert [node.inputs[1] is None for node in paged] == [False, True] * LAYERS
    assert {*steps.fed} == {*CROSS, *([MASK] if kind in MASKED else [])}
    assert [cache.past for cache in steps.fixed] == CROSS
    assert [cache.begins for cache in steps.fixed] == [i * HEADS * PAGE * SIZE for i in range(4)]
    assert steps.mask == (MASK if kind in MASKED else None)
    names = {value.name for value in graph.inputs}
    assert names >= {FIXED_RUNS, FIXED_PAGES, "ids"}
    assert names.isdisjoint([*CROSS, MASK])


def test_page_has_room_for_the_larger_of_both() -> None:
    _, steps = join_steps(ps.load(cross_decoder("unmasked")).graph)
    assert steps.page_size == 2 * LAYERS * HEADS * PAGE * SIZE


def test_mask_that_attention_does_not_read_leaves_nothing_out() -> None:
    model = ps.load(cross_decoder("added", {", masked)": ", nothing)"}))
    assert join_steps(model.graph)[1].mask is None


def test_keys_that_layers_share_lie_in_pages_once() -> None:
    changes = {"past_cross_k1": "past_cross_k0", "past_cross_v1": "past_cross_v0"}
    _, steps = join_steps(ps.load(cross_decoder("microsoft", changes)).graph)
    assert [cache.past for cache in steps.fixed] == CROSS[:2]


def test_keys_that_are_computed_in_each_step_stay() -> None:
    computed = """keys_flat = MatMul (encoder_hidden_states, wq0) keys_parts = Reshape (keys_flat, of_heads)
        keys = Transpose <perm = [0, 2, 1, 3]> (keys_parts) x0 = Add"""
    changes = {"x0 = Add": computed, "past_cross_k0": "keys"}
    more = [f"float[b, n, {WIDTH}] encoder_hidden_states"]
    why = why_steps_stay("unmasked", changes, more)
    assert "computed from 'encoder_hidden_states' in each step; export a decoder" in why


def test_hidden_states_that_are_not_read_do_not_matter() -> None:
    more = [f"float[b, n, {WIDTH}] encoder_hidden_states"]
    _, steps = join_steps(ps.load(cross_decoder("unmasked", None, more)).graph)
    assert {*steps.fed} == {*CROSS, "encoder_hidden_states"}


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"Sub (unit, flags)": "Identity (flags)"}, "other than those where its mask"),
        (
            {"Mul (absent, low)": "Mul (absent, factor)"},
            "to cross attention scores, which is not a mask",
        ),
        ({"Add (c1_c, masked)": "Add (c1_c, nothing)"}, "some layers apply the mask"),
        (
            {"x0 = Add (x, y)": "most = ReduceMax (flags) z = Mul (y, most) x0 = Add (x, z)"},
            "reads 'encoder_mask', which only cross attention may read",
        ),
        (
            {"(past_cross_k1)": "(odd)", "r1 = Add": "odd = Exp (past_cross_k1) r1 = Add"},
            "reads caches through",
        ),
    ],
)
def test_other_uses_of_what_an_encoder_returned_stay(changes: dict[str, str], why: str) -> None:
    assert why in why_steps_stay("added", changes)


def test_several_masks_stay() -> None:
    changes = {
        "Cast <to = 1> (encoder_mask)": "Cast <to = 1> (both)",
        "flags =": "both = Mul (encoder_mask, cross_mask) flags =",
    }
    why = why_steps_stay("added", changes, ["int64[b, n] cross_mask"])
    assert "candidates are ['encoder_mask', 'cross_mask']" in why
