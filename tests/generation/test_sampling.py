"""The choice of tokens, compared with plain references that sort the whole vocabulary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput, RunError
from penstock.generation.options import GenerationOptions
from penstock.generation.sampling import (
    TokenSampler,
    candidates,
    largest_first,
    log_sum_exp,
    nucleus,
)
from tests.support.sweeps import examples


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores.astype(np.float64) - scores.max())
    return weights / weights.sum()


def reference_filter(
    logits: np.ndarray, options: GenerationOptions, slack: float = 0.0
) -> np.ndarray:
    """The logits as Hugging Face's warpers leave them, in float64, with ``slack`` more of top-p."""
    scores = logits.astype(np.float64) / options.temperature
    if options.top_k:
        last = np.sort(scores)[-min(options.top_k, scores.size)]
        scores = np.where(scores < last, -np.inf, scores)
    if options.top_p < 1:
        order = np.argsort(scores, kind="stable")
        removed = softmax(scores)[order].cumsum() <= 1 - options.top_p - slack
        removed[-1] = False
        scores[order[removed]] = -np.inf
    if options.min_p > 0:
        probabilities = softmax(scores)
        scores[probabilities < options.min_p * probabilities.max()] = -np.inf
    return scores


def reference_penalties(
    logits: np.ndarray, tokens: list[int], generated: int, options: GenerationOptions
) -> np.ndarray:
    scores = logits.copy()
    for token, bias in (options.logit_bias or {}).items():
        scores[token] += np.float32(bias)
    text = tokens[len(tokens) - generated :]
    for token in {*tokens}:
        penalty = np.float32(options.repetition_penalty)
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
        scores[token] -= np.float32(options.frequency_penalty) * np.float32(text.count(token))
        scores[token] -= np.float32(options.presence_penalty) * np.float32(token in text)
    return scores


def logits_of(seed: int, size: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


SIZES = st.sampled_from([1, 2, 63, 64, 65, 300, 1000, 5000])
SEEDS = st.integers(0, 2**32)
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 2.0, 50.0]),
        "top_k": st.sampled_from([None, 0, 1, 2, 7, 40, 100, 4000, 10_000]),
        "top_p": st.sampled_from([0.01, 0.3, 0.9, 0.95, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]),
    }
)


@examples(4)
@given(size=SIZES, seed=SEEDS, filters=FILTERS, impossible=st.booleans())
def test_candidates_equal_those_of_reference(
    size: int, seed: int, filters: dict[str, Any], impossible: bool
) -> None:
    logits = logits_of(seed, size)
    if impossible:
        logits[1 : size // 2] = -np.inf
    options = GenerationOptions(**filters)
    ids, weights = candidates(logits, options)
    # Sums are rounded: whether the last token of a nucleus is just needed may differ.
    least, most = (reference_filter(logits, options, slack) for slack in (-1e-6, 1e-6))
    assert {*(least > -np.inf).nonzero()[0]} <= {*ids} <= {*(most > -np.inf).nonzero()[0]}
    assert (ids[1:] > ids[:-1]).all()
    expected = logits[ids].astype(np.float64) / options.temperature
    np.testing.assert_allclose(weights / weights.sum(), softmax(expected), rtol=1e-5)


@examples(2)
@given(
    values=st.lists(st.integers(0, 4), min_size=1, max_size=1000),
    times=st.integers(1, 3),
    mass=st.floats(0.01, 0.99),
)
def test_nucleus_with_equal_scores_is_shortest_end_of_sorted_ones(
    values: list[int], times: int, mass: float
) -> None:
    scores = np.array(values * times, np.float32)
    weights = np.exp(scores.astype(np.float64))
    needed = mass * weights.sum()
    kept = nucleus(scores, weights, needed)
    order = np.argsort(scores, kind="stable")[::-1]
    np.testing.assert_array_equal(np.sort(order[: kept.size]), kept)
    assert weights[kept].sum() >= needed * (1 - 1e-9)
    assert weights[order[: kept.size - 1]].sum() < needed * (1 + 1e-9)


@given(size=SIZES, seed=SEEDS, count=st.integers(0, 200), rounded=st.booleans())
def test_largest_first_equal_beginning_of_sorted_ones(
    size: int, seed: int, count: int, rounded: bool
) -> None:
    values = logits_of(seed, size)
    values = values.round() if rounded else values
    assert largest_first(values, count) == np.argsort(-values, kind="stable")[:count].tolist()


@given(
    seed=SEEDS,
    tokens=st.lists(st.integers(0, 99), max_size=30),
    prompt=st.integers(0, 30),
    penalties=st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
            "presence_penalty": st.sampled_from([0.0, 0.5, -1.0]),
            "frequency_penalty": st.sampled_from([0.0, 0.25]),
            "logit_bias": st.sampled_from([None, {3: 5.0, 99: -2.0}]),
        }
    ),
)
def test_adjusted_logits_equal_reference_at_each_step(
    seed: int, tokens: list[int], prompt: int, penalties: dict[str, Any]
) -> None:
    options = GenerationOptions(**penalties)
    sampler = TokenSampler(options, 100)
    logits = logits_of(seed, 100)
    before = logits.copy()
    prompt = min(prompt, len(tokens))
    for length in range(prompt, len(tokens) + 1):
        part = tokens[:length]
        scores = sampler.adjusted(logits, part, length - prompt)
        expected = reference_penalties(logits, part, length - prompt, options)
        np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(logits, before)


