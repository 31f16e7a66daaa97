"""A server without file descriptors says so once, and goes on when there are some again."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import resource
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from penstock.core.errors import PenstockError
from penstock.serving.listener import Listener, LoopErrors
from tests.support.logs import logged
from tests.support.timing import SOON
from tests.support.triton import AFFINE, save


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(LoopErrors())
    yield loop
    loop.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "no such host"])
def test_address_that_cannot_be_had_is_named(host):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PenstockError, match=f"cannot listen at {host} port {port}: .*--port"):
            Listener(host, port)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_connections_that_cannot_be_accepted_are_reported_once(loop, code):
    context = {"message": "m", "exception": OSError(code, os.strerror(code)), "socket": None}
    with logged() as records:
        for _ in range(2048):
            loop.call_exception_handler(dict(context))
    (record,) = records
    assert record.levelno == logging.ERROR
    assert "ulimit -n" in record.getMessage()


def test_other_errors_are_reported_as_ever(loop):
    with logged() as records:
        for error in (OSError(errno.EMFILE, "m"), KeyError("k")):
            loop.call_exception_handler({"message": "a task failed", "exception": error})
        loop.call_exception_handler({"message": "alone"})
    assert [record.name for record in records] == ["asyncio"] * 3


def test_server_without_file_descriptors_keeps_its_log_short(tmp_path):
    model = save(tmp_path / "affine.onnx", AFFINE)
    command = [sys.executable, "-m", "penstock.cli", "serve", str(model), "--port", "0"]
    limit = 80

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=limited) as process,
        ExitStack() as clients,
    ):
        log = process.stderr
        address = re.search(r"http://([\d.]+):(\d+)", log.readline())
        host, port = address[1], int(address[2])
        for _ in range(2 * limit):
            clients.enter_context(socket.create_connection((host, port), SOON))
        line = log.readline()
        assert "ulimit -n" in line
        clients.close()
        with socket.create_connection((host, port), SOON) as client:
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"live": True}
        process.terminate()
        assert log.read() == ""
