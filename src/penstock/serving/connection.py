"""The HTTP connections of the server: uvicorn's, with fewer turns of the event loop a request.

uvicorn gives an application each piece of a body as it arrives, and reads no further until the
application has asked for it; it sends the head of a response before its body. A tensor of 600 KB
takes three pieces, six changes of what the event loop watches, and copies between them. Here a body
of up to a megabyte is one message, and what a turn of the event loop writes is one packet::

    pieces of a body ──> on_body, on_body, on_message_complete ──> one http.request
    http.response.start, http.response.body ──> Packets ──> one send
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

# Bytes of a body that are gathered before the application gets them. Longer bodies are read as the
# application asks for them, this much at a time.
_GATHERED = 1 << 20
# Bytes that are joined, to be written at once.
_PACKET = 1 << 16
# Bytes that the head of a request may have, and what else is no body.
_HEAD = 1 << 16


class Packets:
    """A transport that joins what is written in one turn of the event loop, if it is short. Other
    methods are those of ``transport``."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if sum(map(len, parts)) <= _PACKET:
            parts = [b"".join(parts)]
        for part in parts:
            self._transport.write(part)


class Connection(HttpToolsProtocol):  # type: ignore[misc]
    """A connection to a client. It ends if a request has not arrived within ``seconds`` of the
    connection or the last response, with status 408 if it has begun; and with status 431 if its
    head is too long, of which uvicorn would keep any number of bytes."""

    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._begun = self._arrived = False  # the last request
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._gathered = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(Packets(transport))
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if not self._begun:
            self.transport.close()
            return
        self._refuse(408, f"the request has not arrived within {self._seconds} s")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is no whole request, unless it has an answer, and hang up."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = json.dumps({"error": message}).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _HEAD and not self.transport.is_closing():
            self._refuse(431, f"the head of the request is longer than {_HEAD} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun, self._arrived = True, False
        self._pieces, self._gathered = [], 0

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._pieces.append(body)
        self._gathered += len(body)
        if self._gathered > _GATHERED:
            self._hand_over()
            self.flow.pause_reading()  # until the application asks for more

    def on_message_complete(self) -> None:
        self._arrived, self._head_bytes = True, 0
        self._stop_timer()
        if self._pieces:
            self._hand_over()
        super().on_message_complete()

    def _hand_over(self) -> None:
        """Give the application what was gathered, without a copy if it is all that there is."""
        pieces, self._pieces, self._gathered = self._pieces, [], 0
        cycle = self.cycle
        if not cycle.response_complete:
            body = b"".join(pieces)
            # uvicorn takes it as ``bytes(cycle.body)``, which does not copy bytes.
            cycle.body = cycle.body + body if cycle.body else body
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        queued = bool(self.pipeline)
        self._begun = queued or not self._arrived
        super().on_response_complete()
        if not (queued and self._arrived) and not self.transport.is_closing():
            self._start_timer()


def connections(seconds: float) -> Any:
    """What makes the connections of a server (``uvicorn.Config(http=...)``)."""
    return partial(Connection, seconds=seconds)
