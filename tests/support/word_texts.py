"""Texts of the words w0, w1, ..., each a token, and the generators of small decoders with these."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import penstock as ps
from penstock.generation.generator import Generator
from penstock.generation.tokenizer import TextTokenizer
from tests.support.decoders import VOCABULARY, decoder_model, reference_logits

PROMPT = [5, 3, 9]


def word_tokenizer(**options: object) -> TextTokenizer:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return TextTokenizer(tokenizer, **options)


def letter_tokenizer() -> TextTokenizer:
    """A tokenizer of bytes, for grammars: letters and digits are tokens, and so is a space."""
    letters = "Ġ0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQ"[:VOCABULARY]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer, end_ids=[VOCABULARY - 1])


def generator_of(kind: str = "spelled", **options: object) -> Generator:
    return Generator(ps.load(decoder_model(kind)), word_tokenizer(), **options)


def likeliest(prompt: Sequence[int], count: int, kind: str = "spelled") -> list[int]:
    """The likeliest tokens behind a prompt, by ONNX Runtime, one by one."""
    tokens, model = [*prompt], decoder_model(kind)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
