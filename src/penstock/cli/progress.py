"""How far a command has come, on a terminal: rich's bar where rich is installed, else a line."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from penstock.core.checkpoints import Progress, reporting
from penstock.host.progress_line import ProgressLine

_DELAY = 1.0  # most commands have ended by then, for which a bar would only flicker


@contextmanager
def showing_progress(what: str, *, quiet: bool) -> Iterator[None]:
    """Show how far the work of the block has come, if it takes longer than a second."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    with _shown(what) as progress, reporting(progress):
        yield


def _shown(what: str) -> AbstractContextManager[Progress]:
    try:
        import rich  # noqa: F401
    except ImportError:
        return _line(what)
    return _bar(what)


@contextmanager
def _line(what: str) -> Iterator[Progress]:
    line = ProgressLine(_DELAY)
    try:
        yield lambda step, done, total: line(f"{what}: {step}", done, total)
    finally:
        line.clear()


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    description, elapsed = TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(stderr=True)
    bar = Bar(description, BarColumn(), elapsed, console=console, transient=True)
    task = bar.add_task(what, total=None)
    timer = threading.Timer(_DELAY, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda step, done, total: bar.update(
            task, description=f"{what}: {step}", completed=done, total=total
        )
    finally:
        timer.cancel()
        # A timer that has just fired could else start the bar after it was stopped.
        timer.join()
        bar.stop()
