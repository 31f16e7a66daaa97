"""Text as tokens and back, whole and in pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from penstock.core.errors import InvalidInput, InvalidModel
from penstock.generation.tokenizer import StopTexts, TextStream, TextTokenizer
from tests.support.sweeps import examples
from tests.support.tokenizers import (
    TEXTS,
    byte_tokenizer,
    gpt2_metadata,
    llama_metadata,
    trained_tokenizer,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(TEXTS)


def streamed(
    tokenizer: TextTokenizer, ids: list[int], before: list[int] | None = None
) -> list[str]:
    stream = TextStream(tokenizer, before or [])
    pieces = [stream.push(token) for token in ids]
    return [*pieces, stream.finish()]


def llama_tokenizer() -> TextTokenizer:
    return TextTokenizer.of_gguf(llama_metadata())


@examples(4)
@given(TEXT)
def test_stream_of_byte_pairs_gives_text_of_all(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@examples(2)
@given(st.lists(st.integers(0, 421)))
def test_stream_of_any_tokens_of_bytes_gives_text_of_all(ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@examples(4)
@given(TEXT)
def test_stream_of_pairs_by_score_gives_text_of_all(text: str) -> None:
    tokenizer = llama_tokenizer()
    ids = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@given(TEXT, TEXT)
def test_stream_behind_other_tokens_gives_what_they_lack(one: str, other: str) -> None:
    tokenizer = llama_tokenizer()
    before, ids = tokenizer.encode(one), tokenizer.encode(other, add_special=False)
    whole = tokenizer.decode([*before, *ids])
    assert tokenizer.decode(before) + "".join(streamed(tokenizer, ids, before)) == whole


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, llama_tokenizer])
def test_stream_gives_no_part_of_a_letter(tokenizer: Any) -> None:
    ids = tokenizer().encode("éß漢👩‍👩‍👧!")
    for piece in streamed(tokenizer(), ids):
        assert "\ufffd" not in piece


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, llama_tokenizer])
def test_stream_that_ends_inside_a_letter_gives_a_replacement(tokenizer: Any) -> None:
    ids = tokenizer().encode("👩")[:-1]
    assert set("".join(streamed(tokenizer(), ids)).strip()) == {"\ufffd"}


def test_stream_gives_bytes_that_are_no_letter_before_its_end() -> None:
    tokenizer = llama_tokenizer()
    pieces = streamed(tokenizer, [3 + 0xFF] * 100)
    assert sum(map(len, pieces[:50])) > 20


def test_stream_gives_words_as_their_tokens_come() -> None:
    tokenizer = llama_tokenizer()
    pieces = streamed(tokenizer, tokenizer.encode("hello world"))
    assert pieces == ["", "hello", " world", ""]


def test_stream_of_tokens_without_text_decodes_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, lengths = llama_tokenizer(), []
    decode = tokenizer.decode

    def counting(ids: list[int], skip_special: bool = True) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special)

    monkeypatch.setattr(tokenizer, "decode", counting)
    assert "".join(streamed(tokenizer, [2] * 1000)) == ""
    assert max(lengths) < 200


def cut(text: str, stops: list[str]) -> str:
    """``text`` before the stop text that is complete first."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


@examples(8)
@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=10),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_texts_cut_before_the_first_that_is_complete(
    pieces: list[str], stops: list[str]
) -> None:
    stop_texts = StopTexts(stops)
    given_text, whole = "", ""
    for piece in pieces:
        given_text += stop_texts.push(piece)
        whole += piece
        if stop_texts.found is None:
            held = whole[len(given_text) :]
            assert given_text + held == whole
            assert not held or any(stop.startswith(held) for stop in stops)
    given_text += stop_texts.finish()
    assert given_text == cut(whole, stops)
    assert (stop_texts.found is None) == (given_text == whole and cut(whole, stops) == whole)


@given(pieces=st.lists(st.text("ab", max_size=5)), stop=st.text("ab", min_size=1, max_size=4))
def test_one_stop_text_cuts_where_find_finds_it(pieces: list[str], stop: str) -> None:
    stop_texts, whole = StopTexts([stop]), "".join(pieces)
    text = "".join([stop_texts.push(piece) for piece in pieces]) + stop_texts.finish()
    at = whole.find(stop)
    assert text == (whole if at < 0 else whole[:at])
    assert stop_texts.found == (None if at < 0 else stop)


def test_encode_adds_tokens_around_a_text_if_asked() -> None:
    tokenizer = llama_tokenizer()
    assert tokenizer.encode("hello")[0] == tokenizer.start_id
    assert tokenizer.encode("hello", add_special=False) == tokenizer.encode("hello")[1:]


