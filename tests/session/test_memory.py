"""Bytes that sessions leave in use: by many of them, and by many shapes."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.session.test_release import EXECUTORS
from tests.support.malloc import needs_glibc
from tests.support.onnx_text import compile_text
from tests.support.processes import end_of

TEXT = """g (float[N, M] x, int64 n) => (float[N, M] y) {
    true = Constant<value = bool {1}> ()
    a = Loop (n, true, x) <body = body (int64 i, bool go, float[N, M] s) => (bool on, float[N, M] t)
        { on = Identity (go) t = Add (s, s) }>
    y = Softmax (a)
}"""


def run(session: ps.Session, rows: int, columns: int) -> None:
    feeds = {"x": np.ones((rows, columns), np.float32), "n": np.array(2)}
    session.run(feeds)
    session.submit(feeds, timeout=60).result(60)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_plans_of_many_shapes_stay_within_max_plans_bytes(executor):
    session = compile_text(TEXT, executor=executor, limits=ps.Limits(max_plans_bytes=2**17))
    for rows in range(1, 61):
        run(session, rows, 4)
    assert session.memory.plans <= 2**17
    assert session.memory.count < 30


SESSIONS = """
import sys
from tests.session.test_memory import TEXT, run
from tests.support.malloc import bytes_in_use
from tests.support.onnx_text import compile_text

for executor in sys.argv[1:]:
    for backends in (None, ["numpy"]):
        held = []
        for i in range(70):
            with compile_text(TEXT, executor=executor, backends=backends) as session:
                run(session, 2, 4)
            if i in (19, 44, 69):
                held.append(bytes_in_use())
        print(min(held[1] - held[0], held[2] - held[1]))
"""


@needs_glibc
def test_closed_sessions_leave_no_bytes_in_use():
    """Once at most Python's table of interned strings grows, by a megabyte."""
    growths = end_of(SESSIONS, *EXECUTORS).split()
    assert max(map(int, growths)) < 25 * 600, growths


SHAPES = """
import sys
import penstock as ps
from tests.session.test_memory import TEXT, run
from tests.support.malloc import bytes_in_use
from tests.support.onnx_text import compile_text

for executor in sys.argv[1:]:
    limits = ps.Limits(max_plans_bytes=2**18)
    with compile_text(TEXT, executor=executor, limits=limits) as session:
        held = []
        for rows in range(1, 31):
            for columns in range(1, 31):
                run(session, rows, columns)
            if not rows % 10:
                held.append(bytes_in_use())
        print(min(held[1] - held[0], held[2] - held[1]))
"""


@needs_glibc
def test_session_of_many_shapes_leaves_no_bytes_in_use():
    """All descriptors and primitives that are kept are there after 300 of 900 shapes."""
    growths = end_of(SHAPES, "linear", "interpret").split()
    assert max(map(int, growths)) < 300 * 50, growths
