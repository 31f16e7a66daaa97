from __future__ import annotations

import pytest

import penstock as ps
from penstock.frontends.weights.configuration import (
    DecoderConfiguration,
    activation_of,
    decoder_configuration,
)
from penstock.frontends.weights.settings import Settings

SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}


def configured(model_type: str, **more: object) -> DecoderConfiguration:
    return decoder_configuration(Settings("config.json", SIZES | more), model_type)


def test_sizes_that_are_left_out_follow_from_others() -> None:
    config = configured("llama")
    assert (config.kv_heads, config.head_size, config.scale) == (4, 16, 0.25)
    assert (config.windows, config.activation) == ([0] * 6, "silu")
    assert not config.qkv_bias
    assert len({id(rotary) for rotary in config.rotaries}) == 1


def test_gemma_3_has_windows_and_slower_rotations_by_layer() -> None:
    config = configured(
        "gemma3_text", sliding_window=8, rope_scaling={"rope_type": "linear", "factor": 8.0}
    )
    assert config.windows == [8, 8, 8, 8, 8, 0]
    assert config.rotaries[0] is not config.rotaries[5]
    assert config.rotaries[0].frequencies[1] > config.rotaries[5].frequencies[1]  # type: ignore[union-attr]
    assert config.rotaries[5].frequencies[0] == 1 / 8  # type: ignore[union-attr]
    assert (config.norm_offset, config.embedding_scale, config.head_size) == (1, 8, 256)


def test_gemma_2_has_caps_unless_they_are_off() -> None:
    assert (configured("gemma2").softcap, configured("gemma2").final_softcap) == (50, 30)
    assert configured("gemma2").windows == [4096, 0] * 3
    config = configured("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.softcap, config.final_softcap) == (0, 0)


def test_gemma_3_has_a_cap_of_its_logits_alone() -> None:
    config = configured("gemma3_text", attn_logit_softcapping=3.0, final_logit_softcapping=2.0)
    assert (config.softcap, config.final_softcap) == (0, 2)


def test_window_that_is_null_is_none() -> None:
    assert configured("mistral", num_key_value_heads=4).windows == [4096] * 6
    assert configured("mistral", num_key_value_heads=4, sliding_window=None).windows == [0] * 6


def test_qwen_with_experts_has_windows_in_all_layers() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = configured("qwen3_moe", use_sliding_window=True, sliding_window=8, **experts)
    assert config.windows == [8] * 6


def test_qwen_has_windows_only_if_it_says_so() -> None:
    assert configured("qwen2", sliding_window=8).windows == [0] * 6
    config = configured("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=4)
    assert config.windows == [0, 0, 0, 0, 8, 8]
    types = ["sliding_attention", "full_attention"] * 3
    config = configured("qwen3", sliding_window=8, use_sliding_window=True, layer_types=types)
    assert config.windows == [8, 0] * 3


def test_smollm_3_has_layers_without_positions() -> None:
    config = configured("smollm3")
    assert [rotary is None for rotary in config.rotaries] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    config = configured("smollm3", no_rope_layers=[0, 1, 1, 1, 1, 1])
    assert config.rotaries[0] is None


def test_experts_are_in_the_layers_that_have_them() -> None:
    more = {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [1],
        "num_experts_per_tok": 2,
    }
    experts = configured("qwen3_moe", **more, decoder_sparse_step=2).experts
    assert experts is not None
    assert experts.layers == {3, 5}
    assert not experts.normalized


@pytest.mark.parametrize(
    ("model_type", "more", "reason"),
    [
        ("llama", {"num_hidden_layers": 20_000}, "a number up to 10000"),
        ("llama", {"hidden_size": "64"}, "'hidden_size' of config.json"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "default"}, "head_dim": 7}, "7 features"),
        ("llama", {"rope_parameters": 3}, "a group of settings"),
        ("phi3", {"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "6 elements"),
        ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 3}, "at most 2"),
    ],
)
def test_wrong_settings_are_refused(model_type: str, more: dict[str, object], reason: str) -> None:
    with pytest.raises(ps.InvalidModel, match=reason):
        configured(model_type, **more)


@pytest.mark.parametrize(
    ("model_type", "more", "reason"),
    [
        ("llama", {"hidden_act": "mish"}, "activation 'mish'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "later positions"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 6}, "layer type 'chunked_attention'"),
    ],
)
def test_variants_are_unsupported(model_type: str, more: dict[str, object], reason: str) -> None:
    with pytest.raises(ps.Unsupported, match=reason):
        configured(model_type, **more)


def test_activation_has_a_default() -> None:
    assert activation_of(Settings("config.json", {}), "hidden_act", "gelu_new") == "gelu_tanh"


def test_scaling_may_have_its_older_names() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16}
    older = configured("qwen2", rope_theta=1e6, rope_scaling={"type": "yarn", **scaling})
    newer = configured("qwen2", rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **scaling})
    for a, b in zip(older.rotaries, newer.rotaries, strict=True):
        assert a is not None
        assert b is not None
        assert a.frequencies.tolist() == b.frequencies.tolist()
        assert a.magnitude == b.magnitude != 1


def test_scaling_of_phi_3_may_have_its_first_length_beside_it() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = configured(
        "phi3",
        rope_scaling={"type": "su", **factors},
        max_position_embeddings=64,
        original_max_position_embeddings=16,
    )
    (rotary, *_) = config.rotaries
    assert rotary is not None
    assert rotary.original == 16
    assert rotary.magnitude == pytest.approx((1 + 0.5) ** 0.5)
