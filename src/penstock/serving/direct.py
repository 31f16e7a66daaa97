"""Requests for inference that a single thread reads, runs and answers.

The event loop would hand each request to the thread of a replica, which would hand the outputs
back: three threads that wake each other while runs keep all cores busy, and the code of four
libraries, which runs evict from the CPU caches. A client that has requested one inference is likely
to request another, so the event loop lends the client's connection to a thread::

    event loop   first request ──> lend                            take back: other requests
    thread                          └─> read, run, answer, read, ... ──┘

The thread answers ordinary requests (a body of known length and up to a megabyte, no encodings), as
long as the client sends requests and receives answers without a pause. Otherwise it returns the
connection, with the bytes that it has read or has not yet sent: the event loop handles slow
clients, long bodies, other endpoints and all HTTP errors.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol

import httptools
import numpy as np

from penstock.core.records import dataclass
from penstock.executors.control import CancelToken
from penstock.host.threads import Workers
from penstock.serving.access_log import log_request
from penstock.serving.protocol import HEADER_LENGTH, HEADER_PRIORITY, priority_of

# Maximum number of lent connections: each has a thread, with memory for a body.
_MOST = 32
# Timeouts of a thread, in seconds: for the next bytes of a client, and for a whole request or
# response.
_PAUSE_S, _ARRIVAL_S = 0.1, 1.0
# Buffer sizes, in bytes: for a head with the bytes after it, and for a body.
_FIRST, _LONGEST = 1 << 14, 1 << 20
# Seconds between two reports of exhausted file descriptors.
REPORT_S = 60.0
# Seconds between two checks that the client of a run is still connected.
LOOK_S = 0.25
# Whether a page of another origin may read the response is decided by the event loop.
_ODD_HEADERS = frozenset(
    (b"content-encoding", b"expect", b"origin", b"transfer-encoding", b"upgrade")
)
_LENGTH, _PRIORITY = HEADER_LENGTH.encode(), HEADER_PRIORITY.encode()
_MOST_DIGITS = 20
# Alignment, in bytes: that of the widest vectors.
_ALIGNMENT = 64
_QUICK_ACK = getattr(socket, "TCP_QUICKACK", None)
# Maximum number of buffers that the system sends in one call.
_MOST_PARTS = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """The status of a response, its body in parts, the length of its JSON object if bytes follow,
    and the header of times."""

    status: int
    parts: Sequence[bytes | memoryview]
    header_length: int | None
    timing: str = ""


class Borrowed(Protocol):
    """A connection whose socket a thread may use until it gives the connection back."""

    socket: Any
    client: str
    ending: bool

    def begin(self) -> CancelToken:
        """Return a token for the run of a request, which is cancelled if the client disconnects."""
        ...

    def end(self) -> None:
        """End the use of the token: the run has ended, and the thread is about to respond."""
        ...

    def head(self, answer: Answer) -> bytes:
        """Return the status line and the headers of a response."""
        ...

    def give_back(self, unread: bytes, unsent: bytes, *, odd: bool) -> None:
        """Return the connection to the event loop, with the bytes that were read, and those that
        must be sent. ``odd``: threads cannot answer its requests. Called on any thread."""
        ...


class DirectAnswers:
    """Threads that answer requests for inference.

    Args:
        takes: Returns whether the threads answer the requests of a path.
        answer: Answers a request. Its arguments are the path, the length of the JSON object and the
            priority (None without these headers), the body, whose memory is reused for the next
            request, a token that ends the run, and a function to call with the answer, on another
            thread, if the answer cannot wait for the end of the run.
        max_bytes: The maximum size of a body: the event loop refuses longer ones.
    """

    def __init__(
        self,
        takes: Callable[[str], bool],
        answer: Callable[
            [str, str | None, int | None, memoryview, CancelToken, Callable[[Answer], None]], Answer
        ],
        max_bytes: int,
    ) -> None:
        self.takes = takes
        self.answer = answer
        self.longest = min(_LONGEST, max_bytes)
        self._workers = Workers("http", _MOST)

    def offer(self, connection: Borrowed) -> bool:
        """Lend a connection to a free thread, if there is one, and return whether there was."""
        return self._workers.offer(lambda: self._serve(connection))

    def close(self) -> None:
        """End the threads, once they have returned their connections."""
        self._workers.close()

    # On a thread.

    def _serve(self, connection: Borrowed) -> None:
        of = connection.socket
        client = socket.socket(of.family, of.type, of.proto, fileno=of.fileno())
        try:
            client.settimeout(_PAUSE_S)
            requests = _Requests(client, self)
            while self._answer_next(connection, requests, client):
                pass
        finally:
            client.detach()  # the event loop has the connection

    def _answer_next(
        self, connection: Borrowed, requests: _Requests, client: socket.socket
    ) -> bool:
        """Read a request and answer it. Return False if the connection was returned."""
        try:
            request = requests.next()
        except _UnfitError as error:
            connection.give_back(error.unread, b"", odd=error.odd)
            return False
        claim = threading.Lock()  # taken by the thread that answers first

        def late(answer: Answer) -> None:
            if claim.acquire(blocking=False):
                connection.end()
                _log(connection, request, answer)
                unsent = b"".join([connection.head(answer), *answer.parts])
                connection.give_back(b"", unsent, odd=False)

        cancel = connection.begin()
        path, length, priority = request.path, request.header_length, request.priority
        answer = self.answer(path, length, priority, requests.body, cancel, late)
        if answer.status != 200:
            requests.forget_memory()
        if not claim.acquire(blocking=False):
            return False
        connection.end()
        _log(connection, request, answer)
        unsent = _send(client, connection.head(answer), answer.parts)
        if unsent or connection.ending:
            connection.give_back(b"", unsent, odd=False)
            return False
        return True


class _Requests:
    """The requests that arrive from a client. Most clients repeat the head of their last request:
    it is read together with the body, and only compared. ``body``: the body of the last request."""

    def __init__(self, client: socket.socket, direct: DirectAnswers) -> None:
        self._client = client
        self._direct = direct
        self._first = bytearray(_FIRST)
        self._head = b""
        self._request = _Request(b"")
        self.forget_memory()

    def next(self) -> _Request:
        """Return the next request. Raises ``_UnfitError``."""
        head, first = self._head, memoryview(self._first)
        have = self._receive([first[: len(head)], self.body] if head else [first])
        if not have:
            raise _UnfitError(b"", odd=False)
        began = monotonic()
        if head and have >= len(head) and self._first.startswith(head):
            have -= len(head)
        else:
            behind = self.body[: have - len(head)] if head and have > len(head) else b""
            have = self._read_head(b"".join([first[: have - len(behind)], behind]), began)
        body = self.body
        while have < len(body):
            self._acknowledge()
            count = self._receive([body[have:]])
            have += count
            if not count or monotonic() > began + _ARRIVAL_S:
                raise _UnfitError(b"".join([self._head, body[:have]]), odd=False)
        return self._request

    def forget_memory(self) -> None:
        """Read the next request into other memory, since a stopped run may still read this one."""
        self._memory = np.empty(0, np.uint8)
        self.body = self._memory.data
        self._head = b""

    def _read_head(self, got: bytes, began: float) -> int:
        """Read another head, which began with ``got`` at ``began``, and return the number of bytes
        of the body read so far. Raises ``_UnfitError``."""
        while not (end := got.find(b"\r\n\r\n") + 4) >= 4:
            if len(got) > _FIRST:
                raise _UnfitError(got, odd=True)
            self._acknowledge()
            count = self._receive([memoryview(self._first)])
            got += self._first[:count]
            if not count or monotonic() > began + _ARRIVAL_S:
                raise _UnfitError(got, odd=False)
        request = _Request(got[:end])
        have, size = len(got) - end, request.body_size
        if (
            not request.ordinary
            or not have <= size <= self._direct.longest
            or not self._direct.takes(request.path)
        ):
            raise _UnfitError(got, odd=True)
        self._head, self._request, self.body = got[:end], request, self._place(request)
        self.body[:have] = got[end:]
        return have

    def _place(self, request: _Request) -> memoryview:
        """Return memory for a body, in which the bytes after the JSON object are aligned."""
        if len(self._memory) < request.body_size + _ALIGNMENT:
            self._memory = np.empty(request.body_size + _ALIGNMENT, np.uint8)
        length = request.header_length or ""
        text = int(length) if len(length) < _MOST_DIGITS and length.isdecimal() else 0
        start = -(self._memory.ctypes.data + text) % _ALIGNMENT
        return self._memory.data[start : start + request.body_size]

    def _acknowledge(self) -> None:
        """Acknowledge received bytes at once, not with the response: otherwise a client that delays
        small packets (without TCP_NODELAY) sends the rest 40 ms later."""
        if _QUICK_ACK is not None:
            with suppress(OSError):  # not a TCP socket
                self._client.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)

    def _receive(self, into: list[memoryview]) -> int:
        """Return the number of bytes received; 0 after the timeout or the end of the connection."""
        try:
            return self._client.recvmsg_into(into)[0]
        except OSError:  # TimeoutError among them
            return 0


class _UnfitError(Exception):
    """A thread cannot answer a request. ``unread``: the bytes that have arrived; ``odd``: whether
    the request is of another kind, rather than late."""

    def __init__(self, unread: bytes, *, odd: bool) -> None:
        super().__init__()
        self.unread = unread
        self.odd = odd


class _Request:
    """A request. ``ordinary``: whether the thread supports all that its head requests."""

    def __init__(self, head: bytes) -> None:
        self.path = ""
        self.header_length: str | None = None
        self.priority: int | None = None
        self.body_size = 0
        self.ordinary = True
        self._complete = False
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(head)
        except httptools.HttpParserError:  # the event loop answers with the error
            self.ordinary = False
            return
        method, version = parser.get_method(), parser.get_http_version()
        self.ordinary &= (method, version, self._complete) == (b"POST", "1.1", True)
        self.ordinary &= parser.should_keep_alive()

    # Callbacks of the parser.

    def on_url(self, url: bytes) -> None:
        self.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            self.body_size = int(value)  # the parser has checked that it is a number
        elif name == _LENGTH:
            # If it is repeated, two readers of the request may use different ones.
            self.ordinary &= self.header_length is None
            self.header_length = value.decode("latin-1")
        elif name == _PRIORITY:
            self.priority = priority_of(value.decode("latin-1"))
        elif name in _ODD_HEADERS:
            self.ordinary = False

    def on_headers_complete(self) -> None:
        self._complete = True

    def on_message_complete(self) -> None:  # with no body, or none that has a length
        self.ordinary = False


def _log(connection: Borrowed, request: _Request, answer: Answer) -> None:
    line = f"POST {request.path} HTTP/1.1"
    log_request(connection.client, line, answer.status, sum(map(len, answer.parts)))


def _send(client: socket.socket, head: bytes, body: Sequence[bytes | memoryview]) -> bytes:
    """Send a response. Return the bytes that could not be sent without waiting."""
    if len(body) >= _MOST_PARTS:
        body = [b"".join(body)]
    parts, begin = [memoryview(part) for part in (head, *body)], monotonic()
    while parts:
        try:
            count = client.sendmsg(parts)
        except OSError:
            break
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][count:]
            if monotonic() > begin + _ARRIVAL_S:
                break
    return b"".join(parts)
