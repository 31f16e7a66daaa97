"""TFLite files with layers of chosen types, beside LiteRT, which runs them as they are written."""

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.quantizing.rounding import gram_matrices
from penstock.quantizing.samples import samples_of
from penstock.quantizing.tflite_graph import int8_operators
from penstock.quantizing.tflite_rewriting import TfliteRewriter
from penstock.quantizing.weights import learned
from tests.support.litert import by_litert
from tests.support.tflite_networks import (
    CONV,
    between,
    convolutional,
    feed_forward,
    images,
    names_of,
    network,
    rows,
    weights,
    written,
)

REFERENCE = "BUILTIN_REF"
MODELS = {"convolutional": (convolutional, images), "feed_forward": (feed_forward, rows)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("type_", "most"),
    [("static", 0.03), ("dynamic", 0.02), ("weights8", 0.02), ("weights16", 0.001)],
)
def test_types_are_near_the_float_model_and_litert(name, type_, most):
    make, data = MODELS[name]
    x = data()[0]
    file = written(make(), type_, x)
    (wanted,) = by_litert(make(), {"x": x})
    (theirs,) = by_litert(file, {"x": x}, resolver=REFERENCE)
    (fast,) = by_litert(file, {"x": x}, resolver="BUILTIN")
    ours = ps.compile(file)(x)
    spread = np.ptp(wanted)
    assert 0 < np.abs(ours - wanted).max() < most * spread
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    # XNNPACK rounds in another way, by a step of codes of a few values.
    np.testing.assert_allclose(ours, fast, atol=most * spread)


@pytest.mark.parametrize("name", MODELS)
def test_learned_codes_have_less_error_on_litert(name):
    make, data = MODELS[name]
    rewriter, samples = TfliteRewriter(make(), "main"), data(24)
    layers = [layer for layer in rewriter.layers if layer.learns]
    choice = {layer.name: "weights8" for layer in layers}
    files = [rewriter.rewritten(choice, {}, {}).data]
    session = ps.compile(rewriter.model)
    for layer, gram in gram_matrices(session, layers, samples_of(samples, ["x"])):
        rewriter.learn(layer, "weights8", learned(layer, "weights8", gram))
    # Corrections are of the nearest codes: others have none.
    biases = {layer.name: np.ones(layer.weights.shape[layer.axis]) for layer in layers}
    files.append(rewriter.rewritten(choice, {}, biases).data)
    assert len(files[0]) == pytest.approx(len(files[1]), abs=200)
    errors = []
    for file in files:
        outputs = [by_litert(file, {"x": x})[0] - session(x) for x in data(30)[24:]]
        errors.append(np.sqrt(np.square(outputs).mean()))
    assert 0 < errors[1] < (0.5 if name == "convolutional" else 0.95) * errors[0]


def test_static_network_is_int8_from_its_first_layer_to_its_last():
    x = images()[0]
    file = written(convolutional(), "static", x)
    operators = names_of(file)
    assert operators[0] == "QUANTIZE" and operators[-2:] == ["DEQUANTIZE", "SOFTMAX"]
    assert Counter(operators)["QUANTIZE"] == Counter(operators)["DEQUANTIZE"] == 1
    session = ps.compile(file)
    steps = Counter(step.node.op.name for step in session.inspect.plan.steps)
    assert (steps["QLinearConv"], steps["QGemm"], steps["Conv"]) == (4, 1, 0)
    assert len(file) < 0.5 * len(convolutional())


OPERATORS = {
    "ADD": (["c", "k"], ("AddOptions", {}), {"k": weights(2, 8, inner=1)}),
    "AVERAGE_POOL_2D": (
        ["c"],
        ("Pool2DOptions", {**CONV, "filter_width": 2, "filter_height": 2}),
        {},
    ),
    "BATCH_TO_SPACE_ND": (["c", "k", "crops"], None, {"k": [2, 2], "crops": [[0, 0], [0, 0]]}),
    "CONCATENATION": (
        ["c", "k", "c"],
        ("ConcatenationOptions", {"axis": 3}),
        {"k": weights(2, 4, 8, 8, 16, inner=1)},
    ),
    "DEPTH_TO_SPACE": (["c"], ("DepthToSpaceOptions", {"block_size": 2}), {}),
    "EXPAND_DIMS": (["c", "k"], None, {"k": 1}),
    "GATHER": (["c", "k"], ("GatherOptions", {"axis": 1}), {"k": [3, 1, 2, 0]}),
    "HARD_SWISH": (["c"], None, {}),
    "LEAKY_RELU": (["c"], ("LeakyReluOptions", {"alpha": 0.2}), {}),
    "LOGISTIC": (["c"], None, {}),
    "MAXIMUM": (["c", "k"], None, {"k": weights(2, 8, inner=0.1)}),
    "MAX_POOL_2D": (["c"], ("Pool2DOptions", {**CONV, "filter_width": 2, "filter_height": 2}), {}),
    "MEAN": (["c", "k"], ("ReducerOptions", {}), {"k": [1, 2]}),
    "MINIMUM": (["c", "k"], None, {"k": weights(2, 8, inner=1)}),
    "MIRROR_PAD": (
        ["c", "k"],
        ("MirrorPadOptions", {"mode": 0}),
        {"k": [[0, 0], [1, 1], [0, 0], [0, 0]]},
    ),
    "MUL": (["c", "k"], ("MulOptions", {}), {"k": weights(2, 8, inner=1)}),
    "PACK": (["c", "c"], ("PackOptions", {"axis": 0, "values_count": 2}), {}),
    "PAD": (["c", "k"], None, {"k": [[0, 0], [1, 1], [0, 0], [0, 0]]}),
    "PADV2": (
        ["c", "k", "value"],
        None,
        {"k": [[0, 0], [1, 1], [0, 0], [0, 0]], "value": np.float32(9)},
    ),
    "PRELU": (["c", "k"], None, {"k": weights(2, 1, 1, 8, inner=4)}),
    "RELU": (["c"], None, {}),
    "RELU6": (["c"], None, {}),
    "RELU_N1_TO_1": (["c"], None, {}),
    "RESHAPE": (["c", "k"], None, {"k": [16, 128]}),
    "RESIZE_BILINEAR": (["c", "k"], ("ResizeBilinearOptions", {}), {"k": [12, 12]}),
    "RESIZE_NEAREST_NEIGHBOR": (["c", "k"], ("ResizeNearestNeighborOptions", {}), {"k": [12, 12]}),
    "SLICE": (["c", "k", "size"], None, {"k": [0, 1, 0, 0], "size": [4, 4, 8, 8]}),
    "SOFTMAX": (["c"], ("SoftmaxOptions", {"beta": 1.0}), {}),
    "SPACE_TO_BATCH_ND": (["c", "k", "pads"], None, {"k": [2, 2], "pads": [[0, 0], [0, 0]]}),
    "SPACE_TO_DEPTH": (["c"], ("SpaceToDepthOptions", {"block_size": 2}), {}),
    "SPLIT": (["k", "c"], ("SplitOptions", {"num_splits": 2}), {"k": 3}),
    "SQUEEZE": (["c"], ("SqueezeOptions", {}), {}),
    "STRIDED_SLICE": (
        ["c", "k", "end", "steps"],
        ("StridedSliceOptions", {}),
        {"k": [0, 0, 0, 0], "end": [4, 8, 8, 8], "steps": [1, 2, 1, 1]},
    ),
    "SUB": (["k", "c"], ("SubOptions", {}), {"k": weights(2, 8, inner=1)}),
    "TANH": (["c"], None, {}),
    "TRANSPOSE": (["c", "k"], None, {"k": [0, 2, 1, 3]}),
    "UNPACK": (["c"], ("UnpackOptions", {"axis": 0, "num": 4}), {}),
}


