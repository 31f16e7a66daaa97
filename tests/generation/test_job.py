"""The texts of a request, and its end."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.generation.job import TextJob
from penstock.generation.options import GenerationOptions
from penstock.generation.result import GeneratedText
from tests.support.word_texts import PROMPT, generator_of


def text_of(score: float, *tokens: int) -> GeneratedText:
    return GeneratedText(tokens=[*tokens], score=score, finish="stop")


def test_best_texts_have_the_highest_score_for_each_token() -> None:
    job = TextJob(3, GenerationOptions(best_of=3, count=2, temperature=1))
    texts = [text_of(-4.0, 1, 2), text_of(-5.0, 1, 2, 3), text_of(-3.0, 1)]
    job.end(texts)
    assert job.result is not None
    assert [text.score for text in job.result.texts] == [-5.0, -4.0]
    assert job.result.generated_tokens == 6


def test_text_without_tokens_is_no_error() -> None:
    job = TextJob(3, GenerationOptions(best_of=2, temperature=1))
    job.end([text_of(float("nan")), text_of(-1.0, 4)])
    assert job.result is not None
    assert job.result.tokens == [4]


def test_first_error_is_that_of_the_request() -> None:
    job, told = TextJob(3, GenerationOptions()), []
    job.notify = lambda: told.append(job.error)
    first = ps.Cancelled("first")
    job.fail(first)
    job.fail(ps.Cancelled("second"))
    assert told == [first]


def test_error_of_a_prompt_ends_all_its_texts() -> None:
    with generator_of() as generator:
        with pytest.raises(ps.PenstockError):
            generator.generate([10_000], count=3, temperature=1.0, max_tokens=3)
        assert not generator.stepper._engine.holding
        result = generator.generate(PROMPT, count=2, temperature=1.0, seed=0, max_tokens=3)
        assert len(result.texts) == 2
