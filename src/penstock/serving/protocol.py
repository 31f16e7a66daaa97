"""The Open Inference Protocol, version 2: requests and responses with tensors as JSON or as bytes.

A body with binary tensors is a JSON object, whose length a header says, and the bytes of the
tensors behind it, in the order in which the object names them::

    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2],
                 "parameters": {"binary_data_size": 8}}]}<8 bytes>

Elements of BYTES are preceded by their number of bytes, in four bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from penstock.algorithms.records import dataclass, field
from penstock.errors import InvalidInput
from penstock.types import STRING, TensorType, Type

HEADER_LENGTH = "inference-header-content-length"
"""the header with the length of the JSON object, where bytes follow it"""

_DATATYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
    **{f"INT{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)},
    **{f"FP{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BYTES": STRING,
}
_NAMES = {dtype: name for name, dtype in _DATATYPES.items()}
_ITEM = struct.Struct("<I")
# Of lengths, and numbers of microseconds: Python refuses to read thousands.
_MOST_DIGITS = 20


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request: its id, the feeds, the outputs that it wants (None: all) and which of them as
    bytes, and the seconds that it gives the server, if it says so."""

    id: str
    feeds: Mapping[str, np.ndarray]
    fetches: Sequence[str] | None
    binary: Mapping[str, bool] = field(default_factory=dict)
    binary_by_default: bool = False
    timeout: float | None = None


def describe_port(name: str, type_: Type) -> dict[str, Any] | None:
    """The metadata of an input or output; None if the protocol has no type for it."""
    if not isinstance(type_, TensorType) or (type_.dtype or STRING) not in _NAMES:
        return None
    dims = [d if isinstance(d, int) else -1 for d in type_.shape or ()]
    return {"name": name, "datatype": _NAMES[type_.dtype or STRING], "shape": dims}


