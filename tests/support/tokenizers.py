"""Small tokenizers for tests of generated text."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.generation.tokenizer import TextTokenizer

TEXTS = [
    '{"name": "Anna", "age": 31, "tags": ["a", "b"]} hello world, hello there. The cat sat on it.',
    "Größe naïve 漢字かな交じり文 Привет мир 👩‍👩‍👧 1234567890",
]


@cache
def trained_tokenizer() -> Tokenizer:
    """Byte pairs of a few sentences, with all bytes and two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens(["<tool call>"])
    return tokenizer


@cache
def byte_tokenizer() -> TextTokenizer:
    """``trained_tokenizer`` with its ends."""
    return TextTokenizer(trained_tokenizer(), start_id=0, end_ids=[1])


def gpt2_metadata() -> dict[str, Any]:
    """What a GGUF file with the vocabulary of ``trained_tokenizer`` has."""
    import json

    tokenizer = trained_tokenizer()
    size = tokenizer.get_vocab_size()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokenizer.id_to_token(i) for i in range(size)],
        "tokenizer.ggml.token_type": [3, 3, *[1] * (size - 3), 4],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def llama_metadata() -> dict[str, Any]:
    """What a GGUF file with a small vocabulary of SentencePiece has."""
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "é", "▁h", "el", "lo", "▁hel", "▁hello"]
    words += ["▁w", "or", "▁wor", "ld", "▁world", "▁he"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(len(word)) for word in words],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
