"""Request bodies of bounded size, which may be compressed."""

from __future__ import annotations

import asyncio
import zlib

from starlette.requests import Request

from penstock.core.errors import InvalidInput
from penstock.serving.error_answers import TooLargeError


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a request, decompressed. Raises ``TooLargeError`` for more than ``most``
    bytes, and ``InvalidInput`` for a body that does not match its content-encoding."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise InvalidInput(f"content-encoding {encoding!r:.40} is unsupported: use gzip or deflate")
    return await asyncio.to_thread(_decompressed, body, most)


def _decompressed(body: bytes, most: int) -> bytes:
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip, or zlib
    try:
        # The limit is on the output: few bytes may decompress to any number.
        content = decompressor.decompress(body, most + 1)
    except zlib.error as error:
        raise InvalidInput(f"the body does not match its content-encoding: {error}") from error
    if len(content) > most:
        raise _too_large(most)
    if not decompressor.eof:
        raise InvalidInput("the compressed body is truncated")
    return content


def _too_large(most: int) -> TooLargeError:
    return TooLargeError(f"the request is larger than {most} bytes")
