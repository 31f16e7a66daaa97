"""ONNX Runtime's exceptions, by the names and codes that programs look for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    InvalidModel,
    LimitExceeded,
    PenstockError,
    Unsupported,
)


class CodedError(Exception):
    """An error whose message begins as ONNX Runtime's do, with a code and its name."""

    code = 1
    title = "FAIL"

    def __init__(self, message: object = "") -> None:
        super().__init__(f"[ONNXRuntimeError] : {self.code} : {self.title} : {message}")


class Fail(CodedError):
    """Something failed that has no error of its own."""


class InvalidArgument(CodedError):
    """An argument of a run does not fit the model."""

    code, title = 2, "INVALID_ARGUMENT"


class NoSuchFile(CodedError):
    """There is no file of the model."""

    code, title = 3, "NO_SUCHFILE"


class NoModel(CodedError):
    """There is no model."""

    code, title = 4, "NO_MODEL"


class EngineError(CodedError):
    """An engine failed."""

    code, title = 5, "ENGINE_ERROR"


class RuntimeException(CodedError):
    """A run failed."""

    code, title = 6, "RUNTIME_EXCEPTION"


class InvalidProtobuf(CodedError):
    """A file is no model."""

    code, title = 7, "INVALID_PROTOBUF"


class ModelLoaded(CodedError):
    """A model was loaded already."""

    code, title = 8, "MODEL_LOADED"


class NotImplemented(CodedError):
    """An operation of the model has no kernel, or Penstock lacks what is asked for."""

    code, title = 9, "NOT_IMPLEMENTED"


class InvalidGraph(CodedError):
    """The graph of a model breaks a rule."""

    code, title = 10, "INVALID_GRAPH"


class EPFail(CodedError):
    """An execution provider failed."""

    code, title = 11, "EP_FAIL"


class ModelLoadCanceled(CodedError):
    """Loading was cancelled."""

    code, title = 12, "MODEL_LOAD_CANCELED"


class ModelRequiresCompilation(CodedError):
    """A model must be compiled first; no error of Penstock's."""

    code, title = 13, "MODEL_REQUIRES_COMPILATION"


class NotFound(CodedError):
    """Something was not found."""

    code, title = 14, "NOT_FOUND"


_ERRORS: tuple[tuple[type[BaseException], type[CodedError]], ...] = (
    (FileNotFoundError, NoSuchFile),
    (InvalidInput, InvalidArgument),
    (Unsupported, NotImplemented),
    (InvalidModel, InvalidGraph),
    (LimitExceeded, RuntimeException),
    (DeadlineExceeded, RuntimeException),
    (Cancelled, Fail),
)


@contextmanager
def translated(*, otherwise: type[CodedError] = RuntimeException) -> Iterator[None]:
    """Raise what ONNX Runtime raises in place of Penstock's errors, which are the causes."""
    try:
        yield
    except (PenstockError, FileNotFoundError) as error:
        named = next((own for kind, own in _ERRORS if isinstance(error, kind)), otherwise)
        raise named(error) from error
