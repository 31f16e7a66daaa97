"""What ONNX says of its operations: the facts of their schemas, looked up once and kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import onnx
from onnx import AttributeProto

from penstock.frontends.onnx.tensors import text

# Attributes that every operation of the first versions may have and that never meant anything.
LEGACY = frozenset({"consumed_inputs"})

KINDS: Mapping[int, str] = {
    code: name for name, code in AttributeProto.AttributeType.items() if code
}


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """One version of one operation: its attributes by name, and how many values it takes and gives.

    ``required`` inputs are the positions that may not be left out, nor may any from position
    ``many`` on; ``attributes`` have an ``AttributeProto`` type each, ``defaults`` are the values of
    those that have one.
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
    many: int
    names: tuple[str, ...]
    function: onnx.FunctionProto | None

    def faults(
        self, given: Mapping[str, int], inputs: Sequence[Any], outputs: int
    ) -> Iterator[str]:
        """What is wrong with a node that has these attributes (their types by name) and values."""
        for name, kind in given.items():
            wanted = self.attributes.get(name)
            if wanted is None:
                if name not in LEGACY and not name.startswith("_"):
                    yield f"has an attribute {name!r}, which {self} does not have"
            elif wanted != kind:
                kinds = f"is of kind {KINDS.get(kind, kind)}, not {KINDS[wanted]}"
                yield f"has an attribute {name!r} that {kinds}"
        for name in self.mandatory:
            if name not in given:
                yield f"lacks attribute {name!r}, which {self} requires"
        for what, count, (least, most) in (
            ("inputs", len(inputs), self.inputs),
            ("outputs", outputs, self.outputs),
        ):
            if not least <= count <= most:
                allowed = f"{least}" if least == most else f"{least} to {most}"
                if most > 2**30:
                    allowed = f"at least {least}"
                yield f"has {count} {what}, but {self} has {allowed}"
        count = min(len(inputs), self.inputs[1])
        for i in (*self.required, *range(self.many, count)):
            if i < count and inputs[i] is None:
                name = self.names[min(i, len(self.names) - 1)]
                yield f"leaves out input {i} ({name}), which {self} requires"

    def __str__(self) -> str:
        return f"{self.domain + '.' if self.domain else ''}{self.name}-{self.version}"


@lru_cache(maxsize=4096)
def find_schema(name: str, domain: str, opset: int) -> Schema | None:
    """The schema that ``name`` has in an opset of its domain."""
    try:
        found = onnx.defs.get_schema(name, opset, domain)
    except onnx.defs.SchemaError:
        return None
    version = found.since_version
    return _schema(name, domain, version) if version != opset else _read(found)


@lru_cache(maxsize=4096)
def _schema(name: str, domain: str, version: int) -> Schema:
    return _read(onnx.defs.get_schema(name, version, domain))


def _read(found: onnx.defs.OpSchema) -> Schema:
    attributes = {name: int(a.type.value) for name, a in found.attributes.items()}
    protos = {
        name: a.default_value
        for name, a in found.attributes.items()
        if a.default_value.type != AttributeProto.UNDEFINED
    }
    options = onnx.defs.OpSchema.FormalParameterOption
    last = found.inputs[-1] if found.inputs else None
    # Several inputs of one type, of which there may be any number: each is a value.
    many = last is not None and last.option == options.Variadic and last.is_homogeneous
    return Schema(
        name=found.name,
        domain=found.domain,
        version=found.since_version,
        attributes=attributes,
        mandatory=tuple(
            name for name, a in found.attributes.items() if a.required and name not in LEGACY
        ),
        defaults={name: _value(proto) for name, proto in protos.items()},
        default_protos=protos,
        inputs=(found.min_input, found.max_input),
        outputs=(found.min_output, found.max_output),
        required=tuple(
            i for i, formal in enumerate(found.inputs) if formal.option == options.Single
        ),
        many=len(found.inputs) - 1 if many else found.max_input,
        names=tuple(formal.name for formal in found.inputs),
        function=found.function_body if found.has_function else None,
    )


def _value(proto: AttributeProto) -> Any:
    """A default: numbers, strings, and lists of them."""
    value = onnx.helper.get_attribute_value(proto)
    if isinstance(value, bytes):
        return text(value)
    if isinstance(value, int | float):
        return value
    return [text(item) if isinstance(item, bytes) else item for item in value]


def newest_opset(domain: str) -> int:
    """The last opset of a domain that the onnx package knows; 0 for a domain it does not know."""
    if not domain:
        return int(onnx.defs.onnx_opset_version())
    return _newest().get(domain, 0)


@cache
def _newest() -> Mapping[str, int]:
    """By domain; to look at all schemas takes 10 ms, which ONNX's own domain is spared."""
    newest: dict[str, int] = defaultdict(int)
    for domain, version in onnx.helper.OP_SET_ID_VERSION_MAP:
        newest[domain] = max(newest[domain], version)
    for schema in onnx.defs.get_all_schemas():
        newest[schema.domain] = max(newest[schema.domain], schema.since_version)
    return dict(newest)
