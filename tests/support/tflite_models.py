"""TFLite files written from Python values, by the table of the schema.

A table is a dict, or a pair of the name of a union's table and a dict. ``model`` makes a file of
subgraphs that ``subgraph`` describes by arrays and names::

    model([subgraph({"x": FLOAT32[2]}, [("ABS", ["x"], ["y"], None)], ["y"])])
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.frontends.tflite.flatbuffer import TableField, schema

_CODES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float32 float64"
QUANTIZED_KINDS = dict(zip(_CODES.split(), "?bBhHiIqQfd", strict=True))
TYPES = [
    "float32",
    "float16",
    "int32",
    "uint8",
    "int64",
    "object",
    "bool",
    "int16",
    "complex64",
    "int8",
    "float64",
]
TYPES += ["complex128", "uint64", "resource"]
Operator = tuple[str, Sequence[str | None], Sequence[str], Any]


class _Writer:
    """Appends tables after what refers to them, and fills the offset in."""

    def __init__(self) -> None:
        self.data = bytearray(8)

    def align(self, size: int) -> int:
        self.data += bytes(-len(self.data) % size)
        return len(self.data)

    def point(self, at: int, target: int) -> None:
        struct.pack_into("<I", self.data, at, target - at)

    def table(self, kind: str, fields: Mapping[str, Any]) -> int:
        declared = schema().tables[kind]
        assert set(fields) <= set(declared), (kind, set(fields) - set(declared))
        slots = max((field.slot + 1 for field in declared.values()), default=0)
        vtable = self.align(8)
        self.data += bytes(4 + 2 * slots)
        at = self.align(8)
        self.data += struct.pack("<i", at - vtable) + bytes(4)
        pending = []
        for name, value in fields.items():
            field = declared[name]
            code = None if field.vector else QUANTIZED_KINDS.get(field.type)
            place = self.align(8)
            self.data += bytes(8)
            struct.pack_into("<H", self.data, vtable + 4 + 2 * field.slot, place - at)
            if code is None:
                pending.append((place, field, value))
            else:
                struct.pack_into(f"<{code}", self.data, place, value)
        size = len(self.data) - at
        struct.pack_into("<HH", self.data, vtable, 4 + 2 * slots, size)
        for place, field, value in pending:
            self.point(place, self.content(field, value))
        return at

    def content(self, field: TableField, value: Any) -> int:
        if field.type in schema().unions:
            return self.table(*value)
        if not field.vector:
            return (
                self.bytes(value.encode())
                if field.type == "text"
                else self.table(field.type, value)
            )
        if field.type == "uint8":
            return self.bytes(bytes(value))
        code = QUANTIZED_KINDS.get(field.type)
        if code is not None:
            return self.bytes(struct.pack(f"<{len(value)}{code}", *value), len(value))
        at = self.align(8)
        self.data += struct.pack("<I", len(value)) + bytes(4 * len(value))
        for i, element in enumerate(value):
            single = TableField(field.type, False, 0, 0)
            self.point(at + 4 + 4 * i, self.content(single, element))
        return at

    def bytes(self, data: bytes, count: int | None = None) -> int:
        """A vector, whose elements are aligned to 16 bytes."""
        self.data += bytes(-(len(self.data) + 4) % 16)
        at = len(self.data)
        self.data += struct.pack("<I", len(data) if count is None else count) + data + b"\0"
        return at


def serialized(fields: Mapping[str, Any], identifier: bytes = b"TFL3") -> bytes:
    """The file of a ``Model`` table."""
    writer = _Writer()
    writer.data[4:8] = identifier
    writer.point(0, writer.table("Model", fields))
    return bytes(writer.data)


def subgraph(
    inputs: Mapping[str, tuple[str, Sequence[int]]],
    operators: Sequence[Operator],
    outputs: Sequence[str],
    constants: Mapping[str, np.ndarray] | None = None,
    **tensors: Mapping[str, Any],
) -> dict[str, Any]:
    """A subgraph by names of tensors. ``inputs`` have dtypes and shapes, ``tensors`` fields of
    tensors, such as the type of an output, which is float32 unless it is given."""
    constants = constants or {}
    names = list(dict.fromkeys([*inputs, *constants]))
    for n in [*(n for _, read, written, _ in operators for n in (*read, *written)), *outputs]:
        names += [n] if n is not None and n not in names else []
    fields: dict[str, dict[str, Any]] = {name: {"name": name, "type": 0} for name in names}
    for name, (dtype, shape) in inputs.items():
        fields[name] |= {"type": TYPES.index(dtype), "shape": list(shape)}
    for name, array in constants.items():
        number = TYPES.index(array.dtype.name)
        fields[name] |= {"type": number, "shape": list(array.shape), "constant": array}
    for name, more in tensors.items():
        fields[name] |= more
    return {"names": names, "fields": fields, "operators": operators} | {
        "inputs": [names.index(name) for name in inputs],
        "outputs": [names.index(name) for name in outputs],
    }


def strings(array: np.ndarray) -> bytes:
    """The number of strings, the offset of each and of the end, then their bytes."""
    texts = [text.encode() for text in array.reshape(-1)]
    ends = np.cumsum([4 * (len(texts) + 2), *map(len, texts)])
    return struct.pack(f"<{len(texts) + 2}i", len(texts), *ends) + b"".join(texts)


def model(subgraphs: Sequence[dict[str, Any]], **more: Any) -> bytes:
    """The file of these subgraphs. The options of an operator are the table and its fields, the
    bytes of those of a custom operator, whose name begins with "CUSTOM:", or a dict with fields of
    the operator itself."""
    numbers = {name: number for number, name in schema().operators.items()}
    codes: list[str] = []
    buffers: list[dict[str, Any]] = [{}]
    tables = []
    for description in subgraphs:
        names = description["names"]
        for fields in description["fields"].values():
            constant = fields.pop("constant", None)
            if constant is not None:
                fields["buffer"] = len(buffers)
                data = strings(constant) if constant.dtype == object else constant.tobytes()
                buffers.append({"data": data})
        operators = []
        for op, read, written, options in description["operators"]:
            codes += [op] if op not in codes else []
            operator = {
                "opcode_index": codes.index(op),
                "inputs": [-1 if name is None else names.index(name) for name in read],
                "outputs": [names.index(name) for name in written],
            }
            if isinstance(options, bytes):
                operator["custom_options"] = options
            elif isinstance(options, dict):
                operator |= options
            elif options is not None:
                field = "builtin_options"
                union = {kind: i for i, kind in schema().unions["BuiltinOptions"].items()}
                if options[0] not in union:
                    field = "builtin_options2"
                    union = {kind: i for i, kind in schema().unions["BuiltinOptions2"].items()}
                operator |= {f"{field}_type": union[options[0]], field: options}
            operators.append(operator)
        tables.append(
            {
                "tensors": list(description["fields"].values()),
                "inputs": description["inputs"],
                "outputs": description["outputs"],
                "operators": operators,
                "name": description.get("name", ""),
            }
        )
    entries = [
        {"builtin_code": numbers["CUSTOM"], "deprecated_builtin_code": numbers["CUSTOM"]}
        | {"custom_code": op.removeprefix("CUSTOM:"), "version": 1}
        if op.startswith("CUSTOM:")
        else {"builtin_code": numbers[op], "deprecated_builtin_code": min(numbers[op], 127)}
        | {"version": more.get("versions", {}).get(op, 1)}
        for op in codes
    ]
    more.pop("versions", None)
    fields = {"version": 3, "operator_codes": entries, "subgraphs": tables, "buffers": buffers}
    return serialized({**fields, **more})
