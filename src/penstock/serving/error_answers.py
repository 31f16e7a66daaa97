"""Responses to failed requests: the status, and the document of the protocol."""

# tests: tests/serving/test_error_answers.py tests/serving/test_text_endpoints.py

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.core.errors import DeadlineExceeded, InvalidInput, PenstockError, QueueFull, RunError
from penstock.core.types import JsonObject
from penstock.serving.direct import Answer
from penstock.serving.repository import UnknownModel
from penstock.serving.sequence_table import SequenceConflict, TooManySequences
from penstock.serving.shared_memory import UnknownRegion
from penstock.serving.text_protocol import FieldError, error_object

TEXTS = "/v1/"
"""the prefix of the paths of OpenAI's API"""
_RETRY_AFTER = "1"
"""seconds after which a client may retry if the queue was full. The end of a text cannot be
predicted, and clients of this API back off anyway."""


class MissingExtensionError(PenstockError):
    """A request needs a part of the protocol that the server does not support."""


class TooLargeError(PenstockError):
    """A request is larger than the server accepts."""


_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (UnknownModel, 404),
    (UnknownRegion, 404),
    (MissingExtensionError, 404),
    (InvalidInput, 400),
    (SequenceConflict, 409),
    (TooManySequences, 429),
    (QueueFull, 503),
    (DeadlineExceeded, 504),
    (TooLargeError, 413),
)


def described(error: Exception) -> tuple[str, int]:
    """Return the message and the status of an error."""
    status = next((code for of, code in _STATUS if isinstance(error, of)), 500)
    if isinstance(error, RunError) and error.by_feeds:
        status = 400
    if isinstance(error, QueueFull):
        return ("the queue of the model is full: try again later", status)
    own = isinstance(error, PenstockError | OSError)
    return str(error) if own else f"{type(error).__name__}: {error}", status


def error_response(message: str, status: int) -> Response:
    """Return the response of the Open Inference Protocol for an error."""
    return JSONResponse({"error": message}, status)


def text_error_document(error: Exception) -> tuple[JsonObject, int]:
    """Return the object of OpenAI's API for an error, and the status."""
    message, status = described(error)
    status = 429 if isinstance(error, QueueFull) else status
    param = error.param if isinstance(error, FieldError) else None
    code = error.code if isinstance(error, FieldError) else None
    if isinstance(error, UnknownModel):
        param, code = "model", "model_not_found"
    return error_object(message, status, param, code), status


def text_error(error: Exception) -> Response:
    """Return the response of OpenAI's API for an error."""
    document, status = text_error_document(error)
    headers = {"retry-after": _RETRY_AFTER} if status == 429 else None
    return JSONResponse(document, status, headers)


def error_answer(error: Exception) -> Answer:
    """Return the response for an error on a thread that has borrowed a connection."""
    message, status = described(error)
    return Answer(status, [json.dumps({"error": message}).encode()], None)


async def refused(request: Request, error: Any) -> Response:
    """Return the response to a request for an unknown path or with an unsupported method."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    if request.url.path.startswith(TEXTS):
        return JSONResponse(error_object(message, error.status_code), error.status_code)
    return error_response(message, error.status_code)
