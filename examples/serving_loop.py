"""A server under load: requests of several clients at once, and what became of them.

``python examples/serving_loop.py MODEL [--clients 8] [--requests 200] [--max-batch 16]`` starts
``penstock serve`` (needs ``penstock-runtime[serve]``) with MODEL at a free port, sends it requests
of one row of random numbers, one thread for each client, and prints their latencies and the sizes
of the batches that the server made of them. The server ends with the program.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np

DTYPES = {
    "FP32": "float32",
    "FP64": "float64",
    "INT64": "int64",
    "INT32": "int32",
    "UINT8": "uint8",
}


@contextmanager
def server(model: Path, *options: str) -> Iterator[str]:
    """A server of ``model`` that is ready; its address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    command = [sys.executable, "-m", "penstock.cli", "serve", f"model={model}", "--port", port]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}/v2"
        wait_until_ready(address, process)
        yield address
    finally:
        process.terminate()
        process.wait()


def ask(address: str, document: Any = None) -> Any:
    """The answer to a request: of a document, if there is one. Raises ``RuntimeError`` for an
    error of the server, ``OSError`` if there is no answer."""
    data = None if document is None else json.dumps(document).encode()
    try:
        with urlopen(Request(address, data, {"Content-Type": "application/json"})) as answer:
            return json.loads(answer.read() or "{}")
    except HTTPError as error:
        raise RuntimeError(json.load(error)["error"]) from None


def wait_until_ready(address: str, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            ask(f"{address}/models/model/ready")
            return
        except (OSError, RuntimeError):
            if process.poll() is not None:
                sys.exit("the server has ended; it says why above")
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def request(inputs: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """A request of one row of random numbers; dims that the model leaves open are 1."""
    rng, tensors = np.random.default_rng(seed), []
    for port in inputs:
        shape = [1 if dim < 1 else dim for dim in port["shape"]]
        values = rng.integers(0, 10, shape).astype(DTYPES[port["datatype"]])
        tensors.append({**port, "shape": shape, "data": values.ravel().tolist()})
    return {"inputs": tensors}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Put a server under load.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-batch", type=int, default=16)
    options = parser.parse_args(arguments)

    with server(options.model, "--max-batch", str(options.max_batch)) as address:
        inputs = ask(f"{address}/models/model")["inputs"]

        def one(seed: int) -> float:
            document = request(inputs, seed)
            begin = time.perf_counter()
            ask(f"{address}/models/model/infer", document)
            return time.perf_counter() - begin

        begin = time.perf_counter()
        with ThreadPoolExecutor(options.clients) as pool:
            seconds = sorted(pool.map(one, range(options.requests)))
        rate = len(seconds) / (time.perf_counter() - begin)
        stats = ask(f"{address}/models/model/stats")
    print(f"{len(seconds)} requests of {options.clients} clients, {rate:.0f} a second")
    print(f"median {np.median(seconds) * 1e3:.1f} ms, slowest {seconds[-1] * 1e3:.1f} ms")
    print(json.dumps(stats, indent=1))


if __name__ == "__main__":
    main()
