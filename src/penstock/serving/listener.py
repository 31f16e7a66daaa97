"""The listening socket of the server, and its behavior without free file descriptors.

asyncio would try to accept each waiting connection, 2,048 of them, report each failure with a
traceback, and repeat this every second: the log would grow by a megabyte per second. Here, a
failure ends the attempts of this second, and failures are logged only from time to time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from time import monotonic
from typing import Any

from penstock.core.errors import PenstockError
from penstock.serving.direct import REPORT_S

_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)


class Listener(socket.socket):
    """A socket at a host and a port, from which asyncio accepts connections. Its protocol is TCP:
    only then does asyncio set TCP_NODELAY, without which small packets are delayed by 40 ms."""

    def __init__(self, host: str, port: int) -> None:
        of_tcp = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP}
        self._failed = False
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, **of_tcp)[0]
            super().__init__(family, kind, protocol)
            try:
                self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.bind(address)
                self.listen(1024)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise PenstockError(
                f"cannot listen at {host} port {port}: {error.strerror}; --host and --port name "
                "another address"
            ) from error

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a pending connection. After an error for lack of file descriptors, the next call
        raises ``BlockingIOError`` as if none were pending, so that asyncio pauses its attempts."""
        if self._failed:
            self._failed = False
            raise BlockingIOError(
                errno.EAGAIN, "the process has no free file descriptor for a connection"
            )
        try:
            return super().accept()
        except OSError as error:
            self._failed = error.errno in _OUT_OF_FILES
            raise


class LoopErrors:
    """An exception handler for an event loop (``loop.set_exception_handler``)."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "socket" not in context or getattr(error, "errno", None) not in _OUT_OF_FILES:
            loop.default_exception_handler(context)
        elif monotonic() >= self._next:
            self._next = monotonic() + REPORT_S
            logging.getLogger(__name__).error(
                "new connections wait, since the process has reached its limit of open files: "
                "%s; raise the limit (ulimit -n), or reduce the number of concurrent clients",
                error,
            )
