"""Write ``schemas.txt`` for the installed onnx package: ``python -m tools.onnx_schemas``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import onnx

from penstock.analysis.schemas import FILE, OnnxSchema, SchemaAttribute, SchemaPort


def schema_of(schema: onnx.defs.OpSchema) -> OnnxSchema:
    """A schema of the package as the table has it."""

    def ports(formals: Sequence[Any]) -> list[SchemaPort]:
        return [
            SchemaPort(
                f.name, f.type_str, int(f.option.value), f.is_homogeneous, frozenset(f.types)
            )
            for f in formals
        ]

    return OnnxSchema(
        schema.name,
        schema.domain,
        schema.since_version,
        schema.min_input,
        schema.max_input,
        schema.min_output,
        schema.max_output,
        {
            name: SchemaAttribute(
                int(a.type.value), a.required, a.default_value.SerializeToString().hex()
            )
            for name, a in schema.attributes.items()
        },
        ports(schema.inputs),
        ports(schema.outputs),
    )


def text() -> str:
    """The table: last opsets by domain, the sets of types, and a line for each operation."""
    schemas = sorted(
        map(schema_of, onnx.defs.get_all_schemas_with_history()),
        key=lambda s: (s.domain, s.name, -s.version),
    )
    sets: dict[frozenset[str], int] = {}

    def row(schema: OnnxSchema) -> list[object]:
        ports = [
            [[*port[:4], sets.setdefault(port.types, len(sets))] for port in side]
            for side in (schema.inputs, schema.outputs)
        ]
        _, _, *numbers, _, _ = vars(schema).values()
        return [*numbers, *ports]

    lines = [
        f"{domain} {name} {json.dumps([row(s) for s in group], separators=(',', ':'))}"
        for (domain, name), group in groupby(schemas, key=lambda s: (s.domain, s.name))
    ]
    newest: dict[str, int] = {}
    versions = [(schema.domain, schema.version) for schema in schemas]
    for domain, version in [*onnx.helper.OP_SET_ID_VERSION_MAP, *versions]:
        newest[domain or "ai.onnx"] = max(newest.get(domain or "ai.onnx", 0), version)
    return "\n".join([json.dumps(newest), json.dumps([sorted(s) for s in sets]), *lines, ""])


if __name__ == "__main__":
    Path(FILE).write_text(text(), "ascii")
