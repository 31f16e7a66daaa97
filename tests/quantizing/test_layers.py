"""Layers, and the values that are codes if layers are."""

import numpy as np
import pytest

import penstock as ps
from penstock.quantizing.layers import QuantizableLayer, codes_of, layers_of
from penstock.quantizing.source import float_model
from tests.support.quantizable import convolutional, feed_forward, with_weights


def graph_of(proto):
    return float_model(ps.load(proto)).graph


def coded(graph, choice):
    return {value.name for value in codes_of(graph, layers_of(graph), choice).values}


def test_layers_have_types_by_operation():
    layers = {layer.name: layer for layer in layers_of(graph_of(convolutional()))}
    assert [*layers] == ["first", "depthwise", "point", "last", "dense"]
    every = ["float32", "static", "dynamic", "bfloat16", "bfloat16x8", "weights8", "weights16"]
    assert layers["point"].types == every
    odd = [name for name, layer in layers.items() if "bfloat16" not in layer.types]
    assert odd == ["first", "depthwise"]  # kernels multiply pairs of channels
    assert "blocks8" in layers["dense"].types
    assert layers["dense"].axis == 0


def test_all_values_between_static_layers_are_codes():
    graph = graph_of(convolutional())
    choice = {layer.name: "static" for layer in layers_of(graph)}
    # Each Relu is part of its layer's step; what pooling averages stays float32.
    assert coded(graph, choice) == {"x", "r0", "r1", "c2", "a", "m", "f"}


def test_moves_share_the_scale_of_what_they_move():
    graph = graph_of(convolutional())
    codes = codes_of(graph, layers_of(graph), {"last": "static"})
    names = {value.name: group.name for value, group in codes.group_of.items()}
    assert names == {"m": "m"}  # no layer of codes produces what is pooled
    codes = codes_of(
        graph, layers_of(graph), {"point": "static", "first": "static", "last": "static"}
    )
    names = {value.name: group.name for value, group in codes.group_of.items()}
    assert names["m"] == names["a"]


def test_elementwise_chain_has_no_codes_within():
    text = """g (float[1,32,8,8] x, float[32,32,1,1] w) => (float[1,32,8,8] y)
        { a = Conv(x, w) b = Sigmoid(a) c = Exp(b) d = Tanh(c) y = Conv(d, w) }"""
    weights = np.random.default_rng(0).standard_normal((32, 32, 1, 1)).astype(np.float32)
    graph = graph_of(with_weights(text, w=weights))
    layers = layers_of(graph)
    names = coded(graph, {layer.name: "static" for layer in layers})
    assert names == {"x", "a", "d"}


def test_other_weights_can_only_be_stored():
    proto = with_weights(
        "g (int64[2] i, float[30,40] w) => (float[2,40] y) { y = Gather(w, i) }",
        w=np.ones((30, 40), np.float32),
    )
    (layer,) = layers_of(graph_of(proto))
    assert layer.types == ("float32", "weights8", "weights16")
    assert layer.nbytes("weights8") == 30 * 40 + 4 * 30
    assert layer.nbytes("weights16") == 2 * 30 * 40


@pytest.mark.parametrize(
    ("largest", "others", "fits"),
    [
        (65504, 1, True),
        (65536, 1, False),
        (-1e9, 1, False),
        (1e-3, 1e-4, True),
        (1e-4, 1e-6, False),
    ],
)
def test_float16_is_offered_for_weights_that_it_has(largest, others, fits):
    weights = np.full((30, 40), others, np.float32)
    weights[3, 5] = largest
    proto = with_weights(
        "g (int64[2] i, float[30,40] w) => (float[2,40] y) { y = Gather(w, i) }", w=weights
    )
    (layer,) = layers_of(graph_of(proto))
    assert ("weights16" in layer.types) == fits
    if fits:
        error = weights.astype(np.float16) - weights
        assert np.linalg.norm(error) <= 2**-10 * np.linalg.norm(weights)


def test_bytes_of_blocks():
    layer = next(own for own in layers_of(graph_of(feed_forward())) if own.name == "up")
    assert isinstance(layer, QuantizableLayer)
    assert layer.nbytes("float32") == 4 * 64 * 128
    assert layer.nbytes("blocks4") == 64 * 128 // 2 + 4 * 64 * 128 // 32
