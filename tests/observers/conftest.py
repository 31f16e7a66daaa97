"""The clock and the threads of runs that are acted out."""

from __future__ import annotations

import pytest

from tests.support.traces import Clock, Threads


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def threads():
    threads = Threads()
    yield threads
    for pool in threads.pools.values():
        pool.shutdown()
