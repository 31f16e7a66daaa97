"""Schemas against the onnx package."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.analysis.schemas import FILE, find_schema
from penstock.core.errors import InvalidModel
from tests.support.onnx_text import compile_text
from tests.support.processes import end_of
from tools.onnx_schemas import schema_of, text

ALL = onnx.defs.get_all_schemas_with_history()


def test_table_is_that_of_the_package():
    assert Path(FILE).read_text("ascii") == text()


def test_every_version_of_every_operation_is_that_of_the_package():
    for schema in ALL:
        own = find_schema(schema.name, schema.domain, schema.since_version)
        assert own is not None
        assert astuple(own) == astuple(schema_of(schema))


@pytest.mark.parametrize("opset", [1, 6, 12, 13, 100])
def test_version_of_an_opset_is_the_newest_up_to_it(opset):
    for name, domain in {(schema.name, schema.domain) for schema in ALL}:
        versions = [s.since_version for s in ALL if (s.name, s.domain) == (name, domain)]
        wanted = max((v for v in versions if v <= opset), default=None)
        own = find_schema(name, domain, opset)
        assert (own and own.version) == wanted
    assert find_schema("NoSuch", "", opset) is None


def test_model_is_loaded_without_the_schemas_of_the_package():
    program = """
import onnx
refuse = lambda *arguments: 1 / 0
onnx.defs.get_schema = onnx.defs.get_all_schemas = onnx.defs.has = refuse
from tests.support.onnx_text import compile_text
print(*compile_text("g (float[2] x) => (float[2] y) { a = Relu (x) y = Add (a, x) }").outputs)
"""
    assert end_of(program) == "y: float32[2]\n"


# Attributes with a closed set of values.

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


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "node",
    [
        'CastLike<round_mode = "even">(x, x)',
        'Resize<mode = "sinc">(x, , one)',
        'Resize<coordinate_transformation_mode = "pixel">(x, , one)',
    ],
)
def test_attribute_of_a_node_without_effect_is_refused_by_every_executor(node, executor):
    text = f"g (float[2] x) => (float[2] y) {{ one = Constant<value_floats = [1.0]>() y = {node} }}"
    with pytest.raises(InvalidModel, match="which is none of"):
        compile_text(text, opset=24, executor=executor).explain()


@pytest.mark.parametrize(("flag", "shape"), [(0, ()), (1, (1, 1))])
def test_flags_of_zero_and_one_are_taken(flag, shape):
    y = "float" if flag == 0 else "float[1, 1]"
    session = compile_text(
        f"g (float[2, 3] x) => ({y} y) {{ y = ReduceSum<keepdims = {flag}>(x) }}"
    )
    assert session(np.ones((2, 3), np.float32)).shape == shape


def test_empty_auto_pad_means_none():
    session = compile_text(
        "g (float[1, 1, 4] x) => (float[1, 1, 3] y)"
        ' { y = MaxPool<kernel_shape = [2], auto_pad = "">(x) }'
    )
    assert session([[[1, 2, 4, 3]]]).tolist() == [[[2, 4, 4]]]
