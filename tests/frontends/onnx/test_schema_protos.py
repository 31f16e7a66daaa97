"""Defaults and definitions of operations are those of the onnx package."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from penstock.analysis.schemas import find_schema
from penstock.frontends.common.diagnostics import InexpressibleError
from penstock.frontends.onnx.schema_protos import default_protos, defaults, definition

ALL = onnx.defs.get_all_schemas_with_history()


def test_defaults_are_those_of_the_package():
    for schema in ALL:
        own = find_schema(schema.name, schema.domain, schema.since_version)
        wanted = {key: a.default_value for key, a in schema.attributes.items()}
        wanted = {key: proto for key, proto in wanted.items() if proto.type}
        protos = {key: proto.SerializeToString() for key, proto in default_protos(own).items()}
        assert protos == {key: proto.SerializeToString() for key, proto in wanted.items()}
        values = {key: onnx.helper.get_attribute_value(proto) for key, proto in wanted.items()}
        for key, value in defaults(own).items():
            np.testing.assert_equal(value, _text(values[key]))


def _text(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode()
    return [_text(x) for x in value] if isinstance(value, list) else value


def test_definitions_are_those_of_the_package():
    defined = [schema for schema in ALL if schema.has_function]
    assert defined
    for schema in defined:
        own = find_schema(schema.name, schema.domain, schema.since_version)
        assert own.has_function
        assert definition(own) == schema.function_body


def test_older_package_is_told(monkeypatch):
    own = find_schema("Softmax", "", 13)

    def none(*arguments: object) -> None:
        raise onnx.defs.SchemaError("no such schema")

    monkeypatch.setattr(onnx.defs, "get_schema", none)
    with pytest.raises(InexpressibleError, match=r"is not in onnx .* install the newest version"):
        definition(own)
