"""Sessions whose memory is bounded (``memory=``)."""

from __future__ import annotations

import re

import numpy as np
import pytest

import penstock as ps
from tests.support.onnx_text import model_from_text

WIDE = """g (float[N, 1024] x) => (float[N, 4] y) {
    two = Constant<value = float {2}> ()
    w = Constant<value = float[1, 4] {1, -1, 0.5, 2}> ()
    last = Constant<value = int64[1] {1}> ()
    a = Mul(x, two) b = Sin(a) c = Cos(a) d = Mul(b, c) e = Softmax(d)
    m = ReduceMax<keepdims = 1>(e, last) y = Mul(m, w) }"""


def session_of(text: str | bytes, **options: object) -> ps.Session:
    model = model_from_text(text) if isinstance(text, str) else text
    return ps.compile(model, cache=False, threads=1, **options)


def held(session: ps.Session) -> int:
    found = session.memory
    return found.weights + found.plans + found.arenas


def least(text: str | bytes, feeds: dict[str, np.ndarray], **options: object) -> int:
    """The least ``memory=`` for these feeds, perhaps in parts, as the error says it."""
    with pytest.raises(ps.LimitExceeded) as caught:
        session_of(text, memory=1, **options).run(feeds)
    found = re.search(r"at least (\d+) are needed", str(caught.value))
    assert found is not None, caught.value
    return int(found[1])


def whole(text: str | bytes, feeds: dict[str, np.ndarray]) -> int:
    """The bytes that a session needs for all of these feeds in one run."""
    session = session_of(text, memory="1GB")
    session.run(feeds)
    memory, executor = session._plans.memory, session._executors.latest
    assert memory is not None
    return int(memory.held + executor.needs_bytes)


def rows(count: int, seed: int = 0, width: int = 1024) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def wants(text: str | bytes, feeds: dict[str, np.ndarray], memory: int) -> ps.Session:
    """A session that runs ``feeds`` and has the answers of one without a bound."""
    session = session_of(text, memory=memory)
    expected = session_of(text).run(feeds)
    for name, value in session.run(feeds).items():
        np.testing.assert_allclose(value, expected[name], 1e-5, 1e-6)
    assert held(session) <= memory
    return session
