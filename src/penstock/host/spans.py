"""Spans of OpenTelemetry: what a run, a request or a batch took, in the trace of whoever caused it.

There are spans where the program has ``opentelemetry`` with a provider of tracers before sessions
are made; Penstock imports nothing of it before. Names and attributes are in
docs/how-to/opentelemetry.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from penstock.core import VERSION

_NAMES = "opentelemetry.trace", "opentelemetry.propagate"

P = ParamSpec("P")
R = TypeVar("R")


def is_traced() -> bool:
    """Whether somebody collects spans."""
    return _tracer() is not None


def _tracer() -> Any:
    """The tracer of Penstock's spans; None where nobody collects them."""
    api = sys.modules.get(_NAMES[0])
    # Set while it is imported by another thread, before it has its functions.
    if api is None or not hasattr(api, "get_tracer_provider"):
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, api.ProxyTracerProvider):  # it stands for one that may come
        return None
    return provider.get_tracer("penstock", VERSION)


class Span:
    """A span that begins now, on the thread that causes it, and may end on another one.

    Args:
        name: What takes the time.
        attributes: What is known of it now.
        causes: Spans that it works for, if these are several.
        headers: Those of a request from another process, whose span may be named there.
    """

    def __init__(
        self,
        name: str,
        attributes: Mapping[str, Any],
        causes: Iterable[Span] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        tracer, api = _tracer(), sys.modules[_NAMES[0]]
        links = [api.Link(cause._span.get_span_context()) for cause in causes]
        context = kind = None
        if headers is not None:
            context = import_module(_NAMES[1]).extract(headers)
            kind = api.SpanKind.SERVER
        self._api = api
        self._span: Any = tracer.start_span(
            name, context, kind or api.SpanKind.INTERNAL, dict(attributes), links
        )

    @contextmanager
    def current(self) -> Iterator[None]:
        """Spans that begin meanwhile on this thread are parts of this one."""
        with self._api.use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield

    def add(self, attributes: Mapping[str, Any]) -> None:
        """Add what is known only now."""
        self._span.set_attributes(attributes)

    def event(self, name: str) -> None:
        """Something happens now."""
        self._span.add_event(name)

    def end(self, error: BaseException | None = None) -> None:
        """End the span, with an error if there was one; another call does nothing."""
        if not self._span.is_recording():  # it has ended, or nobody wants this one
            return
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(error)))
        self._span.end()


def span(
    name: str,
    attributes: Mapping[str, Any],
    causes: Iterable[Span] = (),
    headers: Mapping[str, str] | None = None,
) -> Span | None:
    """A ``Span``, if somebody collects them."""
    return Span(name, attributes, causes, headers) if is_traced() else None


def has_current_span() -> bool:
    """Whether a span has begun on this thread, of the program or of another library."""
    return bool(sys.modules[_NAMES[0]].get_current_span().get_span_context().is_valid)


def during(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function each of whose calls has a span, if somebody collects them."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            own, error = span(name, {}), None
            if own is None:
                return function(*arguments, **named)
            try:
                with own.current():
                    return function(*arguments, **named)
            except BaseException as raised:
                error = raised
                raise
            finally:
                own.end(error)
                del error  # it holds this frame

        return call

    return decorate