def test_penalties_after_tokens_are_taken_back_are_those_of_fewer() -> None:
    options = GenerationOptions(frequency_penalty=1.0)
    sampler, logits = TokenSampler(options, 10), np.zeros(10, np.float32)
    sampler.adjusted(logits, [1, 2, 2, 3], 3)
    assert sampler.adjusted(logits, [1, 2], 1).tolist() == [0, 0, -1] + [0] * 7


def test_penalties_of_more_tokens_than_first_room_are_kept() -> None:
    sampler = TokenSampler(GenerationOptions(presence_penalty=1.0), 500)
    scores = sampler.adjusted(np.zeros(500, np.float32), list(range(300)), 300)
    assert (scores == -1).sum() == 300


def test_greedy_without_penalties_reads_logits_themselves() -> None:
    sampler, logits = TokenSampler(GenerationOptions(), 1000), logits_of(0, 1000)
    assert sampler.adjusted(logits, [1, 2], 1) is logits
    assert sampler.choose(logits, [1, 2], 1).token == int(logits.argmax())


def test_draws_of_one_seed_are_the_same_whatever_others_draw() -> None:
    options = GenerationOptions(temperature=1.0, seed=7)
    logits = logits_of(1, 50_000, 1.0)

    def drawn(sampler: TokenSampler) -> int:
        return sampler.choose(logits, [], 0).token

    alone = TokenSampler(options, 50_000)
    expected = [drawn(alone) for _ in range(20)]
    one, other = TokenSampler(options, 50_000), TokenSampler(options, 50_000, index=1)
    mixed = [(drawn(one), drawn(other)) for _ in range(20)]
    assert [a for a, _ in mixed] == expected
    assert [b for _, b in mixed] != expected


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_draws_are_as_frequent_as_probabilities(filters: dict[str, Any]) -> None:
    options = GenerationOptions(temperature=0.8, seed=3, **filters)
    logits = logits_of(2, 40, 1.0)
    sampler, counts = TokenSampler(options, 40), np.zeros(40)
    for _ in range(4000):
        counts[sampler.choose(logits, [], 0).token] += 1
    expected = softmax(reference_filter(logits, options))
    assert (counts[expected == 0] == 0).all()
    assert np.abs(counts / 4000 - expected).max() < 0.03


def test_draw_from_many_blocks_reaches_tokens_of_each() -> None:
    size = 70_000
    logits = np.full(size, -np.inf, np.float32)
    logits[[5, 20_000, 69_999]] = 0
    sampler = TokenSampler(GenerationOptions(temperature=1.0, seed=0), size)
    drawn = {sampler.choose(logits, [], 0).token for _ in range(60)}
    assert drawn == {5, 20_000, 69_999}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("as_bits", [False, True])
def test_mask_leaves_allowed_tokens(temperature: float, as_bits: bool) -> None:
    logits = logits_of(4, 100)
    allowed = np.zeros(96, np.bool_)  # the last tokens are impossible, too
    allowed[[3, 40, 95]] = True
    mask = np.packbits(allowed, bitorder="little").view("<u4") if as_bits else allowed
    sampler = TokenSampler(GenerationOptions(temperature=temperature, seed=1), 100)
    drawn = {sampler.choose(logits, [], 0, mask).token for _ in range(50)}
    if temperature:
        assert drawn <= {3, 40, 95}
    else:
        assert drawn == {max((3, 40, 95), key=lambda i: float(logits[i]))}


