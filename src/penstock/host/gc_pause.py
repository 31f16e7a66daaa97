"""Pause garbage collection while graphs are built."""

from __future__ import annotations

import gc
import sys
from contextlib import ContextDecorator

from penstock.host.fork import in_child, shared_lock

_LOCK = shared_lock()
_holders = 0
_was_enabled = False
_MOST_OVERLAPS = 256
_MANY = 16  # modules; from this number on it pays off to move their objects to the old generation
_overlaps = 0  # pauses that ended since the first of the present holders began
_modules = 0  # the number of imported modules when objects were last moved


class paused(ContextDecorator):  # noqa: N801
    """Pause cyclic garbage collection. Building a graph allocates hundreds of thousands of objects
    that all stay alive. Python's collector would walk them repeatedly, which takes a quarter of the
    time to compile a graph of 100,000 nodes. Counts and generations stay as they are, unless many
    modules were imported meanwhile: their objects, none of them garbage, are made old at once.

    If threads always overlap in building graphs, garbage is collected after every 256 of them.
    """

    def __enter__(self) -> None:
        global _holders, _was_enabled
        with _LOCK:  # ordered so that a signal handler may pause and resume in between
            _holders += 1
            if _holders == 1:
                _was_enabled = gc.isenabled()
                gc.disable()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        global _holders, _overlaps
        with _LOCK:
            _overlaps = (_overlaps + 1) % _MOST_OVERLAPS if _holders > 1 else 0
            due = _was_enabled and _holders > 1 and _overlaps == 0
            if _holders == 1 and _was_enabled:
                _make_modules_old()
                gc.enable()
            _holders -= 1
        if due:
            gc.collect()


def _make_modules_old() -> None:
    """Move all objects to the oldest generation if many modules were imported: the next collection
    would walk tens of thousands, a tenth of the time until the first answer of a process."""
    global _modules
    if len(sys.modules) >= _modules + _MANY:
        _modules = len(sys.modules)
        if not gc.get_freeze_count():  # objects that users froze stay frozen; counting walks them
            gc.freeze()
            gc.unfreeze()


@in_child
def _reset_in_child() -> None:
    """Reset the pause in a forked child, since the threads that held it do not exist there."""
    global _holders
    if _holders and _was_enabled:
        gc.enable()
    _holders = 0
