"""Decoders with random weights and a small vocabulary of bytes, in the forms that engines read."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from bench.exports import CACHE

SIZES = {
    "tiny": {"layers": 4, "width": 256, "heads": 8, "groups": 4, "inner": 704, "words": 4096},
    "250M": {"layers": 16, "width": 1024, "heads": 16, "groups": 4, "inner": 2816, "words": 32000},
}
CONTEXT, BLOCK = 4096, 32


def _folder(name: str) -> Path:
    return CACHE / "generation" / name


def _byte_letters() -> list[str]:
    """The letters by which GPT-2 spells bytes, in their order."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return [*map(chr, printed), *[chr(256 + i) for i in range(len(others))]]


def _words(count: int) -> tuple[list[str], list[tuple[str, str]]]:
    """A vocabulary of ``count`` tokens, and its byte-pair merges."""
    letters = _byte_letters()
    pairs = [*islice(product(letters[32:94], letters[:94]), count - len(letters) - 1)]
    words = [*letters, *["".join(pair) for pair in pairs]]
    return [*words, *[f"<{i}>" for i in range(count - len(words))]], pairs


def folder_of(name: str) -> Path:
    """A folder as transformers saves it."""
    folder, sizes = _folder(f"{name}-folder"), SIZES[name]
    if (folder / "config.json").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words, merges = _words(sizes["words"])
    last = len(words) - 1
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["groups"],
        intermediate_size=sizes["inner"],
        max_position_embeddings=CONTEXT,
        bos_token_id=last,
        eos_token_id=last,
        pad_token_id=last,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), words[-1])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def onnx_of(name: str) -> Path:
    """The ONNX file that onnxruntime-genai's builder makes, with weights of 4 bits."""
    folder = _folder(f"{name}-onnx")
    if not (folder / "genai_config.json").exists():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "int4"]
        command += ["-m", str(folder_of(name)), "-o", str(folder), "-e", "cpu"]
        command += ["-c", str(_folder("cache"))]
        subprocess.run(command, check=True, capture_output=True)
    return folder / "model.onnx"


def gguf_of(name: str) -> Path:
    """A GGUF file with weights of 4 bits."""
    path, sizes = _folder(f"{name}.gguf"), SIZES[name]
    if path.exists():
        return path
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    writer, rng = gguf.GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    width, inner, size = sizes["width"], sizes["inner"], sizes["width"] // sizes["heads"]
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(sizes["layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["groups"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(sizes["words"])
    writer.add_file_type(2)  # Q4_0, by which OpenVINO GenAI reads it
    words, merges = _words(sizes["words"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_types([1] * (len(words) - 1) + [3])
    writer.add_bos_token_id(len(words) - 1)
    writer.add_eos_token_id(len(words) - 1)

    def add(name: str, *shape: int) -> None:
        numbers = (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            return
        kind: Any = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)

    add("token_embd.weight", sizes["words"], width)
    add("output.weight", sizes["words"], width)
    add("output_norm.weight", width)
    for i in range(sizes["layers"]):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{norm}.weight", width)
        for part, rows in (
            ("q", width),
            ("k", size * sizes["groups"]),
            ("v", size * sizes["groups"]),
        ):
            add(f"blk.{i}.attn_{part}.weight", rows, width)
        add(f"blk.{i}.attn_output.weight", width, width)
        for part in ("gate", "up"):
            add(f"blk.{i}.ffn_{part}.weight", inner, width)
        add(f"blk.{i}.ffn_down.weight", width, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
