"""Defaults of attributes are those of the onnx package."""

from __future__ import annotations

import numpy as np
import onnx

from penstock.analysis.schemas import find_schema
from penstock.frontends.onnx.schema_protos import default_protos, defaults

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
