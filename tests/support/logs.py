"""What is logged while a test runs.

Pytest's own plugin for this is off (pyproject.toml): it makes handlers for each phase of each test,
a fiftieth of the suite's time, and few tests look at logs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Records(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self.emit = records.append  # type: ignore[method-assign]


@contextmanager
def logged(
    name: str | None = None, level: int = logging.WARNING
) -> Iterator[list[logging.LogRecord]]:
    """The records of a logger and of those below it, from ``level`` on; None: of all loggers."""
    records: list[logging.LogRecord] = []
    logger, handler = logging.getLogger(name), _Records(records)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield records
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
