"""Pools of workers, and a gate, for tests of the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.host.threads import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers("test", 2)
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[Workers]:
    made = Workers("other", 1)
    yield made
    made.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that is set at the end in any case, so that a failed test ends too."""
    made = threading.Event()
    yield made
    made.set()
