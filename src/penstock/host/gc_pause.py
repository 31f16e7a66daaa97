"""Garbage collection while graphs are built."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.host.fork import in_child

_LOCK = threading.Lock()
_holders = 0
_was_enabled = False


@contextmanager
def paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile.

    Building a graph allocates hundreds of thousands of objects that all stay. Python's collector
    would walk them again and again: a quarter of the time to compile a graph of 100,000 nodes. In
    the end they are old, as after many collections, and wait for a full one.
    """
    global _holders, _was_enabled
    with _LOCK:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _LOCK:
            _holders -= 1
            if _holders == 0 and _was_enabled:
                _age()
                gc.enable()


def _age() -> None:
    """Make all objects old, without a walk over them."""
    if not gc.get_freeze_count():  # or what the user has frozen would thaw
        gc.freeze()
        gc.unfreeze()


@in_child
def _forget() -> None:
    """After a fork the child has none of its parent's threads, and nobody who builds a graph."""
    global _holders, _LOCK
    _LOCK = threading.Lock()
    if _holders and _was_enabled:
        gc.enable()
    _holders = 0
