"""Joined steps of decoders whose cross attention is fed: each answer is that of ONNX Runtime."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import penstock as ps
from penstock.ops.internal.joined_steps import PAGE
from tests.support.cross_decoders import (
    CROSS,
    KINDS,
    MASK,
    VOCABULARY,
    cross_decoder,
    cross_logits,
    cross_stepper,
    fixed_of,
)
from tests.support.decoders import fed

RNG = np.random.default_rng(9)
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def text_of(length: int) -> np.ndarray:
    return RNG.integers(0, VOCABULARY, length)


def last_logits(stepper: ps.Stepper, fixed: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    return stepper.sequence(initial=fixed).step(fed(ids))["logits"][0, 0]


@pytest.mark.parametrize("backends", [None, ["numpy"]])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_unlike_lengths_equal_each_alone(
    kind: str, backends: list[str] | None
) -> None:
    model, sizes = cross_decoder(kind), [(5, 1), (PAGE, 0), (70, 9)]
    with cross_stepper(kind, max_rows=32, backends=backends) as stepper:
        assert stepper.reason is None
        fixed = [fixed_of(kind, n, n, absent) for n, absent in sizes]
        texts = [text_of(60) for _ in sizes]
        sequences = [stepper.sequence(initial=own) for own in fixed]
        wanted = [cross_logits(model, own, ids) for own, ids in zip(fixed, texts, strict=True)]
        at = 0
        for size in (1, 2, 40, 1, 16):
            for sequence, ids, want in zip(sequences, texts, wanted, strict=True):
                got = sequence.step(fed(ids[at : at + size]), wanted=size)["logits"]
                np.testing.assert_allclose(got[0], want[at : at + size], **TOLERANCE)
            at += size


@pytest.mark.parametrize("offset", [0, 2])
def test_positions_that_are_a_slice_of_a_table_are_read(offset: int) -> None:
    moved = f"ahead = Constant <value_int = {offset}> () first = Add (past, ahead)"
    changes = {
        "begin = Unsqueeze (past, zeros)": f"{moved} begin = Unsqueeze (first, zeros)",
        "end = Unsqueeze (total, zeros)": "past_end = Add (total, ahead) end = Unsqueeze (past_end, zeros)",
    }
    model, ids = cross_decoder("unmasked", changes), text_of(40)
    with ps.Stepper(ps.load(model)) as stepper:
        assert stepper.reason is None
        fixed = fixed_of("unmasked", 7, 1)
        got = stepper.sequence(initial=fixed).step(fed(ids), wanted=40)["logits"][0]
        np.testing.assert_allclose(got, cross_logits(model, fixed, ids), **TOLERANCE)


@pytest.mark.parametrize("kind", ["unmasked", "flat"])
def test_mask_of_lengths_alone_is_read(kind: str) -> None:
    """Which is a constant of a graph for some rows."""
    upper = """rows2 = Unsqueeze (rows, zeros) total2 = Unsqueeze (total, zeros)
        dims2 = Concat <axis = 0> (rows2, total2) zeros2 = ConstantOfShape (dims2)
        ones2 = Add (zeros2, unit) next = Add (past, one) upper = Trilu (ones2, next)
        behind = Cast <to = 9> (upper)"""
    model, ids = cross_decoder(kind, {"behind = Greater (all, place)": upper}), text_of(40)
    with ps.Stepper(ps.load(model)) as stepper:
        assert stepper.reason is None
        fixed = fixed_of(kind, 7, 1)
        got = stepper.sequence(initial=fixed).step(fed(ids), wanted=40)["logits"][0]
        np.testing.assert_allclose(got, cross_logits(model, fixed, ids), **TOLERANCE)


def test_what_is_fed_as_keys_and_as_values_is_read() -> None:
    model = cross_decoder("unmasked", {"(c0_w, past_cross_v0)": "(c0_w, past_cross_k0)"})
    fixed, ids = fixed_of("unmasked", 45, 1), text_of(40)
    with ps.Stepper(ps.load(model)) as stepper:
        assert stepper.reason is None
        got = stepper.sequence(initial=fixed).step(fed(ids), wanted=40)["logits"][0]
        np.testing.assert_allclose(got, cross_logits(model, fixed, ids), **TOLERANCE)


def test_rows_of_an_export_without_a_mask_are_those_one_by_one() -> None:
    """One row, which exporters trace, needs no mask."""
    whole, ids = cross_decoder("unmasked"), text_of(40)
    model = cross_decoder("unmasked", {", bias)": ", nothing)"})
    with ps.Stepper(ps.load(model)) as stepper:
        assert stepper.reason is None
        fixed = fixed_of("unmasked", 7, 1)
        got = stepper.sequence(initial=fixed).step(fed(ids), wanted=40)["logits"][0]
        np.testing.assert_allclose(got, cross_logits(whole, fixed, ids), **TOLERANCE)


@pytest.mark.parametrize("pages", [6, 1000])
def test_many_threads_get_the_answers_of_each_alone(pages: int) -> None:
    model = cross_decoder("added")
    fixed = [
        fixed_of("added", int(n), i, int(n) // 5) for i, n in enumerate(RNG.integers(1, 90, 8))
    ]
    texts = [text_of(int(n)) for n in RNG.integers(2, 80, 8)]
    with cross_stepper("added") as probe:
        nbytes = probe._engine.runner.pool.nbytes_of_page
    with cross_stepper("added", max_rows=24, cache_bytes=pages * nbytes) as stepper:

        def client(i: int) -> None:
            rng, ids, at = np.random.default_rng(i), texts[i], 0
            want = cross_logits(model, fixed[i], ids.tolist())
            with stepper.sequence(initial=fixed[i]) as sequence:
                while at < len(ids):
                    size = min(len(ids) - at, int(rng.choice([1, 1, 3, 30])))
                    got = sequence.step(fed(ids[at : at + size]), wanted=size)["logits"]
                    np.testing.assert_allclose(got[0], want[at : at + size], **TOLERANCE)
                    at += size

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(client, range(8)))
        assert stepper.stats.pages[:2] == (0, 0)
        assert (stepper.stats.preempted > 0) == (pages == 6)


def test_rows_of_several_sequences_are_computed_in_one_step() -> None:
    with cross_stepper("flat") as stepper:
        sequences = [stepper.sequence(initial=fixed_of("flat", 9, i)) for i in range(4)]
        with stepper._engine.lock:
            for sequence in sequences:
                sequence.feed({"ids": np.array([[1, 2]])}, 1, lambda *_: None)
        while stepper._engine.step():
            pass
        assert stepper.stats.steps == 1


def test_equal_texts_of_unlike_prompts_share_no_pages() -> None:
    """Rows of the decoder alone say nothing of what an encoder returned."""
    model, ids = cross_decoder("unmasked"), text_of(80)
    with cross_stepper("unmasked") as stepper:
        for seed in (1, 2):
            fixed = fixed_of("unmasked", 40, seed)
            want = cross_logits(model, fixed, ids.tolist())[-1]
            np.testing.assert_allclose(last_logits(stepper, fixed, ids), want, **TOLERANCE)
        assert stepper.stats.prefixes == 0
        assert stepper.stats.rows == 160


def test_fork_reads_the_same_pages_of_the_encoder() -> None:
    model, ids, fixed = cross_decoder("added"), text_of(50), fixed_of("added", 100, 3, 4)
    other = np.concatenate([ids[:20], text_of(30)])
    with cross_stepper("added") as stepper:
        first = stepper.sequence(initial=fixed)
        first.step(fed(ids[:20]))
        assert stepper.stats.pages[0] == 1 + -(-96 // PAGE)
        second = first.fork()
        assert stepper.stats.pages[0] == 2 + -(-96 // PAGE)
        for sequence, text in ((second, other), (first, ids)):
            got = sequence.step(fed(text[20:]))["logits"][0, 0]
            np.testing.assert_allclose(got, cross_logits(model, fixed, text)[-1], **TOLERANCE)
            sequence.close()
        assert stepper.stats.pages[0] == 0


def test_rows_that_were_cut_are_forgotten() -> None:
    model, ids, fixed = cross_decoder("added"), text_of(50), fixed_of("added", 10, 3)
    with cross_stepper("added") as stepper:
        sequence = stepper.sequence(initial=fixed)
        for kept in (40, 7, 0):
            sequence.step(fed(text_of(50 - sequence.length)))
            sequence.cut(kept)
            ids[:kept] = sequence._state.rows.part("ids", 0, kept)
            fork = sequence.fork()
            got = fork.step(fed(ids[kept:]))["logits"][0, 0]
            np.testing.assert_allclose(got, cross_logits(model, fixed, ids)[-1], **TOLERANCE)


@pytest.mark.parametrize("absent", [0, 36, 68])
def test_positions_that_a_mask_leaves_out_take_no_pages(absent: int) -> None:
    model, fixed, ids = cross_decoder("chosen"), fixed_of("chosen", 69, 1, absent), text_of(3)
    with cross_stepper("chosen") as stepper:
        sequence = stepper.sequence(initial=fixed)
        got = sequence.step(fed(ids))["logits"][0, 0]
        np.testing.assert_allclose(got, cross_logits(model, fixed, ids)[-1], **TOLERANCE)
        assert stepper.stats.pages[0] == 1 + -(-(69 - absent) // PAGE)


def test_sequence_that_needs_more_pages_than_there_are_ends() -> None:
    with cross_stepper("unmasked") as probe:
        nbytes = probe._engine.runner.pool.nbytes_of_page
    with cross_stepper("unmasked", cache_bytes=3 * nbytes) as stepper:
        with pytest.raises(
            ps.LimitExceeded, match=r"97 positions of an encoder .* raise cache_bytes"
        ):
            last_logits(stepper, fixed_of("unmasked", 97, 1), text_of(1))
        last_logits(stepper, fixed_of("unmasked", 64, 1), text_of(1))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({CROSS[0]: np.zeros((1, 2, 9, 16), np.float32)}, "different numbers of positions"),
        ({MASK: np.ones((1, 9), np.int64)}, "different numbers of positions"),
        ({MASK: np.full((1, 10), 2)}, "other elements than 0 and 1"),
        ({MASK: np.zeros((1, 10), np.int64)}, "no positions to attend to"),
        ({MASK: np.ones((2, 10), np.int64)}, "of one sample"),
        ({"ids": np.ones((1, 1), np.int64)}, "begins with"),
    ],
)
def test_what_a_sequence_cannot_begin_with_is_refused(
    changes: dict[str, np.ndarray], said: str
) -> None:
    with cross_stepper("added") as stepper:
        with pytest.raises(ps.InvalidInput, match=said):
            stepper.sequence(initial={**fixed_of("added", 10, 1), **changes})
        with pytest.raises(ps.InvalidInput, match="begins with"):
            stepper.sequence()
