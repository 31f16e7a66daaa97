"""The HTTP connections of the server: uvicorn's, with fewer event loop iterations per request.

uvicorn passes each piece of a body to the application as it arrives, and reads no further until the
application requests it; it sends the head of a response before the body. A tensor of 600 KB takes
three pieces, six changes of the watched events, and several copies. Here, a body of up to a
megabyte is one message, and all that an event loop iteration writes is one packet::

    pieces of a body ──> on_body, on_body, on_message_complete ──> one http.request
    http.response.start, http.response.body ──> Packets ──> one send

Connections that request inference are lent to threads, which answer the next requests without the
event loop (``serving/direct.py``).
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.executors.control import CancelToken
from penstock.serving.access_log import log_request
from penstock.serving.direct import LOOK_S, Answer, DirectAnswers
from penstock.serving.protocol import HEADER_LENGTH, HEADER_TIMING

# Bytes of a body that are buffered before the application gets them. Longer bodies are read in
# chunks of this size, as the application requests them.
_GATHERED = 1 << 20
# Bytes that are concatenated for a single write.
_PACKET = 1 << 16
# Maximum bytes of a request's head, and of other data outside a body.
_HEAD = 1 << 16
_TIMING = HEADER_TIMING.encode()
# A client that closed its connection fully, not just its sending side, resets it when it receives
# bytes. Any number of these may precede a response.
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
# Connection events: end of the client's data; reset.
_NO_MORE = getattr(select, "POLLRDHUP", 0)
_RESET = select.POLLHUP | select.POLLERR if hasattr(select, "POLLHUP") else 0


class Packets:
    """A transport that joins short writes within one iteration of the event loop. All other methods
    are those of ``transport``."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Write the joined bytes."""
        parts, self._parts = self._parts, []
        if sum(map(len, parts)) <= _PACKET:
            parts = [b"".join(parts)]
        for part in parts:
            self._transport.write(part)


