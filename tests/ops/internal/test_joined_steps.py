"""What is said of graphs of joined steps holds for those that the pass makes."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.ops.internal import joined_steps as names
from penstock.passes.lowering.join_steps import join_steps
from tests.support.cross_decoders import cross_decoder
from tests.support.decoders import GROUPS, LAYERS, SIZE, decoder_model

OF_FIXED = {names.FIXED_RUNS, names.FIXED_PAGES}
OF_ALL = {names.POSITIONS, names.POOL, names.RUNS, names.PAGES, names.READ}


@pytest.mark.parametrize("cross", [False, True])
def test_inputs_are_rows_and_those_that_are_named(cross: bool) -> None:
    model = cross_decoder("unmasked") if cross else decoder_model("spelled")
    graph, steps = join_steps(ps.load(model).graph)
    inputs = {value.name for value in graph.inputs}
    assert inputs <= {*steps.rows} | OF_ALL | OF_FIXED
    assert inputs & OF_FIXED == (OF_FIXED if cross else set())
    assert inputs >= {*steps.rows, names.POOL, names.RUNS, names.PAGES, names.READ}


def test_caches_lie_behind_one_another_in_a_page() -> None:
    _, steps = join_steps(ps.load(decoder_model("spelled")).graph)
    begins = [cache.begins for cache in steps.caches]
    assert begins == [i * GROUPS * names.PAGE * SIZE for i in range(2 * LAYERS)]
    assert steps.page_size == begins[-1] + GROUPS * names.PAGE * SIZE


def test_types_of_rows_are_those_of_the_decoder() -> None:
    graph = ps.load(decoder_model("spelled")).graph
    _, steps = join_steps(graph)
    types = {value.name: value.type for value in graph.inputs}
    assert steps.rows == {"ids": types["ids"]}
