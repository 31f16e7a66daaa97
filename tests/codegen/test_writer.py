"""Generated programs: what their lines are, and that names from a file stay names."""

from __future__ import annotations

import gc
import linecache
import re
import textwrap
import traceback
import weakref

import numpy as np
import pytest

import penstock as ps
from tests.support.onnx_text import compile_text


def compiled(text: str, **options) -> ps.Session:
    return compile_text(text, backends=["numpy"], **options)


def program(text: str, **options) -> str:
    """The source of the model's plan, without comments at the ends of lines."""
    return plain(compiled(text, shapes={}, **options).source)


def plain(source: str) -> str:
    return "\n".join(re.sub(r"(?<=\S) +# .*", "", line) for line in source.splitlines())


def lines(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


LOOP = """g (float[4] x, int64 n, bool z) => (float[4] y, float[K, 4] rows) <int64 most = {3}> {
    y, rows = Loop (n, z, x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w, float[4] v) {
        w = Mul(v, v) d = Less(i, most) }>
}"""


def test_dynamic_values_are_released_after_their_last_use():
    text = program(
        """g (float[8] x) => (int64[1, N] y, float[8] z) {
            a = NonZero(x) b = Neg(a) c = Abs(b) z = Exp(x) y = Add(c, a) }"""
    )
    order = ["v2 = negative(v1)", "v3 = absolute(v2)", "del v2", "v5 = add(v3, v1)", "del v1, v3"]
    places = [text.index(line) for line in order]
    assert places == sorted(places)


def test_a_second_arena_runs_the_same_program():
    session = compiled(LOOP)
    feeds = {"x": np.full(4, 0.5, np.float32), "n": np.array(3), "z": np.array(True)}
    first = session.run(feeds)
    session.trim()  # so that the next run needs a new arena
    second = session.run(feeds)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)


def test_errors_in_long_programs_name_their_node():
    chain = " ".join(f"v{i + 1} = Neg(v{i})" for i in range(3000))
    session = compiled(
        f"""g (float[3] v0, int64[N] i, bool c) => (float[N] y) {{
            {chain}
            y = If (c) <then_branch = t () => (float[N] p) {{ [pick] q = Gather(v3000, i) p = Neg(q) }},
                        else_branch = e () => (float[N] r) {{ r = Gather(v3000, i) }}>
        }}"""
    )
    feeds = {"v0": np.arange(3, dtype=np.float32), "i": np.array([1]), "c": np.array(True)}
    assert session.run(feeds)["y"].tolist() == [-1]
    with pytest.raises(ps.RunError, match=r"Gather \(pick in then_branch of .*int64\[1\]"):
        session.run(feeds | {"i": np.array([5])})


def test_tracebacks_show_lines_for_as_long_as_there_is_the_program():
    session = compiled("g (float[3] x, int64[N] i) => (float[N] y) { y = Gather(x, i) }")
    try:
        session(np.zeros(3, np.float32), np.array([5]))
    except ps.RunError as error:
        text = "".join(traceback.format_exception(error))
    assert "gather_0(v0, v1)" in text
    filename = session.inspect.executor._program.filename
    assert filename in linecache.cache
    del session
    gc.collect()
    assert filename not in linecache.cache


def test_arenas_go_with_their_plan_and_do_not_wait_for_the_garbage_collector():
    session = compiled("g (float[N] x) => (float[N] y) { a = Exp(x) y = Neg(a) }")
    session(np.zeros(1000, np.float32))
    gc.collect()
    gc.disable()
    try:
        (bound,) = session.inspect.executor._arenas.free[0].values()
        gone = weakref.ref(bound.args[0])
        del bound
        assert gone() is not None
        session.trim()
        assert gone() is None
    finally:
        gc.enable()
