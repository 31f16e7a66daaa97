"""Places of slots that the checker of plans refuses."""

from __future__ import annotations

import numpy as np

from penstock.backends.numpy import NumpyBackend
from penstock.core.records import replace as changed
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import clone
from penstock.passes.pipeline import optimize
from penstock.plan.arena_layout import plan_arena
from penstock.plan.builder import compile_plan
from penstock.plan.check import check_schedule
from penstock.plan.plan import SlotKind
from tests.support.changed_plans import (
    CHAIN,
    compiled,
    in_branches,
    refused,
    replace_plan,
    replaced_offset,
    replaced_slot,
    slot,
)
from tests.support.onnx_text import compile_text, graph_from_text


def test_slot_behind_the_arena_is_refused() -> None:
    plan, arena = in_branches(compiled(CHAIN))
    for at in (arena.size, arena.size - 16, -64, 16):
        refused(plan, replaced_offset(arena, slot(plan, "a"), at), "'a' .* outside the arena")


def test_larger_slot_than_its_place_is_refused() -> None:
    plan, arena = in_branches(compiled(CHAIN))
    i = slot(plan, "a")
    large = changed(plan.slots[i], type=TensorType(FLOAT32, (1000,)))
    slots = (*plan.slots[:i], large, *plan.slots[i + 1 :])
    refused(replace_plan(plan, slots=slots), arena, "outside the arena|overwrit|never written")
    unknown = changed(plan.slots[i], type=TensorType(FLOAT32, (None,)))
    slots = (*plan.slots[:i], unknown, *plan.slots[i + 1 :])
    refused(replace_plan(plan, slots=slots), arena, "but its type float")


def test_view_beyond_what_it_views_is_refused() -> None:
    text = """g (float[4, 8] x) => (float[2, 8] y) <int64[1] i = {1}, int64[1] j = {3}> {
        a = Exp(x) b = Slice(a, i, j) y = Sin(b) }"""
    graph = clone(graph_from_text(text))
    optimize(graph)
    plan = compile_plan(graph, [NumpyBackend()])
    arena = plan_arena(plan)
    (i,) = [i for i, s in enumerate(plan.slots) if s.kind is SlotKind.ALIAS]
    check_schedule(plan, arena)
    for change in ({"offset": 96}, {"offset": -32}, {"strides": (64, 8)}, {"strides": (-64, 4)}):
        view = changed(plan.slots[i], **change)
        slots = (*plan.slots[:i], view, *plan.slots[i + 1 :])
        refused(replace_plan(plan, slots=slots), arena, "beyond the slot that it views")
    view = changed(plan.slots[i], base=i)
    slots = (*plan.slots[:i], view, *plan.slots[i + 1 :])
    refused(replace_plan(plan, slots=slots), arena, "view of a slot outside the arena")


def test_elements_that_share_bytes_are_refused() -> None:
    text = "g (float[4, 8] x) => (float[4, 8] y) { a = Exp(x) y = Sin(a) }"
    plan, arena = in_branches(compiled(text))
    i = slot(plan, "a")
    check_schedule(replaced_slot(plan, i, strides=(32, 4)), arena)
    for strides in ((4, 4), (16, 4), (32, 8), (0, 4), (-32, 4), (4,)):
        refused(replaced_slot(plan, i, strides=strides), arena, "overlap or leave gaps")
    refused(replaced_slot(plan, i, offset=64), arena, "overlap or leave gaps")
    refused(replaced_slot(plan, 0, strides=(4, 16)), arena, "declares strides")


def test_strides_of_no_elements_have_no_order() -> None:
    text = """
    g (float[2, 0, 1, 2] x, int64[2] s) => (float[2, 0] y) {
        t = Transpose <perm = [3, 2, 0, 1]> (x)
        y = Reshape <allowzero = 1> (t, s)
    }
    """
    feeds = {"x": np.ones((2, 0, 1, 2), np.float32), "s": np.array([2, 0])}
    assert compile_text(text).run(feeds)["y"].shape == (2, 0)
