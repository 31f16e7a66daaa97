"""Errors speak of the fields of the request, on the event loop and on threads alike."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

import pytest

import penstock as ps
from tests.support.timing import SOON, wait_until
from tests.support.triton import save, serving

MODEL = """m (float[N, 3] x, int64[N] i, string[N] s) => (float[N, 3] y, int64[N] j, string[N] t) {
    y = Add(x, x) j = Add(i, i) t = Identity(s) }"""
X: dict[str, Any] = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
IDS: dict[str, Any] = {"name": "i", "shape": [1], "datatype": "INT64", "data": [1]}
TEXTS: dict[str, Any] = {"name": "s", "shape": [1], "datatype": "BYTES", "data": ["a"]}
GOOD = {"inputs": [X, IDS, TEXTS]}


@pytest.fixture(params=["event loop", "thread", "batches"], scope="module")
def connection(request, tmp_path_factory):
    """A connection whose requests are answered by the event loop, by a thread, or in batches."""
    path = save(tmp_path_factory.mktemp("models") / "m.onnx", MODEL)
    most = 4 if request.param == "batches" else 1
    with serving({"m": path}, lambda p: ps.Replicas(p, 1, max_batch=most)) as (_, url, server):
        if request.param == "event loop":
            server.direct.takes = lambda path: False
        client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=SOON)
        assert asked(client, GOOD) == (200, "")
        if request.param == "thread":
            wait_until(lambda: server.direct._workers.threads == 1)
        yield client
        client.close()


def asked(client: http.client.HTTPConnection, document: object) -> tuple[int, str]:
    client.request("POST", "/v2/models/m/infer", json.dumps(document))
    with client.getresponse() as response:
        return response.status, json.loads(response.read()).get("error", "")


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"inputs": [IDS, TEXTS]}, "\"inputs\" lacks 'x'"),
        ({"input": [X, IDS, TEXTS]}, "\"inputs\" lacks 'x', 'i', 's'"),
        (
            {"inputs": [*GOOD["inputs"], {**X, "name": "z"}]},
            "\"inputs\" has 'z', but the model has",
        ),
        ({**GOOD, "outputs": [{"name": "q"}]}, "\"outputs\" has 'q', but the model has"),
        (
            {"inputs": [{**X, "datatype": "FP64"}, IDS, TEXTS]},
            '"datatype" FP64, but the model expects FP32',
        ),
        (
            {"inputs": [X, IDS, {**TEXTS, "datatype": "INT8", "data": [1]}]},
            "INT8, but the model expects BYTES",
        ),
        (
            {"inputs": [{**X, "shape": [3]}, IDS, TEXTS]},
            '"shape" [3], but the model expects [-1, 3]',
        ),
        (
            {"inputs": [{**X, "shape": [3, 1]}, IDS, TEXTS]},
            '"shape" [3, 1], but the model expects [-1, 3]',
        ),
        ({"inputs": [{**X, "datatype": "FLOAT"}, IDS, TEXTS]}, "which must be one of BOOL, UINT8"),
        ({"inputs": [X, {**IDS, "data": [2**70]}, TEXTS]}, "bits, which is out of range for INT64"),
        (
            {"inputs": [X, {**IDS, "data": [0.5]}, TEXTS]},
            "of datatype INT64 has non-integer elements",
        ),
        (
            {"inputs": [{**X, "data": [1, 2, None]}, IDS, TEXTS]},
            "an element null, which is not of datatype FP32",
        ),
        ({"inputs": [{**X, "shape": None}, IDS, TEXTS]}, '"shape" null: it must be a list'),
    ],
)
def test_error_speaks_of_the_fields_of_the_request(connection, document, reason):
    status, error = asked(connection, document)
    assert (status, reason in error) == (400, True), error
    assert not re.search(r"\w\(|=|np\.|array|float32|int64|None", error), "of Python, not of HTTP"
    assert asked(connection, GOOD) == (200, "")


def test_dims_that_disagree_between_inputs_are_named(connection):
    two = {**X, "shape": [2, 3], "data": [1] * 6}
    status, error = asked(connection, {"inputs": [two, IDS, TEXTS]})
    assert status == 400
    assert "'N' at axis 0 is 1, but 2 at 'x'" in error or "same number of rows" in error
