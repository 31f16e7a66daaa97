"""What options of a generated text may be."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.core.errors import InvalidInput
from penstock.generation.options import GenerationOptions

WRONG_VALUES: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 2**31],
    "min_tokens": [-1],
    "max_length": [0],
    "min_length": [-1],
    "no_repeat_ngram_size": [-1],
    "encoder_no_repeat_ngram_size": [2**31],
    "bad_words_ids": [[[]], [[-1]]],
    "early_stopping": ["always", None],
    "temperature": [-0.1, math.nan, math.inf, 101, 10**400, -(10**400)],
    "top_k": [-1],
    "top_p": [0, -0.1, 1.1, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0, -1, 1e-38, math.nan, math.inf],
    "presence_penalty": [math.nan, -math.inf],
    "frequency_penalty": [math.nan, math.inf],
    "logit_bias": [{-1: 0.0}, {1: math.nan}, {1: math.inf}, {1: 1e39}, {1: 10**400}],
    "seed": [-1, 2**64],
    "stop": ["", ["a", ""], "a" * 20_000, ["ab"] * 10_000],
    "stop_ids": [[-1]],
    "logprobs": [-1, 1001],
    "beams": [0],
    "length_penalty": [math.nan],
    "best_of": [0],
    "count": [0, 1025],
    "json_schema": [{"a": {1, 2}}],
}
WRONG_TYPES: dict[str, list[Any]] = {
    "max_tokens": [1.0, "1", True],
    "min_tokens": [None],
    "temperature": ["0", None, True],
    "top_k": [1.5],
    "top_p": [None],
    "logit_bias": [[1], {1: "a"}, {"1": 1.0}],
    "seed": [1.0],
    "stop": [1, [1]],
    "stop_ids": ["1", 1, [1.0]],
    "forced_end_ids": [1],
    "bad_words_ids": ["ab", [1], 1],
    "no_repeat_ngram_size": [2.0, None],
    "ignore_end": [1],
    "logprobs": [True],
    "grammar": [1],
    "json_schema": [1],
    "regex": [b"a"],
}


def cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(option, value) for option, values in table.items() for value in values]


@pytest.mark.parametrize(("option", "value"), cases(WRONG_VALUES))
def test_options_with_value_out_of_bounds_raise(option: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=option):
        GenerationOptions(**{option: value})


@pytest.mark.parametrize(("option", "value"), cases(WRONG_TYPES))
def test_options_with_wrong_type_raise(option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=option):
        GenerationOptions(**{option: value})


def test_options_error_names_option_value_and_bounds() -> None:
    with pytest.raises(InvalidInput) as error:
        GenerationOptions(top_p=1.5)
    assert str(error.value) == "top_p=1.5: a number above 0 up to 1 is needed"


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 5, "max_tokens": 4},
        {"count": 3, "best_of": 2},
        {"beams": 2, "temperature": 1.0},
        {"beams": 2, "count": 3},
        {"beams": 2, "best_of": 2},
        {"regex": "a", "grammar": "start: A"},
    ],
)
def test_options_that_contradict_one_another_raise(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        GenerationOptions(**options)


def test_options_by_default_are_greedy_without_constraint() -> None:
    options = GenerationOptions()
    assert options.greedy
    assert options.constraint is None
    assert GenerationOptions(temperature=1e-6).greedy
    assert not GenerationOptions(temperature=0.1).greedy


def test_options_normalize_sequences_counts_and_schemas() -> None:
    options = GenerationOptions(
        stop="end", stop_ids=[1, 2], count=3, json_schema={"type": "object"}, logit_bias={5: 1}
    )
    assert options.stop == ("end",)
    assert options.stop_ids == (1, 2)
    assert options.best_of == 3
    assert options.constraint == ("json_schema", '{"type": "object"}')
    assert options.logit_bias == {5: 1.0}
    assert GenerationOptions(logit_bias={5: -1e300}).logit_bias == {5: -math.inf}
    assert GenerationOptions(beams=4, count=2).best_of == 1


def test_bias_below_the_range_of_floats_is_minus_infinity() -> None:
    options = GenerationOptions(logit_bias={1: -(10**400), 2: -(10**30)})
    assert options.logit_bias == {1: -math.inf, 2: -1e30}
