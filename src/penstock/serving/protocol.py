"""The Open Inference Protocol, version 2: requests and responses with tensors as JSON or as bytes.

A body with binary tensors is a JSON object, with its length in a header, followed by the bytes of
the tensors in the order of the object::

    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2],
                 "parameters": {"binary_data_size": 8}}]}<8 bytes>

Elements of BYTES are preceded by their number of bytes, in four bytes. Tensors may also be in
shared memory, at an offset given in their parameters (``serving/shared_memory.py``).

JSON has no NaN or infinite numbers: they are the strings "NaN", "Infinity" and "-Infinity", as in
the JSON of Protocol Buffers.
"""

from __future__ import annotations

import json
import math
import re
import struct
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from penstock.core.errors import InvalidInput
from penstock.core.records import dataclass, field
from penstock.core.types import STRING, JsonObject, NamedValues, RunValue, TensorType, Type
from penstock.serving.long_json import LongData, loads, read_document
from penstock.serving.shared_memory import SharedMemory, SharedPlace

HEADER_LENGTH = "inference-header-content-length"
"""the header with the length of the JSON object, if binary data follows"""
HEADER_PRIORITY = "priority"
HEADER_TIMING = "server-timing"
_URGENCY = re.compile(r"(?:^|,)\s*u=([0-7])\s*(?:,|;|$)")

SHARED_MEMORY_OFF = "shared memory is not enabled: use penstock serve --shared-memory"

_DATATYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
    **{f"INT{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)},
    **{f"FP{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BYTES": STRING,
}
_NAMES = {dtype: name for name, dtype in _DATATYPES.items()}
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_ITEM = struct.Struct("<I")
# Maximum digits of lengths and of microseconds: Python refuses to parse thousands of digits.
_MOST_DIGITS = 20
# Largest dim, and most dims: the product of a shape is then an integer of at most a few hundred
# bytes. Python multiplies longer ones in one call that blocks other threads.
_LARGEST_DIM, _MOST_DIMS = 2**62, 64
# Most bytes of JSON parsed in one call, for requests about models, and most elements read or
# written in one call, which holds Python's interpreter lock.
_MOST_AT_ONCE, _MOST_OPTIONS, _PIECE = 1 << 18, 1 << 16, 1 << 14
# Sequence ids: most characters, as in Triton, and the bound of integers.
_LONGEST_ID, _IDS = 128, 2**64
# Number of cached JSON objects, and their most bytes.
_MOST_REMEMBERED, _REMEMBERED = 64, 1 << 12


@dataclass(frozen=True, slots=True)
class SequenceControl:
    """The place of a request in its sequence: the sequence's id, whether the request is the first
    or the last one, and for how many of the last rows outputs are ``wanted`` (None: all)."""

    id: int | str
    start: bool = False
    end: bool = False
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request: its id, feeds, requested outputs (None: all) and whether each is sent as bytes,
    timeout in seconds if any, places of outputs in shared memory, and sequence."""

    id: str
    feeds: Mapping[str, np.ndarray]
    fetches: Sequence[str] | None
    binary: Mapping[str, bool] = field(default_factory=dict)
    binary_by_default: bool = False
    timeout: float | None = None
    places: Mapping[str, SharedPlace] = field(default_factory=dict)
    sequence: SequenceControl | None = None


@dataclass(frozen=True, slots=True)
class _Input:
    """An input as described in the JSON object. Its elements are ``data`` (a list or ``LongData``),
    the next ``size`` bytes, or in shared memory if ``parameters`` are given."""

    name: str
    shape: list[int]
    dtype: np.dtype
    data: Any
    size: int | None
    parameters: JsonObject | None


@dataclass(frozen=True, slots=True)
class _Header:
    """The JSON object of a request. ``places``: the places of outputs in shared memory."""

    id: str
    inputs: tuple[_Input, ...]
    fetches: tuple[str, ...] | None
    binary: Mapping[str, bool]
    binary_by_default: bool
    timeout: float | None
    places: tuple[tuple[str, JsonObject], ...]
    sequence: SequenceControl | None


def describe_port(name: str, type_: Type) -> JsonObject | None:
    """Return the metadata of an input or output; None if the protocol has no datatype for it."""
    if not isinstance(type_, TensorType) or (type_.dtype or STRING) not in _NAMES:
        return None
    dims = [d if isinstance(d, int) else -1 for d in type_.shape or ()]
    return {"name": name, "datatype": _NAMES[type_.dtype or STRING], "shape": dims}


def datatype_of(dtype: np.dtype) -> str:
    """Return the protocol's name of a dtype, or NumPy's name if the protocol has none."""
    return _NAMES.get(dtype, dtype.name)


def datatypes() -> list[str]:
    """Return the protocol's names of dtypes."""
    return [*_DATATYPES]


def element_bytes(datatype: str) -> int:
    """Return the bytes of an element, or of the length prefix of a string."""
    dtype = _DATATYPES[datatype]
    return _ITEM.size if dtype == STRING else dtype.itemsize


def decode_options(body: bytes) -> JsonObject:
    """Parse the optional JSON object of a request about models. Raises ``InvalidInput``."""
    if len(body) > _MOST_OPTIONS:
        raise InvalidInput(f"a request to load or unload must have at most {_MOST_OPTIONS} bytes")
    document = _document(body) if body else {}
    _parameters(document)
    return document


def _document(text: bytes) -> JsonObject:
    document = loads(text) if len(text) <= _MOST_AT_ONCE else read_document(text)
    if not isinstance(document, dict):
        raise InvalidInput("the body must be a JSON object")
    return document


def priority_of(header: str | None) -> int | None:
    """Return the priority in a header by RFC 9218, whose urgency is from 0 (the highest) to 7, and
    3 for priority 0. None if the header has no priority."""
    found = None if header is None else _URGENCY.search(header)
    return None if found is None else 3 - int(found[1])


def timing(queue: float, run: float) -> str:
    """Return the header Server-Timing for the seconds of a request."""
    return f"queue;dur={1e3 * queue:.3f}, run;dur={1e3 * run:.3f}"


def json_bytes(body: bytes | memoryview, header_length: str | None) -> int:
    """Return the size of the JSON object at the start of a body. Raises ``InvalidInput``."""
    if header_length is None:
        return len(body)
    digits = len(header_length) if header_length.isdecimal() else 0
    if not 0 < digits <= _MOST_DIGITS or int(header_length) > len(body):
        raise InvalidInput(
            f"{HEADER_LENGTH} {header_length!r:.40} must be a number of bytes within the body"
        )
    return int(header_length)


def decode_request(
    body: bytes | memoryview, header_length: str | None, shared: SharedMemory | None = None
) -> InferenceRequest:
    """Read the body of a request; feeds may be views of it. Raises ``InvalidInput``, also for
    tensors in shared memory if the server does not support it."""
    end = json_bytes(body, header_length)
    text = bytes(body[:end])
    header = _header_again(text) if end <= _REMEMBERED else _header(text)
    feeds: dict[str, np.ndarray] = {}
    # Their size is independent of the body's, whose limit does not bound them.
    left = 0 if shared is None else shared.max_bytes
    for of in header.inputs:
        if of.parameters is not None:
            place = _place(of.parameters, shared)
            if place.size > left:
                raise InvalidInput("inputs in shared memory exceed the maximum size of a request")
            left -= place.size
            value = _shared_tensor(of, place)
        elif of.size is None:
            value = _from_json(of.name, of.data, of.dtype, of.shape)
        else:
            if end + of.size > len(body):
                raise _too_few(of.name, of.size)
            data = memoryview(body)[end : end + of.size]
            value = _from_bytes(of.name, data, of.dtype, of.shape)
            end += of.size
        feeds[of.name] = value
    if end != len(body):
        raise InvalidInput(f"{len(body) - end} bytes of the body belong to none of the inputs")
    return InferenceRequest(
        header.id,
        feeds,
        header.fetches,
        header.binary,
        header.binary_by_default,
        header.timeout,
        {name: _place(parameters, shared) for name, parameters in header.places},
        header.sequence,
    )


def encode_response(
    request: InferenceRequest, model: str, version: str, outputs: NamedValues
) -> tuple[list[bytes | memoryview], int | None]:
    """Return the body of a response in parts, which may be views of outputs, and the length of its
    JSON object if bytes follow it. Writes outputs to shared memory if requested. Raises
    ``InvalidInput`` for outputs that do not fit, or have no type in the protocol."""
    texts: list[str] = []
    tails: list[bytes | memoryview] = []
    named = {"model_name": model, "model_version": version}
    if request.id:
        named["id"] = request.id
    before = f'{json.dumps(named)[:-1]}, "outputs": ['
    for name, value in outputs.items():
        if not isinstance(value, np.ndarray) or value.dtype not in _NAMES:
            kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise InvalidInput(
                f"output {name!r} is a {kind}, for which the protocol has no datatype"
            )
        datatype = _NAMES[value.dtype]
        texts.append(before)
        if (place := request.places.get(name)) is not None:
            parameters = place.parameters(place.write(_bytes(value)))
            texts.append(_entry(name, datatype, value.shape, parameters=parameters))
        elif request.binary.get(name, request.binary_by_default):
            tails.append(_bytes(value))
            texts.append(_entry_of_bytes(name, datatype, value.shape, len(tails[-1])))
        else:
            texts += [_entry(name, datatype, value.shape)[:-1], ', "data": [']
            texts += _texts(value.reshape(-1)) if value.dtype == STRING else _numbers(value)
            texts.append("]}")
        before = ", "
    texts.append("]}" if outputs else before + "]}")
    parts = _joined(texts)
    return [*parts, *tails], sum(map(len, parts)) if tails else None


def _joined(texts: Sequence[str]) -> list[bytes]:
    """Yield texts as bytes, joined to pieces, since a copy of all texts would take long."""
    parts, begin, size = [], 0, 0
    for i, text in enumerate(texts):
        size += len(text)
        if size >= _MOST_AT_ONCE or i == len(texts) - 1:
            parts.append("".join(texts[begin : i + 1]).encode())
            begin, size = i + 1, 0
    return parts


def _entry(name: str, datatype: str, shape: tuple[int, ...], **rest: Any) -> str:
    """Return the entry of an output in the JSON object of a response."""
    return json.dumps({"name": name, "datatype": datatype, "shape": shape, **rest})


@lru_cache(_MOST_REMEMBERED)
def _entry_of_bytes(name: str, datatype: str, shape: tuple[int, ...], size: int) -> str:
    return _entry(name, datatype, shape, parameters={"binary_data_size": size})


# Requests.


def _header(text: bytes) -> _Header:
    """Read the JSON object of a request. Raises ``InvalidInput``."""
    document = _document(text)
    inputs: dict[str, _Input] = {}
    for entry in _objects(document, "inputs"):
        of = _input(entry)
        if of.name in inputs:
            raise InvalidInput(f"input {of.name!r} is given twice")
        inputs[of.name] = of
    wanted = _objects(document, "outputs")
    parameters = _parameters(document)
    binary, places = {}, []
    for entry in wanted:
        of_output = _parameters(entry)
        if "shared_memory_region" in of_output:
            places.append((_name(entry), of_output))
        if "classification" in of_output:
            raise InvalidInput('"classification" is not supported: outputs are returned as tensors')
        if "binary_data" in of_output:
            binary[_name(entry)] = bool(of_output["binary_data"])
    return _Header(
        str(document.get("id", "")),
        tuple(inputs.values()),
        tuple([_name(entry) for entry in wanted]) or None,
        binary,
        bool(parameters.get("binary_data_output", False)),
        _seconds(parameters.get("timeout")),
        tuple(places),
        _sequence(parameters),
    )


# Clients often repeat a JSON object with other bytes after it.
_header_again = lru_cache(_MOST_REMEMBERED)(_header)


def _input(entry: JsonObject) -> _Input:
    parameters = _parameters(entry)
    name, shape, datatype = _name(entry), entry.get("shape"), entry.get("datatype")
    dtype = _DATATYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise InvalidInput(
            f'input {name!r} has "datatype" {_start(datatype)}, which must be one of '
            f"{', '.join(_DATATYPES)}"
        )
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not all(map(_is_count, shape)):
        raise InvalidInput(
            f'input {name!r} has "shape" {_start(shape)}: '
            f"it must be a list of at most {_MOST_DIMS} dims, none of them negative"
        )
    size, is_shared = parameters.get("binary_data_size"), "shared_memory_region" in parameters
    if is_shared and ("data" in entry or "binary_data_size" in parameters):
        raise InvalidInput(f"tensor {name!r} must not be both in shared memory and in the request")
    if size is not None and not _is_count(size):
        raise _too_few(name, size)
    return _Input(name, shape, dtype, entry.get("data"), size, parameters if is_shared else None)


def _start(value: object) -> str:
    """Return the first characters of a value, for messages. An integer is described by its size,
    since Python may take seconds to convert it to digits."""
    if isinstance(value, list):
        first = [_start(each) if isinstance(each, int) else "?" for each in value[:4]]
        return f"[{', '.join(first)}{', ...' * (len(value) > len(first))}]"
    if isinstance(value, int) and abs(value) > _LARGEST_DIM:
        return f"an integer of {value.bit_length()} bits"
    return f"{json.dumps(value):.40}"


def _too_few(name: str, size: object) -> InvalidInput:
    return InvalidInput(
        f'input {name!r} has "binary_data_size" {_start(size)}, which must be a number of bytes '
        "in the body"
    )


def _objects(document: JsonObject, key: str) -> list[JsonObject]:
    entries = document.get(key) or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidInput(f'"{key}" must be a list of objects')
    return entries


def _parameters(entry: JsonObject) -> JsonObject:
    parameters = entry.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidInput('"parameters" must be an object')
    return parameters


def _name(entry: JsonObject) -> str:
    name = entry.get("name")
    if not isinstance(name, str):
        raise InvalidInput('each entry of "inputs" and "outputs" must have a "name", a string')
    return name


def _seconds(timeout: object) -> float | None:
    """Convert a timeout in microseconds to seconds; 0 means none."""
    if not timeout:
        return None
    if not _is_count(timeout):
        raise InvalidInput(f'"timeout" {_start(timeout)} must be a number of microseconds')
    return timeout / 1e6


def _sequence(parameters: JsonObject) -> SequenceControl | None:
    """Return the sequence of a request; None for the ids 0 and ""."""
    own = parameters.get("sequence_id")
    is_text = isinstance(own, str) and len(own) <= _LONGEST_ID
    if not is_text and (own is not None and (type(own) is not int or not 0 <= own < _IDS)):
        raise InvalidInput(
            f'"sequence_id" {_start(own)} must be an unsigned 64-bit integer or a string of '
            f"at most {_LONGEST_ID} characters"
        )
    if not own:
        return None
    flags = [parameters.get(name, False) for name in ("sequence_start", "sequence_end")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise InvalidInput('"sequence_start" and "sequence_end" must be true or false')
    wanted = parameters.get("wanted")
    if wanted is not None and not (_is_count(wanted) and wanted):
        raise InvalidInput(f'"wanted" {_start(wanted)} must be a positive number of rows')
    return SequenceControl(own, flags[0], flags[1], wanted)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_DIM


def _from_bytes(name: str, data: memoryview, dtype: np.dtype, shape: list[int]) -> np.ndarray:
    count = math.prod(shape)
    if dtype == STRING:
        return _shaped(name, _strings(name, data, count), shape)
    if len(data) != count * dtype.itemsize:
        raise InvalidInput(
            f"input {name!r} of shape {shape} and {_NAMES[dtype]} has {len(data)} bytes, which "
            "does not match"
        )
    return _shaped(name, np.frombuffer(data, dtype), shape)


def _shaped(name: str, values: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    try:
        return values.reshape(shape)
    except ValueError as error:  # dims, together with a 0, that no array can have
        raise InvalidInput(f"input {name!r}: {error}") from error


def _place(parameters: JsonObject, shared: SharedMemory | None) -> SharedPlace:
    """Return the place in shared memory that the parameters of an input or output name."""
    if shared is None:
        raise InvalidInput(SHARED_MEMORY_OFF)
    return shared.place(parameters)


def _shared_tensor(of: _Input, place: SharedPlace) -> np.ndarray:
    """Return the value of an input in shared memory."""
    if of.dtype != STRING and place.size != math.prod(of.shape) * of.dtype.itemsize:
        raise InvalidInput(
            f"input {of.name!r} of shape {of.shape} and {_NAMES[of.dtype]} has {place.size} "
            "bytes, which does not match"
        )
    return _from_bytes(of.name, place.read(), of.dtype, of.shape)


def _from_json(name: str, data: RunValue, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    count = math.prod(shape)
    if isinstance(data, LongData):
        arrays, have = [], 0
        for piece in data.pieces():
            have += len(piece)
            if have > count:
                raise InvalidInput(f'input {name!r}: "data" has more elements than shape {shape}')
            arrays.append(_array(name, piece, dtype))
        values = np.concatenate(arrays)
    elif isinstance(data, list):
        values = _array(name, _flat(name, data), dtype)
    else:
        raise InvalidInput(
            f'input {name!r} must have "data", a list, or the parameter "binary_data_size"'
        )
    if len(values) != count:
        raise InvalidInput(
            f'input {name!r}: "data" has {len(values)} elements, but shape {shape} requires {count}'
        )
    return _shaped(name, values, shape)


def _flat(name: str, elements: list[Any]) -> list[Any]:
    """Return the flattened elements of nested rows."""
    while elements and isinstance(elements[0], list):
        if not all(isinstance(row, list) for row in elements):
            raise InvalidInput(f'input {name!r}: "data" mixes rows and elements at the same level')
        elements = [element for row in elements for element in row]
    return elements


def _array(name: str, elements: list[Any], dtype: np.dtype) -> np.ndarray:
    allowed = {str} if dtype == STRING else {bool} if dtype.kind == "b" else {int, float, bool}
    types, infinities, datatype = {*map(type, elements)}, 0, _NAMES[dtype]
    if str in types and _is_float(dtype):
        infinities = sum([elements.count(x) for x in ("Infinity", "-Infinity")])
        elements = [_NOT_FINITE.get(x, x) if isinstance(x, str) else x for x in elements]
        types = {*map(type, elements)}
    if not types <= allowed:
        wrong = next(x for x in elements if type(x) not in allowed)
        raise InvalidInput(
            f"input {name!r} has an element {_start(wrong)}, which is not of datatype {datatype}"
        )
    if dtype.kind in "iu" and float in types:
        raise InvalidInput(f"input {name!r} of datatype {datatype} has non-integer elements")
    try:
        if dtype == STRING:
            "".join(elements).encode()  # lone surrogates cannot be encoded
        with np.errstate(over="ignore"):  # infinities are counted below
            values = np.array(elements, dtype)
    except ValueError as error:
        raise InvalidInput(f"input {name!r}: {error}") from error
    except OverflowError as error:
        raise _out_of_range(name, elements, dtype) from error
    if _is_float(dtype) and np.count_nonzero(np.isinf(values)) != infinities:
        raise _out_of_range(name, elements, dtype)
    return values


def _out_of_range(name: str, elements: Sequence[float], dtype: np.dtype) -> InvalidInput:
    """Return the error for a number that a dtype cannot represent."""
    what = "a number"
    if dtype.kind in "iu":
        range_ = np.iinfo(dtype)
        what = _start(next(x for x in elements if not range_.min <= x <= range_.max))
    return InvalidInput(f"input {name!r} has {what}, which is out of range for {_NAMES[dtype]}")


def _strings(name: str, data: memoryview, count: int) -> np.ndarray:
    texts: list[str] = []
    at = 0
    try:
        while at < len(data):
            # Checked before each element: an empty string takes four bytes of the request, but more
            # in memory.
            if len(texts) == count:
                raise InvalidInput(
                    f"input {name!r} has more than {count} strings, the elements of its shape"
                )
            (size,) = _ITEM.unpack_from(data, at)
            at += _ITEM.size + size
            if at > len(data):
                raise InvalidInput(f"input {name!r} has a string that extends beyond its bytes")
            # Bytes that are not UTF-8, as those of an image, become lone surrogates.
            texts.append(str(data[at - size : at], "utf-8", "surrogateescape"))
    except struct.error as error:
        raise InvalidInput(
            f"input {name!r} has invalid BYTES, which must be length-prefixed strings: {error}"
        ) from error
    if len(texts) != count:
        raise InvalidInput(f"input {name!r} has {len(texts)} strings; its shape requires {count}")
    return np.array(texts, object)


# Responses.


def _texts(strings: Iterable[object]) -> Iterator[str]:
    """Yield the JSON of a row of strings. A long string is decoded and written in pieces."""
    quote = '"'
    for element in strings:
        if len(element if isinstance(element, bytes) else str(element)) <= _PIECE:
            text = element.decode(errors="replace") if isinstance(element, bytes) else str(element)
            yield f"{quote}{json.dumps(text)[1:]}"
        else:
            yield quote
            for piece in _pieces(element):
                yield json.dumps(piece)[1:-1]
            yield '"'
        quote = ', "'


def _pieces(element: object) -> Iterator[str]:
    decoder = getincrementaldecoder("utf-8")("replace")
    text = element if isinstance(element, bytes) else str(element)
    for i in range(0, len(text), _PIECE):
        piece, ends = text[i : i + _PIECE], i + _PIECE >= len(text)
        yield decoder.decode(piece, ends) if isinstance(piece, bytes) else piece


def _numbers(value: np.ndarray) -> Iterator[str]:
    """Yield the JSON of the elements of an array, in pieces."""
    flat, before = value.reshape(-1), ""
    # Each call of json.dumps holds Python's interpreter lock to its end.
    for i in range(0, len(flat), _PIECE):
        yield f"{before}{json.dumps(_finite(flat[i : i + _PIECE]))[1:-1]}"
        before = ", "


def _finite(value: np.ndarray) -> list[Any]:
    """Return numbers, with strings for NaN and infinities."""
    if not _is_float(value.dtype):
        integers: list[Any] = value.tolist()
        return integers
    numbers = value.astype(np.float64)
    elements: list[Any] = numbers.tolist()
    for i in np.flatnonzero(~np.isfinite(numbers)):
        x = elements[i]
        elements[i] = "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    return elements


def _is_float(dtype: np.dtype) -> bool:
    return dtype != STRING and dtype.kind not in "biu"


def _bytes(value: np.ndarray) -> bytes | memoryview:
    """Return the elements as bytes, a view if they are contiguous."""
    if value.dtype != STRING:
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    parts = [
        x if isinstance(x, bytes) else str(x).encode("utf-8", "surrogateescape")
        for x in value.reshape(-1)
    ]
    return b"".join([_ITEM.pack(len(part)) + part for part in parts])