@pytest.mark.parametrize(("text", "error"), [(b"a", TypeError), ("\ud800", InvalidInput)])
def test_encode_of_what_is_no_text_raises(text: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        byte_tokenizer().encode(text)


def test_tokenizer_that_truncates_is_used_without() -> None:
    tokenizer = trained_tokenizer().from_str(trained_tokenizer().to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=10)
    ids = TextTokenizer(tokenizer).encode("hello world, hello there")
    assert ids == byte_tokenizer().encode("hello world, hello there")
    assert tokenizer.truncation is not None


def test_tokenizer_tells_size_and_texts_of_tokens() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.size == trained_tokenizer().get_vocab_size()
    assert (tokenizer.text_of(1), tokenizer.text_of(10**6)) == ("<|end|>", None)
    assert tokenizer.end_ids == (1,)


def test_size_of_a_vocabulary_with_gaps_is_beyond_its_largest_token() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    assert TextTokenizer(tokenizer).size == 8


def save(folder: Path, **files: Any) -> Path:
    (folder / "tokenizer.json").write_text(trained_tokenizer().to_str(), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_load_of_file_reads_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(save(tmp_path) / "tokenizer.json")
    assert tokenizer.encode(TEXTS[1]) == byte_tokenizer().encode(TEXTS[1])
    assert (tokenizer.start_id, tokenizer.end_ids, tokenizer.chat_template) == (None, (), None)


def test_load_of_folder_reads_tokens_and_template(tmp_path: Path) -> None:
    settings = {
        "bos_token": {"content": "<|start|>"},
        "eos_token": "<|end|>",
        "chat_template": "{{ 1 }}",
    }
    save(tmp_path, tokenizer_config=settings, generation_config={"eos_token_id": [5, 7]})
    tokenizer = TextTokenizer.load(tmp_path)
    assert (tokenizer.start_id, tokenizer.end_id, tokenizer.end_ids) == (0, 1, (1, 5, 7))
    assert tokenizer.chat_template == "{{ 1 }}"
    (tmp_path / "chat_template.jinja").write_text("{{ 2 }}")
    assert TextTokenizer.load(tmp_path).chat_template == "{{ 2 }}"


def test_load_of_folder_reads_tokens_of_other_files(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    save(
        tmp_path,
        tokenizer_config={"chat_template": named},
        special_tokens_map={"eos_token": {"content": "<|end|>"}},
        config={"eos_token_id": 9},
    )
    tokenizer = TextTokenizer.load(tmp_path)
    assert tokenizer.end_ids == (1, 9)
    assert tokenizer.chat_templates == {"default": "a", "tool_use": "b"}


def test_load_of_folder_without_tokenizer_raises(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"no tokenizer\.json"):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "generation_config"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_load_of_wrong_file_names_it(tmp_path: Path, name: str, content: bytes) -> None:
    save(tmp_path)
    (tmp_path / f"{name}.json").write_bytes(content)
    with pytest.raises(InvalidModel, match=f"{name}.json"):
        TextTokenizer.load(tmp_path)


def test_load_of_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TextTokenizer.load(tmp_path / "tokenizer.json")


def test_tokenizer_of_gguf_has_its_tokens_and_template() -> None:
    tokenizer = TextTokenizer.of_gguf(gpt2_metadata())
    assert (tokenizer.start_id, tokenizer.end_id, tokenizer.end_ids) == (0, 1, (1,))
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert tokenizer.is_of_bytes
    assert not llama_tokenizer().is_of_bytes


def changed_file(folder: Path, **model: Any) -> Path:
    """The file of ``trained_tokenizer`` with another model."""
    content = json.loads(trained_tokenizer().to_str())
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content | {"model": content["model"] | model}))
    return path


def test_file_that_tokenizers_panics_of_is_refused(tmp_path: Path) -> None:
    merges = [["a", "b"], ["ab", "ab"]]
    path = changed_file(tmp_path, vocab={"a": 0, "b": 1, "ab": 2}, merges=merges)
    with pytest.raises(InvalidModel, match="is not a tokenizer"):
        TextTokenizer.load(path)


def test_text_that_tokenizers_cannot_divide_is_refused(tmp_path: Path) -> None:
    model = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"a": 0}}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    path = changed_file(tmp_path, **model)
    with pytest.raises(InvalidInput, match=r"cannot divide 'b': .*UNK"):
        TextTokenizer.load(path).encode("b")


@pytest.mark.parametrize("merge", [["a", "é"], "a é", ["a"], 3])
def test_merge_without_the_prefix_of_its_model_is_refused(tmp_path: Path, merge: object) -> None:
    # tokenizers itself ends the process where the prefix is as long as half of a letter.
    path = changed_file(tmp_path, continuing_subword_prefix="x", merges=[merge])
    with pytest.raises(
        InvalidModel, match=r"its merge .* begins with the continuing_subword_prefix"
    ):
        TextTokenizer.load(path)


def test_setting_with_half_of_a_letter_names_no_token(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "\\ud800"}')
    assert TextTokenizer.load(tmp_path).start_id is None


def test_tokens_that_tokenizers_cannot_join_are_refused(tmp_path: Path) -> None:
    content = json.loads(trained_tokenizer().to_str())
    strip = {"type": "Strip", "content": "a", "start": 0, "stop": 2}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content | {"decoder": strip}))
    tokenizer = TextTokenizer.load(path)
    with pytest.raises(InvalidInput, match=r"cannot join tokens: .* may be damaged"):
        tokenizer.decode(tokenizer.encode("a"))
