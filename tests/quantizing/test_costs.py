"""Seconds of steps as costs of layers."""

import pytest

import penstock as ps
from penstock.quantizing.costs import Conversions, NodeSeconds, by_node, layer_costs
from penstock.quantizing.layers import layers_of
from penstock.quantizing.rewriting import rewritten
from penstock.quantizing.source import float_model
from tests.support.quantizable import convolutional, feed_forward


def test_steps_are_of_their_layers():
    graph = float_model(ps.load(feed_forward())).graph
    layers = layers_of(graph)
    form = rewritten(graph, {"up": "dynamic"}, {})
    other = next(node.name for node in graph.nodes if node.op.name == "Relu")
    new = next(name for name, layer in form.layer_of.items() if layer == "up")
    steps = {("up", other): 1.0, (new,): 0.25, (other,): 2.0, ("nothing",): 8.0}
    seconds = by_node(graph, layers, form, steps)
    assert seconds.layers == {"up": 1.25}
    assert seconds.others == {other: 2.0}


def test_what_lies_between_layers_is_paid_by_their_types():
    graph = float_model(ps.load(convolutional())).graph
    layers = layers_of(graph)
    add = next(node.name for node in graph.nodes if node.op.name == "Add")
    ones = {layer.name: 1.0 for layer in layers}
    real = NodeSeconds(ones, {add: 3.0}, {})
    coded = NodeSeconds(dict.fromkeys(ones, 0.25), {add: 0.5}, {})
    seconds, errors = {"float32": real, "static": coded}, {"last": {"static": 0.1}}
    sizes = {layer.x.name: 1000 for layer in layers}
    costs = layer_costs(layers, seconds, errors, Conversions(sizes, 1.0))
    every = {layer.name: "static" for layer in layers}
    floats = costs.total({})
    assert floats.seconds == pytest.approx(5 + 3)
    assert costs.total(every).seconds == pytest.approx(5 * 0.25 + 0.5, abs=1e-4)
    assert costs.total(every).error == 0.1
    assert costs.conversions(every) == 0 < costs.conversions({"point": "static"})


def test_stored_weights_cost_no_time():
    graph = float_model(ps.load(feed_forward())).graph
    layers = layers_of(graph)
    seconds = {
        "float32": NodeSeconds({"up": 1.0, "down": 1.0}, {}, {}),
        "weights8": NodeSeconds({"up": 1.05, "down": 2.0}, {}, {}),
    }
    up, down = layer_costs(layers, seconds, {}, Conversions({}, 1.0)).table
    assert up["weights8"].seconds == 1.0
    assert down["weights8"].seconds == 1.0  # whatever was measured: it computes the same
