"""Long JSON is read in pieces, as ``json.loads`` reads it, and refused where it does."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import InvalidInput
from penstock.serving import long_json, protocol
from penstock.serving.long_json import LongData, read_document
from penstock.serving.protocol import decode_options, decode_request, encode_response


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """Pieces of some bytes, so that documents of the tests have many."""
    monkeypatch.setattr(long_json, "_PIECE", 16)


def value(read: Any) -> Any:
    """What was read, with the elements of data in a line."""
    if isinstance(read, LongData):
        return [x for piece in read.pieces() for x in piece]
    if isinstance(read, dict):
        return {key: value(x) for key, x in read.items()}
    return [value(x) for x in read] if isinstance(read, list) else read


def flat(data: Any) -> Any:
    """Data with their rows in a line, as ``value`` has them."""
    while isinstance(data, list) and data and isinstance(data[0], list):
        data = [x for row in data for x in row]
    return data


STRINGS = [
    "",
    "a",
    'quote " backslash \\ both \\"',
    "[1, 2]",
    "{}",
    ",,",
    "zwölf \U0001f600",
    "\\\\",
]


def random_document(rng: random.Random) -> dict[str, Any]:
    def element(kind: str) -> Any:
        if kind == "strings":
            return rng.choice(STRINGS)
        return rng.choice([1, -7, 0.5, 1e300, -0.0, True, 2**63, None])

    def data(rank: int, kind: str) -> list[Any]:
        rows = rng.randint(1, 9)
        return [element(kind) if rank == 1 else data(rank - 1, kind) for _ in range(rows)]

    inputs = [
        {
            "name": rng.choice(STRINGS),
            "data": data(rng.randint(1, 3), rng.choice(["strings", "numbers"])),
            "parameters": {"nested": [{"a": [1, "]"]}, None]},
        }
        for _ in range(rng.randint(0, 4))
    ]
    return {"id": "[", "inputs": inputs, "outputs": [{"name": "y"}], "parameters": {"b": {}}}


@pytest.mark.parametrize("seed", range(50))
def test_document_is_read_as_json_does(seed):
    rng = random.Random(seed)
    document = random_document(rng)
    text = json.dumps(
        document, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5
    ).encode()
    for of in document["inputs"]:
        of["data"] = flat(of["data"])
    assert value(read_document(text)) == document


@pytest.mark.parametrize("seed", range(50))
def test_damaged_document_is_refused_where_json_refuses_it(seed):
    rng = random.Random(seed)
    text = bytearray(json.dumps(random_document(rng)).encode())
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(text))
        if rng.random() < 0.5:
            del text[at]
        else:
            text[at] = rng.choice(b'[]{},:"\\1e-. \xff')
    try:
        wanted = json.loads(str(text, "utf-8"))
        json.dumps(wanted, allow_nan=False)
    except ValueError:
        with pytest.raises(InvalidInput):
            value(read_document(bytes(text)))
        return
    try:
        found = value(read_document(bytes(text)))
    except InvalidInput:  # rows beside elements, and empty rows, are refused in addition
        return
    if isinstance(wanted, dict) and isinstance(wanted.get("inputs"), list):
        for of in wanted["inputs"]:
            if isinstance(of, dict) and "data" in of:
                of["data"] = flat(of["data"])
    assert found == wanted


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"{} {}", "unexpected data after"),
        (b'{"inputs": [{"data": [1, 2', "not terminated"),
        (b'{"inputs": [{"data": ["a', "unterminated string"),
        (b'{"inputs": [{"data": [{"a": 1}]}]}', "data must not contain objects"),
        (b'{"inputs": [{"data": [[1], 2]}]}', "rows and elements at the same level"),
        (b'{"inputs": [{"data": [1 2]}]}', "not valid JSON"),
        (b'{"inputs": [{"data": [1,]}]}', "not valid JSON"),
        (b'{"inputs": [{"data": [[1][2]]}]}', "not valid JSON"),
        *[
            (b'{"inputs": [{"data": [%b]}]}' % data, "not valid JSON")
            for data in (b"[1,][2]", b"[1][,2]", b'["a",]["b"]', b"[1,2,3,4,5,6,7,8],", b",[1]")
        ],
        *[(b"{%b}" % text, "duplicate key 'a'") for text in (b'"a":1,"a":1', b'"b":{"a":1,"a":2}')],
        (b'{"inputs": [{"data": [1, NaN]}]}', "NaN is not a JSON number"),
        (b'{"parameters": {"x": -Infinity}}', "-Infinity is not a JSON number"),
        (b'{"id": "' + b"a" * (1 << 16) + b'"}', "more than 65536 bytes"),
        (b'{"id": "\xff"}', "utf-8"),
        (b'\xef\xbb\xbf{"id": "a"}', "expected|not valid JSON"),
        (b"{1: 2}", "a key must be a string"),
        (b'{"a" 2}', "expected"),
    ],
)
def test_wrong_document_is_refused(text, reason):
    with pytest.raises(InvalidInput, match=reason):
        value(read_document(text))


def test_inputs_and_strings_are_bounded(monkeypatch):
    monkeypatch.setattr(long_json, "_MOST_TENSORS", 3)
    with pytest.raises(InvalidInput, match="more than 3 inputs"):
        read_document(b'{"inputs": [{}, {}, {}, {}]}')
    monkeypatch.setattr(long_json, "_MOST_STRINGS", 9)
    with pytest.raises(InvalidInput, match="more than 9 strings and rows"):
        read_document(json.dumps({"inputs": [{"data": ["a"] * 9}]}).encode())


def request(data: Any, datatype: str = "FP32", shape: Any = None) -> bytes:
    x = {"name": "x", "shape": shape or [len(data)], "datatype": datatype, "data": data}
    return json.dumps({"inputs": [x]}).encode()


@pytest.mark.parametrize(
    ("data", "datatype"),
    [
        ([0.5, 1, 2.25] * 9000, "FP32"),
        ([2**64 - 1, 0] * 9000, "UINT64"),
        ([True, False] * 40_000, "BOOL"),
        (["a", "", "[,]"] * 20_000, "BYTES"),
        ([0.5, "NaN", "Infinity", 1e-3, "-Infinity"] * 20, "FP32"),
    ],
)
def test_long_request_has_the_elements_of_a_short_one(monkeypatch, data, datatype):
    monkeypatch.setattr(protocol, "_MOST_AT_ONCE", 1 << 30)
    wanted = decode_request(request(data, datatype), None).feeds["x"]
    monkeypatch.setattr(protocol, "_MOST_AT_ONCE", 100)
    found = decode_request(request(data, datatype), None).feeds["x"]
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("data", "datatype", "shape", "reason"),
    [
        ([1.0] * 99, "FP32", [98], "has more elements"),
        ([1.0] * 99, "FP32", [100], "has 99 elements"),
        ([1.0] * 99 + ["a"], "FP32", None, 'an element "a"'),
        ([1] * 99 + [300], "INT8", None, "300"),
        ([1] * 99 + [0.5], "INT8", None, "non-integer elements"),
        ([1.0] * 99 + [1e40], "FP32", None, "a number, which is out of range for FP32"),
        (["Infinity"] * 99 + [-1e6], "FP16", None, "a number, which is out of range for FP16"),
        ([1.0] * 99 + ["inf"], "FP32", None, 'an element "inf"'),
        ([1] * 99 + ["NaN"], "INT8", None, 'an element "NaN"'),
        (["a"] * 99 + ["\ud83d"], "BYTES", None, "surrogates not allowed"),
    ],
)
def test_long_request_is_refused_like_a_short_one(monkeypatch, data, datatype, shape, reason):
    for most in (1 << 30, 100):
        monkeypatch.setattr(protocol, "_MOST_AT_ONCE", most)
        reason = reason if most == 100 else reason.replace("has more", "has 99")
        with pytest.raises(InvalidInput, match=reason):
            decode_request(request(data, datatype, shape), None)


LONG_STRINGS = ["a" * 3_000_000, "\\" * 1_000_000, "ä[" * 500_000, '"' * 700_000] * 2


@pytest.mark.costly
@pytest.mark.parametrize(
    ("data", "datatype", "most"),
    [
        ([[x / 7, -x] for x in range(50_000)], "FP64", 1 << 19),
        ([["ab", "[,"] for _ in range(100_000)], "BYTES", 1 << 19),
        # An element is read in one call, but is written in several.
        ([[text, text] for text in LONG_STRINGS], "BYTES", 1 << 23),
    ],
    ids=["numbers", "strings", "long strings"],
)
def test_no_call_of_json_is_long(monkeypatch, data, datatype, most):
    """Python's lock is held for the whole of one: of megabytes here, 64 KiB at a time."""
    monkeypatch.undo()
    decoder, dumps, longest = long_json._DECODER, json.dumps, {"read": 0, "written": 0}

    def measured(what: str, text: str) -> str:
        longest[what] = max(longest[what], len(text))
        return text

    class Short(json.JSONDecoder):
        def decode(self, text: Any, *more: Any) -> Any:
            return decoder.decode(measured("read", text), *more)

        def raw_decode(self, text: Any, *more: Any) -> Any:
            return decoder.raw_decode(measured("read", text), *more)

    text = request(data, datatype, shape=[len(data), 2])
    assert len(text) > 1 << 20
    monkeypatch.setattr(long_json, "_DECODER", Short())
    monkeypatch.setattr(json, "dumps", lambda x: measured("written", dumps(x)))
    asked = decode_request(text, None)
    x = asked.feeds["x"]
    np.testing.assert_array_equal(x, np.array(data, x.dtype))
    parts, _ = encode_response(asked, "m", "1", {"y": x})
    assert max(map(len, parts)) < 1 << 20
    assert 1 << 12 < longest["read"] < most
    assert longest["written"] < 1 << 19
    monkeypatch.undo()
    (output,) = json.loads(b"".join(parts))["outputs"]
    np.testing.assert_array_equal(np.reshape(output["data"], (-1, 2)), x)


