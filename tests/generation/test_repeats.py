"""Tokens that would repeat a part of a text, beside a search through all of its parts."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.generation.options import GenerationOptions
from penstock.generation.repeats import ForbiddenRepeats


def parts_of(tokens: list[int], size: int) -> set[tuple[int, ...]]:
    return {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 2, 4, 40])
def test_forbidden_tokens_are_those_that_repeat_a_part(size: int, length: int) -> None:
    rng = np.random.default_rng(size)
    tokens, read = rng.integers(0, 4, length).tolist(), rng.integers(0, 4, 30).tolist()
    for option, text in (("no_repeat_ngram_size", tokens), ("encoder_no_repeat_ngram_size", read)):
        options = GenerationOptions(**{option: size})
        repeats = ForbiddenRepeats(options, read)
        parts = parts_of(text, size)
        wanted = {n for n in range(4) if length + 1 >= size and (*tokens, n)[-size:] in parts}
        assert options.forbids_repeats
        assert {*repeats.after(tokens).tolist()} == wanted


def test_forbidden_tokens_are_those_that_complete_a_word() -> None:
    options = GenerationOptions(bad_words_ids=[[5], [1, 6], [2, 1, 7], [3, 1, 8], [9, 2, 1, 4]])
    repeats = ForbiddenRepeats(options)
    assert {*repeats.after([0, 2, 1]).tolist()} == {5, 6, 7}
    assert {*repeats.after([1]).tolist()} == {5, 6}
    assert {*repeats.after([]).tolist()} == {5}


def test_options_without_repeats_forbid_nothing() -> None:
    assert not GenerationOptions().forbids_repeats
