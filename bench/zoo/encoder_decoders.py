"""Encoder-decoders for the tests, ``tests/models/encoder_decoders.zip``: of transformers, with random
weights, in the folders that optimum exports; and the tokens that transformers generates with them.

Needs ``optimum-onnx`` (0.1), ``transformers`` (4.57) and ``torch`` (2.13), which the tests do not. To
write it anew: ``python -m bench.zoo.encoder_decoders``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parents[2] / "tests" / "models" / "encoder_decoders.zip"
_TOKENS, _LENGTH, _RATE, _FRAMES = 60, 20, 16_000, 100
_SIZES = {
    "vocab_size": _TOKENS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 40, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "vocab_size": _TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 2, "relative_attention_max_distance": 12,
    "relative_attention_num_buckets": 8, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_WHISPER = {
    **_SIZES, "num_mel_bins": 8, "max_source_positions": _FRAMES // 2, "max_target_positions": 40,
    "pad_token_id": 50, "bos_token_id": 50, "eos_token_id": 50, "decoder_start_token_id": 51,
    "suppress_tokens": [3, 4], "begin_suppress_tokens": [5, 50],
}  # fmt: skip
_BART_TOKENS = {
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_MARIAN_TOKENS = {"pad_token_id": 59, "eos_token_id": 0, "decoder_start_token_id": 59}

# The name, transformers' classes of the configuration and the model, the sizes, what weights are
# multiplied by so that texts are no repetitions, and which files of an export are kept.
_MERGED = ("decoder_model_merged.onnx",)
_SPLIT = ("decoder_model.onnx", "decoder_with_past_model.onnx")
MODELS: list[tuple[str, str, str, dict[str, Any], float, tuple[str, ...]]] = [
    ("t5", "T5Config", "T5ForConditionalGeneration", _T5, 3.0, _MERGED),
    (
        "bart",
        "BartConfig",
        "BartForConditionalGeneration",
        {**_SIZES, **_BART_TOKENS},
        40.0,
        _SPLIT,
    ),
    ("marian", "MarianConfig", "MarianMTModel", {**_SIZES, **_MARIAN_TOKENS}, 40.0, _MERGED),
    ("whisper", "WhisperConfig", "WhisperForConditionalGeneration", _WHISPER, 30.0, _MERGED),
]


def exported(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The files of all models by name, made in a folder."""
    import torch
    import transformers
    from optimum.exporters.onnx import main_export

    for name, config, model_class, sizes, factor, kept in MODELS:
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(getattr(transformers, config)(**sizes)).eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if weight.ndim > 1 and weight.requires_grad:
                    # What the encoder gives is the same in all steps, and would outweigh the text.
                    weight *= factor / 6 if "encoder_attn.out" in key else factor
        place, task = folder / name, "text2text-generation-with-past"
        model.save_pretrained(place / "model")
        if name == "whisper":
            task = "automatic-speech-recognition-with-past"
            _features().save_pretrained(place / "model")
        main_export(
            str(place / "model"), place, task=task, do_validation=False, nb_max_frames=_FRAMES
        )
        files = ["encoder_model.onnx", *kept, "config.json", "generation_config.json"]
        for file in [*files, *(["preprocessor_config.json"] if name == "whisper" else [])]:
            yield f"{name}/{file}", (place / file).read_bytes()
        yield from _answers(name, model)


def _features() -> Any:
    import transformers

    return transformers.WhisperFeatureExtractor(
        feature_size=_WHISPER["num_mel_bins"], chunk_length=1, hop_length=_RATE // _FRAMES
    )


def _answers(name: str, model: Any) -> Iterator[tuple[str, bytes]]:
    """Prompts, and the tokens that follow; sound in a file of its own."""
    import torch

    rng, cases = np.random.default_rng(1), []
    for number, length in enumerate((2, 9, 17)):
        prompt: Any = rng.integers(6, 50, length).tolist()
        given = {"input_ids": torch.tensor([prompt])}
        if name == "whisper":
            prompt = f"{name}/sound{number}.f2"
            sound = (0.1 * rng.standard_normal(length * _RATE // 100)).astype(np.float16)
            yield prompt, sound.tobytes()
            features = _features()(
                sound.astype(np.float32), sampling_rate=_RATE, return_tensors="pt"
            )
            given = {"input_features": features.input_features}
            yield f"{name}/features{number}.f4", features.input_features.numpy().tobytes()
        for beams in (1, 3):
            tokens = _generated(model, given, beams)
            cases.append({"prompt": prompt, "beams": beams, "tokens": tokens})
            sys.stderr.write(f"{name} {beams} {tokens}\n")
    yield f"{name}/cases.json", json.dumps({"length": _LENGTH, "cases": cases}).encode()


def _generated(model: Any, given: dict[str, Any], beams: int) -> list[int]:
    settings = model.generation_config
    result = model.generate(**given, max_new_tokens=_LENGTH, num_beams=beams, do_sample=False)
    tokens = result[0].tolist()
    if tokens[0] == settings.decoder_start_token_id:
        tokens = tokens[1:]
    end = settings.eos_token_id
    return tokens[: tokens.index(end)] if end in tokens else tokens


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(FILE, "w", zipfile.ZIP_LZMA) as archive,
    ):
        for name, content in exported(Path(folder)):
            archive.writestr(name, content)
            sys.stderr.write(f"{name} {len(content)}\n")


if __name__ == "__main__":
    main()
