"""Messages that ONNX's schemas hold: defaults of attributes, and definitions as functions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from penstock.analysis.schemas import AttributeKind, OnnxSchema
from penstock.frontends.common.diagnostics import InexpressibleError
from penstock.frontends.common.encoding import decode_text
from penstock.frontends.onnx.messages import AttributeProto, FunctionProto
from penstock.ir.op import Attrs

_FIELDS: Mapping[int, str] = {
    AttributeKind.INT: "i",
    AttributeKind.FLOAT: "f",
    AttributeKind.STRING: "s",
    AttributeKind.INTS: "ints",
    AttributeKind.FLOATS: "floats",
    AttributeKind.STRINGS: "strings",
}


def definition(schema: OnnxSchema) -> FunctionProto:
    """The body that defines an operation (``has_function``), which only the onnx package has.
    Raises ``InexpressibleError`` if the package is older than the operation."""
    import onnx

    try:
        found = onnx.defs.get_schema(schema.name, schema.version, schema.domain)
    except onnx.defs.SchemaError:
        found = None
    if found is None or found.since_version != schema.version:
        raise InexpressibleError(
            f"its definition is not in onnx {onnx.__version__}, which is installed; install "
            "the newest version that Penstock takes"
        )
    return found.function_body


@cache
def default_protos(schema: OnnxSchema) -> Mapping[str, AttributeProto]:
    """The defaults of the attributes that have one, as they stand in the schema."""
    digits = {key: a.default for key, a in schema.attributes.items() if a.default}
    return {key: AttributeProto.FromString(bytes.fromhex(x)) for key, x in digits.items()}


@cache
def defaults(schema: OnnxSchema) -> Attrs:
    """The values of the ``default_protos``."""
    return {key: _value(proto) for key, proto in default_protos(schema).items()}


def _value(proto: AttributeProto) -> Any:
    """A default: a number, a string, or a list of these."""
    value = getattr(proto, _FIELDS[proto.type])
    if isinstance(value, bytes):
        return decode_text(value)
    if isinstance(value, int | float):
        return value
    return [decode_text(item) if isinstance(item, bytes) else item for item in value]
