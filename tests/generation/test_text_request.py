"""How a text ends, and the pieces that it comes in."""

from __future__ import annotations

from penstock.generation.options import GenerationOptions
from penstock.generation.sampling import TokenChoice
from penstock.generation.text_request import TextSource, TextWriter
from tests.support.word_texts import word_tokenizer


def writer_of(context: int | None = None, **options: object) -> TextWriter:
    source = TextSource("ids", "logits", word_tokenizer(), frozenset([7]), context)
    return TextWriter(source, [1, 2], GenerationOptions(**options), 0)


def taken(writer: TextWriter, tokens: list[int]) -> list[tuple[str, str]]:
    pieces = [writer.take(TokenChoice(token, -1.0, [])) for token in tokens]
    return [(piece.text.strip(), piece.finish) for piece in pieces]


def test_token_that_ends_texts_is_no_part_of_it() -> None:
    writer = writer_of()
    assert taken(writer, [3, 7]) == [("w3", ""), ("", "stop")]
    assert writer.result.tokens == [3]
    assert writer.result.stop is None


def test_end_that_the_maximum_forces_is_of_the_length() -> None:
    assert taken(writer_of(max_tokens=2, forced_end_ids=[7]), [3, 7])[-1] == ("", "length")
    assert taken(writer_of(max_tokens=3, forced_end_ids=[7]), [3, 7])[-1] == ("", "stop")


def test_stop_ids_end_a_text_too() -> None:
    assert taken(writer_of(stop_ids=[4], ignore_end=True), [7, 4]) == [("w7", ""), ("", "stop")]


def test_stop_text_is_held_back_and_cut() -> None:
    writer = writer_of(stop=["w3 w4"])
    assert taken(writer, [5, 3, 4]) == [("w5", ""), ("", ""), ("", "stop")]
    assert (writer.result.text.strip(), writer.result.stop) == ("w5", "w3 w4")


def test_text_that_was_held_back_is_given_at_the_end() -> None:
    assert taken(writer_of(stop=["w3 w4"]), [5, 3, 7])[-1] == ("w3", "stop")
    assert taken(writer_of(stop=["w3 w4"], max_tokens=2), [5, 3])[-1] == ("w3", "length")


def test_length_is_the_least_of_its_bounds() -> None:
    assert writer_of(max_tokens=5).left == 5
    assert writer_of(6, max_tokens=5).left == 4
    assert writer_of().left is None
    assert taken(writer_of(3), [3]) == [("w3", "length")]


def test_text_whose_grammar_is_at_its_end_stops() -> None:
    piece = writer_of().take(TokenChoice(3, 0.0, []), complete=True)
    assert (piece.tokens, piece.finish) == ([3], "stop")


def test_finished_text_stays_as_it_is() -> None:
    writer = writer_of()
    taken(writer, [3, 7])
    assert writer.finished("length").finish == "stop"
    other = writer_of()
    taken(other, [3])
    assert other.finished("length").finish == "length"
