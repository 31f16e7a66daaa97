"""Defaults of attributes, which ONNX's schemas store as messages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from penstock.analysis.schemas import AttributeKind, OnnxSchema
from penstock.frontends.common.encoding import decode_text
from penstock.frontends.onnx.messages import AttributeProto
from penstock.ir.op import Attrs

_FIELDS: Mapping[int, str] = {
    AttributeKind.INT: "i",
    AttributeKind.FLOAT: "f",
    AttributeKind.STRING: "s",
    AttributeKind.INTS: "ints",
    AttributeKind.FLOATS: "floats",
    AttributeKind.STRINGS: "strings",
}


@cache
def default_protos(schema: OnnxSchema) -> Mapping[str, AttributeProto]:
    """Return the defaults of the attributes that have one, as they are in the schema."""
    digits = {key: a.default for key, a in schema.attributes.items() if a.default}
    return {key: AttributeProto.FromString(bytes.fromhex(x)) for key, x in digits.items()}


@cache
def defaults(schema: OnnxSchema) -> Attrs:
    """Return the values of the ``default_protos``."""
    return {key: _value(proto) for key, proto in default_protos(schema).items()}


def _value(proto: AttributeProto) -> Any:
    """Return a default: a number, a string, or a list of these."""
    value = getattr(proto, _FIELDS[proto.type])
    if isinstance(value, bytes):
        return decode_text(value)
    if isinstance(value, int | float):
        return value
    return [decode_text(item) if isinstance(item, bytes) else item for item in value]
