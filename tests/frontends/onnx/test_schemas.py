"""Schemas against the onnx package."""

from __future__ import annotations

from dataclasses import astuple

import onnx
import pytest

from penstock.frontends.onnx.schemas import FILE, find_schema
from tests.support.processes import end_of
from tools.onnx_schemas import schema_of, text

ALL = onnx.defs.get_all_schemas_with_history()


def test_table_is_that_of_the_package():
    assert FILE.read_text("ascii") == text()


def test_every_version_of_every_operation_is_that_of_the_package():
    for schema in ALL:
        own = find_schema(schema.name, schema.domain, schema.since_version)
        assert own is not None
        assert astuple(own) == astuple(schema_of(schema))
        body = schema.function_body if schema.has_function else None
        assert own.function == body


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
