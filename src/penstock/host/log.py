"""Events for a program that listens: lines of the logger "penstock" about plans compiled or dropped
and about what is missing, and spans of OpenTelemetry.

Penstock does not import ``logging``, which takes a few milliseconds, nor ``opentelemetry``: a
program that listens has imported them.
"""

from __future__ import annotations

import sys
from typing import Any

DEBUG, INFO, WARNING = 10, 20, 30
"""the levels of ``logging``"""


def is_logged(level: int) -> bool:
    """Whether anything reads lines of this level."""
    logging = _complete("logging", "captureWarnings")
    return logging is not None and bool(logging.getLogger("penstock").isEnabledFor(level))


def log(level: int, message: str, *arguments: object) -> None:
    """Write a line, whose ``arguments`` are formatted if anything reads it."""
    logging = _complete("logging", "captureWarnings")
    if logging is not None:
        logging.getLogger("penstock").log(level, message, *arguments)


def is_traced() -> bool:
    """Whether anything collects spans (``host.spans``)."""
    api = _complete("opentelemetry.trace", "use_span")
    # One that stands for a provider that may come collects none.
    return api is not None and not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)


def _complete(name: str, last: str) -> Any:
    """The module, if its import has come to the definition of ``last``: a signal handler may
    interrupt it half done."""
    module = sys.modules.get(name)
    return module if hasattr(module, last) else None
