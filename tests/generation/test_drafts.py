"""Guesses at the next tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.generation.drafts import DraftModel, DraftSource, PromptLookup
from tests.support.decoders import VOCABULARY, decoder_model
from tests.support.word_texts import PROMPT, generator_of, likeliest


def test_lookup_goes_on_as_before() -> None:
    lookup = PromptLookup(longest=4)
    assert lookup.propose([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 9) == [4, 5, 6, 7]
    assert lookup.propose([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], 2) == [5, 6]


def test_lookup_takes_the_longest_ending_and_its_last_place() -> None:
    assert PromptLookup().propose([1, 2, 9, 5, 2, 8, 1, 2], 1) == [9]
    assert PromptLookup().propose([2, 7, 5, 2, 8, 2], 1) == [8]


def test_lookup_of_a_text_without_repetition_is_empty() -> None:
    assert PromptLookup().propose([1, 2, 3], 5) == []
    assert PromptLookup().propose([1], 5) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 12))
def test_lookup_by_steps_equals_a_search(tokens: list[int], most: int) -> None:
    lookup = PromptLookup()
    for count in range(1, len(tokens) + 1):
        text, want = tokens[:count], []
        for n in (3, 2, 1):
            ends = [e for e in range(n, count) if text[e - n : e] == text[count - n :]]
            if n < count and ends:
                want = text[ends[-1] : ends[-1] + min(10, most)]
                break
        assert lookup.propose(text, most) == want


def test_draft_of_a_model_is_its_likeliest_tokens() -> None:
    stepper = ps.Stepper(ps.load(decoder_model("spelled")))
    draft = DraftModel(DraftSource.of(stepper, None), longest=4)
    want = likeliest(PROMPT, 6)
    assert draft.propose(PROMPT, 9) == want[:4]
    assert draft.propose([*PROMPT, *want[:2]], 9) == want[2:6]
    other = [*PROMPT, 7]
    assert draft.propose(other, 2) == likeliest(other, 2)
    draft.close()
    assert not stepper._engine.holding


def test_there_are_no_drafts_behind_what_a_model_does_not_read() -> None:
    stepper = ps.Stepper(ps.load(decoder_model("spelled")))
    draft = DraftModel(DraftSource.of(stepper, None)._replace(size=10, context=6))
    assert draft.propose([3, 10], 9) == []
    assert draft.propose([3, 9, 4, 4, 4, 4, 4], 9) == []
    want = likeliest([3, 9, 4, 4], 3)
    assert draft.propose([3, 9, 4, 4], 9) == want
    draft.close()


def test_tokens_that_a_draft_alone_has_are_left_out() -> None:
    """Exporters pad vocabularies, each model's to another size."""
    with generator_of() as generator:
        want = generator.generate(PROMPT, max_tokens=8).tokens

        class Guesses:
            def propose(self, tokens: list[int], most: int) -> list[int]:
                return [want[len(tokens) - len(PROMPT)], VOCABULARY, 1][:most]

            def close(self) -> None:
                pass

        generator._drafts_of_text = Guesses  # type: ignore[method-assign]
        assert generator.generate(PROMPT, max_tokens=8).tokens == want
