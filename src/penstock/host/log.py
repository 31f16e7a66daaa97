"""Events for programs that listen: records of the logger "penstock" on plans that were compiled or
dropped and on what is missing, and spans of OpenTelemetry.

Penstock imports neither ``logging``, which takes a few milliseconds, nor ``opentelemetry``: a
program that listens has imported them.
"""

from __future__ import annotations

import sys
from typing import Any

DEBUG, INFO, WARNING = 10, 20, 30
"""the levels of ``logging``"""


def is_logged(level: int) -> bool:
    """Whether a handler is enabled for records of this level."""
    logging = _complete("logging", "captureWarnings")
    return logging is not None and bool(logging.getLogger("penstock").isEnabledFor(level))


def log(level: int, message: str, *arguments: object) -> None:
    """Log a message, whose ``arguments`` are formatted only if it is read."""
    logging = _complete("logging", "captureWarnings")
    if logging is not None:
        logging.getLogger("penstock").log(level, message, *arguments)


def is_traced() -> bool:
    """Whether anything collects spans (``host.spans``)."""
    api = _complete("opentelemetry.trace", "use_span")
    # The default provider, a proxy for one that may be set later, collects none.
    return api is not None and not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)


def _complete(name: str, last: str) -> Any:
    """Return the module if its import has reached the definition of ``last``. A signal handler may
    interrupt an import."""
    module = sys.modules.get(name)
    return module if hasattr(module, last) else None
