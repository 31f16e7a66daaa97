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


SOFTMAXES = [
    ((7,), 0),
    ((1, 1000), 1),
    ((33, 17), -1),
    ((2, 3, 9), 2),
    ((2, 3, 4, 5), -1),
    ((2, 21, 6, 7), 1),
    ((1, 5, 3, 4, 2), 1),
    ((3, 10, 1, 1), 1),
    ((4, 5, 1), 1),
]


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("shape", "axis"), SOFTMAXES)
def test_softmax_equals_numpy(op, shape, axis):
    feeds = {"x": 5 * draw(*shape)}
    check(one_node(op, feeds, axis=axis), feeds, op)


@pytest.mark.parametrize("perm", [(0, 2, 3, 1), (0, 3, 1, 2), (0, 2, 1, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("axis", [1, 3])
def test_softmax_of_a_view(perm, axis):
    feeds = {"x": draw(2, 3, 4, 5)}
    check(one_node("Softmax", feeds, perm=perm, axis=axis), feeds, "Softmax")


@pytest.mark.parametrize("axis", [-1, 0, 1, 2, 3])
def test_softmax_over_all_axes_from_one_on(axis):
    feeds = {"x": draw(2, 3, 4, 5)}
    check(one_node("Softmax", feeds, opset=11, axis=axis), feeds, "Softmax")


@pytest.mark.parametrize(("shape", "axis"), [((8, 9), 0), ((2, 3, 4), 1), ((2, 3, 4, 5), 2)])
def test_softmax_along_other_axes_runs_on_numpy(shape, axis):
    feeds = {"x": draw(*shape)}
    refused(one_node("Softmax", feeds, axis=axis), feeds, "Softmax")


def test_softmax_of_large_differences_does_not_overflow():
    x = np.array([[1000, 1001, -1000], [-np.inf, 0, 1], [3e38, -3e38, 0]], np.float32)
    check(one_node("Softmax", {"x": -x}, axis=-1), {"x": -x}, "Softmax")


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


@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 17), (1, 24, 6, 7), (1, 32, 9, 9), (1, 8, 4, 5, 6)])
def test_instance_normalization_equals_numpy(shape, perm):
    feeds = {"x": 3 * draw(*shape) + 1}
    constants = {"s": draw(shape[1]), "b": draw(shape[1])}
    order = (0, 1, *range(len(shape) - 1, 1, -1)) if perm else ()
    proto = one_node("InstanceNormalization", feeds, constants, perm=order, epsilon=1e-3)
    check(proto, feeds, "InstanceNormalization", atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 8, 6, 7), (1, 3, 6, 7)])
def test_instance_normalization_of_batches_or_few_channels_runs_on_numpy(shape):
    feeds = {"x": draw(*shape)}
    constants = {"s": draw(shape[1]), "b": draw(shape[1])}
    refused(one_node("InstanceNormalization", feeds, constants), feeds, "InstanceNormalization")


@pytest.mark.parametrize("size", [1, 3, 5, 9])
@pytest.mark.parametrize("shape", [(1, 64, 6, 5), (2, 7, 4, 5)])
def test_lrn_equals_numpy(shape, size):
    feeds = {"x": draw(*shape)}
    check(one_node("LRN", feeds, size=size, alpha=0.3, bias=1.5), feeds, "LRN")


def test_lrn_over_an_even_number_of_channels_runs_on_numpy():
    feeds = {"x": draw(2, 7, 4, 5)}
    refused(one_node("LRN", feeds, size=4), feeds, "LRN")


PERMS = [(), (0, 2, 3, 1), (0, 3, 1, 2), (1, 0, 2, 3)]


@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("slopes", ["one", "channels", "all"])
def test_prelu_equals_numpy(slopes, perm):
    feeds = {"x": draw(2, 3, 4, 5)}
    dims = tuple(np.transpose(feeds["x"], perm or None or range(4)).shape)
    shape = {"one": (1,), "channels": (dims[1], 1, 1), "all": dims}[slopes]
    check(one_node("PRelu", feeds, {"s": draw(*shape)}, perm=perm), feeds, "PRelu")


def test_prelu_of_a_value_with_no_other_reader():
    feeds = {"x": draw(6, 17, 12, 9), "s": 3 + draw(6, 17, 12, 9)}
    check(one_node("PRelu", feeds), feeds, "PRelu")


def test_prelu_with_computed_slopes():
    for shape in ((3, 1, 1), (2, 3, 4, 5)):
        feeds = {"x": draw(2, 3, 4, 5), "s": draw(*shape)}
        check(one_node("PRelu", feeds), feeds, "PRelu")
    late = {"x": draw(2, 3, 4, 5), "s": draw(5)}
    refused(one_node("PRelu", late), late, "PRelu")


@pytest.mark.parametrize("op", ["Sum", "Mean", "Max", "Min"])
@pytest.mark.parametrize("perm", PERMS)
def test_sum_mean_max_min_of_several_tensors(op, perm):
    x = draw(2, 3, 4, 5)
    dims = np.transpose(x, perm or range(4)).shape
    two = {"x": x, "z": draw(*dims)}
    check(one_node(op, two, {"k": draw(*dims)}, perm=perm), two, op)
    check(one_node(op, two, {"k": draw(dims[1], 1, 1)}, perm=perm), two, op)
    four = two | {"u": draw(*dims), "v": draw(*dims)}
    check(one_node(op, four, perm=perm), four, op)
    proto = one_node(op, two, perm=perm)
    if op in ("Max", "Min"):
        check(proto, two, op)
    else:
        refused(proto, two, op)


@pytest.mark.parametrize("shape", [(4, 4, 1, 1), (2, 17, 1), (3, 5, 1, 1, 1), (1, 6, 1, 1), (4, 6)])
def test_post_ops_on_channels_of_one_element(shape):
    channels = shape[1]
    parameters = [draw(channels) for _ in range(3)] + [np.abs(draw(channels)) + 1]
    known = dict(zip("abmv", parameters, strict=True))
    feeds = {"x": draw(*shape)}
    nodes = [helper.make_node("BatchNormalization", ["x", *known], ["y"])]
    check(proto_of(nodes, feeds, ["y"], known), feeds, "BatchNormalization")
    each = (1, channels, *(1,) * (len(shape) - 2))
    late = feeds | {"p": draw(*each), "q": draw(*each)}
    chain = [
        helper.make_node("Add", ["x", "x"], ["h"]),
        helper.make_node("Mul", ["h", "p"], ["k"]),
        helper.make_node("Sub", ["k", "q"], ["y"]),
    ]
    session = check(proto_of(chain, late, ["y"]), late, "Add")
    assert len(session.inspect.plan.steps) == 1
