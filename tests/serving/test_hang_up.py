"""A client that hangs up ends its run; one that only sends no more gets its answer."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.serving import app, connection
from tests.serving.test_replicas import Held
from tests.support.timing import SOON, wait_until
from tests.support.triton import asked, save, serving

LOOP = """g (int64 n, float[4] x) => (float[4] y) {
    y = Loop(n, , x) <body = b (int64 i, bool t, float[4] v) => (bool u, float[4] w) {
        u = Identity(t) w = Sin(v) }> }"""
ENDLESS = 2**40


X = {"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}


def request(*inputs: dict[str, Any], version: str = "1.1") -> bytes:
    body = json.dumps({"inputs": inputs}).encode()
    head = f"POST /v2/models/g/infer HTTP/{version}\r\nHost: here\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def infer(n: int) -> bytes:
    return request({"name": "n", "datatype": "INT64", "shape": [], "data": [n]}, X)


@pytest.fixture(params=["event loop", "thread"])
def running(request, tmp_path):
    """A server, and a connection of which it runs a request without end."""

    def make(path: Path) -> ps.Replicas:
        return ps.Replicas(path, 1)

    with serving({"g": save(tmp_path / "g.onnx", LOOP)}, make) as (_, url, server):
        host, _, port = url.removeprefix("http://").partition(":")
        client = socket.create_connection((host, int(port)), SOON)
        if request.param == "thread":
            client.sendall(infer(1))
            assert b"200" in client.recv(1 << 16)
            wait_until(lambda: server.direct._workers.threads == 1)
        replicas = server.repository.find("g", None).replicas
        client.sendall(infer(ENDLESS))
        wait_until(lambda: replicas.counts.running == 1)
        yield client, replicas, url
        client.close()


def answers(url: str) -> Any:
    return asked(f"{url}/v2/models/g/infer", infer(0).partition(b"\r\n\r\n")[2])


def test_run_ends_when_its_client_closes_the_connection(running):
    client, replicas, url = running
    client.close()
    wait_until(lambda: replicas.counts.running == 0)
    assert answers(url)[0] == 200


def test_run_ends_when_its_client_resets_the_connection(running):
    client, replicas, url = running
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    wait_until(lambda: replicas.counts.running == 0)
    assert answers(url)[0] == 200


def test_requests_in_the_queue_leave_it_with_their_clients(running):
    client, replicas, _ = running
    others = [socket.create_connection(client.getpeername(), SOON) for _ in range(9)]
    for other in others:
        other.sendall(infer(ENDLESS))
    wait_until(lambda: replicas.counts.queued == 9)
    for other in others:
        other.close()
    wait_until(lambda: replicas.counts.queued == 0)
    assert replicas.counts.running == 1


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_client_that_sends_no_more_gets_its_answer(tmp_path, monkeypatch, version):
    """However often the server looks whether it is still there."""
    monkeypatch.setattr(connection, "LOOK_S", 0.001)
    monkeypatch.setattr(app, "LOOK_S", 0.001)
    backend = Held()
    backend.opened.set()  # for the plan that is tried out

    def make(path: Path) -> ps.Replicas:
        return ps.Replicas(path, 1, backends=[backend])

    model = save(tmp_path / "g.onnx", "g (float[N] x) => (float[N] y) { y = Sin(x) }")
    with serving({"g": model}, make) as (_, url, _):
        backend.opened.clear()
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), SOON) as client:
            client.sendall(request(X, version=version))
            client.shutdown(socket.SHUT_WR)
            got, looks = b"", 5 if version == "1.1" else 0
            while got.count(b"100 Continue") < looks:
                got += client.recv(1 << 16)
            backend.opened.set()
            while piece := client.recv(1 << 16):
                got += piece
    assert got.count(b" 200 OK") == 1
    assert b'"data": [0.84' in got
