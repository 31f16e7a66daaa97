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

    prefix: str

    def __init_subclass__(cls, *, code: int, title: str) -> None:
        cls.prefix = f"[ONNXRuntimeError] : {code} : {title} : "

    def __init__(self, message: object = "") -> None:
        super().__init__(f"{self.prefix}{message}")


class Fail(CodedError, code=1, title="FAIL"):
    """Something failed that has no error of its own."""


class InvalidArgument(CodedError, code=2, title="INVALID_ARGUMENT"):
    """An argument of a run does not fit the model."""


class NoSuchFile(CodedError, code=3, title="NO_SUCHFILE"):
    """There is no file of the model."""


class NoModel(CodedError, code=4, title="NO_MODEL"):
    """There is no model."""


class EngineError(CodedError, code=5, title="ENGINE_ERROR"):
    """An engine failed."""


class RuntimeException(CodedError, code=6, title="RUNTIME_EXCEPTION"):
    """A run failed."""


class InvalidProtobuf(CodedError, code=7, title="INVALID_PROTOBUF"):
    """A file is no model."""


class ModelLoaded(CodedError, code=8, title="MODEL_LOADED"):
    """A model was loaded already."""


class NotImplemented(CodedError, code=9, title="NOT_IMPLEMENTED"):
    """An operation of the model has no kernel, or Penstock lacks what is asked for."""


class InvalidGraph(CodedError, code=10, title="INVALID_GRAPH"):
    """The graph of a model breaks a rule."""


class EPFail(CodedError, code=11, title="EP_FAIL"):
    """An execution provider failed."""


class ModelLoadCanceled(CodedError, code=12, title="MODEL_LOAD_CANCELED"):
    """Loading was cancelled."""


class ModelRequiresCompilation(CodedError, code=13, title="MODEL_REQUIRES_COMPILATION"):
    """A model must be compiled first; no error of Penstock's."""


class NotFound(CodedError, code=14, title="NOT_FOUND"):
    """Something was not found."""


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
