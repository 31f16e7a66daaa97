"""The socket that the server listens on, and its behavior if the process is out of files.

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
    """A socket from which asyncio accepts connections, for an address of a host and a port. It says
    that it is of TCP: asyncio lets small packets wait for others on a socket that does not (no
    TCP_NODELAY), for 40 ms."""

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
        """A connection that waits. Behind an error for want of a file comes ``BlockingIOError``, as
        if none did: at that asyncio stops accepting until it tries again."""
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
    """An exception handler of an event loop (``loop.set_exception_handler``)."""

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
