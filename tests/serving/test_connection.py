"""Connections: how often the event loop turns for a request, and what clients may do wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvicorn

from penstock.serving.connection import Packets, connections
from tests.support.timing import SOON, wait_until

HEAD = "POST /{} HTTP/1.1\r\nHost: here\r\nContent-Length: {}\r\n\r\n"

CHUNKED = "POST /a HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"


class Echo:
    """An application that answers with the number of bytes of a body; ``messages`` has the bytes of
    each message that it got. It does not answer ``/held`` until ``opened``."""

    def __init__(self) -> None:
        self.messages: list[int] = []
        self.opened = threading.Event()
        self.padding = 0  # bytes at the end of answers
        self.server: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more, size = True, 0
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            more = message["more_body"]
            self.messages.append(len(message["body"]))
            size += len(message["body"])
        if scope["path"] == "/held":
            await asyncio.to_thread(self.opened.wait, SOON)
        body = f"{scope['path']} {size}".encode() + bytes(self.padding)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextmanager
def served(seconds: float = SOON) -> Iterator[tuple[socket.socket, Echo]]:
    """A connection to a server of ``Echo``."""
    app = Echo()
    config = uvicorn.Config(app, http=connections(seconds), log_level="critical", lifespan="off")
    app.server = server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: server.started)
            with socket.create_connection(listener.getsockname(), SOON) as client:
                yield client, app
        finally:
            app.opened.set()
            server.should_exit = True
            thread.join(SOON)
    assert not thread.is_alive()


def read_to_end(client: socket.socket) -> tuple[str, Any]:
    """The status line of an answer after which the server hangs up, and its document."""
    text = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()
    head, _, body = text.partition("\r\n\r\n")
    assert "connection: close" in head
    return head.split("\r\n")[0], json.loads(body)


def answers(client: socket.socket, *bodies: str) -> None:
    """Read answers with these bodies, one after the other."""
    text = ""
    for body in bodies:
        while f"\r\n\r\n{body}" not in text:
            piece = client.recv(1 << 16)
            assert piece, text
            text += piece.decode()
        text = text.partition(f"\r\n\r\n{body}")[2]
    assert text == ""


@pytest.mark.parametrize("size", [0, 1, 600_000, 1 << 20])
def test_body_of_up_to_a_megabyte_is_one_message(size):
    with served() as (client, app):
        for _ in range(3):
            client.sendall(HEAD.format("a", size).encode() + bytes(size))
            answers(client, f"/a {size}")
        assert app.messages == [size] * 3


def test_longer_body_is_handed_over_as_it_arrives():
    size = 5 << 20
    with served() as (client, app):
        client.sendall(HEAD.format("a", size).encode() + bytes(size))
        answers(client, f"/a {size}")
    assert sum(app.messages) == size
    assert 3 <= len(app.messages) <= 6


def test_chunked_body_in_small_chunks_is_one_message():
    with served() as (client, app):
        client.sendall(CHUNKED.encode() + b"3\r\nabc\r\n" * 1000 + b"0\r\n\r\n")
        answers(client, "/a 3000")
    assert app.messages == [3000]


def test_pipelined_requests_are_answered_in_their_order():
    with served() as (client, app):
        client.sendall(b"".join(HEAD.format(n, n).encode() + bytes(n) for n in (3, 2, 1)))
        answers(client, "/3 3", "/2 2", "/1 1")
    assert app.messages == [3, 2, 1]


@pytest.mark.parametrize("sent", ["POST /a HT", HEAD.format("a", 10) + "abc"])
def test_request_that_does_not_arrive_in_time_is_refused(sent):
    with served(seconds=0.2) as (client, _):
        client.sendall(sent.encode())
        status, document = read_to_end(client)
    assert status == "HTTP/1.1 408 Request Timeout"
    assert document == {"error": "the request has not arrived within 0.2 s"}


@pytest.mark.parametrize("requests", [0, 1])
def test_connection_without_a_request_is_closed(requests):
    with served(seconds=0.2) as (client, _):
        for _ in range(requests):
            client.sendall(HEAD.format("a", 0).encode())
            answers(client, "/a 0")
        assert client.recv(1) == b""


def test_long_head_is_refused():
    begin = b"GET / HTTP/1.1\r\nA: "
    with served() as (client, _):
        client.sendall(begin + bytes([97]) * ((1 << 16) + 1 - len(begin)))
        status, document = read_to_end(client)
    assert status == "HTTP/1.1 431 Request Header Fields Too Large"
    assert document == {"error": "the head of the request is longer than 65536 bytes"}


@pytest.mark.parametrize("begin", ["GET / HTTP/1.1\r\nA: ", CHUNKED + "1\r\na\r\n0\r\nA: "])
@pytest.mark.parametrize("more", ["a", "a\r\nA: "])
def test_head_or_trailer_without_end_is_not_read_on(begin, more):
    with served() as (client, _):
        client.sendall(begin.encode())
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(more.encode() * ((1 << 16) // len(more)))


def test_second_request_that_does_not_arrive_in_time_is_refused():
    with served(seconds=0.2) as (client, _):
        client.sendall((HEAD.format("a", 0) + HEAD.format("b", 10)).encode())
        answers(client, "/a 0")
        assert read_to_end(client)[0] == "HTTP/1.1 408 Request Timeout"


def test_request_that_has_arrived_may_take_longer():
    with served(seconds=0.2) as (client, app):
        client.sendall(HEAD.format("held", 3).encode() + b"abc")
        wait_until(lambda: app.messages)
        threading.Timer(0.4, app.opened.set).start()
        answers(client, "/held 3")


def test_connection_whose_answer_is_not_read_is_closed():
    with served(seconds=0.3) as (client, app):
        app.padding = 64 << 20
        client.sendall(HEAD.format("a", 0).encode())
        wait_until(lambda: app.messages and not app.server.server_state.connections)
        with suppress(ConnectionError):
            size = sum(map(len, iter(lambda: client.recv(1 << 20), b"")))
            assert size < app.padding


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\nx y: z\r\n\r\n"]
)
def test_what_is_no_http_is_refused_in_the_form_of_the_protocol(sent):
    with served() as (client, app):
        client.sendall(sent)
        status, document = read_to_end(client)
    assert status == "HTTP/1.1 400 Bad Request"
    assert document == {"error": "Invalid HTTP request received."}
    assert app.messages == []


async def turn_of_the_event_loop() -> None:
    loop = asyncio.get_running_loop()
    turned = loop.create_future()
    loop.call_soon(turned.set_result, None)
    await turned


class Sent:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def close(self) -> None:
        self.closed = True


def test_what_one_turn_of_the_event_loop_writes_is_one_packet_unless_it_is_long():
    async def write() -> None:
        transport = Sent()
        packets = Packets(transport)  # type: ignore[arg-type]
        packets.write(b"head")
        packets.write(b"body")
        assert transport.written == []
        await turn_of_the_event_loop()
        assert transport.written == [b"headbody"]
        long = bytes(1 << 17)
        packets.write(b"head")
        packets.write(long)
        packets.close()
        assert transport.written == [b"headbody", b"head", long]
        assert transport.written[-1] is long
        assert transport.closed
        await turn_of_the_event_loop()
        assert len(transport.written) == 3

    asyncio.run(write())
