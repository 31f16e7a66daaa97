"""Log lines of the logger "penstock": plans that are compiled and dropped, and what is missing.

Penstock does not import ``logging``, which takes a few milliseconds: a program that reads its lines
has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

DEBUG, INFO, WARNING = 10, 20, 30
"""the levels of ``logging``"""


def is_logged(level: int) -> bool:
    """Whether anything reads lines of this level."""
    logging = _logging()
    return logging is not None and bool(logging.getLogger("penstock").isEnabledFor(level))


def log(level: int, message: str, *arguments: object) -> None:
    """Write a line, whose ``arguments`` are formatted if anything reads it."""
    logging = _logging()
    if logging is not None:
        logging.getLogger("penstock").log(level, message, *arguments)


def _logging() -> Any:
    """The module, if its import has ended: a signal handler may interrupt it half done."""
    module = sys.modules.get("logging")
    return module if hasattr(module, "captureWarnings") else None  # what it defines last
