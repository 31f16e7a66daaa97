from __future__ import annotations

import pytest

from penstock.frontends.weights.names import file_names


@pytest.mark.parametrize(
    ("model_type", "embedding", "name", "expected"),
    [
        (
            "llama",
            "model.embed_tokens.weight",
            "blk.3.attn_q.weight",
            "model.layers.3.self_attn.q_proj.weight",
        ),
        ("llama", "model.embed_tokens.weight", "output.weight", "lm_head.weight"),
        ("llama", "embed_tokens.weight", "output_norm.weight", "norm.weight"),
        (
            "qwen3_moe",
            "model.embed_tokens.weight",
            "blk.0.mlp.experts.7.up_proj.weight",
            "model.layers.0.mlp.experts.7.up_proj.weight",
        ),
        (
            "gemma3_text",
            "language_model.model.embed_tokens.weight",
            "blk.1.ffn_norm.weight",
            "language_model.model.layers.1.pre_feedforward_layernorm.weight",
        ),
        ("gpt2", "wte.weight", "blk.0.attn_qkv.bias", "h.0.attn.c_attn.bias"),
        ("gpt2", "transformer.wte.weight", "output_norm.bias", "transformer.ln_f.bias"),
        (
            "distilbert",
            "distilbert.embeddings.word_embeddings.weight",
            "blk.2.ffn_up.weight",
            "distilbert.transformer.layer.2.ffn.lin1.weight",
        ),
    ],
)
def test_names_of_checkpoints_follow_from_those_of_gguf(
    model_type: str, embedding: str, name: str, expected: str
) -> None:
    assert file_names(model_type, {embedding})(name) == expected


def test_head_of_a_nested_decoder_is_nested() -> None:
    files = {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"}
    name_of = file_names("gemma3_text", files)
    assert name_of("output.weight") == "language_model.lm_head.weight"
