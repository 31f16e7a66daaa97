"""Texts of many requests, each as it would be alone."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.generation.generator import Generator
from penstock.generation.options import GenerationOptions
from penstock.host.stop_condition import StopCondition
from tests.support.decoders import VOCABULARY, decoder_model
from tests.support.onnx_text import model_from_text
from tests.support.timing import SOON, turns_until, wait_until
from tests.support.word_texts import (
    PROMPT,
    generator_of,
    letter_tokenizer,
    likeliest,
    word_tokenizer,
)


def test_text_is_that_of_the_likeliest_tokens() -> None:
    with generator_of() as generator:
        result = generator.generate("w5 w3 w9", max_tokens=12)
        want = likeliest(PROMPT, 12)
        assert result.tokens == want
        assert result.text.split() == [f"w{token}" for token in want]
        assert (result.prompt_tokens, result.generated_tokens) == (3, 12)
        assert result.texts[0].finish == "length"


def test_stream_gives_the_text_in_pieces() -> None:
    with generator_of() as generator:
        pieces = [*generator.stream(PROMPT, max_tokens=9)]
        assert [token for piece in pieces for token in piece.tokens] == likeliest(PROMPT, 9)
        assert "".join(p.text for p in pieces) == generator.generate(PROMPT, max_tokens=9).text
        assert [piece.finish for piece in pieces] == [""] * 8 + ["length"]


def test_stream_that_is_closed_ends_the_request() -> None:
    with generator_of() as generator:
        stream = generator.stream(PROMPT, max_tokens=100)
        next(stream)
        stream.close()
        assert not generator.stepper._engine.holding


def test_requests_of_many_threads_are_those_of_each_alone() -> None:
    with generator_of(max_rows=16) as generator, ThreadPoolExecutor(6) as threads:
        prompts = [[i, i + 1, *range(i % 3)] for i in range(12)]
        texts = threads.map(lambda p: generator.generate(p, max_tokens=15).tokens, prompts)
        for prompt, tokens in zip(prompts, texts, strict=True):
            assert tokens == likeliest(prompt, 15)


def test_asynchronous_requests_share_steps() -> None:
    async def main(generator: Generator) -> list[list[int]]:
        jobs = [generator.agenerate([i], max_tokens=10) for i in range(6)]
        return [result.tokens for result in await asyncio.gather(*jobs)]

    with generator_of() as generator:
        assert asyncio.run(main(generator)) == [likeliest([i], 10) for i in range(6)]
        assert generator.stepper.stats.steps < 60


def test_step_wakes_the_event_loop_once_for_all_texts(monkeypatch) -> None:
    async def main(generator: Generator) -> int:
        loop, wakes = asyncio.get_running_loop(), itertools.count()
        wake = loop.call_soon_threadsafe

        def counted(*arguments: Any) -> object:
            next(wakes)
            return wake(*arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        await asyncio.gather(*[generator.agenerate([i], max_tokens=100) for i in range(6)])
        return next(wakes)

    with generator_of(context=300) as generator:
        # The thread that begins a request wakes the loop, too, and a text may end by itself.
        assert asyncio.run(main(generator)) <= generator.stepper.stats.steps + 3 * 6
        assert generator.stepper.stats.steps < 6 * 50


def test_asynchronous_stream_gives_the_text_in_pieces() -> None:
    async def main(generator: Generator) -> list[int]:
        pieces = [piece async for piece in generator.astream(PROMPT, max_tokens=7)]
        return [token for piece in pieces for token in piece.tokens]

    with generator_of() as generator:
        assert asyncio.run(main(generator)) == likeliest(PROMPT, 7)


def test_cancelled_task_ends_its_request() -> None:
    async def main(generator: Generator) -> None:
        stream = generator.astream(PROMPT, max_tokens=390)
        await anext(stream)
        task = asyncio.ensure_future(generator.agenerate(PROMPT, max_tokens=390))
        await anext(stream)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()

    with generator_of() as generator:
        asyncio.run(main(generator))
        assert not generator.stepper._engine.waiting


@pytest.mark.parametrize("draft", ["prompt", "model"])
def test_drafts_change_no_text(draft: str) -> None:
    with generator_of() as plain:
        steps = plain.generate(PROMPT, max_tokens=60), plain.stepper.stats.steps
    guesser = "prompt" if draft == "prompt" else ps.load(decoder_model("window"))
    with generator_of(draft=guesser) as generator:
        result = generator.generate(PROMPT, max_tokens=60)
        assert result.tokens == steps[0].tokens
        assert generator.stepper.stats.steps < steps[1]
        drawn = {"temperature": 0.8, "seed": 5, "max_tokens": 40}
        with generator_of() as plain:
            assert (
                generator.generate(PROMPT, **drawn).tokens == plain.generate(PROMPT, **drawn).tokens
            )


def test_same_seed_gives_the_same_text_whatever_else_runs() -> None:
    drawn = {"temperature": 1.0, "max_tokens": 20}
    with generator_of() as generator, ThreadPoolExecutor(4) as threads:
        alone = [generator.generate(PROMPT, seed=i, **drawn).tokens for i in range(4)]
        together = threads.map(
            lambda i: generator.generate(PROMPT, seed=i, **drawn).tokens, range(4)
        )
        assert [*together] == alone
        assert len({*map(tuple, alone)}) == 4


def test_several_texts_share_their_prompt() -> None:
    prompt = [*range(40)]
    with generator_of() as generator:
        result = generator.generate(prompt, count=3, temperature=1.0, seed=1, max_tokens=5)
        assert len({tuple(text.tokens) for text in result.texts}) == 3
        assert result.generated_tokens == 15
        assert generator.stepper.stats.rows == 40 + 3 * 4
        first = generator.generate(prompt, temperature=1.0, seed=1, max_tokens=5)
        assert first.tokens == result.tokens


def test_best_texts_are_the_likeliest_of_those_drawn() -> None:
    drawn = {"temperature": 1.5, "seed": 2, "max_tokens": 6}
    with generator_of() as generator:
        every = generator.generate(PROMPT, count=5, logprobs=0, **drawn).texts
        best = generator.generate(PROMPT, best_of=5, count=2, **drawn)
        order = sorted(every, key=lambda text: -text.score)
        assert [text.tokens for text in best.texts] == [text.tokens for text in order[:2]]
        assert best.generated_tokens == 30
        pieces = [*generator.stream(PROMPT, best_of=5, count=2, **drawn)]
        assert [piece.tokens for piece in pieces] == [text.tokens for text in order[:2]]


def test_logprobs_are_those_of_the_model() -> None:
    from tests.support.decoders import reference_logits

    with generator_of() as generator:
        text = generator.generate(PROMPT, max_tokens=4, logprobs=3).texts[0]
    logits = reference_logits(decoder_model("spelled"), [*PROMPT, *text.tokens[:-1]])[2:]
    logs = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    for own, row in zip(text.logprobs, logs, strict=True):
        assert abs(own.logprob - row[own.token]) < 1e-4
        assert [token for token, _ in own.alternatives] == row.argsort()[::-1][:3].tolist()


@pytest.mark.parametrize("draft", [None, "prompt"])
@pytest.mark.parametrize("regex", ["(ab){3}", "a( bc)* d", "[0-9]{2,9}x"])
def test_text_has_the_form_of_its_grammar(regex: str, draft: str | None) -> None:
    model = ps.load(decoder_model("spelled"))
    with Generator(model, letter_tokenizer(), draft=draft) as generator:
        for seed in range(3):
            drawn = {"seed": seed, "temperature": 1.0, "max_tokens": 40}
            text = generator.generate([1, 2], regex=regex, **drawn).texts[0]
            assert text.finish == "stop"
            assert re.fullmatch(regex, text.text)


def test_text_ends_at_tokens_that_end_texts() -> None:
    want = likeliest(PROMPT, 20)
    end = want[4]
    first = want.index(end)
    tokenizer = word_tokenizer(end_ids=[end])
    with Generator(ps.load(decoder_model("spelled")), tokenizer) as generator:
        text = generator.generate(PROMPT, max_tokens=20).texts[0]
        assert (text.tokens, text.finish, text.stop) == (want[:first], "stop", None)
        assert generator.generate(PROMPT, max_tokens=20, ignore_end=True).tokens == want


def test_text_ends_before_a_stop_text() -> None:
    want = likeliest(PROMPT, 20)
    word = f"w{want[2]}"
    with generator_of() as generator:
        text = generator.generate(PROMPT, max_tokens=20, stop=[word]).texts[0]
        assert text.finish == "stop"
        assert text.stop == word
        assert word not in text.text
        pieces = [p.text for p in generator.stream(PROMPT, max_tokens=20, stop=[word])]
        assert "".join(pieces) == text.text


def test_text_ends_with_the_context() -> None:
    with generator_of(context=10) as generator:
        text = generator.generate(PROMPT).texts[0]
        assert (len(text.tokens), text.finish) == (7, "length")
        with pytest.raises(ps.InvalidInput, match="may have 10"):
            generator.generate([*range(10)])


def test_messages_are_written_by_the_chat_template() -> None:
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}w9"
    tokenizer = word_tokenizer(chat_templates={"default": template})
    with Generator(ps.load(decoder_model("spelled")), tokenizer) as generator:
        messages = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w3"}]
        assert generator.encode(messages) == PROMPT
        assert generator.generate(messages, max_tokens=5).tokens == likeliest(PROMPT, 5)


def test_deadline_and_cancellation_end_requests() -> None:
    token = ps.CancelToken()
    token.cancel()
    with generator_of() as generator:
        with pytest.raises(ps.DeadlineExceeded):
            generator.generate(PROMPT, max_tokens=50, timeout=0)
        with pytest.raises(ps.Cancelled):
            generator.generate(PROMPT, max_tokens=50, cancel=token)
        assert not generator.stepper._engine.holding


def test_errors_of_steps_are_those_of_their_request() -> None:
    with generator_of() as generator:
        with pytest.raises(ps.PenstockError):
            generator.generate([VOCABULARY + 3], max_tokens=3)
        assert generator.generate(PROMPT, max_tokens=3).tokens == likeliest(PROMPT, 3)


@pytest.mark.parametrize("prompt", [[], [-1], ["w1", 2], [1.5]])
def test_wrong_prompts_are_refused(prompt: list[object]) -> None:
    with generator_of() as generator, pytest.raises(ps.InvalidInput):
        generator.generate(prompt)


def test_bytes_are_no_tokens() -> None:
    with generator_of() as generator, pytest.raises(TypeError, match="a text, tokens"):
        generator.generate(b"w1")


def test_unknown_options_are_refused() -> None:
    with generator_of() as generator, pytest.raises(TypeError, match="temprature"):
        generator.generate(PROMPT, temprature=1)


def test_tokenizer_beside_a_model_is_found(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(decoder_model("spelled").SerializeToString())
    with pytest.raises(ps.InvalidInput, match=r"no tokenizer\.json beside it"):
        Generator(tmp_path / "model.onnx")
    word_tokenizer().tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 20}')
    with Generator(tmp_path / "model.onnx") as generator:
        text = generator.generate("w5 w3 w9").texts[0]
        assert text.tokens == likeliest(PROMPT, 17)


def test_model_without_tokens_is_refused() -> None:
    text = """g (float[b, s, 4] x, float[b, 1, p, 4] past) => (float[b, s, 4] y,
        float[b, 1, t, 4] present) <int64[1] one = {1}> {
        r = Unsqueeze (x, one) present = Concat <axis = 2> (past, r) y = Identity (x) }"""
    with pytest.raises(ps.InvalidInput, match="generates no text"):
        Generator(ps.load(model_from_text(text)), word_tokenizer())


def test_encoder_is_refused() -> None:
    text = """g (int64[b, s] ids, float[b, 1, p, 4] past) => (float[b, s, 4] last_hidden_state,
        float[b, 1, t, 4] present) <int64[1] one = {1}> {
        x = Gather (table, ids) r = Unsqueeze (x, one) present = Concat <axis = 2> (past, r)
        last_hidden_state = Identity (x) }"""
    model = model_from_text(text)
    table = np.zeros((VOCABULARY, 4), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    with pytest.raises(ps.InvalidInput, match="'last_hidden_state', not logits"):
        Generator(ps.load(model), word_tokenizer())


def test_tools_without_messages_are_refused() -> None:
    with generator_of() as generator, pytest.raises(ps.InvalidInput, match="give messages"):
        generator.generate(PROMPT, tools=[{"name": "f"}])


def test_prompt_that_is_too_long_is_refused_with_what_says_so(tmp_path: Path) -> None:
    model = ps.load(decoder_model("spelled", places=30))
    with Generator(model, word_tokenizer()) as generator:
        with pytest.raises(ps.InvalidInput, match=r"30 tokens .* 30, as the model's table of pos"):
            generator.generate([1] * 30)
        result = generator.generate([1] * 25)
        assert (result.generated_tokens, result.texts[0].finish) == (5, "length")
    refused = pytest.raises(ps.InvalidInput, match="may have 4, as the generator's context says")
    with generator_of(context=4) as generator, refused:
        generator.generate([1] * 4)
    onnx.save(decoder_model("spelled"), tmp_path / "model.onnx")
    (tmp_path / "config.json").write_text('{"n_positions": 6}')
    with Generator(tmp_path / "model.onnx", word_tokenizer()) as generator:
        with pytest.raises(ps.InvalidInput, match=r"6, as n_positions in .*config\.json says"):
            generator.generate([1] * 6)
        assert generator.stepper.stats.steps == 0


@pytest.mark.parametrize("context", [0, -3, "4", True])
def test_context_is_a_count(context: object) -> None:
    with pytest.raises((TypeError, ValueError), match="context"):
        generator_of(context=context)


def test_options_beside_a_stepper_are_refused() -> None:
    stepper = ps.Stepper(ps.load(decoder_model("spelled")))
    with pytest.raises(ps.InvalidInput, match="max_rows"):
        Generator(stepper, word_tokenizer(), max_rows=3)


def test_cancelled_task_ends_a_search_and_gives_its_pages_back() -> None:
    generator = generator_of(context=300)
    runner, reached, released = generator.stepper._engine.runner, *events(2)
    run_pieces = runner.run

    def held(pieces: object) -> object:
        if generator.stepper.stats.steps == 4:
            reached.set()
            assert released.wait(SOON)
        return run_pieces(pieces)

    runner.run = held

    async def run() -> None:
        task = asyncio.ensure_future(
            generator.agenerate(PROMPT, beams=3, max_tokens=250, ignore_end=True)
        )
        await asyncio.to_thread(reached.wait, SOON)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        released.set()

    asyncio.run(run())
    wait_until(lambda: not generator.stepper._engine.holding)
    assert generator.stepper.stats.steps <= 6
    generator.close()


def events(count: int) -> list[threading.Event]:
    return [threading.Event() for _ in range(count)]


def test_task_that_is_cancelled_while_its_request_begins_leaves_none() -> None:
    generator = generator_of(context=300)
    encode, entered, released = generator.encode, *events(2)

    def held(*arguments: object) -> list[int]:
        entered.set()
        assert released.wait(SOON)
        return encode(*arguments)

    generator.encode = held

    async def run() -> None:
        task = asyncio.ensure_future(generator.agenerate(PROMPT, max_tokens=250))

        await asyncio.to_thread(entered.wait, SOON)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        released.set()

        async def ended() -> bool:
            engine = generator.stepper._engine
            return engine._count > 0 and not engine.waiting

        await turns_until(ended)

    asyncio.run(run())
    generator.close()


def test_deadline_ends_all_texts_of_a_request() -> None:
    generator = generator_of(context=300)
    stop = StopCondition(3600.0)
    options = GenerationOptions(max_tokens=250, count=3, ignore_end=True)
    job = generator.begin(PROMPT, options, stop)
    generator.stepper._drive(lambda: len(job.pieces) > 6)
    assert [request.sequence._state.stop for request in job._requests] == [stop] * 3
    stop.deadline = 0.0
    generator.stepper._drive(lambda: job.done)
    assert isinstance(job.error, ps.DeadlineExceeded)
    assert not generator.stepper._engine.holding
    generator.close()
