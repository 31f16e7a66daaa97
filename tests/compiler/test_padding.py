"""Which feeds are masks that hide rows, and when a run takes the plan without these."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.compiler.padding import PackedSubgraph, unpadded
from penstock.session.ahead import padding_masks
from tests.passes.lowering.test_pack_rows import (
    ATTEND,
    EMBED,
    MASK,
    MEAN,
    ROWS,
    feeds_of,
    model_of,
    operations,
    reference,
)

MODEL = model_of(EMBED, MASK, ATTEND, MEAN)


@pytest.mark.parametrize("lengths", [(ROWS,) * 3, (ROWS, ROWS, ROWS - 5), (0, 0, 0)])
def test_batch_without_many_rows_that_pad_takes_the_usual_plan(lengths):
    session, feeds = ps.compile(MODEL, cache=False), feeds_of(*lengths)
    (got,) = session.run(feeds).values()
    np.testing.assert_allclose(got, reference(MODEL, feeds), rtol=1e-5, atol=1e-5)
    assert operations(session)["LiveRows"] == 0


def test_masks_whose_lengths_are_compared_with_positions_are_told():
    lengths = """at = Constant <value_ints = [1]> () n = ReduceSum (mask, at)
        order = Constant <value_ints = RANGE> () h = Less (order, n) hw = Unsqueeze (h, two)
        zero = Constant <value_float = 0.0> () bias = Where (hw, zero, low)"""
    mask = f"f = Cast <to = 1> (mask) {lengths.replace('RANGE', str([*range(ROWS)]))}"
    model, feeds = model_of(EMBED, mask, ATTEND, MEAN), feeds_of()
    session = ps.compile(model, cache=False)
    (got,) = session.run(feeds).values()
    np.testing.assert_allclose(got, reference(model, feeds), rtol=1e-5, atol=1e-5)
    assert operations(session)["LiveRows"] == 1


def test_inputs_that_reach_no_attention_are_no_masks():
    session = ps.compile(model_of(EMBED, "f = Cast <to = 1> (mask)", MEAN.replace("y", "x")))
    main = session._subgraphs.main
    assert unpadded(main, list(feeds_of().values()), "proven") is None
    assert main.masks == ()


def test_graph_that_cannot_be_packed_is_tried_a_few_times():
    mean = "z = ReduceMean <keepdims = 0> (y, one)"
    session = ps.compile(model_of(EMBED, MASK, ATTEND, mean), cache=False)
    main = session._subgraphs.main
    for _ in range(3):
        assert not main.not_packed
        session.run(feeds_of())
    assert "ReduceMean" in main.not_packed
    assert main.not_packed in session.explain(reasons=True)
    assert padding_masks(session) == ("mask",)
    assert session.stats.plans_made == 1


def test_variant_has_plans_for_exact_shapes_and_goes_with_its_base():
    main = ps.compile(MODEL, cache=False)._subgraphs.main
    variant = PackedSubgraph(main, "proven")
    assert variant.base is main
    assert variant.varying.open(((3, 40), (3, 40)), 0) is None