def decode_options(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a request about models, which may be left out. Raises ``InvalidInput``."""
    document = _document(body) if body else {}
    _parameters(document)
    return document


def _document(text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidInput("the body must be a JSON object")
    return document


def decode_request(body: bytes, header_length: str | None) -> InferenceRequest:
    """Read the body of a request. Raises ``InvalidInput``."""
    end = len(body)
    if header_length is not None:
        digits = len(header_length) if header_length.isdecimal() else 0
        if not 0 < digits <= _MOST_DIGITS or int(header_length) > len(body):
            raise InvalidInput(f"{HEADER_LENGTH} {header_length!r:.40} is no length in the body")
        end = int(header_length)
    document = _document(body[:end])
    feeds: dict[str, np.ndarray] = {}
    for entry in _objects(document, "inputs"):
        name, value, size = _tensor(entry, body, end)
        if name in feeds:
            raise InvalidInput(f"input {name!r} is given twice")
        feeds[name] = value
        end += size
    if end != len(body):
        raise InvalidInput(f"{len(body) - end} bytes follow the inputs, which none of them has")
    wanted = _objects(document, "outputs")
    parameters = _parameters(document)
    binary = {}
    for entry in wanted:
        if "classification" in _parameters(entry):
            raise InvalidInput("outputs are tensors: 'classification' is not supported")
        if "binary_data" in _parameters(entry):
            binary[_name(entry)] = bool(_parameters(entry)["binary_data"])
    return InferenceRequest(
        str(document.get("id", "")),
        feeds,
        [_name(entry) for entry in wanted] or None,
        binary,
        bool(parameters.get("binary_data_output", False)),
        _seconds(parameters.get("timeout")),
    )


def encode_response(
    request: InferenceRequest, model: str, version: str, outputs: Mapping[str, Any]
) -> tuple[bytes, int | None]:
    """The body of a response, and the length of its JSON object if bytes follow it."""
    entries, tails = [], []
    for name, value in outputs.items():
        if not isinstance(value, np.ndarray) or value.dtype not in _NAMES:
            kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise InvalidInput(f"output {name!r} is a {kind}, which the protocol has no type for")
        datatype = _NAMES[value.dtype]
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(value.shape)}
        if request.binary.get(name, request.binary_by_default):
            tails.append(_bytes(value))
            entry["parameters"] = {"binary_data_size": len(tails[-1])}
        else:
            entry["data"] = _elements(value)
        entries.append(entry)
    document: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": entries}
    if request.id:
        document["id"] = request.id
    text = json.dumps(document).encode()
    return b"".join([text, *tails]), len(text) if tails else None


# Requests.


def _objects(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = document.get(key) or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidInput(f"{key!r} must be a list of objects")
    return entries


def _parameters(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = entry.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidInput("'parameters' must be an object")
    return parameters


def _name(entry: Mapping[str, Any]) -> str:
    name = entry.get("name")
    if not isinstance(name, str):
        raise InvalidInput("an input or output has no name")
    return name


def _seconds(timeout: Any) -> float | None:
    """A timeout in microseconds as seconds; 0 stands for none."""
    if not timeout:
        return None
    if not _is_count(timeout) or timeout >= 10**_MOST_DIGITS:
        raise InvalidInput(f"timeout {timeout!r:.40} is no number of microseconds")
    return timeout / 1e6


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(entry: Mapping[str, Any], body: bytes, start: int) -> tuple[str, np.ndarray, int]:
    """The name and the value of an input, and how many bytes from ``start`` on it has."""
    name, shape, datatype = _name(entry), entry.get("shape"), entry.get("datatype")
    dtype = _DATATYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise InvalidInput(f"input {name!r} has datatype {datatype!r:.40}, which there is not")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise InvalidInput(f"input {name!r} has shape {shape!r:.40}; a list of sizes is needed")
    count = math.prod(shape)
    size = _parameters(entry).get("binary_data_size")
    if size is None:
        return name, _from_json(name, entry.get("data"), dtype, shape), 0
    if not _is_count(size) or start + size > len(body):
        raise InvalidInput(f"input {name!r} has {size!r:.40} bytes, more than there are")
    data = memoryview(body)[start : start + size]
    if dtype == STRING:
        return name, _strings(name, data, count).reshape(shape), size
    if size != count * dtype.itemsize:
        raise InvalidInput(f"input {name!r} of shape {shape} and {datatype} has {size} bytes")
    return name, np.frombuffer(data, dtype).reshape(shape), size


def _from_json(name: str, data: Any, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    if not isinstance(data, list):
        raise InvalidInput(f"input {name!r} has neither 'data', a list, nor bytes")
    elements = data
    while elements and isinstance(elements[0], list):  # nested rows are allowed, too
        if not all(isinstance(row, list) for row in elements):
            raise InvalidInput(f"input {name!r} has rows beside elements")
        elements = [element for row in elements for element in row]
    if len(elements) != math.prod(shape):
        raise InvalidInput(f"input {name!r} of shape {shape} has {len(elements)} elements")
    allowed = (str,) if dtype == STRING else (bool,) if dtype.kind == "b" else (int, float)
    wrong = next((x for x in elements if not isinstance(x, allowed)), None)
    if wrong is not None or (None in elements):
        raise InvalidInput(f"input {name!r} has an element {wrong!r:.40}, not of {dtype}")
    if dtype.kind in "iu" and any(isinstance(x, float) for x in elements):
        raise InvalidInput(f"input {name!r} of {dtype} has elements that are not whole numbers")
    try:
        with np.errstate(over="raise"):  # a number that ``dtype`` has only infinity for
            return np.array(elements, dtype).reshape(shape)
    except (OverflowError, ValueError, FloatingPointError) as error:
        raise InvalidInput(f"input {name!r}: {error}") from error


def _strings(name: str, data: memoryview, count: int) -> np.ndarray:
    texts: list[str] = []
    at = 0
    try:
        while at < len(data):
            (size,) = _ITEM.unpack_from(data, at)
            at += _ITEM.size + size
            if at > len(data):
                raise InvalidInput(f"input {name!r} has a string that ends beyond its bytes")
            texts.append(str(data[at - size : at], "utf-8"))
    except (struct.error, UnicodeDecodeError) as error:
        raise InvalidInput(f"input {name!r} has no strings in UTF-8: {error}") from error
    if len(texts) != count:
        raise InvalidInput(f"input {name!r} has {len(texts)} strings, not {count}")
    return np.array(texts, object)


# Responses.


def _elements(value: np.ndarray) -> list[Any]:
    """The elements in a row, as Python's JSON has them: NaN and infinities by their names."""
    flat = value.reshape(-1)
    if value.dtype == STRING:
        return [x.decode(errors="replace") if isinstance(x, bytes) else str(x) for x in flat]
    elements: list[Any] = flat.astype(np.float64).tolist() if _is_float(value) else flat.tolist()
    return elements


def _is_float(value: np.ndarray) -> bool:
    return value.dtype.kind not in "biu"


def _bytes(value: np.ndarray) -> bytes:
    if value.dtype != STRING:
        return value.tobytes()
    parts = [x if isinstance(x, bytes) else str(x).encode() for x in value.reshape(-1)]
    return b"".join([_ITEM.pack(len(part)) + part for part in parts])
