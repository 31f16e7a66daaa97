"""What a request for text returns."""

from __future__ import annotations

from penstock.generation.result import GeneratedText, Generation


def test_text_and_tokens_are_those_of_the_first_text() -> None:
    texts = [GeneratedText("a", [1]), GeneratedText("b", [2, 3])]
    generation = Generation(texts, 4, 3)
    assert (generation.text, generation.tokens) == ("a", [1])