@pytest.mark.parametrize(
    "data",
    [
        b'"' + b"a" * (1 << 23) + b'"',
        b'"' + b'\\"' * (1 << 22) + b'"',
        b"1" * (1 << 23),
        b"1" + b" " * (1 << 23),
    ],
    ids=["string", "quotes", "digits", "spaces"],
)
def test_element_that_is_long_is_refused_before_it_is_read(data):
    """One of 57 MB took 26 s in one call."""
    body = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": [%b]}]}' % data
    with pytest.raises(InvalidInput, match="an element of a tensor has more than 4194304 bytes"):
        decode_request(body, None)


def test_spaces_are_passed_by_some_at_a_time(monkeypatch):
    """A regular expression that matches megabytes of them holds Python's lock meanwhile."""
    monkeypatch.undo()
    most = long_json._SPACE.match(b" " * (1 << 20))
    assert most is not None
    assert most.end() <= 1 << 16
    assert read_document(b" " * (1 << 20) + b'{ "a" : 1 }' + b"\n" * (1 << 20)) == {"a": 1}


def test_keys_of_an_object_are_bounded():
    """Each takes microseconds, since a value may be long: of 7 million keys minutes."""
    keys = ",".join(f'"{i}": 1' for i in range(100))
    for body in (f"{{{keys}}}", f'{{"inputs": [{{{keys}}}]}}'):
        with pytest.raises(InvalidInput, match="more than 64 keys"):
            read_document(body.encode())


@pytest.mark.parametrize("element", [b"\xe2\x82\xac", "€", b"a\xff"])
@pytest.mark.parametrize("count", [1, 5000, 40_000])
def test_string_is_written_alike_however_long_it_is(element, count):
    asked = decode_request(b"{}", None)
    value = np.array([element * count, "b", element], object)
    parts, _ = encode_response(asked, "m", "1", {"y": value})
    (output,) = json.loads(b"".join(parts))["outputs"]
    shown = element.decode(errors="replace") if isinstance(element, bytes) else element
    assert output["data"] == [shown * count, "b", shown]


def test_objects_are_refused_before_they_are_read():
    """A megabyte of small ones takes 150 ms."""
    one = b'{"a":{"b":[{}]}}'
    body = b'{"inputs":[' + b",".join([one] * 200_000) + b"]}"
    with pytest.raises(InvalidInput, match="more than 4096 inputs"):
        decode_request(body, None)
    with pytest.raises(InvalidInput, match="not valid JSON, or has more than 65536 bytes"):
        decode_request(b'{"parameters":[' + b",".join([one] * 20_000) + b"]}", None)
    with pytest.raises(InvalidInput, match="at most 65536 bytes"):
        decode_options(body)
