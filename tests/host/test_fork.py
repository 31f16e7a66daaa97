"""Objects that a forked child resets."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest

from penstock.host.fork import renewed
from tests.support.processes import in_child

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        renewed(self)

    def forked(self) -> None:
        self.lock = threading.Lock()


def test_forked_child_gets_new_locks_and_its_parent_keeps_its_own():
    locked = Locked()
    lock = locked.lock

    def job() -> None:
        assert locked.lock is not lock
        assert locked.lock.acquire(timeout=60)

    with lock:
        assert in_child(job)
    assert locked.lock is lock


def test_renewed_object_is_not_kept_alive():
    locked = Locked()
    gone = weakref.ref(locked)
    del locked
    gc.collect()
    assert gone() is None
    assert in_child(lambda: None)
