"""Spans of OpenTelemetry: the times of runs, requests and batches, in the trace of their cause.

Spans are recorded if the program has imported ``opentelemetry`` and set a tracer provider before
sessions are created (``log.is_traced``). For names and attributes see docs/how-to/opentelemetry.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from penstock.core import VERSION
from penstock.host.log import is_traced

Attributes: TypeAlias = "Mapping[str, str | int | list[str]]"
R = TypeVar("R")


class TracedSpan:
    """A span that begins now, on the thread that causes it, and may end on another thread.

    Args:
        name: The name of the operation.
        attributes: The attributes that are known now.
        causes: Spans that the operation serves, if there are several.
        headers: The headers of a request from another process, which may contain its span.
    """

    def __init__(
        self,
        name: str,
        attributes: Attributes,
        causes: Iterable[TracedSpan] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        from opentelemetry import trace as api

        self._api = api
        tracer = api.get_tracer_provider().get_tracer("penstock", VERSION)
        links = [api.Link(cause._span.get_span_context()) for cause in causes]
        context, kind = None, api.SpanKind.INTERNAL
        if headers is not None:
            from opentelemetry.propagate import extract

            context = extract(headers)
            kind = api.SpanKind.SERVER
        self._span: Any = tracer.start_span(name, context, kind, dict(attributes), links)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make spans that begin meanwhile on this thread children of this one."""
        with self._api.use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield

    def add(self, attributes: Attributes) -> None:
        """Add attributes that are known only now."""
        self._span.set_attributes(attributes)

    def event(self, name: str) -> None:
        """Record an event with the current time."""
        self._span.add_event(name)

    def end(self, error: BaseException | None = None) -> None:
        """End the span, with an error if there was one. Further calls have no effect."""
        if not self._span.is_recording():  # the span has ended, or was not sampled
            return
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(error)))
        self._span.end()


def span(
    name: str,
    attributes: Attributes,
    causes: Iterable[TracedSpan] = (),
    headers: Mapping[str, str] | None = None,
) -> TracedSpan | None:
    """Return a span, or None if nothing collects them."""
    return TracedSpan(name, attributes, causes, headers) if is_traced() else None


def during(name: str, function: Callable[[], R]) -> R:
    """Call a function within a span, and return its result."""
    traced, error = TracedSpan(name, {}), None
    try:
        with traced.current():
            return function()
    except BaseException as raised:
        error = raised
        raise
    finally:
        traced.end(error)
        del error  # the error refers to this frame


def has_current_span() -> bool:
    """Whether a span of the program or of another library is current on this thread."""
    from opentelemetry.trace import get_current_span

    return bool(get_current_span().get_span_context().is_valid)
