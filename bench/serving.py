"""``penstock serve`` beside the same session called in process: ``python -m bench.serving MODEL``.

Clients are threads that send requests in binary form, over connections that they keep, as fast as
answers come; in turn with them as many threads call one session. Both have the same feeds. With
``--shared-memory`` a client copies them into a segment that it shares with the server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np

import penstock as ps

CLIENTS = (1, 2, 4, 8, 16, 32)
SECONDS = 2.0
ROUNDS = 3


def request(name: str, x: np.ndarray, port: str, region: str | None = None) -> bytes:
    """An HTTP request for one inference, its tensor as bytes or in a region of shared memory."""
    where: dict[str, object] = {"binary_data_size": x.nbytes}
    if region is not None:
        where = {"shared_memory_region": region, "shared_memory_byte_size": x.nbytes}
    tensor = {"name": port, "shape": [*x.shape], "datatype": "FP32", "parameters": where}
    whole = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    text = json.dumps(whole).encode()
    data = b"" if region is not None else x.tobytes()
    head = (
        f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n"
        f"Content-Length: {len(text) + len(data)}\r\n\r\n"
    )
    return head.encode() + text + data


def answer(connection: socket.socket, buffer: bytearray) -> None:
    """Read one answer. Raises ``ConnectionError`` unless it is one of status 200."""
    got = 0
    view = memoryview(buffer)
    while (end := buffer.find(b"\r\n\r\n", 0, got)) < 0:
        got += (count := connection.recv_into(view[got:]))
        if not count:
            raise ConnectionError("the server hung up")
    head = bytes(buffer[:end]).lower()
    if not head.startswith(b"http/1.1 200"):
        raise ConnectionError(head.decode())
    match = re.search(rb"content-length: (\d+)", head)
    assert match is not None
    while got < end + 4 + int(match[1]):
        got += connection.recv_into(view[got:])


def served(address: tuple[str, int], content: bytes, clients: int) -> float:
    """Requests per second of as many clients."""

    def call(count: list[int], stop: threading.Event) -> None:
        buffer = bytearray(1 << 20)
        with socket.create_connection(address) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not stop.is_set():
                connection.sendall(content)
                answer(connection, buffer)
                count[0] += 1

    return rate(call, clients)


def served_shared(
    address: tuple[str, int], name: str, x: np.ndarray, port: str, clients: int
) -> float:
    """Requests per second of as many clients with their inputs in shared memory."""
    numbers = itertools.count()
    regions = "http://{}:{}/v2/systemsharedmemory/region/".format(*address)

    def call(count: list[int], stop: threading.Event) -> None:
        region, buffer = f"r{next(numbers)}", bytearray(1 << 20)
        segment = SharedMemory(create=True, size=x.nbytes)
        try:
            document = {"key": segment.name, "offset": 0, "byte_size": x.nbytes}
            urllib.request.urlopen(f"{regions}{region}/register", json.dumps(document).encode())
            content = request(name, x, port, region)
            values = np.ndarray(x.shape, x.dtype, segment.buf)
            with socket.create_connection(address) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while not stop.is_set():
                    np.copyto(values, x)
                    connection.sendall(content)
                    answer(connection, buffer)
                    count[0] += 1
            del values
            urllib.request.urlopen(f"{regions}{region}/unregister", b"")
        finally:
            segment.close()
            segment.unlink()

    return rate(call, clients)


def in_process(session: ps.Session, x: np.ndarray, port: str, clients: int) -> float:
    """Runs per second of as many threads that call a session."""

    def call(count: list[int], stop: threading.Event) -> None:
        while not stop.is_set():
            session.run({port: x})
            count[0] += 1

    return rate(call, clients)


def rate(call: Callable[[list[int], threading.Event], None], clients: int) -> float:
    """How often all threads that ``call`` count something in a second, after some to warm up."""
    counts, stop = [[0] for _ in range(clients)], threading.Event()
    threads = [threading.Thread(target=call, args=(count, stop)) for count in counts]
    for thread in threads:
        thread.start()
    time.sleep(SECONDS / 4)
    before, start = sum(c[0] for c in counts), time.perf_counter()
    time.sleep(SECONDS)
    done, seconds = sum(c[0] for c in counts) - before, time.perf_counter() - start
    stop.set()
    for thread in threads:
        thread.join()
    return done / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shape", default="1x3x224x224")
    parser.add_argument("--clients", default=",".join(map(str, CLIENTS)))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--shared-memory", action="store_true")
    parser.add_argument("serve", nargs="*", help="further options of penstock serve")
    arguments = parser.parse_args()
    shape = [int(dim) for dim in arguments.shape.split("x")]
    x = np.random.default_rng(0).random(shape, np.float32)
    session = ps.compile(arguments.model)
    port = session.inputs[0].name
    session.run({port: x})
    command = [sys.executable, "-m", "penstock.cli", "serve", str(arguments.model), "--port", "0"]
    if arguments.shared_memory:
        command.append("--shared-memory")
    server = subprocess.Popen(
        [*command, *arguments.serve], stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL
    )
    try:
        assert server.stderr is not None
        match = re.search(r"http://([\d.]+):(\d+)", server.stderr.readline())
        assert match is not None
        address = match[1], int(match[2])
        name = arguments.model.stem
        ask = partial(served, address, request(name, x, port))
        if arguments.shared_memory:
            ask = partial(served_shared, address, name, x, port)
        print("| clients | penstock serve | in process | ratio |\n|---|---|---|---|")
        for clients in map(int, arguments.clients.split(",")):
            pairs = [
                (ask(clients), in_process(session, x, port, clients))
                for _ in range(arguments.rounds)
            ]
            one, other = (statistics.median(figures) for figures in zip(*pairs, strict=True))
            print(f"| {clients} | {one:.1f}/s | {other:.1f}/s | {one / other:.2f} |", flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


if __name__ == "__main__":
    main()
