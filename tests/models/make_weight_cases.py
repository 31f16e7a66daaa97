"""Makes ``weights.zip``: what ``transformers`` gives for small models of weights; and
``gguf_blocks.json``: what ``gguf`` gives for blocks of random bytes.

Needs ``torch`` (2.13), ``transformers`` (5.23) and ``gguf`` (0.19), which the tests do not:
``python -m tests.models.make_weight_cases``. Weights follow from their names
(``tests/support/weight_cases.py``), so that only configurations, shapes and results are stored.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize
from safetensors import safe_open

from penstock.artifact.tensor_file import save_arrays
from penstock.frontends.weights.block_codes import FORMATS
from tests.support.weight_cases import BLOCKS, FILE, encoded_array, random_blocks, weights_of

_BASE = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_PHI = {key: x for key, x in _BASE.items() if key != "head_dim"} | {"hidden_size": 32}
_ENCODER = {key: x for key, x in _BASE.items() if key not in ("head_dim", "num_key_value_heads")}
_DEBERTA = {
    "relative_attention": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 4,
    "max_position_embeddings": 10,
}
_OWN = {
    "share_att_key": False,
    "norm_rel_ebd": "none",
    "type_vocab_size": 2,
    "position_biased_input": True,
    "embedding_size": 16,
    "max_position_embeddings": 12,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SCALED = {"rope_theta": 10_000.0, "original_max_position_embeddings": 8}
_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
_GEMMA = {"sliding_window": 5, "query_pre_attn_scalar": 8}

CASES = {
    "llama": ("llama", _BASE),
    "llama_tied": ("llama", _BASE | {"tie_word_embeddings": True}),
    "llama_biases": ("llama", _BASE | {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", _BASE | {"rope_parameters": _SCALED | _LLAMA3}),
    "llama_linear": (
        "llama",
        _BASE | {"rope_parameters": _SCALED | {"rope_type": "linear", "factor": 2.0}},
    ),
    "mistral": ("mistral", _BASE | {"sliding_window": 5}),
    "qwen2": ("qwen2", _PHI),
    "qwen2_yarn": (
        "qwen2",
        _PHI | {"rope_parameters": _SCALED | {"rope_type": "yarn", "factor": 4.0}},
    ),
    "qwen2_yarn_betas": (
        "qwen2",
        _PHI
        | {
            "rope_parameters": _SCALED
            | {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.05, "beta_slow": 0.01}
        },
    ),
    "qwen2_windows": (
        "qwen2",
        _PHI | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", _BASE),
    "qwen3_moe": ("qwen3_moe", _BASE | _EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe_some": ("qwen3_moe", _BASE | _EXPERTS | {"decoder_sparse_step": 2}),
    "gemma2": ("gemma2", _BASE | _GEMMA),
    "gemma3": ("gemma3_text", _BASE | _GEMMA | {"num_hidden_layers": 7}),
    "gemma3_local": (
        "gemma3_text",
        _BASE
        | _GEMMA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
            },
        },
    ),
    "phi3": ("phi3", _PHI | {"sliding_window": 5}),
    "phi3_partial": ("phi3", _PHI | {"partial_rotary_factor": 0.5}),
    "phi3_long": (
        "phi3",
        _PHI
        | {"rope_parameters": _SCALED | _LONG | {"rope_type": "longrope"}}
        | {"original_max_position_embeddings": 8},
    ),
    "smollm3": ("smollm3", _PHI | {"num_hidden_layers": 4}),
    "gpt2": ("gpt2", {"vocab_size": 40, "n_embd": 24, "n_layer": 2, "n_head": 4}),
    "bert": ("bert", _ENCODER),
    "roberta": ("roberta", _ENCODER | {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": (
        "distilbert",
        {"vocab_size": 40, "dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 4},
    ),
    "electra": ("electra", _ENCODER | {"embedding_size": 16}),
    "albert": ("albert", _ENCODER | {"embedding_size": 16, "num_hidden_layers": 3}),
    "albert_groups": ("albert", _ENCODER | {"embedding_size": 24, "num_hidden_groups": 2}),
    "mpnet": ("mpnet", _ENCODER | {"pad_token_id": 1}),
    "deberta": ("deberta-v2", _ENCODER | _DEBERTA),
    "deberta_own": ("deberta-v2", _ENCODER | _DEBERTA | _OWN),
    "deberta_keys": (
        "deberta-v2",
        _ENCODER | _DEBERTA | {"position_buckets": -1, "pos_att_type": ["c2p"]},
    ),
    "modernbert": ("modernbert", _ENCODER | {"num_hidden_layers": 4, "local_attention": 8}),
    "modernbert_biases": (
        "modernbert",
        _ENCODER | dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias"), True),
    ),
}
ENCODERS = (
    *("bert", "roberta", "distilbert", "electra", "albert", "mpnet", "deberta-v2"),
    "modernbert",
)


def main() -> None:
    with zipfile.ZipFile(FILE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, (model_type, settings) in CASES.items():
            # The same date always, so that the file changes only with what is in it.
            archive.writestr(zipfile.ZipInfo(name), json.dumps(_case(model_type, settings)), 8, 9)
            print(name)
    expected = {}
    for name in FORMATS:
        data = random_blocks(name, rows=2, columns=512)
        values = dequantize(data.reshape(2, -1), gguf.GGMLQuantizationType[name])
        expected[name] = encoded_array(values)
    BLOCKS.write_text(json.dumps(expected, indent=1) + "\n")


def _case(model_type: str, settings: dict[str, object]) -> dict[str, object]:
    config = transformers.AutoConfig.for_model(model_type, **settings)
    is_encoder = model_type in ENCODERS
    kind = transformers.AutoModel if is_encoder else transformers.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        kind.from_config(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        with safe_open(file, "numpy") as tensors:
            shapes = {key: list(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        content = json.loads((Path(folder) / "config.json").read_text())
        weights = weights_of(shapes, offset=model_type.startswith("gemma"))
        save_arrays(file, weights, {"format": "pt"})
        model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    ids = np.random.default_rng(7).integers(3, 40, (2, 12))
    inputs = {"input_ids": ids}
    if is_encoder:
        inputs["attention_mask"] = np.array([[1] * 12, [1] * 7 + [0] * 5])
        if model_type in ("roberta", "mpnet"):
            ids[1, 7:] = 1
        if getattr(config, "type_vocab_size", 1) > 1 and model_type != "mpnet":
            inputs["token_type_ids"] = np.array([[0] * 6 + [1] * 6] * 2)
    with torch.no_grad():
        result = model(**{key: torch.tensor(x) for key, x in inputs.items()})
    expected = result.last_hidden_state if is_encoder else result.logits
    return {
        "config": content,
        "shapes": shapes,
        "inputs": {key: x.tolist() for key, x in inputs.items()},
        "expected": encoded_array(expected.numpy()),
    }


if __name__ == "__main__":
    main()
