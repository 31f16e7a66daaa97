"""Spans of OpenTelemetry: what a run, a request or a batch took, in the trace of its cause.

There are spans where the program has ``opentelemetry`` with a provider of tracers before sessions
are made (``log.is_traced``). Names and attributes are in docs/how-to/opentelemetry.md.
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
        """Spans that begin meanwhile on this thread are parts of this one."""
        with self._api.use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield

    def add(self, attributes: Attributes) -> None:
        """Add what is known only now."""
        self._span.set_attributes(attributes)

    def event(self, name: str) -> None:
        """Something happens now."""
        self._span.add_event(name)

    def end(self, error: BaseException | None = None) -> None:
        """End the span, with an error if there was one; another call does nothing."""
        if not self._span.is_recording():  # it has ended, or was not sampled
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
    """A span, if anything collects them."""
    return TracedSpan(name, attributes, causes, headers) if is_traced() else None


def during(name: str, function: Callable[[], R]) -> R:
    """Call a function within a span, and return its result."""
    own, error = TracedSpan(name, {}), None
    try:
        with own.current():
            return function()
    except BaseException as raised:
        error = raised
        raise
    finally:
        own.end(error)
        del error  # it holds this frame


def has_current_span() -> bool:
    """Whether a span has begun on this thread, of the program or of another library."""
    from opentelemetry.trace import get_current_span

    return bool(get_current_span().get_span_context().is_valid)
