"""Small TFLite networks to quantize, and samples for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import penstock as ps
from penstock.frontends.tflite.file import opened_model
from penstock.frontends.tflite.flatbuffer import schema
from penstock.frontends.tflite.writer import Fields, fields_of
from penstock.quantizing.rewriting import ValueRange
from penstock.quantizing.tflite_rewriting import TfliteRewriter
from tests.support.tflite_models import Operator, model, subgraph

CONV = {"padding": 0, "stride_w": 1, "stride_h": 1}
RELU = {"fused_activation_function": 1}


def weights(seed: int, *shape: int, inner: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) / inner**0.5).astype(np.float32)


def network(
    x: Sequence[int],
    operators: Sequence[Operator],
    constants: dict[str, np.ndarray],
    outputs: Sequence[str] = ("y",),
    **more: Any,
) -> bytes:
    """A file with an input ``x`` of these dims, and the shapes of all tensors, as converters write
    it."""

    def file(**shapes: dict[str, Any]) -> bytes:
        # The description of a subgraph is used up by the file of it.
        own = subgraph({"x": ("float32", x)}, operators, outputs, constants, **shapes)
        return model([own], **more)

    names = [name for _, _, written, _ in operators for name in written]
    values = ps.compile(file()).run({"x": np.zeros(x, np.float32)}, fetches=names)
    return file(**{name: {"shape": list(values[name].shape)} for name in names})


def convolutional(**more: Any) -> bytes:
    """Convolutions with Relu, a depthwise one, a sum of two branches, pooling, a product and a
    Softmax."""
    constants = {
        "w0": weights(0, 16, 3, 3, 3, inner=27),
        "b0": weights(1, 16, inner=4),
        "w1": weights(2, 1, 3, 3, 16, inner=9),
        "b1": weights(3, 16, inner=4),
        "w2": weights(4, 16, 1, 1, 16, inner=16),
        "b2": weights(9, 16, inner=4),
        "w3": weights(5, 32, 3, 3, 16, inner=144),
        "b3": weights(6, 32, inner=4),
        "axes": np.array([1, 2], np.int32),
        "w4": weights(7, 10, 32, inner=4),
        "b4": weights(8, 10, inner=4),
    }
    pool = {**CONV, "stride_w": 2, "stride_h": 2, "filter_width": 2, "filter_height": 2}
    operators = [
        ("CONV_2D", ["x", "w0", "b0"], ["first"], ("Conv2DOptions", CONV | RELU)),
        (
            "DEPTHWISE_CONV_2D",
            ["first", "w1", "b1"],
            ["depthwise"],
            ("DepthwiseConv2DOptions", CONV | RELU | {"depth_multiplier": 1}),
        ),
        ("CONV_2D", ["depthwise", "w2", "b2"], ["point"], ("Conv2DOptions", CONV)),
        ("ADD", ["point", "first"], ["sum"], ("AddOptions", {})),
        ("MAX_POOL_2D", ["sum"], ["pooled"], ("Pool2DOptions", pool)),
        ("CONV_2D", ["pooled", "w3", "b3"], ["last"], ("Conv2DOptions", CONV | RELU)),
        ("MEAN", ["last", "axes"], ["mean"], ("ReducerOptions", {})),
        ("FULLY_CONNECTED", ["mean", "w4", "b4"], ["dense"], ("FullyConnectedOptions", {})),
        ("SOFTMAX", ["dense"], ["y"], ("SoftmaxOptions", {"beta": 1.0})),
    ]
    return network([1, 24, 24, 3], operators, constants, **more)


def feed_forward() -> bytes:
    """Two products, the first with a bias, added to their input; rows in two dims."""
    constants = {
        "up": weights(0, 128, 64, inner=64),
        "bias": weights(1, 128, inner=4),
        "down": weights(2, 64, 128, inner=128),
    }
    kept = {"keep_num_dims": True}
    operators = [
        ("FULLY_CONNECTED", ["x", "up", "bias"], ["h"], ("FullyConnectedOptions", RELU | kept)),
        ("FULLY_CONNECTED", ["h", "down", None], ["d"], ("FullyConnectedOptions", kept)),
        ("ADD", ["d", "x"], ["y"], ("AddOptions", {})),
    ]
    return network([2, 4, 64], operators, constants)


def between(
    op: str, inputs: Sequence[str], options: Any, outputs: int, constants: dict[str, np.ndarray]
) -> bytes:
    """An operator, which reads "c" and constants, between a convolution of images [4, 8, 8, 8] and
    a product with rows of 32 for each of its outputs."""
    fixed = {
        "w": weights(0, 8, 1, 1, 8, inner=8),
        "b": weights(3, 8, inner=8),
        "v": weights(1, 8, 32, inner=32),
    }
    results = [f"o{i}" for i in range(outputs)]
    operators: list[Operator] = [
        ("CONV_2D", ["x", "w", "b"], ["c"], ("Conv2DOptions", CONV)),
        (op, inputs, results, options),
    ]
    dense = ("FullyConnectedOptions", {})
    operators += [
        ("FULLY_CONNECTED", [name, "v"], [f"y{i}"], dense) for i, name in enumerate(results)
    ]
    ys = [f"y{i}" for i in range(outputs)]
    return network([4, 8, 8, 8], operators, fixed | constants, ys)


def images(count: int = 8, seed: int = 0) -> np.ndarray:
    """[count, 1, 24, 24, 3], smooth."""
    noise = np.random.default_rng(seed).standard_normal((count, 1, 24, 24, 3))
    for axis in (2, 3):
        noise = noise + np.roll(noise, 1, axis) + np.roll(noise, 2, axis)
    return (noise / 3).astype(np.float32)


def rows(count: int = 8, seed: int = 0) -> np.ndarray:
    """[count, 2, 4, 64]."""
    return np.random.default_rng(seed).standard_normal((count, 2, 4, 64)).astype(np.float32)


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


def tables(data: bytes) -> Fields:
    """The tables of a file."""
    with opened_model(data, "m") as (table, contents):
        return fields_of(table, contents)


def names_of(data: bytes) -> list[str]:
    """The names of the file's operators."""
    with opened_model(data, "m") as (table, _):
        codes = [schema().operators[own.builtin_code] for own in table.operator_codes]
        return [codes[own.opcode_index] for own in table.subgraphs[0].operators]