ROUNDED = ("PRELU", "RESIZE_BILINEAR")
"""operators whose codes Penstock computes from real numbers"""


def test_every_operator_of_the_table_is_tried():
    assert {*OPERATORS} == {n for n, own in int8_operators().items() if own.dynamic is None}


@pytest.mark.parametrize("op", OPERATORS)
def test_operator_between_layers_is_int8(op):
    inputs, options, constants = OPERATORS[op]
    # Lists are of integers.
    arrays = {
        name: np.asarray(own, getattr(own, "dtype", np.int32)) for name, own in constants.items()
    }
    data = between(op, inputs, options, {"SPLIT": 2, "UNPACK": 4}.get(op, 1), arrays)
    x = np.random.default_rng(0).standard_normal((4, 8, 8, 8)).astype(np.float32)
    file = written(data, "static", x)
    operators = names_of(file)
    place = operators.index(op)
    assert operators[:2] == ["QUANTIZE", "CONV_2D"] and operators[place - 1] == "CONV_2D"
    assert operators.count("QUANTIZE") == 1
    wanted = by_litert(data, {"x": x})
    theirs = by_litert(file, {"x": x}, resolver=REFERENCE)
    ours = [*ps.compile(file).run({"x": x}).values()]
    for a, b, c in zip(ours, theirs, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2 * np.ptp(c) / 255 if op in ROUNDED else 1e-5)
        assert np.sqrt(np.square(a - c).mean()) < 0.02 * np.ptp(c)


def test_scale_of_an_operator_s_own_is_not_mixed_with_others():
    # The one scale of a Concat cannot be that of LOGISTIC and of a convolution at once.
    constants = {
        "w": weights(0, 8, 1, 1, 8, inner=8),
        "b": weights(1, 8, inner=8),
        "v": weights(2, 8, 1, 1, 16, inner=16),
    }
    conv = ("Conv2DOptions", CONV)
    operators = [
        ("CONV_2D", ["x", "w", "b"], ["c"], conv),
        ("LOGISTIC", ["c"], ["s"], None),
        ("CONCATENATION", ["s", "c"], ["o"], ("ConcatenationOptions", {"axis": 3})),
        ("CONV_2D", ["o", "v", "b"], ["y"], conv),
    ]
    data = network([1, 4, 4, 8], operators, constants)
    x = np.random.default_rng(0).standard_normal((1, 4, 4, 8)).astype(np.float32)
    file = written(data, "static", x)
    assert names_of(file)[2:5] == ["DEQUANTIZE", "LOGISTIC", "CONCATENATION"]
    theirs = by_litert(file, {"x": x}, resolver=REFERENCE)[0]
    np.testing.assert_allclose(ps.compile(file)(x), theirs, atol=1e-5)


def test_layers_may_have_different_types():
    x = images()[0]
    choice = {"CONV_2D_0": "static", "DEPTHWISE_CONV_2D_1": "static", "CONV_2D_5": "weights8"}
    file = written(convolutional(), choice, x)
    assert names_of(file)[:6] == [
        *("QUANTIZE", "CONV_2D", "DEQUANTIZE", "DEPTHWISE_CONV_2D", "DEQUANTIZE", "CONV_2D")
    ]
    (theirs,) = by_litert(file, {"x": x})
    (wanted,) = by_litert(convolutional(), {"x": x})
    np.testing.assert_allclose(ps.compile(file)(x), theirs, atol=1e-5)
    np.testing.assert_allclose(theirs, wanted, atol=0.03 * np.ptp(wanted))
