"""A line for each request in the Common Log Format, which tools for web servers read::

    127.0.0.1 - - [10/Oct/2026:13:55:36 +0000] "POST /v2/models/g/infer HTTP/1.1" 200 2326

Lines go to the logger of this module at level INFO, from the thread that sends the response.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

LOGGER = logging.getLogger(__name__)
# Characters that would end the line or the field in a log.
_UNSAFE = re.compile(r"[^ !#-\[\]-~]")


def log_request(client: str, request: str, status: int, size: int) -> None:
    """Log a request: the address of its client, its request line ("-" if it has none), and the
    status and the size of the body, in bytes, of the response."""
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    # Time of the response, whose status is logged; most tools accept either time.
    now = time.strftime("%d/%b/%Y:%H:%M:%S %z")
    line = _UNSAFE.sub(lambda found: f"\\x{ord(found.group()):02x}", request)
    LOGGER.info('%s - - [%s] "%s" %d %d', client, now, line, status, size)


class LoggedRequests:
    """An ASGI application that logs the requests of another one."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not LOGGER.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        status = size = 0

        async def counted(message: Message) -> None:
            nonlocal status, size
            status = message.get("status", status)
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            target = scope["raw_path"] + (b"?" if scope["query_string"] else b"")
            target += scope["query_string"]
            line = f"{scope['method']} {target.decode('latin-1')} HTTP/{scope['http_version']}"
            log_request((scope["client"] or ("-",))[0], line, status, size)


@contextmanager
def logging_to(path: Path | None) -> Iterator[None]:
    """Log requests to a file within the context; if it is renamed, a new one is opened. "-" is the
    standard output, None disables the log."""
    if path is None:
        yield
        return
    handler: logging.Handler
    handler = logging.StreamHandler(sys.stdout) if str(path) == "-" else WatchedFileHandler(path)
    before = LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # a handler of the root logger would show each line again
    try:
        yield
    finally:
        LOGGER.level, LOGGER.propagate = before
        LOGGER.removeHandler(handler)
        handler.close()
