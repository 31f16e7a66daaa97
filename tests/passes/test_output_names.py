"""Outputs that passes replaced get their names again."""

from __future__ import annotations

import numpy as np

import penstock as ps
from penstock.frontends.load import check_and_sort
from penstock.passes.output_names import name_outputs
from penstock.passes.pipeline import optimize
from tests.support.onnx_text import model_from_text


def test_inputs_constants_and_outputs_that_are_shared_keep_their_names() -> None:
    """All of which the outputs are once the graph is simplified."""
    text = """g (float[n] x) => (float[n] a, float[n] b, float[n] c, float[1] d)
        <float[1] one = {1}> {
        b = Identity (x) a = Neg (x) c = Identity (a) d = Identity (one) }"""
    model = ps.load(model_from_text(text))
    names = [value.name for value in model.graph.outputs]
    optimize(model.graph)
    assert [value.name for value in model.graph.outputs] != names
    name_outputs(model.graph, names)
    assert [value.name for value in model.graph.outputs] == names
    assert [value.name for value in model.graph.inputs] == ["x"]
    check_and_sort(model)
    results = ps.compile(model).run({"x": np.array([2.0], np.float32)})
    assert [float(results[name][0]) for name in names] == [-2, 2, -2, 1]
