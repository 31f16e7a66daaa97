"""The names of tensors in checkpoints of Hugging Face's models, by their names in GGUF."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from penstock.core.records import NamedTuple

_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}
_GEMMA = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2 = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_DISTILBERT = _BERT | {
    "attn_q": "attention.q_lin",
    "attn_k": "attention.k_lin",
    "attn_v": "attention.v_lin",
    "attn_output": "attention.out_lin",
    "attn_output_norm": "sa_layer_norm",
    "ffn_up": "ffn.lin1",
    "ffn_down": "ffn.lin2",
    "layer_output_norm": "output_layer_norm",
}
_ELECTRA = _BERT | {"token_embd_wide": "embeddings_project"}
_ALBERT = _BERT | {
    "token_embd_wide": "encoder.embedding_hidden_mapping_in",
    "attn_q": "albert_layers.0.attention.query",
    "attn_k": "albert_layers.0.attention.key",
    "attn_v": "albert_layers.0.attention.value",
    "attn_output": "albert_layers.0.attention.dense",
    "attn_output_norm": "albert_layers.0.attention.LayerNorm",
    "ffn_up": "albert_layers.0.ffn",
    "ffn_down": "albert_layers.0.ffn_output",
    "layer_output_norm": "albert_layers.0.full_layer_layer_norm",
}
_MPNET = _BERT | {
    **{f"attn_{x}": f"attention.attn.{x}" for x in "qkv"},
    "attn_output": "attention.attn.o",
    "attn_output_norm": "attention.LayerNorm",
    "relative_positions": "encoder.relative_attention_bias",
}
_MODERN = {
    "token_embd": "embeddings.tok_embeddings",
    "token_embd_norm": "embeddings.norm",
    "output_norm": "final_norm",
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
_DEBERTA = _BERT | {
    "token_embd_wide": "embeddings.embed_proj",
    "relative_positions": "encoder.rel_embeddings",
    "relative_norm": "encoder.LayerNorm",
    "attn_q": "attention.self.query_proj",
    "attn_k": "attention.self.key_proj",
    "attn_v": "attention.self.value_proj",
    "positions_q": "attention.self.pos_query_proj",
    "positions_k": "attention.self.pos_key_proj",
}


class Naming(NamedTuple):
    """``prefixes`` that names may have, one in a file; the text before a layer's number; and
    names by those of GGUF."""

    prefixes: tuple[str, ...]
    layer: str
    names: Mapping[str, str]


_PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")
_NAMINGS = {
    "gemma2": Naming(_PREFIXES, "layers", _GEMMA),
    "gemma3_text": Naming(_PREFIXES, "layers", _GEMMA),
    "phi3": Naming(_PREFIXES, "layers", _LLAMA | {"ffn_up": "mlp.gate_up_proj"}),
    "gpt2": Naming(("transformer.", ""), "h", _GPT2),
    "bert": Naming(("bert.", ""), "encoder.layer", _BERT),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert"), Naming(("roberta.", ""), "encoder.layer", _BERT)
    ),
    "electra": Naming(("electra.", ""), "encoder.layer", _ELECTRA),
    "albert": Naming(("albert.", ""), "encoder.albert_layer_groups", _ALBERT),
    "mpnet": Naming(("mpnet.", ""), "encoder.layer", _MPNET),
    "deberta-v2": Naming(("deberta.", ""), "encoder.layer", _DEBERTA),
    "modernbert": Naming(("model.", ""), "layers", _MODERN),
    "distilbert": Naming(("distilbert.", ""), "transformer.layer", _DISTILBERT),
}
# The names of norms' parameters in checkpoints from before 2020.
_OLD = {"weight": "gamma", "bias": "beta"}


def file_names(model_type: str, tensors: Container[str]) -> Callable[[str], str]:
    """Return a function from GGUF's names to those in files with these ``tensors``."""
    naming = _NAMINGS.get(model_type, Naming(_PREFIXES, "layers", _LLAMA))
    embedding = f"{naming.names['token_embd']}.weight"
    prefixes = [prefix for prefix in naming.prefixes if prefix + embedding in tensors]
    prefix = prefixes[0] if prefixes else naming.prefixes[0]

    def file_name(name: str) -> str:
        role, kind = name.rsplit(".", 1)
        layer = ""
        if role.startswith("blk."):
            _, layer, role = role.split(".", 2)
        if role == "output":
            head = f"{prefix.removesuffix('model.')}lm_head.{kind}"
            return head if head in tensors else f"lm_head.{kind}"
        own = naming.names.get(role, role)
        if layer:
            own = f"{naming.layer}.{layer}.{own}"
        old = f"{prefix}{own}.{_OLD.get(kind, kind)}"
        return old if old in tensors else f"{prefix}{own}.{kind}"

    return file_name
