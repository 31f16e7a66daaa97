"""Counts of present tokens, of which none is padding."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.ir.graph import Graph
from penstock.passes.lowering.count_tokens import count_tokens
from tests.support.onnx_text import model_from_text

_FLAGS = "a = Equal (ids, pad) p = Not (a) f = Cast <to = 6> (p)"


def graph_of(flags: str, count: str = "n = CumSum (f, axis)") -> Graph:
    constants = "<int64 pad = {1}, int64[1] more = {3}, int64 axis = {1}, int64 first = {0}>"
    text = (
        f"g (int64[b, s] ids) => (int32[b, s] n, int32[b, s] f) {constants} {{ {flags} {count} }}"
    )
    graph = ps.load(model_from_text(text)).graph
    infer_types(graph)
    return graph


def is_counted(graph: Graph) -> bool:
    count_tokens(graph, ["ids"])
    (node,) = [node for node in graph.nodes if node.op.name == "CumSum"]
    assert node.inputs[0] is not None
    assert node.inputs[0].producer is not None
    return node.inputs[0].producer.op.name == "ConstantOfShape"


def test_flags_of_all_tokens_but_one_are_counted_as_ones() -> None:
    graph = graph_of(_FLAGS)
    assert is_counted(graph)
    assert graph.outputs[1].producer is not None
    assert graph.outputs[1].producer.op.name == "Cast"  # elsewhere they stay


def test_flags_of_reshaped_tokens_are_counted_as_ones() -> None:
    flags = "d = Shape (ids) r = Reshape (ids, d) " + _FLAGS.replace("(ids", "(r")
    assert is_counted(graph_of(flags))


@pytest.mark.parametrize(
    "flags",
    [
        "p = Equal (ids, pad) f = Cast <to = 6> (p)",  # padding is counted
        "a = Less (ids, more) p = Not (a) f = Cast <to = 6> (p)",  # several tokens have 0
        "f = Cast <to = 6> (ids)",
        "m = Mul (ids, pad) a = Equal (ids, m) p = Not (a) f = Cast <to = 6> (p)",
    ],
)
def test_other_numbers_are_counted_as_they_are(flags: str) -> None:
    assert not is_counted(graph_of(flags))


@pytest.mark.parametrize(
    "count",
    [
        "n = CumSum <exclusive = 1> (f, axis)",
        "n = CumSum <reverse = 1> (f, axis)",
        "n = CumSum (f, first)",
    ],
)
def test_other_counts_stay(count: str) -> None:
    assert not is_counted(graph_of(_FLAGS, count))
