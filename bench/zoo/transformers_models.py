"""Networks of transformers with random weights and small sizes, by both of torch's exporters.

Each is the base model or the one with a head that is most exported; only its first outputs count,
those that are tensors. Attention is "sdpa", transformers' default, and for some also "eager", from
which ONNX Runtime's optimizer and its quantizer start; and some are written by transformers' own
exporter, with its fusions for ONNX Runtime.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bench.zoo import torch_export
from bench.zoo.store import Case, Product, Recipe
from bench.zoo.torch_export import Feed, Network, normal, ones, whole

ROWS = (1, 4)
LENGTH, WORDS, WIDTH = 24, 200, 64

# Sizes by the names that configurations have for them; those that one lacks are left out.
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 64, "d_model": WIDTH, "n_embd": WIDTH,
    "n_layer": 2, "n_head": 4, "n_layers": 2, "n_heads": 4, "dim": WIDTH, "hidden_dim": 128,
    "num_layers": 2, "num_heads": 4, "d_ff": 128, "d_kv": 16, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "ffn_dim": 128, "embedding_size": 32,
    "num_key_value_heads": 2, "head_dim": 16, "n_positions": 64, "n_inner": 128,
    "num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4,
    "moe_intermediate_size": 64, "type_vocab_size": 2, "image_size": 32, "patch_size": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    "sliding_window": 16, "rotary_dim": 8, "num_labels": 10, "word_embed_proj_dim": WIDTH,
    "max_2d_position_embeddings": 64, "attention_window": 8, "n_ctx": 64, "state_size": 8,
    "num_decoder_layers": 2, "d_inner": 128, "d_head": 16,
}  # fmt: skip

IDS, MASK, TYPES = whole(WORDS, LENGTH), ones(LENGTH), whole(2, LENGTH)
TEXT = {"input_ids": IDS, "attention_mask": MASK}
TYPED = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": TYPES}
IMAGE = {"pixel_values": normal(3, 32, 32)}
AUDIO = {"input_values": normal(1600)}
TRANSLATION = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": whole(WORDS, 6)}

# Networks of stages have depths and widths of their own, under the same names.
STAGES = {"num_attention_heads": None, "num_hidden_layers": None, "num_layers": None}

# The family, the model's class after it, inputs, and what its configuration has beside SIZES.
MODELS: list[tuple[str, str, dict[str, Feed], dict[str, Any]]] = [
    ("Albert", "Model", TYPED, {}),
    ("Bert", "Model", TYPED, {}),
    ("Bert", "ForSequenceClassification", TYPED, {}),
    ("Bert", "ForTokenClassification", TEXT, {}),
    ("Bert", "ForQuestionAnswering", TYPED, {"num_labels": 2}),
    ("Bert", "ForMaskedLM", TEXT, {}),
    ("Camembert", "Model", TEXT, {}),
    ("ConvBert", "Model", TYPED, {}),
    ("Deberta", "Model", TEXT, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    ("DebertaV2", "Model", TEXT, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    ("DistilBert", "Model", TEXT, {}),
    ("Electra", "Model", TYPED, {}),
    ("Ernie", "Model", TYPED, {}),
    ("FNet", "Model", {"input_ids": IDS, "token_type_ids": TYPES}, {}),
    ("Funnel", "BaseModel", TYPED, {"block_sizes": [1, 1], "num_hidden_layers": None}),
    ("IBert", "Model", TEXT, {}),
    ("LayoutLM", "Model", TYPED, {}),
    ("Longformer", "Model", TEXT, {}),
    ("MobileBert", "Model", TYPED, {"true_hidden_size": 32, "intra_bottleneck_size": 32}),
    ("ModernBert", "Model", TEXT, {"global_attn_every_n_layers": 2, "local_attention": 8}),
    ("MPNet", "Model", TEXT, {}),
    ("RemBert", "Model", TYPED, {"input_embedding_size": 32}),
    ("Roberta", "Model", TEXT, {}),
    ("RoFormer", "Model", TYPED, {}),
    ("SqueezeBert", "Model", TYPED, {"embedding_size": WIDTH}),
    ("XLMRoberta", "Model", TEXT, {}),
    ("XLNet", "Model", TEXT, {"n_layer": 2, "max_position_embeddings": None}),
    ("GPT2", "LMHeadModel", TEXT, {}),
    ("GPTNeo", "ForCausalLM", TEXT, {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    ("GPTNeoX", "ForCausalLM", TEXT, {}),
    ("GPTJ", "ForCausalLM", TEXT, {}),
    ("GPTBigCode", "ForCausalLM", TEXT, {}),
    ("OPT", "ForCausalLM", TEXT, {}),
    ("Bloom", "ForCausalLM", TEXT, {}),
    ("Falcon", "ForCausalLM", TEXT, {"head_dim": None}),
    ("Mpt", "ForCausalLM", TEXT, {}),
    ("Llama", "ForCausalLM", TEXT, {}),
    ("Mistral", "ForCausalLM", TEXT, {}),
    ("Mixtral", "ForCausalLM", TEXT, {}),
    ("Qwen2", "ForCausalLM", TEXT, {}),
    ("Qwen3", "ForCausalLM", TEXT, {}),
    ("Qwen2Moe", "ForCausalLM", TEXT, {"shared_expert_intermediate_size": 64}),
    ("Phi", "ForCausalLM", TEXT, {}),
    ("Phi3", "ForCausalLM", TEXT, {}),
    ("Gemma", "ForCausalLM", TEXT, {}),
    ("Gemma2", "ForCausalLM", TEXT, {}),
    ("Olmo2", "ForCausalLM", TEXT, {}),
    ("Cohere", "ForCausalLM", TEXT, {}),
    ("StableLm", "ForCausalLM", TEXT, {}),
    ("Starcoder2", "ForCausalLM", TEXT, {}),
    ("SmolLM3", "ForCausalLM", TEXT, {}),
    ("Granite", "ForCausalLM", TEXT, {}),
    ("Mamba", "ForCausalLM", {"input_ids": IDS}, {}),
    ("T5", "EncoderModel", TEXT, {}),
    ("T5", "ForConditionalGeneration", TRANSLATION, {}),
    ("MT5", "EncoderModel", TEXT, {}),
    ("Bart", "Model", TRANSLATION, {}),
    ("Marian", "MTModel", TRANSLATION, {}),
    ("MBart", "Model", TRANSLATION, {}),
    ("Pegasus", "Model", TRANSLATION, {}),
    ("M2M100", "Model", TRANSLATION, {}),
    ("Whisper", "Model", {"input_features": normal(16, 40), "decoder_input_ids": whole(WORDS, 6)}, {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20}),
    ("Wav2Vec2", "ForCTC", AUDIO, {"conv_dim": [32] * 7, "num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 16}),
    ("Hubert", "Model", AUDIO, {"conv_dim": [32] * 7, "num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 16}),
    ("WavLM", "Model", AUDIO, {"conv_dim": [32] * 7, "num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 16}),
    ("ViT", "ForImageClassification", IMAGE, {}),
    ("DeiT", "ForImageClassification", IMAGE, {}),
    ("Beit", "ForImageClassification", IMAGE, {}),
    ("Dinov2", "Model", IMAGE, {}),
    ("Swin", "ForImageClassification", IMAGE, {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4, **STAGES}),
    ("Swinv2", "ForImageClassification", IMAGE, {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4, **STAGES}),
    ("ConvNext", "ForImageClassification", IMAGE, {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "patch_size": 4, **STAGES}),
    ("ResNet", "ForImageClassification", IMAGE, {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "embedding_size": 16}),
    ("RegNet", "ForImageClassification", IMAGE, {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "embedding_size": 16, "groups_width": 8}),
    ("MobileNetV2", "ForImageClassification", IMAGE, {"depth_multiplier": 0.35}),
    ("MobileViT", "ForImageClassification", {"pixel_values": normal(3, 64, 64)}, {"image_size": 64, "patch_size": 2, "hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 16, 24, 32, 40, 64, 64]}),
    ("Segformer", "ForSemanticSegmentation", {"pixel_values": normal(3, 64, 64)}, {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 32, "num_attention_heads": [1, 2, 4, 4], "patch_sizes": [7, 3, 3, 3]}),
    ("PoolFormer", "ForImageClassification", IMAGE, {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}),
    ("CLIPText", "Model", TEXT, {}),
    ("CLIPVision", "Model", IMAGE, {}),
    ("SiglipText", "Model", {"input_ids": IDS}, {}),
    ("SiglipVision", "Model", IMAGE, {}),
]  # fmt: skip
EAGER = {"BertModel", "DistilBertModel", "GPT2LMHeadModel", "LlamaForCausalLM", "T5EncoderModel",
         "ViTForImageClassification", "RobertaModel", "BartModel"}  # fmt: skip


# By transformers' own exporter as well, which fuses for ONNX Runtime.
FUSED = {
    "BertModel", "DistilBertModel", "RobertaModel", "GPT2LMHeadModel", "GPTNeoXForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "Phi3ForCausalLM", "Gemma2ForCausalLM", "OPTForCausalLM",
    "T5EncoderModel", "T5ForConditionalGeneration", "BartModel", "ViTForImageClassification",
    "WhisperModel",
}  # fmt: skip


def recipes(_: str) -> Iterator[Recipe]:
    yield from torch_export.recipes([network for network, _ in networks()])
    for network, model in networks():
        if network.name in FUSED:
            yield Recipe(f"{network.name}_fused", partial(_fused, network, model))


def networks() -> Iterator[tuple[Network, Callable[[], Any]]]:
    """Networks, and how to make their models as transformers has them."""
    for family, last, feeds, arguments in MODELS:
        name = family + last
        for attention in ("", "eager") if name in EAGER else ("",):
            model = partial(build, family, name, arguments, attention)
            title = f"{name}_{attention}" if attention else name
            call = partial(_with_tensors, model, list(feeds))
            yield Network(title, call, list(feeds.values()), ROWS, list(feeds)), model


def build(family: str, name: str, arguments: dict[str, Any], attention: str) -> Any:
    import transformers

    config_class = getattr(transformers, f"{family}Config")
    default = config_class()
    sizes = {key: value for key, value in SIZES.items() if hasattr(default, key)}
    chosen = {key: value for key, value in {**sizes, **arguments}.items() if value is not None}
    config = config_class(**chosen)
    config.use_cache = False
    if attention:
        config._attn_implementation = attention
    return getattr(transformers, name)(config)


def _with_tensors(model: Callable[[], Any], names: Sequence[str]) -> Any:
    """The model from the inputs of ``names``, in their order, to its first outputs."""
    import torch

    inner = model()

    def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = inner(**dict(zip(names, inputs, strict=True)))
        return tuple(value for value in outputs.values() if isinstance(value, torch.Tensor))[:2]

    return torch_export.function_module()(call, inner)


def _fused(network: Network, model: Callable[[], Any]) -> Product:
    torch_export.declare_torchvision()
    logging.disable(logging.WARNING)
    import onnx_ir
    import torch
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    torch.manual_seed(0)
    made = model().eval().requires_grad_(False)
    inputs = {
        case: dict(zip(network.names, torch_export.inputs(network, rows), strict=True))
        for case, rows in zip(("row", "batch"), network.rows, strict=True)
    }
    tensors = {
        case: {name: torch.from_numpy(array) for name, array in arrays.items()}
        for case, arrays in inputs.items()
    }
    options = OnnxConfig(dynamic=True, ort_fusions="cpu")
    exported = OnnxExporter().export(made, tensors["batch"], config=options)
    proto = onnx_ir.to_proto(exported.program)
    wanted = {value.name for value in proto.graph.input}
    cases = {}
    for case, arrays in inputs.items():
        with torch.inference_mode():
            first = next(iter(made(**tensors[case]).values()))
        # How many outputs there are is the exporter's choice; what is compared is ONNX Runtime's.
        answers = [first.numpy()] if len(proto.graph.output) == 1 else None
        cases[case] = Case({n: a for n, a in arrays.items() if n in wanted}, answers)
    return Product(proto.SerializeToString(), cases)
