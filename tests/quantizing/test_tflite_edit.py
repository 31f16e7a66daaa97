"""What an edit of a TFLite file changes, and what it keeps."""

import numpy as np
import pytest

import penstock as ps
from penstock.quantizing.rewriting import ValueRange
from penstock.quantizing.tflite_rewriting import TfliteRewriter
from tests.support.litert import by_litert
from tests.support.tflite_models import model, subgraph
from tests.support.tflite_networks import (
    CONV,
    convolutional,
    feed_forward,
    images,
    names_of,
    network,
    rows,
    tables,
    weights,
    written,
)

REFERENCE = "BUILTIN_REF"


def test_what_is_not_changed_is_kept():
    maps = {"inputs": [{"name": "image", "tensor_index": 0}]}
    more = {
        "description": "a net",
        "signature_defs": [{**maps, "outputs": [], "signature_key": "serving_default"}],
        "metadata": [{"name": "about", "buffer": 0}],
    }
    data = convolutional(**more)
    before, after = tables(data), tables(written(data, "static", images()[0]))
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


def test_weights_that_the_file_has_as_float16_stay_so():
    constants = {"v": weights(0, 40, 16, inner=16).astype(np.float16)}
    operators = [
        ("DEQUANTIZE", ["v"], ["w"], None),
        ("FULLY_CONNECTED", ["x", "w", None], ["y"], ("FullyConnectedOptions", {})),
    ]
    data = network([4, 16], operators, constants)
    (layer,) = TfliteRewriter(data, "main").layers
    assert (layer.nbytes("weights16"), "weights16" in layer.types) == (2 * 40 * 16, True)
    assert tables(written(data, "weights16", None)) == tables(data)


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
    assert tables(file)["subgraphs"][1:] == tables(data)["subgraphs"][1:]
    for ours, theirs, wanted in zip(
        ps.compile(file).run(feeds).values(),
        by_litert(file, feeds),
        by_litert(data, feeds),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        np.testing.assert_allclose(ours, wanted, atol=0.1)
