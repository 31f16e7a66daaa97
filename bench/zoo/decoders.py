"""Decoders with caches for the tests, ``tests/models/decoders.zip``: of transformers, with random weights,
by both of torch's exporters, with numbers of rows and lengths open.

Those of encoder-decoders are fed what cross attention reads. Weights are rounded, so that the archive is
small. What models should answer is not in it: the tests ask ONNX Runtime. To write it anew:
``python -m bench.zoo.decoders``.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.zoo import torch_export
from bench.zoo.encoders import bare, write

if TYPE_CHECKING:
    import torch

FILE = Path(__file__).parents[2] / "tests" / "models" / "decoders.zip"
LAYERS, HEADS, SIZE, WORDS = 2, 2, 8, 40
WIDTH = HEADS * SIZE
SIZES = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "d_model": WIDTH, "n_layer": LAYERS, "n_layers": LAYERS,
    "n_head": HEADS, "n_heads": HEADS, "num_layers": LAYERS, "num_heads": HEADS, "d_kv": SIZE,
    "d_ff": 24, "expansion_ratio": 2, "max_seq_len": 200, "encoder_layers": 1, "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 24, "max_position_embeddings": 160, "max_target_positions": 160,
    "max_source_positions": 50, "num_mel_bins": 4, "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "rotary_dim": 4, "n_embd": WIDTH, "n_positions": 160,
}  # fmt: skip
_PAST, _ROWS, _SOURCE = 5, 3, 9

# The family, the model's class after it, whether it has cross attention, with a mask, and exporters.
DECODERS: list[tuple[str, str, bool, bool, tuple[str, ...]]] = [
    ("Bloom", "ForCausalLM", False, True, ("script", "dynamo")),
    ("Mpt", "ForCausalLM", False, True, ("script",)),
    ("T5", "ForConditionalGeneration", True, True, ("script", "dynamo")),
    ("Bart", "ForConditionalGeneration", True, True, ("dynamo",)),
    ("Whisper", "ForConditionalGeneration", True, False, ("script",)),
    ("GPTJ", "ForCausalLM", False, True, ("script", "dynamo")),
    ("M2M100", "ForConditionalGeneration", True, True, ("script", "dynamo")),
]


def decoders() -> Iterator[tuple[str, bytes]]:
    """Names and bytes of all models."""
    for family, last, cross, masked, exporters in DECODERS:
        for exporter in exporters:
            module, inputs = _module(family, last, cross, masked), _inputs(cross, masked)
            yield f"{family}_{exporter}", _exported(module, inputs, exporter)


def _inputs(cross: bool, masked: bool) -> dict[str, tuple[torch.Tensor, dict[int, str]]]:
    """Examples of inputs, and their open axes."""
    import torch

    inputs = {"input_ids": (torch.randint(3, WORDS, (1, _ROWS)), {1: "rows"})}
    name, length = (
        ("encoder_attention_mask", _SOURCE) if cross else ("attention_mask", _PAST + _ROWS)
    )
    if masked:
        inputs[name] = torch.ones(1, length, dtype=torch.long), {1: "source" if cross else "total"}
    for part in ("decoder.", "encoder.") if cross else ("",):
        positions, axis = (_SOURCE, "source") if part == "encoder." else (_PAST, "past")
        for i in range(LAYERS):
            for what in ("key", "value"):
                example = torch.randn(1, HEADS, positions, SIZE)
                inputs[f"past_key_values.{i}.{part}{what}"] = example, {2: axis}
    return inputs


def _module(family: str, last: str, cross: bool, masked: bool) -> torch.nn.Module:
    import torch
    import transformers
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    config_class = getattr(transformers, f"{family}Config")
    known = {key: value for key, value in SIZES.items() if hasattr(config_class(), key)}
    inner = getattr(transformers, family + last)(config_class(**known)).eval()
    for weight in inner.parameters():
        if weight.ndim > 1:
            weight.data = torch.randn_like(weight) / 2
        weight.data = (weight.data * 16).round() / 16

    def pairs(arrays: Any) -> Any:
        return [(arrays[i], arrays[i + 1]) for i in range(0, 2 * LAYERS, 2)]

    def call(*arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, mask, arrays = arrays[0], arrays[1] if masked else None, arrays[1 + masked :]
        own: Any = DynamicCache(pairs(arrays))
        if cross:
            caches = EncoderDecoderCache(own, DynamicCache(pairs(arrays[2 * LAYERS :])))
            caches.is_updated = dict.fromkeys(range(LAYERS), True)
            # Of the hidden states only the length is read.
            hidden = torch.zeros(1, arrays[-1].shape[2], WIDTH)
            feeds = {"encoder_outputs": (hidden,), "decoder_input_ids": ids}
        else:
            caches, feeds = own, {"input_ids": ids}
        if masked:
            feeds["attention_mask"] = mask
        outputs = inner(**feeds, past_key_values=caches, use_cache=True)
        return outputs.logits, *[x for layer in own.layers for x in (layer.keys, layer.values)]

    return torch_export.function_module()(call, inner).eval().requires_grad_(False)


def _exported(
    module: torch.nn.Module, inputs: dict[str, tuple[torch.Tensor, dict[int, str]]], exporter: str
) -> bytes:
    import torch

    names, file = [*inputs], io.BytesIO()
    arguments = tuple(example for example, _ in inputs.values())
    past = [name for name in names if "past" in name and "encoder." not in name]
    outputs = ["logits", *[name.replace("past_key_values", "present") for name in past]]
    if exporter == "script":
        axes = {name: open_axes for name, (_, open_axes) in inputs.items()}
        options: dict[str, Any] = {"dynamo": False, "opset_version": 17, "dynamic_axes": axes}
    else:
        open_ = torch.export.Dim.DYNAMIC
        shapes = tuple(dict.fromkeys(axes, open_) for _, axes in inputs.values())
        options = {"dynamo": True, "dynamic_shapes": (shapes,), "verbose": False}
    torch.onnx.export(module, arguments, file, input_names=names, output_names=outputs, **options)
    return bare(file.getvalue())


if __name__ == "__main__":
    write(FILE, decoders(), zipfile.ZIP_LZMA)
