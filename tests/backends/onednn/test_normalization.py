"""Softmax, normalizations, and what is alike: oneDNN against the NumPy backend."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from penstock.backends.onednn.library import library
from tests.backends.onednn.forced import check, one_node, proto_of, refused

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


rng = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


LAYERS = [
    ((4, 10), -1, (10,)),
    ((10,), -1, (10,)),
    ((2, 7, 33), -1, (33,)),
    ((2, 7, 33), -1, (1, 1, 33)),
    ((2, 7, 33), -1, (1,)),
    ((2, 6, 5), 1, (6, 5)),
    ((2, 6, 5), 1, (6, 1)),
    ((2, 6, 5), 0, (2, 6, 5)),
    ((1, 3, 4, 768), -1, (768,)),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "axis", "parameters"), LAYERS)
def test_layer_normalization_equals_numpy(shape, axis, parameters, bias):
    feeds = {"x": 3 * draw(*shape) + 1}
    constants = {"s": draw(*parameters)} | ({"b": draw(*parameters)} if bias else {})
    proto = one_node("LayerNormalization", feeds, constants, axis=axis, epsilon=1e-3)
    check(proto, feeds, "LayerNormalization", atol=1e-4)


def test_layer_normalization_with_computed_parameters():
    feeds = {"x": draw(2, 7, 33), "s": draw(33), "b": draw(33)}
    check(one_node("LayerNormalization", feeds), feeds, "LayerNormalization")


def test_layer_normalization_of_a_view():
    feeds = {"x": draw(2, 7, 33)}
    proto = one_node("LayerNormalization", feeds, {"s": draw(7)}, perm=(0, 2, 1))
    check(proto, feeds, "LayerNormalization")


def test_layer_normalization_with_statistics_runs_on_numpy():
    feeds = {"x": draw(2, 7, 5)}
    constants = {"s": draw(5), "b": draw(5)}
    names = ["y", "m", "i"]
    proto = one_node("LayerNormalization", feeds, constants, outputs=names)
    refused(proto, feeds, "LayerNormalization")
    wide = one_node("LayerNormalization", feeds, {"s": draw(7, 5)})
    refused(wide, feeds, "LayerNormalization")
    late = {"x": draw(2, 7, 5), "s": draw(1)}
    refused(one_node("LayerNormalization", late), late, "LayerNormalization")


BATCHES = [(3, 5), (2, 5, 7), (2, 5, 4, 3), (1, 16, 9, 9), (1, 5, 2, 3, 4)]


def parameters(channels: int) -> dict[str, np.ndarray]:
    values = {name: draw(channels) for name in ("scale", "bias", "mean")}
    return values | {"variance": np.abs(draw(channels)) + np.float32(0.1)}


@pytest.mark.parametrize("tail", ["Neg", "Relu", "Sigmoid"])
@pytest.mark.parametrize("shape", BATCHES)
def test_batch_normalization_equals_numpy(shape, tail):
    feeds = {"x": draw(*shape)}
    proto = one_node("BatchNormalization", feeds, parameters(shape[1]), epsilon=1e-3)
    proto.graph.node[-1].op_type = tail
    check(proto, feeds, "BatchNormalization")


@pytest.mark.parametrize("tail", ["Neg", "Relu", "Sigmoid"])
def test_batch_normalization_with_channels_innermost(tail):
    feeds = {"x": draw(2, 6, 7, 5)}
    for perm, channels in (((0, 3, 1, 2), 5), ((0, 2, 3, 1), 7)):
        proto = one_node("BatchNormalization", feeds, parameters(channels), perm=perm)
        proto.graph.node[-1].op_type = tail
        check(proto, feeds, "BatchNormalization")


def test_batch_normalization_in_training_runs_on_numpy():
    feeds = {"x": draw(2, 5, 4)}
    names = ["y", "m", "v"]
    proto = one_node(
        "BatchNormalization", feeds, parameters(5), training_mode=1, outputs=names, opset=15
    )
    refused(proto, feeds, "BatchNormalization")
    late = feeds | parameters(5)
    nodes = [helper.make_node("BatchNormalization", list(late), ["y"])]
    refused(proto_of(nodes, late, ["y"]), late, "BatchNormalization")
