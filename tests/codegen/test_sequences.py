"""Sequences: steps of compiled kernels that one call runs, and what is to be seen of each."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

import penstock as ps
from penstock.host.native import library
from tests.support.onnx_text import compile_text

pytestmark = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")


CHAIN = """g (float[4,6] x) => (float[4,6] y) <int64 one = {1}> {
    [first] a = CumSum(x, one) [second] b = Softmax(a) [third] c = CumSum(b, one) y = Softmax(c) }"""


def chain(**options: object) -> ps.Session:
    return compile_text(CHAIN, backends=["native", "numpy"], **options)


def calls(source: str) -> list[str]:
    """The functions that a program calls, one a line."""
    return re.findall(r"^ +(?:\w+ = )?(\w+)\(", source, re.MULTILINE)


def test_consecutive_steps_of_compiled_kernels_are_one_call() -> None:
    session = chain(shapes={})
    assert calls(session.source) == ["sequence_0", "softmax_3"]
    assert re.search(
        r"# cumsum_0\(v0, c1 -> b2\) +# first in the model: float32\[4, 6\]\n", session.source
    )
    assert session.explain().count(" in the model (sequence_0)\n") == 3


def test_observer_is_told_of_each_step_of_a_sequence() -> None:
    profile = ps.Profile()
    chain().run({"x": np.ones((4, 6), np.float32)}, trace=profile)
    assert [entry.count for entry in profile.entries.values()] == [1] * 4


COUNTING = """g (int64 n) => (float y) <int64 most = {9223372036854775807}, bool yes = {1},
    int64 zero = {0}, int64 one = {1}, float half = {0.5}, float start = {8}> {
    last, y = Loop (most, yes, zero, start) <body = b (int64 i, bool go, int64 k, float s)
        => (bool on, int64 k1, float s1) {
        k1 = Add (k, one) a = Mul (s, half) s1 = Add (a, half) on = Less (k1, n) }> }"""


def test_iteration_of_a_loop_of_scalars_is_one_call() -> None:
    session = compile_text(COUNTING)

    def events(count: int) -> int:
        feeds, seen = {"n": np.array(count)}, []
        session.run(feeds)
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, argument: seen.append(event))
        try:
            session.run(feeds)
        finally:
            sys.setprofile(before)
        return sum(event in ("call", "c_call") for event in seen)

    assert abs(events(1000) - events(100) - 900) < 9  # a run itself makes a few more or less
    (y,) = session.run({"n": np.array(2)}).values()
    assert y == 2.75  # (8 / 2 + 0.5) / 2 + 0.5
