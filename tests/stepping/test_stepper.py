"""Steps of many sequences together: each answer is that of the sequence alone, by ONNX Runtime."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import numpy as np
import pytest

import penstock as ps
from penstock.ops.internal.joined_steps import PAGE
from penstock.stepping.stepper import _run_steps
from tests.support.decoders import (
    SPELLINGS,
    VOCABULARY,
    decoder_model,
    fed,
    reference_logits,
    stepper_of,
)
from tests.support.timing import SOON

RNG = np.random.default_rng(1)
PLACES = 400


def text_of(length: int) -> np.ndarray:
    return RNG.integers(0, VOCABULARY, length)


def check(sequence: ps.StepSequence, kind: str, ids: np.ndarray, sizes: list[int]) -> None:
    """Step a sequence in pieces of some sizes, and compare all logits."""
    want, at = reference_logits(decoder_model(kind), ids.tolist()), 0
    for size in sizes:
        got = sequence.step(fed(ids[at : at + size]), wanted=size)["logits"]
        at += size
        np.testing.assert_allclose(got[0], want[at - size : at], rtol=0, atol=2e-5)
    assert sequence.length == at


@pytest.mark.parametrize("backends", [None, ["numpy"]])
@pytest.mark.parametrize("kind", SPELLINGS)
def test_sequence_equals_the_whole_text_at_once(kind: str, backends: list[str] | None) -> None:
    with stepper_of(kind, max_rows=64, backends=backends) as stepper:
        assert stepper.reason is None
        check(stepper.sequence(), kind, text_of(140), [1, 1, 30, 2, 100, 6])
        assert stepper.stats.rows == 140
        assert stepper.stats.steps >= 6


def test_only_the_wanted_rows_are_returned() -> None:
    with stepper_of() as stepper:
        sequence = stepper.sequence()
        assert sequence.step(fed(text_of(70)))["logits"].shape == (1, 1, VOCABULARY)
        assert sequence.step(fed(text_of(9)), wanted=4)["logits"].shape == (1, 4, VOCABULARY)


@pytest.mark.parametrize("pages", [4, 6, 1000])
def test_many_threads_get_the_answers_of_each_alone(pages: int) -> None:
    texts = [text_of(int(n)) for n in RNG.integers(1, 100, 8)]
    texts[1][: min(map(len, texts[:2]))] = texts[0][: min(map(len, texts[:2]))]
    with stepper_of(max_rows=32) as probe:
        nbytes = probe._engine.runner.pool.nbytes_of_page
    with stepper_of(max_rows=32, cache_bytes=pages * nbytes) as stepper:

        def client(i: int) -> None:
            rng, ids, sizes = np.random.default_rng(i), texts[i], []
            while sum(sizes) < len(ids):
                sizes.append(min(len(ids) - sum(sizes), int(rng.choice([1, 1, 4, 40]))))
            with stepper.sequence() as sequence:
                check(sequence, "spelled", ids, sizes)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(client, range(8)))
        stats = stepper.stats
        assert stats.pages[0] == stats.pages[1]  # no sequence holds any
        assert pages == 6 or (stats.preempted > 0) == (pages == 4)


def test_sequences_that_nobody_steps_give_their_pages_to_others() -> None:
    with stepper_of() as probe:
        nbytes = probe._engine.runner.pool.nbytes_of_page
    with stepper_of(cache_bytes=2 * nbytes) as stepper:
        texts = [text_of(9) for _ in range(4)]
        sequences = [stepper.sequence() for _ in texts]
        for sequence, ids in zip(sequences, texts, strict=True):
            check(sequence, "spelled", ids[:5], [5])
        forks = [sequence.fork() for sequence in sequences]
        for sequence, ids in zip([*sequences, *forks], [*texts, *texts], strict=True):
            got = sequence.step(fed(ids[5:]), wanted=4)["logits"][0]
            want = reference_logits(decoder_model("spelled"), ids.tolist())[5:]
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_prefix_that_was_met_is_not_computed_again() -> None:
    ids = text_of(100)
    with stepper_of() as stepper:
        check(stepper.sequence(), "spelled", ids, [100])
        before = stepper.stats.rows
        second = stepper.sequence()
        want = reference_logits(decoder_model("spelled"), ids.tolist())
        got = second.step(fed(ids))["logits"]
        np.testing.assert_allclose(got[0, 0], want[-1], rtol=0, atol=2e-5)
        full = (len(ids) - 1) // PAGE * PAGE
        assert stepper.stats.prefixes == full
        assert stepper.stats.rows - before == len(ids) - full


def test_wanted_rows_of_a_known_prefix_are_computed() -> None:
    ids = text_of(100)
    with stepper_of() as stepper:
        check(stepper.sequence(), "spelled", ids, [100])
        check(stepper.sequence(), "spelled", ids, [100])
        assert stepper.stats.prefixes == 0


def test_text_that_differs_in_its_first_row_shares_no_pages() -> None:
    ids = text_of(70)
    other = ids.copy()
    other[0] = (other[0] + 1) % VOCABULARY
    with stepper_of() as stepper:
        check(stepper.sequence(), "spelled", ids, [70])
        check(stepper.sequence(), "spelled", other, [69, 1])
        assert stepper.stats.prefixes == 0


@pytest.mark.parametrize("length", [20, PAGE, 70])
def test_fork_goes_on_by_itself(length: int) -> None:
    ids, model = text_of(110), decoder_model("spelled")
    other = np.concatenate([ids[:length], text_of(20)])
    with stepper_of() as stepper:
        first = stepper.sequence()
        first.step(fed(ids[:length]))
        second = first.fork()
        for sequence, text in ((first, ids), (second, other)):
            got = sequence.step(fed(text[length:]), wanted=20)["logits"]
            want = reference_logits(model, text.tolist())[-20:]
            np.testing.assert_allclose(got[0], want, rtol=0, atol=2e-5)
        assert first.length == 110
        assert second.length == length + 20


@pytest.mark.costly
@pytest.mark.parametrize("kept", [0, 1, 31, 32, 33, 64, 69, 70])
def test_rows_that_were_cut_are_forgotten(kept: int) -> None:
    ids = text_of(70)
    text = np.concatenate([ids[:kept], text_of(12)])
    with stepper_of() as stepper:
        sequence = stepper.sequence()
        sequence.step(fed(ids))
        other = sequence.fork()
        sequence.cut(kept)
        assert sequence.length == kept
        got = sequence.step(fed(text[kept:]), wanted=12)["logits"]
        want = reference_logits(decoder_model("spelled"), text.tolist())[-12:]
        np.testing.assert_allclose(got[0], want, rtol=0, atol=2e-5)
        np.testing.assert_allclose(  # the fork reads pages that were not written meanwhile
            other.step(fed(text[-1:]))["logits"][0, 0],
            reference_logits(decoder_model("spelled"), [*ids, text[-1]])[-1],
            rtol=0,
            atol=2e-5,
        )


def test_asynchronous_steps_are_joined() -> None:
    texts = [text_of(40) for _ in range(5)]

    async def client(stepper: ps.Stepper, ids: np.ndarray) -> np.ndarray:
        sequence = stepper.sequence()
        await sequence.astep(fed(ids[:30]))
        for i in range(30, 40):
            last = await sequence.astep(fed(ids[i : i + 1]))
        return last["logits"][0, 0]

    async def main(stepper: ps.Stepper) -> list[np.ndarray]:
        return await asyncio.gather(*[client(stepper, ids) for ids in texts])

    with stepper_of() as stepper:
        for ids, got in zip(texts, asyncio.run(main(stepper)), strict=True):
            want = reference_logits(decoder_model("spelled"), ids.tolist())[-1]
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
        assert stepper.stats.steps < 5 * 11


def test_cancelled_task_closes_its_sequence() -> None:
    async def main(stepper: ps.Stepper) -> None:
        sequence = stepper.sequence()
        with stepper._engine.lock:  # no step begins
            task = asyncio.ensure_future(sequence.astep(fed(text_of(3))))
            await asyncio.wait([task], timeout=0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(ps.InvalidInput, match="is closed"):
            await sequence.astep(fed(text_of(3)))

    with stepper_of() as stepper:
        asyncio.run(main(stepper))
        assert not stepper._engine.waiting


def test_deadline_ends_the_wait_and_leaves_the_sequence_as_it_was() -> None:
    ids = text_of(50)
    with stepper_of() as stepper:
        sequence = stepper.sequence()
        sequence.step(fed(ids[:40]))
        with pytest.raises(ps.DeadlineExceeded):
            sequence.step(fed(text_of(5)), timeout=0)
        assert sequence.length == 40
        got = sequence.step(fed(ids[40:]))["logits"][0, 0]
        want = reference_logits(decoder_model("spelled"), ids.tolist())[-1]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_cancelled_token_ends_the_wait() -> None:
    token = ps.CancelToken()
    token.cancel()
    with stepper_of() as stepper, pytest.raises(ps.Cancelled):
        stepper.sequence().step(fed(text_of(5)), cancel=token)


def test_sequence_longer_than_all_pages_is_refused() -> None:
    with stepper_of(cache_bytes=1) as stepper, pytest.raises(ps.LimitExceeded, match="cache_bytes"):
        stepper.sequence().step(fed(text_of(PAGE + 1)))


def test_wrong_rows_are_refused() -> None:
    with stepper_of() as stepper:
        sequence = stepper.sequence()
        with pytest.raises(
            ps.InvalidInput, match=r"a value is missing for each of these inputs: .ids. \(int64"
        ):
            sequence.step({})
        with pytest.raises(ps.InvalidInput, match="at least one"):
            sequence.step({"ids": np.zeros((1, 0), np.int64)})
        with pytest.raises(ps.InvalidInput, match="at least one"):
            sequence.step({"ids": np.zeros((2, 3), np.int64)})
        with pytest.raises(ps.InvalidInput, match="wanted=4"):
            sequence.step(fed(text_of(3)), wanted=4)
        with pytest.raises(ps.InvalidInput, match="length=1"):
            sequence.cut(1)
        assert sequence.length == 0


def test_closed_stepper_ends_those_who_wait_and_refuses_others() -> None:
    stepper = stepper_of()
    sequence, ended = stepper.sequence(), []
    stepper._engine.feed(
        sequence._state, stepper._checked(fed(text_of(3))), 1, lambda _, error: ended.append(error)
    )
    stepper.close()
    assert isinstance(ended[0], ps.InvalidInput)
    with pytest.raises(ps.InvalidInput, match="closed"):
        stepper.sequence()


def test_stepper_that_nobody_has_is_freed_with_its_thread() -> None:
    stepper = stepper_of()
    asyncio.run(stepper.sequence().astep(fed(text_of(3))))
    thread, gone = stepper._thread, ref(stepper)
    assert isinstance(thread, threading.Thread)
    del stepper
    thread.join(SOON)
    gc.collect()
    assert not thread.is_alive()
    assert gone() is None


def test_sequence_that_nobody_has_gives_its_pages_back() -> None:
    with stepper_of() as stepper:
        for _ in range(3):
            stepper.sequence().step(fed(text_of(40)))
        kept = stepper.sequence()
        kept.step(fed(text_of(5)))
        assert len(stepper._engine.holding) == 1


def test_rows_beyond_the_table_of_positions_are_refused_before_the_step() -> None:
    with ps.Stepper(ps.load(decoder_model("spelled", places=40))) as stepper:
        assert stepper.max_length == 40
        sequence = stepper.sequence()
        with pytest.raises(ps.InvalidInput, match=r"41 rows is longer .* 'places' has 40"):
            sequence.step(fed(text_of(41)))
        assert stepper.stats.steps == sequence.length == 0
        sequence.step(fed(text_of(40)))
        with pytest.raises(ps.InvalidInput, match="41 rows is longer"):
            sequence.step(fed(text_of(1)))
        assert sequence.length == 40


def test_rows_that_no_cache_can_hold_are_refused_before_the_step() -> None:
    with stepper_of() as stepper:
        nbytes = stepper._engine.runner.pool.nbytes_of_page
    with stepper_of(max_rows=8, cache_bytes=2 * nbytes) as stepper:
        with pytest.raises(ps.LimitExceeded, match=r"70 rows needs 3 pages .* may have 2"):
            stepper.sequence().step(fed(text_of(70)))
        assert stepper.stats.steps == 0


def test_thread_of_a_closed_stepper_makes_the_calls_that_wait(monkeypatch) -> None:
    called: list[bool] = []
    stepper = stepper_of()
    monkeypatch.setattr(stepper._engine.loops, "wake", lambda: called.append(True))
    stepper._closed = True
    _run_steps(ref(stepper))
    assert called == [True]