class Connection(HttpToolsProtocol):  # type: ignore[misc]
    """A connection to a client. It ends if a request has not arrived within ``seconds`` of the
    connection or the last response, with status 408 if the request has begun. It ends with status
    431 if the head is too long, since uvicorn would keep any number of bytes. It also ends if the
    client has not received a response within ``seconds``. ``direct``: threads that borrow it."""

    def __init__(
        self, *arguments: object, seconds: float, direct: DirectAnswers | None, **options: object
    ) -> None:
        super().__init__(*arguments, **options)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._direct = direct
        self._to_lend = False  # the last request was for inference
        self._lent: Loan | None = None
        self._begun = self._arrived = False  # the last request
        self._half_closed = False
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._gathered = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(Packets(transport))
        # Let ``pause_writing`` be called as soon as the system does not accept all written bytes.
        transport.set_write_buffer_limits(high=0)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def eof_received(self) -> bool:
        """Handle the end of the client's data. Return whether responses are still to be sent."""
        cycle = self.cycle
        self._half_closed = cycle is not None and not cycle.response_complete and self._arrived
        self.transport.flush()  # before asyncio closes the transport below it
        if self._half_closed:
            self.loop.call_later(LOOK_S, self._look_for_client)
        return self._half_closed

    def _look_for_client(self) -> None:
        """End the requests of a client that has closed its connection, but not of one that has only
        finished sending. Interim responses tell the two apart, if the version of HTTP has them."""
        cycle = self.cycle
        if (
            self.transport.is_closing()
            or cycle.response_started
            or cycle.scope["http_version"] != "1.1"
        ):
            return
        self.transport.write(_INTERIM)
        self.loop.call_later(LOOK_S, self._look_for_client)

    def pause_writing(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._seconds, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()
        self._lend()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

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
        """Answer an incomplete request, unless it has an answer, and close the connection."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = json.dumps({"error": message}).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + b"connection: close\r\n\r\n" + body)
            log_request(_host(self), "-", status, len(body))
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _HEAD and not self.transport.is_closing():
            self._refuse(431, f"the head of the request is longer than {_HEAD} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun, self._arrived, self._to_lend = True, False, False
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
        """Pass the gathered bytes to the application, without a copy if they are the whole body."""
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
        if self._half_closed and not queued:
            self.transport.close()
        if not (queued and self._arrived) and not self.transport.is_closing():
            self._start_timer()
            direct = self._direct
            if direct is not None and direct.takes(self.scope["path"]):
                self._to_lend = True
                self.loop.call_soon(self._lend)  # when the response has been written

    # Loans.

    def _lend(self) -> None:
        """Lend the connection to a thread, if its last request was for inference, and no bytes have
        arrived since or are left to be sent."""
        transport, direct = self.transport, self._direct
        if not self._to_lend or direct is None or transport.is_closing():
            return
        if self._begun or transport.get_write_buffer_size():
            return
        self._to_lend = False
        self._lent = Loan(self)
        self.flow.pause_reading()
        if direct.offer(self._lent):
            self._stop_timer()
            self._unset_keepalive_if_required()
            if _NO_MORE:
                self.loop.call_later(LOOK_S, self._look_at_loan, self._lent)
        else:
            self.flow.resume_reading()
            self._lent = None

    def _look_at_loan(self, loan: Loan) -> None:
        if self._lent is loan:
            loan.look()
            self.loop.call_later(LOOK_S, self._look_at_loan, loan)

    def take_back(self, unread: bytes, unsent: bytes, *, odd: bool) -> None:
        """Continue where the thread that borrowed the connection has stopped."""
        assert self._lent is not None
        ending, self._lent = self._lent.ending, None
        if odd:
            self._direct = None
        self._start_timer()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if unsent:  # a client that reads a long response may send another request
            self._to_lend = self._direct is not None
            self.transport.write(unsent)
            self.loop.call_soon(self._lend)
        self.flow.resume_reading()
        if unread:
            self.data_received(unread)
        if ending:
            self.shutdown()

    def shutdown(self) -> None:
        if self._lent is not None:
            self._lent.ending = True
        else:
            super().shutdown()


def _host(connection: Connection) -> str:
    """Return the address of a client, for logs."""
    return str(connection.client[0]) if connection.client else "-"


class Loan:
    """A connection that is lent to a thread (``Borrowed``)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.socket = connection.transport.get_extra_info("socket")
        self.client = _host(connection)
        self.ending = False
        self._run: CancelToken | None = None
        self._lock = threading.Lock()  # held by the writer during a run
        self._last: tuple[Any, Any, bytes] = (None, None, b"")  # inputs and bytes of the last head

    def begin(self) -> CancelToken:
        self._run = CancelToken()
        return self._run

    def end(self) -> None:
        with self._lock:
            self._run = None

    def look(self) -> None:
        """Cancel the run of a client that has hung up."""
        descriptor, poll = self.socket.fileno(), select.poll()
        poll.register(descriptor, _NO_MORE)
        with self._lock:
            run = self._run
            state = dict(poll.poll(0)).get(descriptor, 0) if run is not None else 0
            if state and not state & _RESET:
                with suppress(OSError):  # reset meanwhile, which the next poll detects
                    os.write(descriptor, _INTERIM)
        # Outside of the lock, which the response to the cancelled request acquires.
        if run is not None and state & _RESET:
            run.cancel()

    def head(self, answer: Answer) -> bytes:
        defaults, size = self._connection.server_state.default_headers, sum(map(len, answer.parts))
        last, of, head = self._last
        key = (answer.status, answer.header_length, size, self.ending)
        if defaults is not last or key != of:  # the server renews its headers every second
            head = self._made(defaults, answer.status, answer.header_length, size, self.ending)
            self._last = defaults, key, head
        # After the others, which are equal for most responses.
        timing = answer.timing.encode()
        return b"%s%s: %s\r\n\r\n" % (head[:-2], _TIMING, timing) if timing else head

    def _made(
        self, defaults: Any, status: int, header_length: int | None, size: int, ending: bool
    ) -> bytes:
        headers = [*defaults, (b"content-length", b"%d" % size)]
        if header_length is None:
            headers.append((b"content-type", b"application/json"))
        else:
            headers.append((HEADER_LENGTH.encode(), b"%d" % header_length))
            headers.append((b"content-type", b"application/octet-stream"))
        if ending:
            headers.append((b"connection", b"close"))
        lines = [STATUS_LINE[status]]
        for name, value in headers:
            lines += [name, b": ", value, b"\r\n"]
        return b"".join([*lines, b"\r\n"])

    def give_back(self, unread: bytes, unsent: bytes, *, odd: bool) -> None:
        connection = self._connection
        take_back = partial(connection.take_back, unread, unsent, odd=odd)
        with suppress(RuntimeError):  # the event loop has ended
            connection.loop.call_soon_threadsafe(take_back)


def connections(seconds: float, direct: DirectAnswers | None = None) -> Any:
    """Return a factory of the connections of a server (``uvicorn.Config(http=...)``)."""
    return partial(Connection, seconds=seconds, direct=direct)
