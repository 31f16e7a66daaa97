"""Values of a run as events of a response, while the run goes on."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import penstock as ps
from tests.support.timing import SOON, wait_until
from tests.support.triton import save, serving

LOOP = """g (int64 n, float[2] x) => (float[2] y) {
    t = Constant<value = bool {1}> () one = Constant<value = float {1}> ()
    y = Loop (n, t, x) <body = b (int64 i, bool c, float[2] s) => (bool c2, float[2] s2) {
        c2 = Identity(c) j = Gather(s, i) d = Mul(j, one) s2 = Add(s, d) }> }"""


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[str, Any]]:
    path: Path = save(tmp_path_factory.mktemp("models") / "loop.onnx", LOOP)
    with serving({"loop": path}, lambda path: ps.Replicas(path, queue=1)) as (_, url, server):
        yield url, server


def body(n: int, *names: str, **parameters: Any) -> bytes:
    inputs = [
        {"name": "n", "shape": [], "datatype": "INT64", "data": [n]},
        {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]},
    ]
    outputs = [{"name": name} for name in names]
    return json.dumps({"inputs": inputs, "outputs": outputs, "parameters": parameters}).encode()


def connect(url: str, content: bytes) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SOON)
    connection.request("POST", "/v2/models/loop/infer_stream", content)
    return connection


def ask(url: str, content: bytes) -> tuple[http.client.HTTPResponse, str]:
    """A response and its text."""
    with closing(connect(url, content)) as connection:
        response = connection.getresponse()
        return response, response.read().decode()


def events(content: str) -> list[tuple[str, Any]]:
    found = []
    for text in content.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in text.split("\n"))
        found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


def test_each_value_is_an_event_and_the_outputs_are_the_last(served):
    url, _ = served
    response, text = ask(url, body(2, "s2", "i"))
    assert response.status == 200
    assert response.getheader("content-type", "").startswith("text/event-stream")
    *values, (kind, last) = events(text)
    found = [document["outputs"][0] for _, document in values]
    assert [of["name"] for of in found] == ["i", "s2", "i", "s2"]
    assert [of["data"] for of in found] == [[0], [2, 3], [1], [5, 6]]
    assert kind == "outputs" and last["outputs"][0]["data"] == [5, 6]
    assert {name for name, _ in values} == {""}


def test_error_on_the_way_is_an_event_and_one_before_the_first_value_an_answer(served):
    url, server = served
    response, text = ask(url, body(3, "s2"))  # there is no third element
    *values, (kind, last) = events(text)
    assert response.status == 200 and len(values) == 2
    assert kind == "error" and "Gather" in last["error"]
    for content, status, reason in (
        (body(2, "s3"), 400, "s3"),
        (b"{", 400, ""),
        (body(2).replace(b'"x"', b'"z"'), 400, "z"),
    ):
        response, text = ask(url, content)
        assert response.status == status and reason in json.loads(text)["error"]
    replicas = server.repository.find("loop", None).replicas
    wait_until(lambda: (replicas.counts.running, replicas.counts.queued) == (0, 0))


def test_client_that_hangs_up_ends_the_run(tmp_path):
    text = LOOP.replace("j = Gather(s, i) d = Mul(j, one)", "d = Mul(s, one)")
    path = save(tmp_path / "loop.onnx", text)
    with serving({"loop": path}, lambda path: ps.Replicas(path, queue=1)) as (_, url, server):
        replicas = server.repository.find("loop", None).replicas
        connection = connect(url, body(10**9, "i"))
        assert connection.getresponse().read(40)
        assert replicas.counts.running == 1
        with pytest.raises(ps.QueueFull):
            for _ in range(3):
                replicas.submit({"n": np.int64(1), "x": np.ones(2, np.float32)})
        connection.close()
        begin = time.monotonic()
        wait_until(lambda: replicas.counts.running == 0)
        assert time.monotonic() - begin < SOON


def test_stream_that_nobody_reads_holds_no_replica_behind_its_deadline(tmp_path):
    path = save(tmp_path / "count.onnx", LOOP.replace("j = Gather(s, i)", "j = Neg(s)"))
    feeds = {"n": np.int64(10**9), "x": np.zeros(2, np.float32)}
    with (
        ps.Replicas(path, queue=1) as replicas,
        replicas.stream(feeds, ["s2"], timeout=0.05) as values,
    ):
        wait_until(lambda: not replicas.counts.running)
        assert replicas.run({**feeds, "n": np.int64(2)})["y"].tolist() == [0, 0]
        with pytest.raises(ps.DeadlineExceeded):
            list(values)
