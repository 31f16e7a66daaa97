"""ONNX's schemas of operations: looked up once and kept, checked against nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import onnx
from onnx import AttributeProto

from penstock.frontends.common.encoding import decode_text
from penstock.frontends.onnx.schema_table import (
    OPTIONAL,
    SchemaRecord,
    default_of,
    newest_versions,
    schema_record,
)

# Attributes that operations of the first versions may have, and that have no meaning.
LEGACY = frozenset({"consumed_inputs"})

TYPE_NAMES: Mapping[int, str] = {
    code: name for name, code in AttributeProto.AttributeType.items() if code
}


@dataclass(frozen=True, slots=True, eq=False)
class OnnxSchema:
    """One version of one operation, from the package's ``record``.

    ``attributes`` are the ``AttributeProto`` types by name, ``defaults`` the values of those that
    have one (``default_protos`` as they stand in the schema).
    """

    record: SchemaRecord
    attributes: Mapping[str, int]
    defaults: Mapping[str, Any]
    default_protos: Mapping[str, AttributeProto]

    def faults(
        self, types: Mapping[str, int], inputs: Sequence[Any], outputs: int
    ) -> Iterator[str]:
        """What is wrong with a node that has these attributes (their types by name) and values, as
        ends of sentences that begin with the node."""
        for name, code in types.items():
            wanted = self.attributes.get(name)
            if wanted is None:
                if name not in LEGACY and not name.startswith("_"):
                    yield f"has an attribute {name!r}, which {self} does not have"
            elif wanted != code:
                names = f"{TYPE_NAMES.get(code, code)}, not {TYPE_NAMES[wanted]}"
                yield f"has an attribute {name!r} that is of kind {names}"
        record = self.record
        for name, attribute in record.attributes.items():
            if attribute.required and name not in types and name not in LEGACY:
                yield f"lacks attribute {name!r}, which {self} requires"
        for role, count, least, most in (
            ("inputs", len(inputs), record.min_input, record.max_input),
            ("outputs", outputs, record.min_output, record.max_output),
        ):
            if not least <= count <= most:
                allowed = f"{least}" if least == most else f"{least} to {most}"
                if most > 2**30:
                    allowed = f"at least {least}"
                yield f"has {count} {role}, but {self} has {allowed}"
        for i, value in enumerate(inputs[: record.max_input]):
            if value is None:
                port = record.inputs[min(i, len(record.inputs) - 1)]
                if port.option != OPTIONAL:
                    yield f"leaves out input {i} ({port.name}), which {self} requires"

    def __str__(self) -> str:
        domain, name = self.record.domain, self.record.name
        return f"{domain + '.' if domain else ''}{name}-{self.record.version}"


@lru_cache(maxsize=4096)
def find_schema(name: str, domain: str, opset: int) -> OnnxSchema | None:
    """The schema that ``name`` has in an opset of its domain."""
    if not 0 < opset < 2**31:  # other numbers are a TypeError of the onnx package
        return None
    record = schema_record(name, domain, opset)
    if record is None or record.version != opset:  # opsets share the schema of the version
        return None if record is None else find_schema(name, domain, record.version)
    attributes = record.attributes
    protos = {key: default_of(a) for key, a in attributes.items() if a.default}
    defaults = {key: _value(proto) for key, proto in protos.items()}
    return OnnxSchema(record, {key: a.type for key, a in attributes.items()}, defaults, protos)


def _value(proto: AttributeProto) -> Any:
    """A default: a number, a string, or a list of these."""
    value = onnx.helper.get_attribute_value(proto)
    if isinstance(value, bytes):
        return decode_text(value)
    if isinstance(value, int | float):
        return value
    return [decode_text(item) if isinstance(item, bytes) else item for item in value]


def newest_opset(domain: str) -> int:
    """The last opset of a domain in the onnx package; 0 for other domains."""
    if not domain:
        return int(onnx.defs.onnx_opset_version())
    return _newest().get(domain, 0)


@cache
def _newest() -> Mapping[str, int]:
    """By domain. Looking at all schemas takes 10 ms, which ONNX's own domain does not need."""
    newest = dict(newest_versions())
    for domain, version in onnx.helper.OP_SET_ID_VERSION_MAP:
        newest[domain] = max(newest.get(domain, 0), version)
    return newest
