"""Decoders with both kinds of steps in one graph."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

import penstock as ps
from tests.support.decoders import decoder_model, reference_logits


def merged(step: onnx.ModelProto) -> onnx.ModelProto:
    """A model that makes the step if ``use_cache_branch`` is true, and else nothing of use."""
    outputs = [value.name for value in step.graph.output]
    then = helper.make_graph(step.graph.node, "then", [], step.graph.output)
    first = step.graph.input[0].name
    nodes = [helper.make_node("Cast", [first], [name], to=1) for name in outputs]
    other = helper.make_graph(nodes, "else", [], step.graph.output)
    node = helper.make_node(
        "If", ["use_cache_branch"], outputs, then_branch=then, else_branch=other
    )
    flag = helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    graph = helper.make_graph(
        [node], "g", [*step.graph.input, flag], step.graph.output, step.graph.initializer
    )
    return helper.make_model(graph, opset_imports=step.opset_import, ir_version=step.ir_version)


def test_steps_of_a_merged_decoder_are_joined() -> None:
    model, ids = decoder_model("spelled"), [5, 3, 9, 17, 2, 40]
    with ps.Stepper(ps.load(merged(model))) as stepper:
        assert stepper.reason is None
        assert [*stepper.rows] == ["ids"]
        sequences = [stepper.sequence() for _ in range(2)]
        for sequence in sequences:
            parts = [sequence.step({"ids": [ids[:4]]}, wanted=4)["logits"]]
            parts += [sequence.step({"ids": [[token]]})["logits"] for token in ids[4:]]
            got = np.concatenate(parts, 1)[0]
            np.testing.assert_allclose(got, reference_logits(model, ids), atol=1e-5)
