"""Models in parts around their loops."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.ops.internal.joined_steps import WRITTEN
from penstock.stepping.loop_parts import loop_parts
from tests.support.onnx_text import model_from_text

TEXT = """g (float[2] x, int64 n) => (float[2] y, float[2] w, float[2] k) <bool yes = {1}, float two = {2},
    int64[1] first = {0}, float[2] fixed = {1, 2}> {
    a = Mul (x, two) b = Neg (x)
    u, rows = Loop (n, yes, a) <body = f (int64 i, bool c, float[2] v)
        => (bool d, float[2] z, float[2] r) { d = Identity (c) z = Add (v, b) r = Neg (v) }>
    s = ReduceSum <keepdims = 0> (rows, first) t = Add (s, b)
    y = Loop (n, , t) <body = h (int64 j, bool e, float[2] p) => (bool g, float[2] q) {
        g = Identity (e) q = Mul (p, x) }>
    w = Add (u, y) k = Identity (fixed) }"""


def test_parts_return_what_others_read() -> None:
    parts = loop_parts(ps.load(model_from_text(TEXT)))
    assert parts.inputs == ["x", "n"]
    assert [*parts.outputs] == ["y", "w", "k"]
    graphs = [None if part is None else part.graph for part, _ in parts.parts]
    assert [g and {v.name for v in g.inputs} for g in graphs] == [{"x"}, {"rows", "b"}, {"u", "y"}]
    produced = [{v.name for v in g.outputs} for g in graphs if g is not None]
    assert {"a", "b"} <= produced[0]
    assert produced[1:] == [{"t"}, {"w"}]
    assert [len(loops) for _, loops in parts.parts] == [1, 1, 0]


def test_body_says_what_it_reads_and_returns() -> None:
    ((_, (first,)), (_, (second,)), _) = loop_parts(ps.load(model_from_text(TEXT))).parts
    state, outside = f"{WRITTEN}state0", f"{WRITTEN}outside0"
    assert (first.trips, first.state, first.first) == ("n", {state: f"{state}/next"}, {state: "a"})
    assert (first.rows, first.results) == ([f"{WRITTEN}rows0"], ["u", "rows"])
    assert (first.outside, second.outside) == ({outside: "b"}, {outside: "x"})
    assert (second.goes_on, second.results) == (None, ["y"])


def test_effects_stay() -> None:
    text = """g (float[2] x, int64 n) => (float[2] y) <bool yes = {1}> {
        y = Loop (n, yes, x) <body = f (int64 i, bool c, float[2] v) => (bool d, float[2] z) {
            d = Identity (c) r = RandomNormalLike (v) z = Add (v, r) }> }"""
    with pytest.raises(ps.InvalidInput, match="effects"):
        loop_parts(ps.load(model_from_text(text)))
