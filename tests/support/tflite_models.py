"""TFLite files written from Python values, as ``serialized`` takes them. ``model`` makes a file of
subgraphs that ``subgraph`` describes by arrays and names::

    model([subgraph({"x": FLOAT32[2]}, [("ABS", ["x"], ["y"], None)], ["y"])])
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.frontends.tflite.flatbuffer import schema
from penstock.frontends.tflite.writer import serialized

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
