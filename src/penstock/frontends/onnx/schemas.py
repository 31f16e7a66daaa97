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
    VARIADIC,
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
    """One version of one operation.

    ``attributes`` are the ``AttributeProto`` types by name, ``mandatory`` the names without which a
    node is invalid, ``defaults`` the values of those that have one (``default_protos`` as they
    stand in the schema). ``inputs`` and ``outputs`` are the least and the greatest number of them.
    ``required`` inputs are the positions that may not be left out, nor may any from position
    ``variadic`` on.
    """

    name: str
    domain: str
    version: int
    attributes: Mapping[str, int]
    mandatory: tuple[str, ...]
    defaults: Mapping[str, Any]
    default_protos: Mapping[str, AttributeProto]
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    required: tuple[int, ...]
    variadic: int
    names: tuple[str, ...]
    record: SchemaRecord

    @property
    def function(self) -> onnx.FunctionProto | None:
        """The body that defines the operation, if there is one."""
        return self.record.function

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
        for name in self.mandatory:
            if name not in types:
                yield f"lacks attribute {name!r}, which {self} requires"
        for role, count, (least, most) in (
            ("inputs", len(inputs), self.inputs),
            ("outputs", outputs, self.outputs),
        ):
            if not least <= count <= most:
                allowed = f"{least}" if least == most else f"{least} to {most}"
                if most > 2**30:
                    allowed = f"at least {least}"
                yield f"has {count} {role}, but {self} has {allowed}"
        count = min(len(inputs), self.inputs[1])
        for i in (*self.required, *range(self.variadic, count)):
            if i < count and inputs[i] is None:
                name = self.names[min(i, len(self.names) - 1)]
                yield f"leaves out input {i} ({name}), which {self} requires"

    def __str__(self) -> str:
        return f"{self.domain + '.' if self.domain else ''}{self.name}-{self.version}"


@lru_cache(maxsize=4096)
def find_schema(name: str, domain: str, opset: int) -> OnnxSchema | None:
    """The schema that ``name`` has in an opset of its domain."""
    if not 0 < opset < 2**31:  # other numbers are a TypeError of the onnx package
        return None
    record = schema_record(name, domain, opset)
    if record is None:
        return None
    return _schema(name, domain, record.version) if record.version != opset else _read(record)


@lru_cache(maxsize=4096)
def _schema(name: str, domain: str, version: int) -> OnnxSchema:
    record = schema_record(name, domain, version)
    assert record is not None
    return _read(record)


def _read(record: SchemaRecord) -> OnnxSchema:
    protos = {name: default_of(a) for name, a in record.attributes.items() if a.default}
    last = record.inputs[-1] if record.inputs else None
    # A list of inputs: none of them may be left out.
    variadic = last is not None and last.option == VARIADIC
    return OnnxSchema(
        name=record.name,
        domain=record.domain,
        version=record.version,
        attributes={name: a.type for name, a in record.attributes.items()},
        mandatory=tuple(
            name for name, a in record.attributes.items() if a.required and name not in LEGACY
        ),
        defaults={name: _value(proto) for name, proto in protos.items()},
        default_protos=protos,
        inputs=(record.min_input, record.max_input),
        outputs=(record.min_output, record.max_output),
        required=tuple(i for i, port in enumerate(record.inputs) if port.option == 0),
        variadic=len(record.inputs) - 1 if variadic else record.max_input,
        names=tuple(port.name for port in record.inputs),
        record=record,
    )


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
