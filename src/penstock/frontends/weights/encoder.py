"""The graph of a text encoder: BERT, RoBERTa and DistilBERT. XLM-RoBERTa and CamemBERT are RoBERTa
with other tokens.

::

    input_ids, attention_mask (, token_type_ids) -> last_hidden_state [batch, rows, width]

The mask is a bias of scores, as exporters write it: 0 for tokens, the lowest number for padding.
"""

from __future__ import annotations

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, INT64
from penstock.frontends.weights.configuration import EXPORT, MOST_LAYERS, activation_of
from penstock.frontends.weights.decoder import activated
from penstock.frontends.weights.settings import Settings, unsupported
from penstock.frontends.weights.tensors import TensorStore
from penstock.frontends.weights.writer import ModelWriter
from penstock.ir.graph import Value
from penstock.ops.common.shape_rules import element_number

_ROBERTA = ("roberta", "xlm-roberta", "camembert")
ENCODERS = ("bert", *_ROBERTA, "distilbert")


class EncoderConfiguration(NamedTuple):
    """``padding``: the padding token, for RoBERTa, whose positions are counted without it."""

    layers: int
    width: int
    inner: int
    heads: int
    epsilon: float
    activation: str
    token_types: bool
    padding: int | None


_DISTILBERT = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
}


def encoder_configuration(settings: Settings, model_type: str) -> EncoderConfiguration:
    """Return the configuration in a ``config.json``."""
    names = _DISTILBERT if model_type == "distilbert" else {key: key for key in _DISTILBERT}
    layers, width, inner, heads = (settings.count(names[key]) for key in [*_DISTILBERT][:4])
    if layers > MOST_LAYERS or width % heads:
        raise settings.wrong(names["num_attention_heads"], heads, f"a divisor of {width}")
    kind = settings.get("position_embedding_type") or "absolute"
    if kind != "absolute" or settings.flag("is_decoder"):
        feature = f"positions of type {kind!r:.40}, or is_decoder,"
        raise unsupported(feature, EXPORT, settings.label)
    padding = None
    if model_type in _ROBERTA:
        padding = 0 if settings.get("pad_token_id") == 0 else settings.count("pad_token_id", 1)
    return EncoderConfiguration(
        layers,
        width,
        inner,
        heads,
        settings.number("layer_norm_eps", 1e-12),
        activation_of(settings, names["hidden_act"], "gelu"),
        model_type != "distilbert",
        padding,
    )


def write_encoder(store: TensorStore, config: EncoderConfiguration) -> ModelWriter:
    """Write the graph. Raises ``InvalidModel`` for weights that do not fit it."""
    b = ModelWriter(store)
    ids = b.input("input_ids", INT64, ("batch", "rows"))
    mask = b.input("attention_mask", INT64, ("batch", "rows"))
    b.section("embeddings")
    x = b.embedding(ids, "token_embd", config.width)
    if config.token_types:
        types = b.input("token_type_ids", INT64, ("batch", "rows"))
        x = b.op("Add", x, b.embedding(types, "token_types", config.width))
    positions = b.embedding(_positions(b, ids, config), "position_embd", config.width)
    x = b.op("Add", x, positions)
    x = b.layer_norm(x, "token_embd_norm", config.width, config.epsilon)
    b.section("mask")
    seen = b.op("Cast", b.op("Unsqueeze", mask, (1, 2)), to=element_number("float32"))
    hidden = b.op("Sub", b.constant(1.0), seen)
    bias = b.op("Mul", hidden, b.constant(float(np.finfo(FLOAT32).min)))
    for i in range(config.layers):
        x = _layer(b, x, bias, i, config)
    b.output("last_hidden_state", x, ("batch", "rows", config.width))
    return b


def _positions(b: ModelWriter, ids: Value, config: EncoderConfiguration) -> Value:
    """Return the positions of tokens: from 0 on, or for RoBERTa after the padding's number."""
    if config.padding is None:
        length = b.op("Gather", b.op("Shape", ids), 1, axis=0)
        scalar = b.constant(np.array(0, np.int64), INT64)
        one = b.constant(np.array(1, np.int64), INT64)
        return b.op("Unsqueeze", b.op("Range", scalar, length, one), (0,))
    padding = b.constant(np.array(config.padding, np.int64), INT64)
    tokens = b.op("Cast", b.op("Not", b.op("Equal", ids, padding)), to=element_number("int64"))
    counted = b.op("Mul", b.op("CumSum", tokens, b.constant(np.array(1, np.int64), INT64)), tokens)
    return b.op("Add", counted, padding)


def _layer(
    b: ModelWriter, x: Value, bias: Value, layer: int, config: EncoderConfiguration
) -> Value:
    width, name = config.width, f"blk.{layer}"
    b.section(f"layers.{layer}.attention")
    y = b.linear(_attention(b, x, bias, name, config), f"{name}.attn_output", width, width)
    x = b.layer_norm(b.op("Add", y, x), f"{name}.attn_output_norm", width, config.epsilon)
    b.section(f"layers.{layer}.feed_forward")
    y = activated(b, b.linear(x, f"{name}.ffn_up", width, config.inner), config.activation)
    y = b.linear(y, f"{name}.ffn_down", config.inner, width)
    return b.layer_norm(b.op("Add", y, x), f"{name}.layer_output_norm", width, config.epsilon)


def _attention(
    b: ModelWriter, x: Value, bias: Value, name: str, config: EncoderConfiguration
) -> Value:
    size = config.width // config.heads

    def heads(role: str, axes: tuple[int, ...]) -> Value:
        y = b.linear(x, f"{name}.attn_{role}", config.width, config.width)
        return b.op("Transpose", b.op("Reshape", y, (0, 0, config.heads, size)), perm=axes)

    scores = b.op("MatMul", heads("q", (0, 2, 1, 3)), heads("k", (0, 2, 3, 1)))
    scores = b.op("Add", b.op("Mul", scores, b.constant(size**-0.5)), bias)
    context = b.op("MatMul", b.op("Softmax", scores, axis=-1), heads("v", (0, 2, 1, 3)))
    return b.op("Reshape", b.op("Transpose", context, perm=(0, 2, 1, 3)), (0, 0, config.width))
