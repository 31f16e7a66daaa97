"""Tokenizers of the vocabularies that GGUF files carry."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidModel
from penstock.generation.gguf_vocabulary import (
    gguf_chat_templates,
    gguf_end_ids,
    gguf_start_id,
    gguf_tokenizer,
)
from tests.support.tokenizers import TEXTS, gpt2_metadata, llama_metadata, trained_tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
# What a name's patterns make of one text: the pieces.
PIECES = {
    "gpt-2": ["It", "'s", " 1234", " x", "\n\n", " ABcd", " !?"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", " x", "\n\n", " ABcd", " !?"],
    "llama-bpe": ["It", "'s", " ", "123", "4", " x", "\n\n", " ABcd", " !?"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", " x", "\n\n", " ABcd", " !?"],
    "qwen35": ["It", "'s", " ", "1", "2", "3", "4", " x", "\n\n", " ABcd", " !?"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", " x", "\n\n", " ABcd", " !?"],
    "gpt-4o": ["It's", " ", "123", "4", " x", "\n\n", " ABcd", " !?"],
    "deepseek-v3": ["It", "'s", " ", "123", "4", " x", "\n\n", " ABcd", " !?"],
    "falcon": ["It", "'", "s", " ", "123", "4", " x", "\n\n", " ABcd", " ", "!?"],
}


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_of_gpt2_vocabulary_equals_the_one_it_came_from(text: str) -> None:
    tokenizer = gguf_tokenizer(gpt2_metadata())
    ids = tokenizer.encode(f"{text}<|end|>").ids
    assert ids == trained_tokenizer().encode(f"{text}<|end|>").ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<tool call>").ids[-1] == trained_tokenizer().get_vocab_size() - 1


@pytest.mark.parametrize("name", PIECES)
def test_division_of_name_gives_its_pieces(name: str) -> None:
    tokenizer = gguf_tokenizer({**gpt2_metadata(), "tokenizer.ggml.pre": name})
    text = "It's 1234 x\n\n ABcd !?"
    assert tokenizer.pre_tokenizer is not None
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[begin:end] for begin, end in spans] == PIECES[name]


@given(TEXT)
def test_text_through_gpt2_vocabulary_is_the_same(text: str) -> None:
    tokenizer = gguf_tokenizer(gpt2_metadata())
    if "<" not in text:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@given(TEXT)
def test_text_through_llama_vocabulary_is_the_same(text: str) -> None:
    tokenizer = gguf_tokenizer(llama_metadata())
    if "<" not in text and "▁" not in text:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_llama_vocabulary_joins_pairs_of_highest_score_first() -> None:
    tokenizer = gguf_tokenizer(llama_metadata())
    assert tokenizer.encode("hello world").tokens == ["start", "▁hello", "▁world"]
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["▁hello"]
    assert tokenizer.encode("ß", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0x9F>"]


def test_llama_vocabulary_without_space_prefix_adds_none() -> None:
    metadata = {**llama_metadata(), "tokenizer.ggml.add_space_prefix": False}
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["h", "el", "lo"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"


@pytest.mark.parametrize(
    ("settings", "begins", "ends"),
    [
        ({}, False, False),
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
    ],
)
def test_tokens_around_texts_are_those_of_the_settings(
    settings: dict[str, Any], begins: bool, ends: bool
) -> None:
    named = {f"tokenizer.ggml.{name}": value for name, value in settings.items()}
    ids = gguf_tokenizer({**gpt2_metadata(), **named}).encode("hello").ids
    assert (ids[0] == 0, ids[-1] == 1) == (begins, ends)


def test_end_ids_are_named_ones_and_known_control_tokens() -> None:
    metadata = llama_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<|im_end|>", "<|eot_id|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 1]  # the second is no control token
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.eom_token_id"] = 5
    assert gguf_end_ids(metadata) == [2, 5, size - 2]
    assert gguf_start_id(metadata) == 1


def test_chat_templates_have_the_names_of_their_keys() -> None:
    metadata = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b", "x": "c"}
    assert gguf_chat_templates(metadata) == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.json"),
        ({"pre": "unheard-of"}, "unheard-of"),
        ({"tokens": None}, "no vocabulary"),
        ({"tokens": "abc"}, "not an array"),
        ({"tokens": [1]}, "not a text"),
        ({"merges": ["x y"]}, "merges"),
        ({"tokens": ["a", "b"], "merges": ["a b"], "token_type": [1, 1]}, "'ab' is no token"),
        ({"token_type": [1]}, "numbers for"),
        ({"bos_token_id": 10**6}, "bos_token_id"),
    ],
)
def test_wrong_metadata_raise(changes: dict[str, Any], message: str) -> None:
    metadata = {**gpt2_metadata(), **{f"tokenizer.ggml.{k}": v for k, v in changes.items()}}
    with pytest.raises(InvalidModel, match=message):
        gguf_tokenizer(metadata)
