"""Servers, and a client of them that others wrote: tritonclient."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import uvicorn

import penstock as ps
from penstock.serving.app import Server
from penstock.serving.connection import connections
from penstock.serving.repository import ModelRepository
from tests.support.onnx_text import model_from_text
from tests.support.timing import SOON, turns_until, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import InferenceServerException

__all__ = [
    "AFFINE",
    "MAX_BYTES",
    "InferInput",
    "InferRequestedOutput",
    "InferenceServerClient",
    "InferenceServerException",
    "asked",
    "fed",
    "save",
    "serving",
]

AFFINE = (
    "affine (float[N, 3] x) => (float[N, 3] y, int64[1] k) <int64[1] k = {7}> { y = Add(x, x) }"
)


MAX_BYTES = 1 << 20


def save(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model_from_text(text), path)
    return path


class _Uvicorn(uvicorn.Server):
    """As Uvicorn's, which looks ten times a second whether it shall end: each test would wait."""

    async def main_loop(self) -> None:
        ticks = count()
        await turns_until(lambda: self.on_tick(next(ticks)))


@contextmanager
def serving(
    paths: dict[str, Path], make: Callable[[Path], ps.Replicas] = ps.Replicas, **options: Any
) -> Iterator[tuple[InferenceServerClient, str, Server]]:
    """A client of a server, and the server's URL."""
    options = {"max_bytes": MAX_BYTES, "timeout": SOON} | options
    server = Server(ModelRepository(paths, make), **options)
    listener = socket.create_server(("127.0.0.1", 0))
    http_class = connections(options["timeout"], server.direct)
    config = uvicorn.Config(server.app, http=http_class, log_level="critical", lifespan="on")
    http = _Uvicorn(config)
    thread = threading.Thread(target=http.run, args=([listener],))
    thread.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    client = InferenceServerClient(address, concurrency=8, network_timeout=SOON)
    try:
        wait_until(lambda: http.started)
        yield client, f"http://{address}", server
    finally:
        client.close()
        http.should_exit = True
        thread.join(SOON)
        listener.close()
        assert not thread.is_alive()
        assert not server.repository.all()


def fed(name: str, value: np.ndarray, datatype: str, *, binary: bool) -> InferInput:
    tensor = InferInput(name, list(value.shape), datatype)
    tensor.set_data_from_numpy(value, binary_data=binary)
    return tensor


def asked(url: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    """The status and the document of a POST."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body, names)
    try:
        with urllib.request.urlopen(request, timeout=SOON) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
