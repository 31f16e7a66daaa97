"""Bodies of requests that are too large, or not compressed as they say."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.core.errors import InvalidInput
from penstock.serving.error_answers import TooLargeError
from penstock.serving.request_body import read_body

TEXT = b"some text " * 10


class Request:
    """What ``read_body`` asks of a request, which comes in pieces of 7 bytes."""

    def __init__(self, body: bytes, encoding: str | None) -> None:
        self.headers = {} if encoding is None else {"content-encoding": encoding}
        self._body = body

    async def stream(self) -> AsyncIterator[bytes]:
        for i in range(0, len(self._body), 7):
            yield self._body[i : i + 7]


def read(body: bytes, encoding: str | None, most: int = 100) -> bytes:
    request: Any = Request(body, encoding)
    return asyncio.run(read_body(request, most))


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (TEXT, None),
        (TEXT, "identity"),
        (gzip.compress(TEXT), "gzip"),
        (zlib.compress(TEXT), "deflate"),
    ],
    ids=["none", "identity", "gzip", "deflate"],
)
def test_body_is_decompressed(body: bytes, encoding: str | None) -> None:
    assert read(body, encoding) == TEXT


@pytest.mark.parametrize(
    ("body", "encoding", "error", "reason"),
    [
        (TEXT, "br", InvalidInput, "use gzip or deflate"),
        (TEXT, "gzip", InvalidInput, "does not match its content-encoding"),
        (gzip.compress(TEXT)[:-4], "gzip", InvalidInput, "truncated"),
        (bytes(101), None, TooLargeError, "larger than 100 bytes"),
        (gzip.compress(bytes(5000)), "gzip", TooLargeError, "larger than 100 bytes"),
    ],
    ids=["unknown", "not compressed", "truncated", "long", "long if decompressed"],
)
def test_body_that_is_wrong_is_refused(
    body: bytes, encoding: str | None, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        read(body, encoding)
