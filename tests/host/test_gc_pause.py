"""Pauses of garbage collection: nesting, ages of objects, forks."""

from __future__ import annotations

import gc
import os
import sys
import types
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import penstock as ps
from penstock.host import gc_pause
from penstock.host.native import FREE_THREADED
from tests.support.onnx_text import compile_text
from tests.support.processes import in_child

LOOP = """g (float[4] x, int64 n) => (float[4] y) {
        y = Loop (n, , x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w) {
            d = Identity (c) w = Add (v, v) }>
    }"""


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Nothing is frozen before a test, as in a process of a user."""
    gc.unfreeze()
    yield
    gc.freeze()


def loop() -> ps.Session:
    return compile_text(LOOP)


def feeds(n: int) -> dict[str, np.ndarray]:
    return {"x": np.ones(4, np.float32), "n": np.array(n)}


def test_gc_is_paused_until_last_holder_leaves():
    assert gc.isenabled()
    with gc_pause.paused():
        with gc_pause.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.costly
def test_gc_collects_while_pauses_of_many_threads_overlap():
    class Node:
        pass

    with gc_pause.paused():
        node = Node()
        node.circle = node
        gone = weakref.ref(node)
        del node
        for _ in range(256):
            assert gone() is not None
            with gc_pause.paused():
                pass
        assert gone() is None
        assert not gc.isenabled()
    assert gc.isenabled()


def test_gc_stays_disabled_if_it_was():
    gc.disable()
    try:
        with gc_pause.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.costly
def test_gc_pause_keeps_counts_and_generations():
    class Node:
        pass

    with gc_pause.paused():
        pass  # modules of other tests are known
    gc.collect()
    with gc_pause.paused():
        # Of the objects before the next collection, so that full collections still come.
        node = Node()
        node.circle = node
        before = gc.get_count()
        assert any(kept is node for kept in gc.get_objects(generation=0))
    assert gc.get_count()[1:] == before[1:]
    assert any(kept is node for kept in gc.get_objects())
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is None


@pytest.mark.costly
@pytest.mark.skipif(FREE_THREADED, reason="the collector has no generations")
def test_gc_pause_makes_objects_old_where_many_modules_were_imported(monkeypatch):
    class Node:
        pass

    # Those of other tests are known, of which some have removed theirs again.
    monkeypatch.setattr(gc_pause, "_modules", len(sys.modules))
    gc.collect()
    others = {f"other {i}": types.ModuleType("other") for i in range(gc_pause._MANY)}
    last = others.popitem()
    sys.modules.update(others)
    try:
        with gc_pause.paused():
            first = Node()
        assert not any(kept is first for kept in gc.get_objects(generation=2))
        sys.modules.update([last])
        with gc_pause.paused():
            node = Node()
        assert any(kept is node for kept in gc.get_objects(generation=2))
        assert gc.get_freeze_count() == 0
        with gc_pause.paused():  # without other modules
            second = Node()
        assert not any(kept is second for kept in gc.get_objects(generation=2))
    finally:
        for name in (*others, last[0]):
            sys.modules.pop(name, None)


def test_gc_pause_counts_frozen_objects_only_where_many_modules_were_imported(monkeypatch):
    """Python walks all frozen objects to count them."""
    counted, count = [], gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or count())
    monkeypatch.setattr(gc_pause, "_modules", 0)
    gc.freeze()
    for _ in range(3):
        with gc_pause.paused():
            pass
    assert len(counted) == 1


def test_gc_pause_keeps_frozen_objects_frozen(monkeypatch):
    monkeypatch.setattr(gc_pause, "_modules", 0)
    gc.freeze()
    with gc_pause.paused():
        pass
    assert gc.get_freeze_count() > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_collects_garbage_while_parent_builds_graph():
    def job() -> None:
        assert gc.isenabled()
        assert loop().run(feeds(1))["y"][0] == 2
        assert gc.isenabled()

    with gc_pause.paused():
        assert in_child(job)
        assert not gc.isenabled()
    assert gc.isenabled()
