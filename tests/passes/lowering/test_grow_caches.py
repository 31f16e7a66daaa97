"""Which Concats become an Append."""

from __future__ import annotations

import pytest

from penstock.passes.context import PassContext
from penstock.passes.lowering.grow_caches import GrowCaches
from tests.support.onnx_text import graph_from_text


def operations(text: str) -> list[str]:
    graph = graph_from_text(text)
    GrowCaches().run(graph, PassContext())
    return [node.op.name for node in graph.walk() if node.op.name in ("Append", "Concat")]


@pytest.mark.parametrize(
    "past, axis", [("float[1, p, 8]", 1), ("int8[p, 1, 8]", 0), ("float[1, 2, p]", -1)]
)
def test_cache_that_is_fed_and_returned_is_appended_to(past, axis):
    new = past.replace("p", "1")
    text = f"g ({past} a, {new} b) => ({past.replace('p', 't')} c) {{ c = Concat <axis = {axis}> (a, b) }}"
    assert operations(text) == ["Append"]


@pytest.mark.parametrize(
    "text",
    [
        # Of known length.
        "g (float[1, 3, 8] a, float[1, 1, 8] b) => (float[1, 4, 8] c) { c = Concat <axis = 1> (a, b) }",
        # Of unknown samples.
        "g (float[n, p, 8] a, float[n, 1, 8] b) => (float[n, t, 8] c) { c = Concat <axis = 1> (a, b) }",
        # Along another axis.
        "g (float[1, p, 8] a, float[1, p, 1] b) => (float[1, p, 9] c) { c = Concat <axis = 2> (a, b) }",
        # In front.
        "g (float[1, p, 8] a, float[1, 1, 8] b) => (float[1, t, 8] c) { c = Concat <axis = 1> (b, a) }",
        # Not returned.
        """g (float[1, p, 8] a, float[1, 1, 8] b) => (float[1, t, 8] d)
        { c = Concat <axis = 1> (a, b) d = Neg (c) }""",
        # Not fed.
        """g (float[1, p, 8] a, float[1, 1, 8] b) => (float[1, t, 8] c)
        { n = Neg (a) c = Concat <axis = 1> (n, b) }""",
        """g (float[1, p, 8] a, float[1, 1, 8] b) => (float[1, t, 8] c)
        { c = Concat <axis = 1> (a, b, b) }""",
    ],
)
def test_other_concats_stay(text):
    assert operations(text) == ["Concat"]
