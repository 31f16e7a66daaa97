"""Decoders whose outputs are fed back: the cache grows in place, and answers are those of ONNX
Runtime whatever else callers do with old caches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.compiler.varying_shapes import GROWN
from penstock.core.limits import Limits
from penstock.host.native import library
from tests.support.onnx_text import model_from_text

pytestmark = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")

SPELLED = """g (float[b, s, 16] x, float[b, 2, p, 8] past_k, float[b, 2, p, 8] past_v)
    => (float[b, s, 16] y, float[b, 2, t, 8] present_k, float[b, 2, t, 8] present_v)
    <float scale = {0.35}, int64[4] heads = {0, 0, 2, 8}, int64[3] wide = {0, 0, 16}> {
    r = Reshape (x, heads) q = Transpose <perm = [0, 2, 1, 3]> (r)
    present_k = Concat <axis = 2> (past_k, q)
    n = Neg (q)
    present_v = Concat <axis = -2> (past_v, n)
    keys = Transpose <perm = [0, 1, 3, 2]> (present_k)
    scores = MatMul (q, keys) scaled = Mul (scores, scale) parts = Softmax <axis = -1> (scaled)
    o = MatMul (parts, present_v) ot = Transpose <perm = [0, 2, 1, 3]> (o) y = Reshape (ot, wide)
}"""
GROUPED = """g (float[b, s, 16] x, float[b, 2, p, 8] past_k, float[b, 2, p, 8] past_v,
    int32[b, 1] last, int32[1] total)
    => (float[b, s, 16] y, float[b, 2, t, 8] present_k, float[b, 2, t, 8] present_v) {
    n = Neg (x)
    y, present_k, present_v = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2>
        (x, x, n, past_k, past_v, last, total)
}"""
# No pass recognizes this cache.
PLAIN = """g (float[b, s, 16] x, float[b, p, 16] past_k) => (float[b, s, 16] y, float[b, t, 16] present_k)
    { present_k = Concat <axis = 1> (past_k, x) m = ReduceMax <keepdims = 1> (present_k)
      y = Add (x, m) }"""
TEXTS = {"spelled": SPELLED, "grouped": GROUPED, "plain": PLAIN}
Cache = dict[str, np.ndarray]


class Decoder:
    """A session, ONNX Runtime's session, and their steps. Each step compares the answers."""

    def __init__(self, name: str, **options) -> None:
        model = model_from_text(TEXTS[name], domains={"com.microsoft": 1})
        self.session = ps.compile(model, **options)
        self.runtime = onnxruntime.InferenceSession(model.SerializeToString())
        self.outputs = [x.name for x in self.runtime.get_outputs()]
        self.inputs = [x.name for x in self.runtime.get_inputs()]
        self.rng = np.random.default_rng(7)

    def empty(self, batch: int = 1) -> Cache:
        shape = (batch, 0, 16) if "past_v" not in self.inputs else (batch, 2, 0, 8)
        return {n: np.zeros(shape, np.float32) for n in self.inputs if n.startswith("past")}

    def feeds(self, past: Cache, rows: int = 1) -> Cache:
        batch, (*_, length, _) = past["past_k"].shape[0], past["past_k"].shape
        feeds = {"x": self.rng.standard_normal((batch, rows, 16)).astype(np.float32), **past}
        if "last" in self.inputs:
            feeds["last"] = np.full((batch, 1), length + rows - 1, np.int32)
            feeds["total"] = np.array([length + rows], np.int32)
        return feeds

    def step(self, past: Cache, rows: int = 1) -> Cache:
        """Run a step, and return the present as the past of the next."""
        feeds = self.feeds(past, rows)
        outputs = self.session.run(feeds)
        for name, wanted in zip(self.outputs, self.runtime.run(None, feeds), strict=True):
            np.testing.assert_allclose(outputs[name], wanted, rtol=1e-4, atol=1e-5)
        return {n.replace("present", "past"): x for n, x in outputs.items() if n != "y"}

    def steps(self, past: Cache, count: int) -> Iterator[Cache]:
        for _ in range(count):
            past = self.step(past)
            yield past


def copied(past: Cache, present: Cache) -> int:
    """Return the bytes of the past that are elsewhere in the present."""
    return sum(x.nbytes for n, x in past.items() if not np.shares_memory(x, present[n]))


def row_bytes(past: Cache) -> int:
    """Return the bytes of a position in all caches."""
    return sum(16 * x.itemsize for x in past.values())


def rooms_of(past: Cache) -> int:
    """Return the bytes of memory of the caches of one sample."""
    return sum(x.strides[0] for x in past.values())


@pytest.mark.parametrize("name", TEXTS)
def test_step_copies_only_its_row_but_where_the_room_is_doubled(name):
    decoder = Decoder(name)
    past, moves, kept = decoder.empty(), [], []
    for i, present in enumerate(decoder.steps(past, 300)):
        if i > GROWN and copied(past, present):
            moves.append(i)
        past = present
        kept.append((present, {n: x.copy() for n, x in present.items()}))
    assert moves == [32, 66, 134, 270]
    for arrays, contents in kept:
        for n, x in arrays.items():
            np.testing.assert_array_equal(x, contents[n])


