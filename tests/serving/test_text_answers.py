"""Documents and chunks of generated texts."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest

from penstock.generation.result import GeneratedText, TextPiece, TokenLogprob
from penstock.generation.tokenizer import TextTokenizer
from penstock.serving.text_answers import TextAnswer, embeddings_answer, event, token_bytes, usage
from tests.support.tokenizers import byte_tokenizer, llama_metadata
from tests.support.word_texts import word_tokenizer

LOGPROBS = [TokenLogprob(4, -0.5, [(4, -0.5), (7, -math.inf)])]


def answer(is_chat: bool, logprobs: bool = False) -> TextAnswer:
    return TextAnswer("m", word_tokenizer(), is_chat, logprobs)


def test_whole_answer_of_a_chat_has_messages():
    texts = [GeneratedText("one", [1], "stop"), GeneratedText("two", [2], "length")]
    document = answer(True).whole(texts, usage(3, 2))
    assert document["object"] == "chat.completion"
    assert [c["message"]["content"] for c in document["choices"]] == ["one", "two"]
    assert [c["finish_reason"] for c in document["choices"]] == ["stop", "length"]
    assert document["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_chunks_of_a_chat_begin_with_the_role_and_end_with_the_reason():
    own = answer(True)
    first = own.first(1)
    assert first is not None
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text, end = own.piece(1, TextPiece("hi", [4], 1, "stop"))
    assert text["choices"][0]["delta"] == {"content": "hi"}
    assert text["choices"][0]["finish_reason"] is None
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "stop")
    assert {first["id"], text["id"], end["id"]} == {own.last({})["id"]}
    assert text["object"] == "chat.completion.chunk"
    assert own.piece(1, TextPiece("", [5])) == []


def test_chunks_of_completions_have_text_and_offsets():
    own = answer(False, True)
    assert own.first(0) is None
    (one,) = own.piece(0, TextPiece("w4", [4], 0, "", LOGPROBS))
    (two,) = own.piece(0, TextPiece(" w4", [4], 0, "length", LOGPROBS))
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in (one, two)] == [[0], [2]]
    assert (two["object"], two["choices"][0]["finish_reason"]) == ("text_completion", "length")


def test_logprobs_have_the_form_of_each_endpoint_and_no_infinity():
    text = GeneratedText("w4", [4], "stop", logprobs=LOGPROBS)
    (choice,) = answer(True, True).whole([text], {})["choices"]
    (token,) = choice["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("w4", -0.5, [119, 52])
    assert [t["logprob"] for t in token["top_logprobs"]] == [-0.5, -9999.0]
    (choice,) = answer(False, True).whole([text], {})["choices"]
    assert choice["logprobs"]["tokens"] == ["w4"]
    assert choice["logprobs"]["top_logprobs"] == [{"w4": -0.5, "w7": -9999.0}]
    json.dumps(choice, allow_nan=False)


def test_tokens_have_the_bytes_that_they_stand_for():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("Größe 漢 !")
    assert b"".join(token_bytes(tokenizer, i) for i in ids).decode() == "Größe 漢 !"
    assert token_bytes(tokenizer, 1) == b"<|end|>"
    llama = TextTokenizer.of_gguf(llama_metadata())
    assert [token_bytes(llama, i) for i in (3 + 65, 259)] == [b"A", b" "]


@pytest.mark.parametrize("coded", [False, True])
def test_vectors_are_numbers_or_bytes(coded):
    vector = np.array([0.5, -1], np.float32)
    document = embeddings_answer("m", [vector], 3, base64_coded=coded)
    value = document["data"][0]["embedding"]
    if coded:
        value = np.frombuffer(base64.b64decode(value), "<f4").tolist()
    assert value == [0.5, -1]
    assert document["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_events_are_lines_of_json():
    assert event({"a": "ö\n"}) == 'data: {"a": "ö\\n"}\n\n'.encode()
