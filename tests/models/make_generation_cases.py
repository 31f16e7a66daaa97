"""Makes ``generation_cases.json``: what ``generate`` of ``transformers`` answers with drawn settings of
``generation_config.json``, for the BART of ``encoder_decoders.zip`` and the Llama of ``weights.zip``.

Needs ``torch`` (2.14) and ``transformers`` (5.24), which the tests do not:
``python -m tests.models.make_generation_cases``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench.zoo.encoder_decoders import MODELS

from tests.support.weight_cases import cases

FILE = Path(__file__).with_name("generation_cases.json")
_COUNT, _FORCED = 40, 7


def _bart() -> Any:
    """The model of ``bench.zoo.encoder_decoders``, whose export the tests read."""
    _, config, kind, sizes, factor, _ = next(own for own in MODELS if own[0] == "bart")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1 and weight.requires_grad:
                weight *= factor / 6 if "encoder_attn.out" in key else factor
    return model


def _llama() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        place = cases()["llama"].write(Path(folder) / "llama")
        return transformers.AutoModelForCausalLM.from_pretrained(place).eval()


def _settings(rng: np.random.Generator, is_decoder: bool) -> dict[str, Any]:
    """Settings of ``generation_config.json``."""

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    def tokens(count: int) -> list[int]:
        return rng.integers(8, 40, count).tolist()

    settings = {
        "eos_token_id": [2, *tokens(one(0, 0, 2, 5))],
        "num_beams": one(1, 1, 2, 3, 4),
        "no_repeat_ngram_size": one(None, None, 1, 2, 3),
        "encoder_no_repeat_ngram_size": one(None, None, None, 1, 2),
        "min_length": one(None, None, 5, 12),
        "min_new_tokens": one(None, None, None, 3, 7),
        "length_penalty": one(1.0, 2.0, 0.5, -1.0),
        "early_stopping": one(False, True, "never"),
        "bad_words_ids": one(None, None, [tokens(1), tokens(2), tokens(2), tokens(3)]),
        "suppress_tokens": one(None, None, tokens(4)),
        "begin_suppress_tokens": one(None, None, tokens(8)),
        "repetition_penalty": one(None, None, 1.3, 0.8),
        "forced_eos_token_id": one(None, None, 2),
        "forced_bos_token_id": None if is_decoder else one(None, None, _FORCED),
        "max_length": one(24, 30) if is_decoder else one(12, 20, 30),
        "decoder_start_token_id": None if is_decoder else 2,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _recorded(name: str, model: Any) -> list[dict[str, Any]]:
    rng, recorded = np.random.default_rng(4), []
    for _ in range(_COUNT):
        settings = _settings(rng, name == "llama")
        prompt = rng.integers(6, 40, rng.integers(1, 12)).tolist()
        request = {"max_new_tokens": int(rng.integers(6, 16))} if rng.random() < 0.4 else {}
        model.generation_config = transformers.GenerationConfig(pad_token_id=0, **settings)
        ids = torch.tensor([prompt])
        with torch.no_grad():
            row = model.generate(ids, attention_mask=torch.ones_like(ids), **request)[0].tolist()
        # The first tokens of a decoder of two halves, of which a forced one was generated.
        forced = int("forced_bos_token_id" in settings)
        tokens = row[len(prompt) if name == "llama" else 1 + forced :]
        if request:
            request = {"max_tokens": request["max_new_tokens"] - forced}
        ends = [i for i, token in enumerate(tokens) if token in settings["eos_token_id"]]
        tokens = tokens[: ends[0]] if ends else tokens
        entry = {"model": name, "settings": settings, "prompt": prompt, "request": request}
        recorded.append({**entry, "tokens": tokens})
    return recorded


def main() -> None:
    recorded = [*_recorded("bart", _bart()), *_recorded("llama", _llama())]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, recorded)) + "\n]\n")
    print(len(recorded), "cases")


if __name__ == "__main__":
    main()
