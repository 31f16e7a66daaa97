"""The protocol: requests and answers in JSON and bytes, and what is refused."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidInput
from penstock.serving import app, protocol
from penstock.serving.protocol import decode_request
from tests.support.timing import SOON, wait_until
from tests.support.triton import InferRequestedOutput, asked, fed, save, serving


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_inference_takes_and_gives_json_and_bytes(client, into, out, compression):
    triton, _ = client
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    outputs = [InferRequestedOutput(name, binary_data=out) for name in ("k", "y")]
    result = triton.infer(
        "affine",
        [fed("x", x, "FP32", binary=into)],
        outputs=outputs,
        request_id="seven",
        request_compression_algorithm=compression,
    )
    np.testing.assert_array_equal(result.as_numpy("y"), x + x)
    np.testing.assert_array_equal(result.as_numpy("k"), [7])
    response = result.get_response()
    assert (response["id"], response["model_name"]) == ("seven", "affine")
    assert [entry["name"] for entry in response["outputs"]] == ["k", "y"]
    both = triton.infer("affine", [fed("x", x, "FP32", binary=into)], model_version="1")
    np.testing.assert_array_equal(both.as_numpy("y"), x + x)
    assert len(both.get_response()["outputs"]) == 2


TYPES = {
    "BOOL": "bool",
    **{f"INT{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"UINT{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    "FP16": "float16",
    "FP32": "float",
    "FP64": "double",
    "BF16": "bfloat16",
    "BYTES": "string",
}


def test_inference_takes_and_gives_every_datatype(tmp_path):
    check_every_datatype(tmp_path, ps.Replicas)


def check_every_datatype(tmp_path: Path, make: Callable[[Path], ps.Replicas]) -> None:
    """Feed a server whose models ``make`` loads each datatype, as JSON and as bytes."""
    paths = {
        name: save(tmp_path / f"{name}.onnx", f"g ({t}[N] x) => ({t}[N] y) {{ y = Identity(x) }}")
        for name, t in TYPES.items()
    }
    values = {
        "BOOL": np.array([True, False, True]),
        "BYTES": np.array(["a", "", "zwölf"], object),
        "BF16": np.array([1.5, -2, 3e38], ml_dtypes.bfloat16),
    }
    with serving(paths, make) as (triton, url, _):
        for name in TYPES:
            dtype = np.dtype(name.lower().replace("fp", "float")) if name not in values else None
            value = values.get(name, np.array([1, 0, 100]).astype(dtype))
            assert triton.get_model_metadata(name)["inputs"][0]["datatype"] == name
            for binary in (True, False):
                if name in ("FP16", "BF16") and not binary:
                    continue  # the client has no JSON for these
                inputs = [fed("x", value, name, binary=binary)]
                wanted = [InferRequestedOutput("y", binary_data=binary)]
                y = triton.infer(name, inputs, outputs=wanted).as_numpy("y")
                if name == "BYTES":
                    texts = [each.decode() if isinstance(each, bytes) else each for each in y]
                    assert texts == ["a", "", "zwölf"]
                else:
                    assert y.dtype == value.dtype
                    np.testing.assert_array_equal(y, value)
        nested = {"name": "x", "shape": [2], "datatype": "BF16", "data": [[1.5], [2]]}
        body = json.dumps({"inputs": [nested]}).encode()
        status, answer = asked(f"{url}/v2/models/BF16/infer", body)
        assert (status, answer["outputs"][0]["data"]) == (200, [1.5, 2.0])


X = {"name": "x", "shape": [1, 3], "datatype": "FP32"}
TEXT = json.dumps({"inputs": [{**X, "data": [1, 2, 3]}]})


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "must be a JSON object"),
        ({"inputs": {}, "outputs": 1}, "must be a list of objects"),
        ({"inputs": [{**X, "data": [1, 2]}]}, "has 2 elements"),
        ({"inputs": [{**X, "data": [[1, 2], 3]}]}, "rows and elements at the same level"),
        ({"inputs": [{**X, "data": [1, 2, "a"]}]}, 'an element "a"'),
        ({"inputs": [{**X, "data": [1, 2, None]}]}, "an element null"),
        ({"inputs": [{**X, "datatype": "FP8", "data": [1, 2, 3]}]}, '"FP8", which must be one of'),
        ({"inputs": [{**X, "datatype": [], "data": [1, 2, 3]}]}, "[], which must be one of"),
        (
            {"inputs": [{**X, "shape": [1, -3], "data": [1]}]},
            "it must be a list of at most 64 dims",
        ),
        (
            {"inputs": [{**X, "shape": [2**62 + 1], "data": [1]}]},
            "it must be a list of at most 64 dims",
        ),
        (
            {"inputs": [{**X, "shape": [1] * 65, "data": [1]}]},
            "it must be a list of at most 64 dims",
        ),
        ({"inputs": [{**X, "shape": [2**62] * 64, "data": [1]}]}, "has 1 elements"),
        ({"inputs": [{**X, "datatype": "INT8", "data": [1, 2, 300]}]}, "300"),
        ({"inputs": [{**X, "datatype": "INT8", "data": [1, 2, 0.5]}]}, "non-integer elements"),
        (
            {"inputs": [{**X, "datatype": "INT64", "data": [1, 2, 3]}]},
            "INT64, but the model expects FP32",
        ),
        ({"inputs": [{**X, "data": [1, 2, 3]}] * 2}, "given twice"),
        ({"inputs": [X]}, 'must have "data"'),
        (
            {"inputs": [{**X, "parameters": {"binary_data_size": 12}}]},
            "must be a number of bytes in the body",
        ),
        (
            {"inputs": [{**X, "parameters": {"binary_data_size": -1}}]},
            "must be a number of bytes in the body",
        ),
        ({"inputs": [{**X, "parameters": 3, "data": []}]}, "must be an object"),
        ({"inputs": [{**X, "name": "z", "data": [1, 2, 3]}]}, "but the model has 'x'"),
        ({"inputs": [{**X, "name": 3, "data": [1, 2, 3]}]}, 'must have a "name"'),
        ({"inputs": [{**X, "shape": [3], "data": [1, 2, 3]}]}, "x"),
        ({"inputs": [{**X, "data": [1, 2, 3]}], "outputs": [{"name": "z"}]}, "'z'"),
        ({"parameters": {"timeout": "soon"}}, "must be a number of microseconds"),
        ({"parameters": {"timeout": 10**400}}, "must be a number of microseconds"),
        ({"inputs": [{**X, "data": [1, 2, 1e40]}]}, "a number, which is out of range for FP32"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 1}}]}, "not supported"),
    ],
)
def test_wrong_request_is_refused_in_the_form_of_the_protocol(client, document, reason):
    _, url = client
    status, answer = asked(f"{url}/v2/models/affine/infer", json.dumps(document).encode())
    assert status == 400
    assert list(answer) == ["error"]
    assert reason in answer["error"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TEXT.replace("2, 3", "2, NaN"), "NaN is not a JSON number: send"),
        (TEXT.replace("2, 3", "2, -Infinity"), "-Infinity is not a JSON number"),
        (TEXT.replace("2, 3", "2, 1e999"), "a number, which is out of range for FP32"),
        (TEXT.replace("2, 3", "2, 3,"), "not valid JSON"),
        (TEXT.replace("{", '{"inputs": [], ', 1), "duplicate key 'inputs'"),
        (TEXT.replace('"data"', '"shape"'), "duplicate key 'shape'"),
        (TEXT + "{}", "not valid JSON"),
        (TEXT + "\0", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("most", [1 << 18, 16])
def test_what_is_not_strictly_json_is_refused(client, monkeypatch, most, text, reason):
    monkeypatch.setattr(protocol, "_MOST_AT_ONCE", most)
    _, url = client
    assert asked(f"{url}/v2/models/affine/infer", TEXT.encode())[0] == 200
    for encoding in ("utf-8", "utf-16"):
        status, answer = asked(f"{url}/v2/models/affine/infer", text.encode(encoding))
        assert status == 400
        assert (reason if encoding == "utf-8" else "not valid JSON") in answer["error"]


def test_numbers_that_are_not_finite_are_strings_in_both_directions(client):
    _, url = client
    data = ["NaN", "Infinity", "-Infinity"]
    body = json.dumps({"inputs": [{**X, "data": data}]}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/affine/infer", body, SOON) as response:
        text = response.read().decode()
    answer = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert answer["outputs"][0]["data"] == data
    triton, _ = client
    x = fed("x", np.array([[np.nan, np.inf, -np.inf]], np.float32), "FP32", binary=True)
    wanted = [InferRequestedOutput("y", binary_data=False)]
    y = triton.infer("affine", [x], outputs=wanted).as_numpy("y")
    np.testing.assert_array_equal(y, [[np.nan, np.inf, -np.inf]])


def test_body_that_is_no_request_is_refused(client):
    _, url = client
    infer = f"{url}/v2/models/affine/infer"
    length = "Inference_Header_Content_Length"
    x = {**X, "parameters": {"binary_data_size": 12}}
    text = json.dumps({"inputs": [x]}).encode()
    for body, headers, status, reason in (
        (b"{", {}, 400, "not valid JSON"),
        (b"[" * 100_000, {}, 400, "not valid JSON"),
        (text + bytes(12), {length: "x"}, 400, "a number of bytes within the body"),
        (text + bytes(12), {length: "9999"}, 400, "a number of bytes within the body"),
        (text + bytes(12), {length: "9" * 5000}, 400, "a number of bytes within the body"),
        (text + bytes(13), {length: str(len(text))}, 400, "1 bytes of the body belong"),
        (text + bytes(11), {length: str(len(text))}, 400, "must be a number of bytes in the body"),
    ):
        assert asked(infer, body, **headers)[0] == status, reason
        assert reason in asked(infer, body, **headers)[1]["error"]
    assert asked(f"{url}/v2/models/other/infer", b"{}")[0] == 404
    assert asked(f"{url}/v2/models/affine/versions/3/infer", b"{}")[0] == 404
    assert "error" in asked(f"{url}/v2/nothing", b"{}")[1]
    assert asked(f"{url}/v2", b"{}")[0] == 405


@pytest.mark.parametrize("tensor", [{"data": [1.0]}, {"parameters": {"binary_data_size": 4}}])
@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        (50, r"an integer of 14281 bits, .* it must be a list of at most 64 dims"),
        (2000, r"more than 65536 bytes"),
    ],
)
def test_long_integers_of_a_shape_are_never_multiplied(tensor, dims, reason):
    """Their product takes hours in one call of Python, in which no other request is answered."""
    x = json.dumps({"name": "x", "datatype": "FP32", "shape": [7], **tensor})
    shape = ",".join(["9" * 4299] * dims)
    body = f'{{"inputs": [{x.replace("[7]", f"[{shape}]")}]}}'.encode()
    with pytest.raises(InvalidInput, match=reason):
        decode_request(body, None)


def test_strings_that_are_none_are_refused(tmp_path):
    path = save(tmp_path / "g.onnx", "g (string[N] x) => (string[N] y) { y = Identity(x) }")
    with serving({"g": path}) as (_, url, _):
        for data, reason in (
            (b"\x05\0\0\0ab", "ends beyond"),
            (b"\x01\0", "invalid BYTES"),
            (b"\x01\0\0\0a", "has 1 strings; its shape requires 2"),
            (b"\0\0\0\0" * 3, "has more than 2 strings"),
            (b"\0\0\0\0" * 2 + b"\xff" * 99, "has more than 2 strings"),
        ):
            x = {"name": "x", "shape": [2], "datatype": "BYTES"}
            x["parameters"] = {"binary_data_size": len(data)}
            text = json.dumps({"inputs": [x]}).encode()
            length = {"Inference_Header_Content_Length": str(len(text))}
            status, answer = asked(f"{url}/v2/models/g/infer", text + data, **length)
            assert status == 400
            assert reason in answer["error"]


def test_strings_that_are_not_utf_8_come_back_as_they_were(tmp_path):
    path = save(tmp_path / "g.onnx", "g (string[N] x) => (string[N] y) { y = Identity(x) }")
    data = b"\x03\0\0\0\xff\x00a" + b"\x02\0\0\0\xc3\xa4"
    x = {"name": "x", "shape": [2], "datatype": "BYTES"}
    x["parameters"] = {"binary_data_size": len(data)}
    request = {"inputs": [x], "parameters": {"binary_data_output": True}}
    text = json.dumps(request).encode()
    with serving({"g": path}) as (_, url, _):
        length = {"Inference-Header-Content-Length": str(len(text))}
        call = urllib.request.Request(f"{url}/v2/models/g/infer", text + data, length)
        with urllib.request.urlopen(call, timeout=SOON) as answer:
            assert answer.read().endswith(data)


def test_halves_of_surrogate_pairs_are_no_strings(tmp_path):
    path = save(tmp_path / "g.onnx", "g (string[N] x) => (string[N] y) { y = Identity(x) }")
    x = {"name": "x", "shape": [2], "datatype": "BYTES", "data": ["\U0001f600", "\ud83d"]}
    with serving({"g": path}) as (_, url, _):
        for binary in (False, True):
            request = {"inputs": [x], "parameters": {"binary_data_output": binary}}
            status, answer = asked(f"{url}/v2/models/g/infer", json.dumps(request).encode())
            assert status == 400
            assert "surrogates not allowed" in answer["error"]


def test_response_with_strings_is_not_written_on_the_event_loop():
    """Their array has their addresses alone, and does not say how long they are."""
    asked = decode_request(b"{}", None)
    assert not app._is_short(asked, {"y": np.array(["a"], object)})
    assert app._is_short(asked, {"y": np.ones(3, np.float32)})


@pytest.mark.parametrize("length", [3, 3000])
def test_long_json_is_read_and_written_while_others_are_answered(monkeypatch, affine, length):
    """Long JSON waits until the server has said that it lives: on its event loop, each would wait
    for the other."""
    at: list[int] = []
    lived = threading.Event()

    def held(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            at.append(threading.get_ident())
            assert length == 3 or lived.wait(SOON)
            return function(*arguments)

        return call

    monkeypatch.setattr(app, "decode_request", held(app.decode_request))
    monkeypatch.setattr(app, "encode_response", held(app.encode_response))
    x = {"name": "x", "datatype": "FP32", "shape": [length // 3, 3], "data": [0.125] * length}
    body = json.dumps({"inputs": [x]}).encode()
    with serving({"affine": affine}) as (triton, url, server), ThreadPoolExecutor(1) as threads:
        loop: list[int] = []
        find = server.repository.find
        monkeypatch.setattr(
            server.repository,
            "find",
            lambda *name: (loop.append(threading.get_ident()), find(*name))[1],
        )
        answer = threads.submit(asked, f"{url}/v2/models/affine/infer", body)
        wait_until(lambda: at)
        assert triton.is_server_live()
        lived.set()
        status, document = answer.result(SOON)
        assert (status, document["outputs"][0]["data"]) == (200, [0.25] * length)
        assert [ident == loop[0] for ident in at] == [length == 3] * 2


@pytest.mark.parametrize(
    ("header", "priority"),
    [("u=0", 3), ("u=3", 0), ("u=7", -4), ("i, u=1", 2), ("u=2, i", 1), ("u=5;x=1", -2)],
)
def test_urgency_of_a_request_is_its_priority(header, priority):
    assert protocol.priority_of(header) == priority


@pytest.mark.parametrize("header", [None, "", "u=8", "u=-1", "u=12", "i", "au=1", "u = 1", "u"])
def test_header_without_an_urgency_asks_for_no_priority(header):
    assert protocol.priority_of(header) is None


def test_times_are_in_milliseconds():
    assert protocol.timing(0.0012, 1.5) == "queue;dur=1.200, run;dur=1500.000"
