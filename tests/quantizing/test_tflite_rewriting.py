"""TFLite files with layers of chosen types, beside LiteRT, which runs them as they are written."""

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.tflite.file import opened_model
from penstock.frontends.tflite.flatbuffer import schema
from penstock.frontends.tflite.writer import fields_of
from penstock.quantizing.rewriting import ValueRange
from penstock.quantizing.tflite_graph import int8_operators
from penstock.quantizing.tflite_rewriting import TfliteRewriter
from tests.support.litert import by_litert
from tests.support.tflite_models import model, subgraph
from tests.support.tflite_networks import (
    CONV,
    between,
    convolutional,
    feed_forward,
    images,
    network,
    rows,
    weights,
)

REFERENCE = "BUILTIN_REF"
MODELS = {"convolutional": (convolutional, images), "feed_forward": (feed_forward, rows)}


def written(data: bytes, choice, x, biases=None) -> bytes:
    """The file with these types of layers, or with one wherever it can be."""
    rewriter = TfliteRewriter(data, "main")
    if isinstance(choice, str):
        choice = {own.name: choice for own in rewriter.layers if choice in own.types}
    assert choice
    names = rewriter.coded(choice)
    values = ps.compile(rewriter.model).run({"x": x}, fetches=names) if names else {}
    ranges = {n: ValueRange.of(float(v.min()), float(v.max())) for n, v in values.items()}
    return rewriter.rewritten(choice, ranges, biases or {}).data


def fields(data: bytes):
    with opened_model(data, "m") as (table, contents):
        return fields_of(table, contents)


def names_of(data: bytes) -> list[str]:
    """The names of the file's operators."""
    with opened_model(data, "m") as (table, _):
        codes = [schema().operators[own.builtin_code] for own in table.operator_codes]
        return [codes[own.opcode_index] for own in table.subgraphs[0].operators]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("type_", "most"), [("static", 0.03), ("dynamic", 0.02), ("weights8", 0.02)]
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


def test_what_is_not_changed_is_kept():
    maps = {"inputs": [{"name": "image", "tensor_index": 0}]}
    more = {
        "description": "a net",
        "signature_defs": [{**maps, "outputs": [], "signature_key": "serving_default"}],
        "metadata": [{"name": "about", "buffer": 0}],
    }
    data = convolutional(**more)
    before, after = fields(data), fields(written(data, "static", images()[0]))
    for name in ("description", "signature_defs", "metadata", "version"):
        assert after[name] == before[name]
    tensors = [{own["name"]: own for own in f["subgraphs"][0]["tensors"]} for f in (before, after)]
    for name in ("x", "y", "axes"):
        old, new = [{k: v for k, v in own[name].items() if k != "buffer"} for own in tensors]
        assert old == new
    # Values of int8 keep the names of those that they stand for, and what is not read is gone.
    assert tensors[1].keys() - tensors[0].keys() == {"x/codes", "dense/codes"}
    size = sum(len(own.get("data", b"")) for own in after["buffers"])
    assert size < 0.35 * sum(len(own.get("data", b"")) for own in before["buffers"])


def test_weights_of_float16_become_codes():
    halves = {
        name: array.astype(np.float16)
        for name, array in {
            "h": weights(0, 16, 3, 3, 8, inner=72),
            "g": weights(1, 16, inner=4),
            "v": weights(2, 40, 16, inner=16),
        }.items()
    }
    operators = [
        ("DEQUANTIZE", ["h"], ["w"], None),
        ("DEQUANTIZE", ["g"], ["b"], None),
        ("CONV_2D", ["x", "w", "b"], ["c"], ("Conv2DOptions", CONV)),
        ("DEQUANTIZE", ["v"], ["m"], None),
        ("FULLY_CONNECTED", ["c", "m", None], ["y"], ("FullyConnectedOptions", {})),
    ]
    data = network([1, 8, 8, 8], operators, halves)
    x = np.random.default_rng(0).standard_normal((1, 8, 8, 8)).astype(np.float32)
    file = written(data, {"CONV_2D_2": "static"}, x)
    assert names_of(file) == ["QUANTIZE", "CONV_2D", "DEQUANTIZE", "DEQUANTIZE", "FULLY_CONNECTED"]
    (theirs,) = by_litert(file, {"x": x}, resolver=REFERENCE)
    (wanted,) = by_litert(data, {"x": x})
    np.testing.assert_allclose(ps.compile(file)(x), theirs, atol=1e-5)
    np.testing.assert_allclose(theirs, wanted, atol=0.02 * np.ptp(wanted))


def test_weights_of_a_transposed_convolution_are_stored():
    constants = {"shape": np.array([1, 8, 8, 16], np.int32), "w": weights(0, 16, 3, 3, 8, inner=72)}
    options = {"padding": 0, "stride_w": 2, "stride_h": 2}
    operators = [("TRANSPOSE_CONV", ["shape", "w", "x"], ["y"], ("TransposeConvOptions", options))]
    data = network([1, 4, 4, 8], operators, constants)
    x = np.random.default_rng(0).standard_normal((1, 4, 4, 8)).astype(np.float32)
    file = written(data, "weights8", x)
    (theirs,) = by_litert(file, {"x": x})
    assert names_of(file) == ["DEQUANTIZE", "TRANSPOSE_CONV"]
    np.testing.assert_allclose(ps.compile(file)(x), theirs, atol=1e-5)


@pytest.mark.parametrize("type_", ["static", "dynamic", "weights8"])
def test_biases_are_corrected(type_):
    x = rows()[0]
    one, other = [
        ps.compile(written(feed_forward(), {"FULLY_CONNECTED_1": type_}, x, biases))(x)
        for biases in ({}, {"FULLY_CONNECTED_1": np.full(64, 0.5, np.float32)})
    ]
    # Some are beyond the range that was observed without.
    assert np.median(other - one) == pytest.approx(0.5, abs=0.05)


def test_subgraphs_that_operators_use_stay_as_they_are():
    w, b = weights(0, 16, 8, inner=8), weights(1, 16, inner=4)
    branch = [
        subgraph(
            {"a": ("float32", [2, 16])}, [(op, ["a"], ["r"], None)], ["r"], r={"shape": [2, 16]}
        )
        for op in ("NEG", "ABS")
    ]
    options = ("IfOptions", {"then_subgraph_index": 1, "else_subgraph_index": 2})
    entry = subgraph(
        {"x": ("float32", [2, 8]), "cond": ("bool", [1])},
        [
            ("FULLY_CONNECTED", ["x", "w", "b"], ["d"], ("FullyConnectedOptions", {})),
            ("IF", ["cond", "d"], ["y"], options),
        ],
        ["y", "d"],
        {"w": w, "b": b},
        d={"shape": [2, 16]},
        y={"shape": [2, 16]},
    )
    data = model([entry, *branch])
    x, cond = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32), np.array([True])
    rewriter = TfliteRewriter(data, "main")
    ranges = {
        name: ValueRange(-6.0, 6.0) for name in rewriter.coded({"FULLY_CONNECTED_0": "static"})
    }
    file = rewriter.rewritten({"FULLY_CONNECTED_0": "static"}, ranges, {}).data
    feeds = {"x": x, "cond": cond}
    assert fields(file)["subgraphs"][1:] == fields(data)["subgraphs"][1:]
    for ours, theirs, wanted in zip(
        ps.compile(file).run(feeds).values(),
        by_litert(file, feeds),
        by_litert(data, feeds),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        np.testing.assert_allclose(ours, wanted, atol=0.1)