@pytest.mark.parametrize("name", TEXTS)
def test_sequences_in_turns_all_grow_in_place(name):
    decoder = Decoder(name)
    caches = [decoder.empty() for _ in range(3)]
    moved = 0
    for i in range(30):
        for k, past in enumerate(caches):
            caches[k] = decoder.step(past)
            moved += i > 2 * GROWN and copied(past, caches[k])
    assert not moved


@pytest.mark.parametrize("name", TEXTS)
def test_older_caches_may_be_continued_again(name):
    decoder = Decoder(name)
    every = [decoder.empty(), *decoder.steps(decoder.empty(), 20)]
    contents = [{n: x.copy() for n, x in each.items()} for each in every]
    for i in (20, 20, 9, 15, 9, 0):
        list(decoder.steps(every[i], 6))
    shortened = {n: x[:, :7] if name == "plain" else x[:, :, :7] for n, x in every[12].items()}
    list(decoder.steps(shortened, 6))
    for each, wanted in zip(every, contents, strict=True):
        for n, x in each.items():
            np.testing.assert_array_equal(x, wanted[n])


@pytest.mark.parametrize("name", TEXTS)
def test_prompts_of_many_rows_may_follow_steps(name):
    decoder = Decoder(name)
    # ONNX Runtime takes several rows only for one sample.
    past = decoder.empty(1 if name == "grouped" else 2)
    for rows in [3, *[1] * 12, 5, *[1] * 8, 40, *[1] * 6, 2, 2, 2, 2, 2, 2]:
        past = decoder.step(past, rows)


@pytest.mark.costly
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("options", [{"backends": ["numpy"]}, {"executor": "interpret"}, {}])
def test_cache_may_be_fed_to_another_session(name, options):
    other, decoder = Decoder(name, **options), Decoder(name)
    for past in decoder.steps(decoder.empty(), 16):
        other.step(past)
    other.step({n: np.asfortranarray(x) for n, x in past.items()})


@pytest.mark.parametrize("name", TEXTS)
def test_clients_that_continue_one_cache_at_once_do_not_meet(name):
    decoder = Decoder(name)
    *_, past = decoder.steps(decoder.empty(), 10)
    feeds = [decoder.feeds(past) for _ in range(40)]
    wanted = [decoder.runtime.run(None, each) for each in feeds]
    with ThreadPoolExecutor(4) as threads:
        for outputs, each in zip(threads.map(decoder.session.run, feeds), wanted, strict=True):
            for n, x in zip(decoder.outputs, each, strict=True):
                np.testing.assert_allclose(outputs[n], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TEXTS)
def test_rooms_of_caches_that_callers_hold_are_memory_of_the_session(name):
    decoder = Decoder(name)
    past = deque(decoder.steps(decoder.empty(), 40), 1).pop()
    assert decoder.session.memory.caches == rooms_of(past) > 60 * row_bytes(past)
    other = deque(decoder.steps(decoder.empty(), 20), 1).pop()
    assert decoder.session.memory.caches == rooms_of(past) + rooms_of(other)
    del past, other
    assert decoder.session.memory.caches == 0


def test_room_that_is_too_large_for_the_limit_has_no_rows_to_spare():
    """After 134 positions twice as many would be needed. Growing in place needs no more."""
    size = row_bytes(Decoder("plain").empty())
    decoder = Decoder("plain", limits=Limits(max_bytes=200 * size))
    past, moves = decoder.empty(), []
    for present in decoder.steps(past, 160):
        if copied(past, present):
            moves.append(present["past_k"].shape[1])
        past = present
    assert [length for length in moves if length > 100] == list(range(135, 161))
    assert rooms_of(past) == 160 * size


@pytest.mark.parametrize("name", TEXTS)
def test_step_whose_cache_grows_past_the_limit_raises_limit_exceeded(name):
    size = row_bytes(Decoder(name).empty())
    limit = 100 * size
    decoder = Decoder(name, limits=Limits(max_bytes=limit))
    past = decoder.empty()
    with pytest.raises(ps.LimitExceeded, match=rf"of Limits.max_bytes = {limit} only"):
        for present in decoder.steps(past, 160):
            past = present
    assert 60 < past["past_k"].shape[-2] < 100
    list(Decoder(name).steps(past, 3))  # a session without that limit continues


@pytest.mark.parametrize("name", TEXTS)
def test_cache_that_shares_memory_refuses_writes(name):
    decoder = Decoder(name)
    *_, past = decoder.steps(decoder.empty(), 10)
    with pytest.raises(ValueError, match="read-only"):
        past["past_k"][...] = 0
    past["past_k"].copy()[...] = 0
