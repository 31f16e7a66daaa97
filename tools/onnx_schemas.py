"""Write ``schemas.txt`` for the installed onnx package: ``python -m tools.onnx_schemas``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import onnx

from penstock.frontends.onnx.schema_table import FILE, SchemaAttribute, SchemaPort, SchemaRecord


def record_of(schema: onnx.defs.OpSchema) -> SchemaRecord:
    """The record of a schema of the package."""

    def ports(formals: Sequence[Any]) -> list[SchemaPort]:
        return [
            SchemaPort(
                f.name, f.type_str, int(f.option.value), f.is_homogeneous, frozenset(f.types)
            )
            for f in formals
        ]

    return SchemaRecord(
        schema.name,
        schema.domain,
        schema.since_version,
        schema.min_input,
        schema.max_input,
        schema.min_output,
        schema.max_output,
        schema.has_function,
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
    """The table: the sets of types, and a line for each operation."""
    records = sorted(
        map(record_of, onnx.defs.get_all_schemas_with_history()),
        key=lambda r: (r.domain, r.name, -r.version),
    )
    sets: dict[frozenset[str], int] = {}

    def row(record: SchemaRecord) -> list[object]:
        ports = [
            [[*port[:4], sets.setdefault(port.types, len(sets))] for port in side]
            for side in (record.inputs, record.outputs)
        ]
        return [*record[2:9], *ports]

    lines = [
        f"{domain} {name} {json.dumps([row(r) for r in group], separators=(',', ':'))}"
        for (domain, name), group in groupby(records, key=lambda r: (r.domain, r.name))
    ]
    return "\n".join([json.dumps([sorted(s) for s in sets]), *lines, ""])


if __name__ == "__main__":
    FILE.write_text(text(), "ascii")