def test_mask_that_permits_the_likeliest_token_chooses_it() -> None:
    logits = logits_of(4, 100)
    mask = np.packbits(np.ones(128, np.bool_), bitorder="little").view("<u4")
    sampler = TokenSampler(GenerationOptions(), 100)
    assert sampler.choose(logits, [], 0, mask).token == int(logits.argmax())


def test_min_tokens_forbid_ends_until_as_many_are_generated() -> None:
    logits = np.array([0, 5, 4, 3], np.float32)
    options = GenerationOptions(min_tokens=2, stop_ids=[2])
    sampler = TokenSampler(options, 4, end_ids=[1])
    assert [sampler.choose(logits, [], n).token for n in range(4)] == [3, 3, 1, 1]


def test_logprobs_are_those_of_the_model() -> None:
    logits = logits_of(5, 20_000)
    options = GenerationOptions(logprobs=3, logit_bias={7: 100.0})
    choice = TokenSampler(options, 20_000).choose(logits, [], 0)
    expected = np.log(softmax(logits))
    order = np.argsort(-logits)[:3].tolist()
    assert choice.token == 7
    assert choice.logprob == pytest.approx(expected[7], abs=1e-4)
    assert [token for token, _ in choice.alternatives] == order
    np.testing.assert_allclose([p for _, p in choice.alternatives], expected[order], atol=1e-4)


def test_logprob_that_no_option_needs_is_not_computed() -> None:
    choice = TokenSampler(GenerationOptions(), 10).choose(logits_of(0, 10), [], 0)
    assert math.isnan(choice.logprob)
    assert choice.alternatives == []


def test_log_sum_exp_equals_that_of_float64() -> None:
    logits = logits_of(6, 40_001)
    assert log_sum_exp(logits) == pytest.approx(np.log(np.exp(logits.astype(float)).sum()))


OPTIONS = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.9},
    {"frequency_penalty": 1.0},
    {"logprobs": 1},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "NaN"), (np.inf, "plus infinity"), (-np.inf, "no token")]
)
def test_logits_that_are_not_finite_raise(
    options: dict[str, Any], value: float, message: str
) -> None:
    logits = np.full(200, -np.inf, np.float32)
    logits[150] = value
    sampler = TokenSampler(GenerationOptions(**options), 200)
    with pytest.raises(RunError, match=message):
        sampler.choose(logits, [1], 0)


@pytest.mark.parametrize("options", OPTIONS)
def test_logits_of_minus_infinity_beside_one_choose_it(options: dict[str, Any]) -> None:
    logits = np.full(200, -np.inf, np.float32)
    logits[150] = -3
    assert TokenSampler(GenerationOptions(**options), 200).choose(logits, [1], 0).token == 150


def test_logits_of_another_shape_raise() -> None:
    with pytest.raises(InvalidInput, match=r"\(1, 10\)"):
        TokenSampler(GenerationOptions(), 10).choose(np.zeros((1, 10), np.float32), [], 0)


def test_bias_of_unknown_token_raises() -> None:
    with pytest.raises(InvalidInput, match="token 10 "):
        TokenSampler(GenerationOptions(logit_bias={10: 1.0}), 10)


def test_logits_of_float16_are_widened() -> None:
    logits = logits_of(0, 100).astype(np.float16)
    assert TokenSampler(GenerationOptions(), 100).choose(logits, [], 0).token == logits.argmax()


def test_last_token_is_a_forced_one_unless_a_grammar_decides() -> None:
    options = GenerationOptions(forced_end_ids=[4, 900], max_tokens=3)
    sampler, logits = TokenSampler(options, 100), logits_of(0, 100)
    assert sampler.choose(logits, [1], 1).token == logits.argmax()
    assert sampler.choose(logits, [1, 5], 2).token == 4
    mask = np.arange(100) == 9
    assert sampler.choose(logits, [1, 5], 2, mask).token == 9
    options = GenerationOptions(forced_end_ids=[4], ignore_end=True, max_tokens=3)
    assert TokenSampler(options, 100).choose(logits, [1, 5], 2).token == logits.argmax()


def test_repeats_are_impossible_tokens() -> None:
    logits = logits_of(0, 100)
    best = int(logits.argmax())
    sampler = TokenSampler(GenerationOptions(no_repeat_ngram_size=1), 100)
    # Tokens of the prompt may be beyond those of the model.
    assert sampler.adjusted(logits, [best, 500], 1)[best] == -np.inf
    assert sampler.choose(logits, [best, 500], 1).token == int(np.argsort(-logits)[1])
