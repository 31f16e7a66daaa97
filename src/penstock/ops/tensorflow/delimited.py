"""Records of delimited fields: lines of CSV files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.core.types import STRING, ShapeError, TensorType, Type, find_dtype
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.onnx.text import strings
from penstock.ops.registry import Prepared
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.text import array_operator, parsed_number, texts

_QUOTE = '"'
_OPTIONS: Prepared = {"options": lambda node: dict(node.attrs)}


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = rules.tensor(types, 0).shape
    return [TensorType(find_dtype(name), shape) for name in attrs["OUT_TYPE"]]


@array_operator("DecodeCSV", infer=_infer, prepared=_OPTIONS)
def decode_csv(records: np.ndarray, *defaults: np.ndarray, options: Attrs) -> common.Outputs:
    """A tensor of the shape of the records for each field. A missing one has its default, unless
    that is empty."""
    dtypes = [find_dtype(name) for name in options["OUT_TYPE"]]
    for default in defaults:
        if default.ndim > 1 or default.size > 1:
            raise ShapeError(f"a default is at most one value, not one of shape {default.shape}")
    columns: list[list[str | int | float]] = [[] for _ in dtypes]
    for number, record in enumerate(texts(records)):
        fields = _chosen(record, options)
        if len(fields) != len(dtypes):
            raise ShapeError(
                f"record {number} has {len(fields)} fields, and {len(dtypes)} are wanted"
            )
        for i, (field, dtype) in enumerate(zip(fields, dtypes, strict=True)):
            if field in ("", options["na_value"]):
                if not defaults[i].size:
                    raise ShapeError(f"record {number} lacks field {i}, which has no default")
                columns[i].append(defaults[i].item())
            elif dtype is None or dtype == STRING:
                columns[i].append(field)
            else:
                columns[i].append(parsed_number(field, dtype))
    return common.outputs(
        [
            strings(column, records.shape)  # type: ignore[arg-type]
            if dtype == STRING
            else np.array(column, dtype).reshape(records.shape)
            for column, dtype in zip(columns, dtypes, strict=True)
        ]
    )


def _chosen(record: str, options: Attrs) -> list[str]:
    chosen = options["select_cols"]
    fields = list(_fields(record, options["field_delim"], options["use_quote_delim"]))
    return [fields[i] for i in chosen if i < len(fields)] if chosen else fields


def _fields(record: str, delimiter: str, quotes: bool) -> Iterator[str]:
    """Split a record. Line ends in front of a field are skipped; a quote in quotes is doubled."""
    at, end = 0, len(record)
    while at < end:
        if record[at] in "\r\n":
            at += 1
            continue
        if quotes and record[at] == _QUOTE:
            field, at = _quoted(record, at + 1, delimiter)
            yield field
            continue
        stop = record.find(delimiter, at)
        field = record[at : stop if stop >= 0 else end]
        if "\n" in field or "\r" in field or (quotes and _QUOTE in field):
            raise ShapeError(f"field {field!r:.100} has a quote or a line end, and is not quoted")
        yield field
        at += len(field) + 1
    if record.endswith(delimiter):
        yield ""


def _quoted(record: str, at: int, delimiter: str) -> tuple[str, int]:
    """The field whose contents begin at a place, and the place of the next field."""
    parts = []
    while True:
        stop = record.find(_QUOTE, at)
        if stop < 0:
            raise ShapeError(f"the quoted field {record[at:]!r:.100} has no end")
        parts.append(record[at:stop])
        after = record[stop + 1 : stop + 2]
        if after in ("", delimiter):
            return "".join(parts), stop + 2
        if after != _QUOTE:
            raise ShapeError(f"a quote in field {record[at:]!r:.100} is not doubled")
        parts.append(_QUOTE)
        at = stop + 2
