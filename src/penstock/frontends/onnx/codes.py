"""The numbers by which ONNX's files name kinds of attributes and types of elements, which are fixed
for ever. They are written out, since protobuf, which has them too, takes as long to import as a
saved session takes to open."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class AttributeKind(IntEnum):
    """Kinds of attributes (``AttributeProto.AttributeType``)."""

    FLOAT = 1
    INT = 2
    STRING = 3
    TENSOR = 4
    GRAPH = 5
    FLOATS = 6
    INTS = 7
    STRINGS = 8
    TENSORS = 9
    GRAPHS = 10
    SPARSE_TENSOR = 11
    SPARSE_TENSORS = 12
    TYPE_PROTO = 13
    TYPE_PROTOS = 14


_ELEMENTS = (
    *("UNDEFINED", "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "STRING"),
    *("BOOL", "FLOAT16", "DOUBLE", "UINT32", "UINT64", "COMPLEX64", "COMPLEX128", "BFLOAT16"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "UINT4", "INT4"),
    *("FLOAT4E2M1", "FLOAT8E8M0", "UINT2", "INT2", "FLOAT6E2M3", "FLOAT6E3M2"),
)
ELEMENT_TYPES: Mapping[str, int] = {name: code for code, name in enumerate(_ELEMENTS)}
"""Codes of element types by their names in upper case."""

# The names of dtypes that are not those of element types in lower case.
_NAMES = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT4E2M1": "float4_e2m1fn",
    "FLOAT6E2M3": "float6_e2m3fn",
    "FLOAT6E3M2": "float6_e3m2fn",
    "FLOAT8E8M0": "float8_e8m0fnu",
}
DTYPE_NAMES: Mapping[int, str] = {
    code: _NAMES.get(name) or name.lower().replace("float8", "float8_")
    for name, code in ELEMENT_TYPES.items()
    if code
}
"""Names of dtypes by codes of element types."""
