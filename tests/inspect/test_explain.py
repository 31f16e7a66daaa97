"""Plans as text: steps, where values live, blocks and tasks."""

from __future__ import annotations

import re

import numpy as np
import pytest

from penstock.ir.describe import format_bytes
from tests.support.onnx_text import compile_text

DIAMOND = """g (float[64] x) => (float[64] y) <float two = {2}> {
    a = Exp(x) [left] b = Neg(a) c = Mul(a, two) y = Add(b, c) }"""


def explained(text: str, **options) -> list[str]:
    return compile_text(text, backends=["numpy"], shapes={}, **options).explain().splitlines()


def test_explain_begins_with_summary_inputs_and_outputs():
    summary, about, inputs, outputs, *steps = explained(DIAMOND, executor="linear")
    assert re.match(r"plan 'g': 4 steps, 0 free views, arena 512 B \(planner \w+, lower", summary)
    assert summary.endswith("constants 4 B")
    assert about == (
        "executor linear, precision float32, up to 1 thread for a kernel, backends numpy"
    )
    assert inputs == "inputs (x: float32[64])"
    assert outputs == "outputs (y: float32[64])"
    assert len(steps) == 4


def test_explain_step_says_where_its_values_live():
    lines = explained(DIAMOND, executor="linear")
    exp, neg, mul, add = sorted(lines[4:], key=lambda line: line.split()[1])
    assert [line.split()[1] for line in (exp, neg, mul, add)] == ["a", "b", "c", "y"]
    assert re.search(r"^ +1 a @(0|256) float32\[64\] = Exp\(x <dynamic>\) on numpy  # ", exp)
    assert "two <constant>" in mul
    assert "y <dynamic> float32[64] = Add(b @" in add


def test_explain_offsets_are_those_of_the_arena():
    session = compile_text(DIAMOND, backends=["numpy"], shapes={}, executor="linear")
    offsets = {int(offset) for offset in re.findall(r"@(\d+)", session.explain())}
    assert max(offsets) + 64 * 4 <= session.memory.arenas
    x = np.linspace(0, 1, 64, dtype=np.float32)
    np.testing.assert_allclose(session(x), np.exp(x), rtol=1e-6)


def test_explain_view_has_an_offset_inside_its_base():
    text = """g (float[4, 4] x) => (float[2, 4] y) <int64[1] s = {2}, int64[1] e = {4}> {
        a = Exp(x) v = Slice(a, s, e) b = Neg(v) y = Abs(b) }"""
    lines = explained(text, executor="linear")
    assert "1 free views" in lines[0]
    base = int(re.search(r"a @(\d+)", lines[4])[1])
    view = int(re.search(r"v @(\d+)", lines[5])[1])
    assert view == base + 2 * 4 * 4


def test_explain_loop_shows_its_body_indented():
    text = """g (float[8] x, int64 n) => (float[8] y) {
        y = Loop (n, , x) <body = b (int64 i, bool c, float[8] v) => (bool d, float[8] w)
            { d = Identity(c) a = Exp(v) w = Neg(a) }> }"""
    lines = explained(text, executor="linear")
    body = lines.index("     body:")
    assert "= Loop(" in lines[body - 1]
    inner = lines[body + 1 :]
    assert inner and all(line.startswith("  ") for line in inner)
    assert any("Exp(" in line for line in inner)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1 << 20, "1.00 MiB"),
        (5 << 40, "5120.00 GiB"),
    ],
)
def test_format_bytes_uses_the_largest_unit_below(n, text):
    assert format_bytes(n) == text
