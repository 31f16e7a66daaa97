"""A line on stderr that shows the progress of long work."""

from __future__ import annotations

import sys
from time import monotonic

_WIDTH = 24


class ProgressLine:
    """Shows the progress of long work (``core.checkpoints.report_progress``) on one line of stderr,
    from ``delay`` seconds after its beginning, and clears the line at the end."""

    def __init__(self, delay: float = 1.0) -> None:
        self._delay = delay
        self._begin: float | None = None
        self._shown = 0

    def __call__(self, step: str, done: int, total: int) -> None:
        if self._begin is None:
            self._begin = monotonic()
        ends = done >= total
        if monotonic() - self._begin >= self._delay and not ends:
            bar = ("#" * (_WIDTH * done // total)).ljust(_WIDTH, ".")
            self._write(f"[{bar}] {done}/{total} {step}")
        elif ends:
            self.clear()

    def clear(self) -> None:
        """Clear the line when the work has ended or failed."""
        self._write("")
        self._begin, self._shown = None, 0

    def _write(self, text: str) -> None:
        """Write a text over the previous one."""
        if text or self._shown:
            sys.stderr.write("\r" + text.ljust(self._shown) + ("" if text else "\r"))
            sys.stderr.flush()
        self._shown = len(text)
