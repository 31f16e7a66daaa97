"""Bytes that sessions leave in use: by many of them, and by many shapes."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

import penstock as ps
from penstock.host.native import library
from tests.session.test_release import EXECUTORS
from tests.support.malloc import needs_glibc
from tests.support.onnx_text import compile_text
from tests.support.processes import end_of
from tests.support.tf_graphs import Builder, Func, Type

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


STEPS = " ".join(f"b{i} = Softmax(a{i}) a{i + 1} = Transpose(b{i})" for i in range(20))
CHAIN = f"g (float[N, M] a0) => (y) {{ {STEPS} y = Softmax(a20) }}"


@pytest.mark.parametrize("backends", [["native", "numpy"], ["numpy"]], ids=str)
def test_plans_are_counted_as_what_they_take(backends):
    if backends[0] == "native" and library() is None:
        pytest.skip("there are no compiled kernels")
    session = compile_text(CHAIN, backends=backends)
    session.run({"a0": np.ones((2, 3), np.float32)})
    gc.collect()
    before = session.memory
    tracemalloc.start()
    try:
        for rows in range(3, 9):
            session.run({"a0": np.ones((rows, 3), np.float32)})
        gc.collect()
        counted = session.memory.plans - before.plans
        taken = tracemalloc.get_traced_memory()[0] - (session.memory.arenas - before.arenas)
    finally:
        tracemalloc.stop()
    assert session.memory.count == 7
    assert 0.5 * taken < counted < 2 * taken


def calling_itself() -> bytes:
    """A function that calls itself ``n`` times, so that frames alone can run it, and adds 1,000
    constants each time; 500 others are added to its result."""
    builder = Builder()
    types = {"Tin": [Type("int32"), Type("float32")], "Tout": [Type("float32")]}
    real, whole = {"T": Type("float32")}, {"T": Type("int32")}
    builder.function("F", {"n": "int32", "x": "float32"}, {"y": "float32"}, {"y": "m:output:0"})
    builder.const(np.int32(0), "zero")
    builder.const(np.int32(1), "one")
    builder.const(np.arange(1000, dtype=np.float32), "constants")
    builder.node("Greater", "n", "zero:output:0", name="go", **whole)
    builder.node("Switch", "n", "go:z:0", name="count", **whole)
    builder.node("Switch", "x", "go:z:0", name="sum", **real)
    builder.node("Sub", "count:output_true:0", "one:output:0", name="less", **whole)
    builder.node("AddV2", "sum:output_true:0", "constants:output:0", name="more", **real)
    builder.node("PartitionedCall", "less:z:0", "more:z:0", name="again", f=Func("F"), **types)
    builder.node("Merge", "sum:output_false:0", "again:output:0", name="m", N=2, **real)
    builder.main()
    builder.placeholder("n", "int32")
    builder.placeholder("x", "float32", 1000)
    builder.const(np.ones(500, np.float32), "others")
    builder.node("PartitionedCall", "n", "x", name="call", f=Func("F"), **types)
    builder.node("Concat", "axis", "call", "others", name="y", N=2, **real)
    builder.const(np.int32(0), "axis")
    return builder.bytes()


@pytest.mark.parametrize("executor", ["auto", "frames"])
def test_memory_has_the_constants_of_framed_graphs_and_their_functions(executor):
    session = ps.compile(calling_itself(), executor=executor)
    y = session.run({"n": np.int32(3), "x": np.zeros(1000, np.float32)}, ["y"])["y"]
    np.testing.assert_array_equal(y, [*np.arange(0, 3000, 3), *[1] * 500])
    assert session.inspect.executor.name == "frames"
    # Of three numbers, one is part of a constant that was folded.
    assert session.memory.weights == 4 * 1000 + 4 * 500 + 2 * 4


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
            for columns in range(261, 291):  # NumPy keeps memory of less than 1,024 bytes
                run(session, rows, columns)
            if not rows % 10:
                for columns in range(261, 291):  # the same plans are held each time
                    run(session, 40, columns)
                held.append(bytes_in_use())
        print(min(held[1] - held[0], held[2] - held[1]))
"""


@needs_glibc
def test_session_of_many_shapes_leaves_no_bytes_in_use():
    """All descriptors and primitives that are kept are there after 300 of 900 shapes."""
    growths = end_of(SHAPES, "linear", "interpret").split()
    assert max(map(int, growths)) < 300 * 50, growths
