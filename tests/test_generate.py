"""The example that continues a text: its tokens are those of ONNX Runtime."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from examples.generate import Choice, Decoder, Tokenizer, letters_of_bytes

import penstock as ps
from bench import nets
from penstock.host.native import library

ROOT = Path(__file__).parent.parent
TEXTS = [
    "the cat and the hat",
    "they're  here, it's 2026!",
    " leading and   trailing  ",
    "grüße 東京\n\ttab_and_more",
    "",
]


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    """A file with all bytes, some pairs that are joined, and a token that ends texts."""
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("a", "t"),
        ("Ġ", "a"),
        ("n", "d"),
        ("Ġa", "nd"),
    ]
    tokens = [*letters_of_bytes(), *[a + b for a, b in merges]]
    file = {
        "added_tokens": [{"id": len(tokens), "content": "<|end|>", "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [f"{a} {b}" for a, b in merges],
        },
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(file), encoding="utf-8")
    return path


@pytest.fixture
def model() -> onnx.ModelProto:
    return nets.gpt2("float32", 1, 64, 4)


def test_tokenizer_joins_pairs_in_their_order(tokenizer):
    own = Tokenizer(tokenizer)
    texts = {i: t for t, i in json.loads(tokenizer.read_text("utf-8"))["model"]["vocab"].items()}
    parts = [texts[i] for i in own.encode("the cat and the hat")]
    assert parts == ["the", "Ġ", "c", "at", "Ġand", "Ġthe", "Ġ", "h", "at"]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_spell_the_text(tokenizer, text):
    own = Tokenizer(tokenizer)
    assert own.decode(own.encode(text)).decode() == text


def test_tokenizer_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "WordPiece"}}))
    with pytest.raises(ValueError, match="no tokenizer of byte pairs"):
        Tokenizer(path)


def greedy(model: onnx.ModelProto, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens on ONNX Runtime, each from all those before, without a cache."""
    session, ids = onnxruntime.InferenceSession(model.SerializeToString()), list(prompt)
    caches = {
        port.name: np.zeros(
            (1, *[dim if isinstance(dim, int) else 0 for dim in port.shape[1:]]), "f"
        )
        for port in session.get_inputs()
        if port.name.startswith("past")
    }
    for _ in range(count):
        logits = session.run(["logits"], {"input_ids": np.array([ids]), **caches})[0]
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_generated_tokens_are_those_of_onnx_runtime_without_a_cache(model):
    decoder = Decoder(ps.compile(model))
    prompt = [5, 17, 300]
    tokens = list(decoder.generate(prompt, 30, set(), Choice()))
    assert tokens == greedy(model, prompt, 30)
    end = tokens[10]
    assert list(decoder.generate(prompt, 30, {end}, Choice())) == tokens[: tokens.index(end)]


@pytest.mark.skipif(library() is None, reason="there are no compiled kernels")
def test_caches_of_generated_tokens_grow_where_they_lie(model):
    decoder = Decoder(ps.compile(model))
    caches, copies = decoder.empty(), 0
    for i in range(60):
        _, present = decoder.step([i], i, caches)
        shared = [np.shares_memory(x, present[name]) for name, x in caches.items()]
        copies += i > 8 and not all(shared)
        caches = present
    assert copies == 1


def test_choice_at_random_is_one_of_the_best():
    choose, logits = Choice(0.7, best=3), np.array([0.0, 5, 4.5, -1, 4.8, 2], np.float32)
    assert {choose(logits) for _ in range(100)} == {1, 2, 4}


def test_model_that_is_no_decoder_is_refused():
    with pytest.raises(ValueError, match="no decoder"):
        Decoder(ps.compile(nets.scan(3, 1, 4, 4)))


def test_command_continues_a_prompt(tokenizer, model, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    command = [sys.executable, "examples/generate.py", str(path), str(tokenizer), "the cat"]
    done = subprocess.run([*command, "--most", "7"], capture_output=True, cwd=ROOT, check=True)
    own = Tokenizer(tokenizer)
    wanted = own.decode(greedy(model, own.encode("the cat"), 7))
    assert done.stdout == b"the cat" + wanted
    assert b"7 tokens" in done.stderr
