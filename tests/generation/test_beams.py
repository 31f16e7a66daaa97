"""Beam search, beside a search through all texts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest

import penstock as ps
from penstock.generation.beams import BeamSearch
from penstock.generation.generator import Generator
from penstock.generation.options import GenerationOptions
from penstock.generation.text_request import TextSource
from tests.support.decoders import VOCABULARY, decoder_model, reference_logits
from tests.support.word_texts import PROMPT, generator_of, letter_tokenizer, word_tokenizer


def log_probabilities(tokens: list[int]) -> np.ndarray:
    logits = reference_logits(decoder_model("spelled"), tokens)[-1].astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def test_beams_as_many_as_tokens_find_the_likeliest_texts() -> None:
    first = log_probabilities(PROMPT)
    second = [log_probabilities([*PROMPT, token]) for token in range(VOCABULARY)]
    pairs = product(range(VOCABULARY), repeat=2)
    scores = {(a, b): (first[a] + second[a][b]) / 2 for a, b in pairs}
    best = sorted(scores, key=lambda pair: -scores[pair])[:4]
    with generator_of(max_rows=128) as generator:
        result = generator.generate(PROMPT, beams=VOCABULARY, count=4, max_tokens=2)
    assert [tuple(text.tokens) for text in result.texts] == best
    for text in result.texts:
        assert abs(text.score - scores[tuple(text.tokens)]) < 1e-5


Change = Callable[[np.ndarray, list[int]], np.ndarray]


def _searched(
    beams: int, length: int, ends: set[int], change: Change = lambda logs, tokens: logs
) -> tuple[list[int], float]:
    """The best text of a beam search that computes every text anew. ``change`` is made to the log
    probabilities of what follows a text."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    found: list[tuple[float, list[int]]] = []
    for step in range(1, length + 1):
        every = [
            (score + log, tokens, token)
            for tokens, score in live
            for token, log in enumerate(change(log_probabilities([*PROMPT, *tokens]), tokens))
        ]
        live = []
        ranked = sorted(every, key=lambda own: -own[0])[: (1 + max(len(ends), 1)) * beams]
        for rank, (score, tokens, token) in enumerate(ranked):
            if token in ends:
                # As in transformers, an ending counts if it ranks among the beams.
                found += [(score / step, tokens)] if rank < beams else []
            else:
                live.append(([*tokens, token], score))
            if len(live) == beams:
                break
        found = sorted(found, key=lambda own: -own[0])[:beams]
        if len(found) == beams and max(score for _, score in live) / step <= found[-1][0]:
            break
    else:
        found += [(score / length, tokens) for tokens, score in live]
    score, tokens = max(found, key=lambda own: own[0])
    return tokens, score


@pytest.mark.parametrize("beams", [2, 3])
@pytest.mark.parametrize("ends", [set(), {49, 6}, {*range(0, VOCABULARY, 3)}])
def test_search_is_that_of_a_search_without_caches(beams: int, ends: set[int]) -> None:
    tokenizer = word_tokenizer(end_ids=sorted(ends))
    with Generator(ps.load(decoder_model("spelled")), tokenizer) as generator:
        result = generator.generate(PROMPT, beams=beams, max_tokens=6)
        assert not generator.stepper._engine.holding
    tokens, score = _searched(beams, 6, ends)
    assert result.tokens == tokens
    assert abs(result.texts[0].score - score) < 1e-5


def test_search_that_stops_early_ends_with_the_first_texts() -> None:
    ends = {*range(0, VOCABULARY, 4)}
    tokenizer = word_tokenizer(end_ids=sorted(ends))
    with Generator(ps.load(decoder_model("spelled")), tokenizer) as generator:
        steps = {}
        for early in (True, False, "never"):
            before = generator.stepper.stats.rows
            generator.generate(
                PROMPT, beams=3, max_tokens=12, early_stopping=early, length_penalty=2.0
            )
            steps[early] = generator.stepper.stats.rows - before
        assert steps[True] < steps["never"]
        assert steps[True] <= steps[False] <= steps["never"]


def test_search_without_a_limit_never_stops_early() -> None:
    source = TextSource("ids", "logits", word_tokenizer(), frozenset([7]), None)
    options = GenerationOptions(beams=2, early_stopping="never")
    with pytest.raises(ps.InvalidInput, match="early_stopping='never'"):
        BeamSearch(source, PROMPT, options, lambda texts, error: None)


