"""Which values of a model can be told while it runs."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.compiler.emitting import emit_values
from penstock.core.errors import InvalidInput
from tests.session.test_value_stream import FEW, LOOP
from tests.support.onnx_text import model_from_text


def test_emit_stands_behind_the_node_that_makes_a_value():
    graph = ps.load(model_from_text(LOOP)).graph
    emit_values(graph, {"mine": "s2", "i": "i", "y": "y"})
    nodes = [[node.op.name for node in inner.nodes] for inner in graph.graphs()]
    assert nodes[1][0] == "Emit" and nodes[1].count("Emit") == 2
    assert nodes[1][nodes[1].index("Add") + 1] == "Emit"
    assert nodes[0][nodes[0].index("Loop") + 1] == "Emit"
    told = [node.attrs["name"] for node in graph.walk() if node.op.name == "Emit"]
    assert sorted(told) == ["i", "mine", "y"]


@pytest.mark.parametrize(
    ("fetches", "reason"),
    [(["s3"], "no such value"), ("s2", r"did you mean \['s2'\]"), (["twice"], "2 values")],
)
def test_wrong_names_are_refused(fetches, reason):
    branches = "<then_branch = p () => (float[3] twice) { twice = Neg(x) },"
    branches += " else_branch = q () => (float[3] twice) { twice = Abs(x) }>"
    text = f"g (bool c, float[3] x) => (float[3] y) {{ y = If(c) {branches} }}"
    model = text if fetches == ["twice"] else LOOP
    session = ps.compile(model_from_text(model), cache=False)
    feeds = FEW if model is LOOP else {"c": np.bool_(True), "x": FEW["x"]}
    with pytest.raises(InvalidInput, match=reason):
        session.stream(feeds, fetches)
