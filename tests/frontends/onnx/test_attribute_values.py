"""Attributes with a closed set of values."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidModel
from tests.support.onnx_text import compile_text

EXECUTORS = ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]

_LOSS = "g (float[2, 3] x, int64[2] t) => (float[A] y) { y = SoftmaxCrossEntropyLoss<%s>(x, t) }"
_UNARY = "g (float[2, 3] x) => (float[A] y) { y = %s(x) }"


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "text",
    [
        _UNARY % "ReduceSum<keepdims = 5>",
        _UNARY % "ReduceSum<keepdims = -1>",
        _UNARY % "ArgMax<select_last_index = 7>",
        _UNARY % 'Gelu<approximate = "cubic">',
        _UNARY % "IsInf<detect_negative = 2>",
        "g (float[2, 3] x) => (float[A] y) { y = Gemm<transA = 3>(x, x) }",
        _LOSS % 'reduction = ""',
        _LOSS % 'reduction = "median"',
        """g (float[1, 2, 4] x, float[2, 1] c, int64[1, 2] p) => (float[A] y) {
            y = RotaryEmbedding<interleaved = 11, num_heads = 2>(x, c, c, p) }""",
        'g (uint8[2] x) => (uint8[2] y) { y = BitShift<direction = "UP">(x, x) }',
        'g (float[1, 1, 4] x) => (float[A] y) { y = MaxPool<kernel_shape = [2], auto_pad = "S">(x) }',
    ],
)
def test_attribute_that_is_none_of_its_values_is_refused_by_every_executor(text, executor):
    with pytest.raises(InvalidModel, match=r"must be one of|which is none of"):
        compile_text(text, opset=23, executor=executor).explain()


@pytest.mark.parametrize("flag", [0, 1])
def test_flags_of_zero_and_one_are_taken(flag):
    compile_text(_UNARY % f"ReduceSum<keepdims = {flag}>")


def test_empty_auto_pad_means_none():
    compile_text(
        'g (float[1, 1, 4] x) => (float[A] y) { y = MaxPool<kernel_shape = [2], auto_pad = "">(x) }'
    )