def test_penalties_are_those_of_each_beam() -> None:
    def change(logs: np.ndarray, tokens: list[int]) -> np.ndarray:
        # Of log probabilities, which are negative, as transformers has it.
        logs[[*{*PROMPT, *tokens}]] *= 1.9
        logs -= 0.3 * np.bincount(tokens, minlength=logs.size)
        return logs

    with generator_of() as generator:
        result = generator.generate(
            PROMPT, beams=3, max_tokens=8, repetition_penalty=1.9, frequency_penalty=0.3
        )
    tokens, score = _searched(3, 8, set(), change)
    assert result.tokens == tokens
    assert abs(result.texts[0].score - score) < 1e-5


def test_forbidden_tokens_make_others_no_likelier() -> None:
    likely = [int(n) for n in np.argsort(-log_probabilities(PROMPT))[:3]]

    def change(logs: np.ndarray, tokens: list[int]) -> np.ndarray:
        logs[likely] = -np.inf
        return logs

    with generator_of() as generator:
        bias = dict.fromkeys(likely, -np.inf)
        result = generator.generate(PROMPT, beams=3, max_tokens=5, logit_bias=bias)
    tokens, score = _searched(3, 5, set(), change)
    assert result.tokens == tokens
    assert abs(result.texts[0].score - score) < 1e-5


def test_beams_without_any_possible_token_are_an_error() -> None:
    bias = dict.fromkeys(range(VOCABULARY), -np.inf)
    with generator_of() as generator, pytest.raises(ps.RunError, match="no beam has a possible"):
        generator.generate(PROMPT, beams=2, max_tokens=2, logit_bias=bias)


def test_texts_of_a_search_have_log_probabilities() -> None:
    with generator_of() as generator:
        text = generator.generate(PROMPT, beams=2, max_tokens=3, logprobs=2).texts[0]
    assert [own.token for own in text.logprobs] == text.tokens
    for place, own in enumerate(text.logprobs):
        logs = log_probabilities([*PROMPT, *text.tokens[:place]])
        likeliest = [int(n) for n in np.argsort(-logs)[:2]]
        assert own.logprob == pytest.approx(logs[own.token], abs=1e-5)
        assert [token for token, _ in own.alternatives] == likeliest
        assert [log for _, log in own.alternatives] == pytest.approx(logs[likeliest], abs=1e-5)


def test_stream_gives_texts_of_a_search_once_they_are_there() -> None:
    with generator_of() as generator:
        pieces = [*generator.stream(PROMPT, beams=3, count=2, max_tokens=4)]
        texts = generator.generate(PROMPT, beams=3, count=2, max_tokens=4).texts
    assert [piece.text for piece in pieces] == [text.text for text in texts]
    assert [piece.index for piece in pieces] == [0, 1]


def test_beams_have_the_form_of_a_grammar() -> None:
    with Generator(ps.load(decoder_model("spelled")), letter_tokenizer()) as generator:
        text = generator.generate(PROMPT, beams=3, regex="ab|ac|bd", max_tokens=5).texts[0]
    assert text.text in ("ab", "ac", "bd")
    assert text.finish == "stop"


@pytest.mark.parametrize("more", [{"ignore_end": True}, {"min_tokens": 4}])
def test_search_ends_texts_that_nothing_may_follow(more: dict[str, object]) -> None:
    with Generator(ps.load(decoder_model("spelled")), letter_tokenizer()) as generator:
        texts = generator.generate(PROMPT, beams=2, regex="ab|c", max_tokens=5, **more).texts
    assert texts[0].text in ("ab", "c")


def test_searches_that_share_few_pages_end() -> None:
    """A beam that waits for the others of its search holds no page that these need."""
    with generator_of() as generator:
        wanted = [generator.generate([n, 3, 9], beams=3, max_tokens=6).tokens for n in range(4)]
        nbytes = generator.stepper._engine.runner.pool.nbytes_of_page
    with generator_of(cache_bytes=3 * nbytes) as generator, ThreadPoolExecutor(4) as threads:
        found = threads.map(
            lambda n: generator.generate([n, 3, 9], beams=3, max_tokens=6, timeout=60).tokens,
            range(4),
        )
        assert [*found] == wanted
        assert generator.stepper.stats.preempted > 0


def test_deadline_ends_a_search() -> None:
    with generator_of() as generator:
        with pytest.raises(ps.DeadlineExceeded):
            generator.generate(PROMPT, beams=3, max_tokens=4, timeout=0)
        assert not generator.stepper._engine.holding
