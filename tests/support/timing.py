"""What tests of threads and lifetimes share: nobody sleeps, and nothing waits for the collector."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# What only a failing test comes to.
SOON = 30


@contextmanager
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing goes but what nobody refers to."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
