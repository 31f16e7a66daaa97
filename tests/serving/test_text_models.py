"""Queues of requests for texts: turns by priority, bounds, and what is counted."""

from __future__ import annotations

import asyncio

import pytest
from tokenizers import Tokenizer, models

import penstock as ps
from penstock.core.errors import DeadlineExceeded, QueueFull
from penstock.generation.generator import Generator
from penstock.generation.tokenizer import TextTokenizer
from penstock.serving.repository import UnknownModel
from penstock.serving.text_models import Admission, TextModels
from penstock.serving.text_protocol import FieldError, decode_text_request
from tests.support.decoders import VOCABULARY
from tests.support.text_server import text_model
from tests.support.timing import SOON, turns_until
from tests.support.word_texts import likeliest


async def entered(admission: Admission, log: list, name: str, priority: int = 0, texts: int = 1):
    inside = await admission.enter(texts, priority, SOON)
    log.append(name)
    return inside


async def begun(admission: Admission, *coroutines) -> list[asyncio.Task]:
    """Tasks that wait, one behind the other."""
    tasks: list[asyncio.Task] = []
    for coroutine in coroutines:
        tasks.append(asyncio.ensure_future(coroutine))

        async def waits() -> bool:
            return len(admission.waiting) == len(tasks)

        await turns_until(waits)
    return tasks


def test_requests_enter_by_priority_and_age():
    async def run() -> list[str]:
        admission, log = Admission(1, 9), []
        first = await entered(admission, log, "first")
        names = [("low", -1), ("a", 0), ("b", 0), ("high", 2)]
        tasks = await begun(admission, *(entered(admission, log, *pair) for pair in names))
        for _ in range(5):
            admission.leave(first)
        await asyncio.gather(*tasks)
        return log

    assert asyncio.run(run()) == ["first", "high", "a", "b", "low"]


def test_low_priority_gets_one_turn_in_eight():
    async def run() -> list[str]:
        admission, log = Admission(1, 20), []
        inside = await entered(admission, log, "first")
        tasks = await begun(
            admission,
            entered(admission, log, "low", -1),
            *(entered(admission, log, f"high {i}", 1) for i in range(9)),
        )
        for _ in range(10):
            admission.leave(inside)
        await asyncio.gather(*tasks)
        return log

    assert asyncio.run(run()).index("low") == 8


def test_full_queue_refuses_and_deadline_ends_a_wait():
    async def run() -> None:
        admission = Admission(2, 1)
        assert await admission.enter(5, 0, SOON) == 2  # more texts than there is room for
        (waits,) = await begun(admission, admission.enter(1, 0, SOON))
        with pytest.raises(QueueFull):
            await admission.enter(1, 0, SOON)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        with pytest.raises(DeadlineExceeded, match="exceeded its timeout"):
            await admission.enter(1, 0, 0.0)
        assert admission.waiting == []
        admission.leave(2)
        assert await admission.enter(2, 0, SOON) == 2

    asyncio.run(run())


def test_request_that_is_cancelled_as_its_turn_comes_gives_it_on():
    async def run() -> None:
        admission = Admission(1, 2)
        inside = await admission.enter(1, 0, SOON)
        one, two = await begun(admission, admission.enter(1, 0, SOON), admission.enter(1, 0, SOON))
        admission.leave(inside)
        one.cancel()
        assert await two == 1

    asyncio.run(run())


def test_run_counts_tokens_and_times():
    model = text_model()
    body = {"prompt": [[5, 3, 9], [7]], "max_tokens": 4, "temperature": 0, "ignore_eos": True}

    async def run() -> list[tuple[int, str]]:
        async with model.run(decode_text_request(body, False), SOON, 0) as texts:
            assert model.counts.running == 1 and model.counts.tokens_in_flight == 4
            pieces = [(index, piece.text) async for index, piece in texts.pieces()]
            assert model.counts.tokens_in_flight == 12
            assert [len(text.tokens) for text in texts.texts] == [4, 4]
            assert (texts.prompt_tokens, texts.generated_tokens) == (4, 8)
            return pieces

    pieces = asyncio.run(run())
    assert {index for index, _ in pieces} == {0, 1}
    counts, histograms = model.counts, model.histograms
    assert (counts.running, counts.queued, counts.tokens_in_flight) == (0, 0, 0)
    assert (counts.prompt_tokens, counts.generated_tokens) == (4, 8)
    assert histograms.queue_seconds.count == histograms.first_token_seconds.count == 1
    assert histograms.between_tokens_seconds.count == 6
    model.close()


def test_texts_that_are_not_given_are_counted():
    model = text_model()
    body = {"prompt": "w5", "max_tokens": 3, "best_of": 3, "seed": 1, "ignore_eos": True}

    async def run() -> int:
        async with model.run(decode_text_request(body, False), SOON, 0) as texts:
            return len([piece async for _, piece in texts.pieces()])

    assert asyncio.run(run()) == 1
    assert model.counts.generated_tokens == 9
    model.close()


def test_wrong_prompt_counts_no_run():
    model = text_model()

    async def run() -> None:
        async with model.run(decode_text_request({"prompt": [1] * 300}, False), SOON, 0):
            pass

    with pytest.raises(ps.InvalidInput, match="300 tokens"):
        asyncio.run(run())
    assert (model.counts.running, model.admission.waiting) == (0, [])
    model.close()


def test_prompt_may_have_tokens_beyond_gaps_of_the_vocabulary():
    words = {word: i for i, word in enumerate(["w0", "w5", "w3", "w9"])}
    gaps = Tokenizer(models.WordLevel(words | {"last": VOCABULARY - 1}, unk_token="w0"))
    model = text_model(tokenizer=TextTokenizer(gaps))

    async def run(prompt: object) -> list[int]:
        asked = decode_text_request({"prompt": prompt, "max_tokens": 4, "temperature": 0}, False)
        async with model.run(asked, SOON, 0) as run:
            async for _ in run.pieces():
                pass
            return run.texts[0].tokens

    prompt = [3, VOCABULARY - 1]
    assert asyncio.run(run("last")) == likeliest(prompt[1:], 4)
    assert asyncio.run(run(prompt)) == likeliest(prompt, 4)
    with pytest.raises(ps.InvalidInput, match=f"must be below {VOCABULARY}"):
        asyncio.run(run([VOCABULARY]))
    model.close()


def test_deadline_ends_a_request_between_its_prompts(monkeypatch):
    model, begin, jobs = text_model(), Generator.abegin, []

    async def begin_late(self, tokens, options, stop, priority):
        jobs.append(await begin(self, tokens, options, stop, priority))
        stop.deadline = 0
        return jobs[-1]

    async def run() -> None:
        asked = decode_text_request({"prompt": [[5], [7], [9]]}, False)
        async with model.run(asked, SOON, 0):
            pass

    monkeypatch.setattr(Generator, "abegin", begin_late)
    with pytest.raises(DeadlineExceeded):
        asyncio.run(run())
    assert len(jobs) == 1 and jobs[0].done
    model.close()


def test_models_are_found_by_name_and_alone_without_one():
    a, b = text_model("a"), text_model("b")
    assert TextModels({"a": a}).generator(None) is a
    both = TextModels({"a": a, "b": b})
    assert both.generator("b") is b and [*both.entries] == ["a", "b"]
    with pytest.raises(FieldError, match="field model is required"):
        both.generator(None)
    with pytest.raises(UnknownModel, match="unknown model 'c'"):
        both.generator("c")
    with pytest.raises(UnknownModel):
        both.embedder("a")
    assert not TextModels()
    both.close()
