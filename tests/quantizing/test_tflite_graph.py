"""Which operators of a TFLite file become int8, and which of their tensors have one scale."""

import numpy as np
import pytest

from penstock.quantizing.rewriting import ValueRange
from penstock.quantizing.tflite_graph import CodeScale, TfliteGraph, int8_operators
from penstock.quantizing.tflite_rewriting import TfliteRewriter
from tests.support.tflite_networks import CONV, convolutional, network, weights

LAYERS = {"w": weights(0, 8, 1, 1, 8, inner=8), "b": weights(1, 8, inner=8)}
CONVOLVE = ("Conv2DOptions", CONV)


def graph(*operators, **constants) -> tuple[TfliteGraph, dict[str, int]]:
    """A graph of operators from "x" to "y", and the numbers of its tensors."""
    rewriter = TfliteRewriter(network([1, 4, 4, 8], operators, LAYERS | constants), "main")
    return rewriter.graph, {name: tensor for tensor, name in rewriter.names.items()}


def conv(x: str, y: str) -> tuple:
    return ("CONV_2D", [x, "w", "b"], [y], CONVOLVE)


def test_operators_between_layers_are_int8_and_those_behind_the_last_are_not():
    own = TfliteRewriter(convolutional(), "main").graph
    static = [o.position for o in own.operators if o.int8 and o.int8.dynamic is not None]
    names = [own.operators[place].name for place in sorted(own.codes(static).operators)]
    assert names == [own.name for own in own.operators][:-1]
    assert own.operators[-1].name == "SOFTMAX"
    # A sum of int8 and of a float32 layer's result is float32. Codes of its result are pooled.
    fewer = own.codes([place for place in static if place != 2])
    assert [own.operators[place].name for place in sorted(fewer.operators)] == [
        *("CONV_2D", "DEPTHWISE_CONV_2D", "MAX_POOL_2D", "CONV_2D", "MEAN", "FULLY_CONNECTED")
    ]


def test_operators_that_keep_the_scale_share_one_range():
    pads = np.array([[0, 0], [1, 1], [1, 1], [0, 0]], np.int32)
    own, tensors = graph(conv("x", "c"), ("PAD", ["c", "p"], ["o"], None), conv("o", "y"), p=pads)
    codes = own.codes([0, 2])
    assert codes.group_of[tensors["c"]] == codes.group_of[tensors["o"]]
    assert len({*codes.group_of.values()}) == 3
    names = {tensor: name for name, tensor in tensors.items()}
    ranges = {"x": (0, 1), "c": (-1, 1), "o": (-2, 0), "y": (0, 5)}
    scales = own.scales(codes, names, {k: ValueRange.of(*v) for k, v in ranges.items()})
    assert scales[tensors["c"]] == scales[tensors["o"]] == CodeScale.of(ValueRange(-2.0, 1.0))


def test_moves_before_the_first_layer_are_int8():
    pads = np.array([[0, 0], [1, 1], [1, 1], [0, 0]], np.int32)
    own, _ = graph(("PAD", ["x", "p"], ["o"], None), conv("o", "y"), p=pads)
    assert own.codes([1]).operators == {0, 1}
    # But nothing that computes.
    own, _ = graph(("RELU", ["x"], ["o"], None), conv("o", "y"))
    assert own.codes([1]).operators == {1}


def test_operator_with_a_scale_of_its_own_is_float_where_its_result_is_mixed():
    concat = ("CONCATENATION", ["s", "c"], ["o"], ("ConcatenationOptions", {"axis": 1}))
    own, _ = graph(conv("x", "c"), ("TANH", ["c"], ["s"], None), concat, conv("o", "y"))
    assert own.codes([0, 3]).operators == {0, 3}
    twice = ("CONCATENATION", ["s", "s"], ["o"], ("ConcatenationOptions", {"axis": 1}))
    own, tensors = graph(conv("x", "c"), ("TANH", ["c"], ["s"], None), twice, conv("o", "y"))
    codes = own.codes([0, 3])
    assert codes.operators == {0, 1, 2, 3}
    names = {tensor: name for name, tensor in tensors.items()}
    scales = own.scales(codes, names, dict.fromkeys("xcsoy", ValueRange(-1.0, 1.0)))
    assert scales[tensors["s"]] == scales[tensors["o"]] == CodeScale(1 / 128, 0)


def test_results_of_hard_swish_are_no_finer_than_its_kernel_takes():
    own, tensors = graph(conv("x", "c"), ("HARD_SWISH", ["c"], ["o"], None), conv("o", "y"))
    names = {tensor: name for name, tensor in tensors.items()}
    ranges = dict.fromkeys("xcy", ValueRange(-300.0, 0.0)) | {"o": ValueRange(-0.375, 0.0)}
    scales = own.scales(own.codes([0, 2]), names, ranges)
    assert scales[tensors["c"]].scale < 128 * scales[tensors["o"]].scale


def test_codes_are_the_nearest_and_saturate():
    scale = CodeScale.of(ValueRange(-1.0, 1.55))
    assert scale == CodeScale(pytest.approx(0.01), -28)
    codes = scale.codes(np.array([-1.0, 0.0, 0.0149, 1.55, 9.0], np.float32))
    assert codes.dtype == np.int8 and codes.tolist() == [-128, -28, -27, 127, 127]


def test_layers_of_one_constant_stay_float():
    # The image of this convolution is computed from constants, and folded.
    pads = np.array([[0, 0], [0, 0], [0, 0], [0, 0]], np.int32)
    image = weights(3, 1, 4, 4, 8, inner=1)
    add = ("ADD", ["x", "c"], ["y"], ("AddOptions", {}))
    data = network(
        [1, 4, 4, 8],
        [("PAD", ["k", "p"], ["o"], None), conv("o", "c"), add],
        {**LAYERS, "p": pads, "k": image},
    )
    assert TfliteRewriter(data, "main").layers == []


def test_table_says_what_the_kernels_ask_for():
    table = int8_operators()
    assert table["SOFTMAX"].fixed == table["LOGISTIC"].fixed == CodeScale(1 / 256, -128)
    assert table["PAD"].same and not table["MEAN"].same
    assert [name for name, own in table.items() if own.dynamic is not None] == [
        *("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
    ]
