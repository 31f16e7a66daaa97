"""The graph of a text encoder with norms behind sums: BERT, ELECTRA, RoBERTa, DistilBERT, ALBERT,
MPNet and DeBERTa of version 2 and 3. XLM-RoBERTa and CamemBERT are RoBERTa with other tokens.

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
from penstock.frontends.weights.relative_positions import Disentangled, mpnet_bias, positions_of
from penstock.frontends.weights.settings import Settings, unsupported
from penstock.frontends.weights.tensors import TensorStore
from penstock.frontends.weights.writer import ModelWriter
from penstock.ir.graph import Value
from penstock.ops.common.shape_rules import element_number

_ROBERTA = ("roberta", "xlm-roberta", "camembert")
_DEBERTA = "deberta-v2"
ENCODERS = ("bert", "electra", *_ROBERTA, "distilbert", "albert", "mpnet", _DEBERTA)
_MPNET_PADDING = 1


class EncoderConfiguration(NamedTuple):
    """``embedded``: the width of embeddings, which a product widens; ``positions``: whether there
    is a table of them; ``padding``: the padding token, for RoBERTa and MPNet, whose positions are
    counted without it; ``groups``: how many layers have weights of their own, which the others
    share; ``biased``: whether scores have MPNet's relative positions; ``disentangled``: those of
    DeBERTa."""

    layers: int
    width: int
    inner: int
    heads: int
    epsilon: float
    activation: str
    embedded: int
    token_types: bool
    positions: bool
    padding: int | None
    groups: int
    biased: bool
    disentangled: Disentangled | None


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
    padding = _MPNET_PADDING if model_type == "mpnet" else None
    if model_type in _ROBERTA:
        padding = 0 if settings.get("pad_token_id") == 0 else settings.count("pad_token_id", 1)
    groups, usual = layers, "gelu"
    if model_type == "albert":
        usual = "gelu_new"
        groups = settings.count("num_hidden_groups", 1)
        if settings.count("inner_group_num", 1) > 1 or groups > layers:
            feature = "inner_group_num above 1, or more groups than layers,"
            raise unsupported(feature, EXPORT, settings.label)
    is_deberta = model_type == _DEBERTA
    types = model_type not in ("distilbert", "mpnet")
    default = 128 if model_type in ("albert", "electra") else width
    return EncoderConfiguration(
        layers,
        width,
        inner,
        heads,
        settings.number("layer_norm_eps", 1e-7 if is_deberta else 1e-12),
        activation_of(settings, names["hidden_act"], usual),
        settings.count("embedding_size", default),
        types and (not is_deberta or settings.get("type_vocab_size") not in (None, 0)),
        not is_deberta or settings.flag("position_biased_input", True),
        padding,
        groups,
        model_type == "mpnet",
        _disentangled(settings) if is_deberta else None,
    )


def _disentangled(settings: Settings) -> Disentangled:
    given = settings.get("pos_att_type") or []
    given = given.split("|") if isinstance(given, str) else given
    kinds: list[object] = given if isinstance(given, list) else [given]
    norm = settings.get("norm_rel_ebd") or "none"
    if (
        any(kind not in ("c2p", "p2c") for kind in kinds)
        or norm not in ("none", "layer_norm")
        or not settings.flag("relative_attention")
        or settings.get("conv_kernel_size")
        or settings.get("attention_head_size")
    ):
        feature = "attention without relative positions, or a convolution beside it,"
        raise unsupported(feature, EXPORT, settings.label)
    # -1 stands for the number of positions, and for no buckets.
    longest = settings.get("max_relative_positions")
    if not isinstance(longest, int) or longest < 1:
        longest = settings.count("max_position_embeddings", 512)
    buckets = settings.get("position_buckets")
    buckets = buckets if isinstance(buckets, int) and buckets > 0 else 0
    if buckets and not 4 <= buckets < 2 * (longest - 1):
        raise settings.wrong("position_buckets", buckets, f"a number from 4 to {2 * longest}")
    return Disentangled(
        buckets or longest,
        buckets,
        longest,
        "c2p" in kinds,
        "p2c" in kinds,
        settings.flag("share_att_key"),
        norm == "layer_norm",
    )


def write_encoder(store: TensorStore, config: EncoderConfiguration) -> ModelWriter:
    """Write the graph. Raises ``InvalidModel`` for weights that do not fit it."""
    b = ModelWriter(store)
    ids = b.input("input_ids", INT64, ("batch", "rows"))
    mask = b.input("attention_mask", INT64, ("batch", "rows"))
    b.section("embeddings")
    x = b.embedding(ids, "token_embd", config.embedded)
    if config.token_types:
        types = b.input("token_type_ids", INT64, ("batch", "rows"))
        x = b.op("Add", x, b.embedding(types, "token_types", config.embedded))
    if config.positions:
        places = _positions(b, ids, config)
        x = b.op("Add", x, b.embedding(places, "position_embd", config.embedded))
    # DeBERTa's norm is behind the product.
    if config.disentangled is None:
        x = b.layer_norm(x, "token_embd_norm", config.embedded, config.epsilon)
    # ALBERT has a product also if it widens nothing.
    if config.embedded != config.width or "token_embd_wide.weight" in b.store:
        x = b.linear(x, "token_embd_wide", config.embedded, config.width)
    if config.disentangled is not None:
        x = b.layer_norm(x, "token_embd_norm", config.width, config.epsilon)
    b.section("mask")
    bias = hidden_bias(b, mask)
    relative = None
    if config.biased:
        bias = b.op("Add", mpnet_bias(b, ids, config.heads), bias)
    if config.disentangled is not None:
        vectors = config.disentangled.vectors(b, config.width, config.epsilon)
        relative = vectors, config.disentangled.indices(b, ids)
    for i in range(config.layers):
        x = _layer(b, x, bias, relative, i, config)
    b.output("last_hidden_state", x, ("batch", "rows", config.width))
    return b


def hidden_bias(b: ModelWriter, mask: Value) -> Value:
    """Return what is added to scores [batch, 1, 1, keys]: the lowest number where the mask is 0."""
    seen = b.op("Cast", b.op("Unsqueeze", mask, (1, 2)), to=element_number("float32"))
    hidden = b.op("Sub", b.constant(1.0), seen)
    return b.op("Mul", hidden, b.constant(float(np.finfo(FLOAT32).min)))


def _positions(b: ModelWriter, ids: Value, config: EncoderConfiguration) -> Value:
    """Return the positions of tokens: from 0 on, or for RoBERTa after the padding's number."""
    if config.padding is None:
        return b.op("Unsqueeze", positions_of(b, ids), (0,))
    padding = b.constant(np.array(config.padding, np.int64), INT64)
    tokens = b.op("Cast", b.op("Not", b.op("Equal", ids, padding)), to=element_number("int64"))
    counted = b.op("Mul", b.op("CumSum", tokens, b.constant(np.array(1, np.int64), INT64)), tokens)
    return b.op("Add", counted, padding)


def _layer(
    b: ModelWriter,
    x: Value,
    bias: Value,
    relative: tuple[Value, Value] | None,
    layer: int,
    config: EncoderConfiguration,
) -> Value:
    width, name = config.width, f"blk.{layer * config.groups // config.layers}"
    b.section(f"layers.{layer}.attention")
    y = b.linear(
        _attention(b, x, bias, relative, name, config), f"{name}.attn_output", width, width
    )
    x = b.layer_norm(b.op("Add", y, x), f"{name}.attn_output_norm", width, config.epsilon)
    b.section(f"layers.{layer}.feed_forward")
    y = activated(b, b.linear(x, f"{name}.ffn_up", width, config.inner), config.activation)
    y = b.linear(y, f"{name}.ffn_down", config.inner, width)
    return b.layer_norm(b.op("Add", y, x), f"{name}.layer_output_norm", width, config.epsilon)


def _attention(
    b: ModelWriter,
    x: Value,
    bias: Value,
    relative: tuple[Value, Value] | None,
    name: str,
    config: EncoderConfiguration,
) -> Value:
    size = config.width // config.heads

    def heads(role: str, axes: tuple[int, ...]) -> Value:
        y = b.linear(x, f"{name}.attn_{role}", config.width, config.width)
        return b.op("Transpose", b.op("Reshape", y, (0, 0, config.heads, size)), perm=axes)

    q, k, parts = heads("q", (0, 2, 1, 3)), heads("k", (0, 2, 3, 1)), 1
    if config.disentangled is not None and relative is not None:
        parts = config.disentangled.parts
        scores = config.disentangled.scores(b, (q, k), relative, name, config.width, size)
    else:
        scores = b.op("MatMul", q, k)
    scores = b.op("Add", b.op("Mul", scores, b.constant((parts * size) ** -0.5)), bias)
    context = b.op("MatMul", b.op("Softmax", scores, axis=-1), heads("v", (0, 2, 1, 3)))
    return b.op("Reshape", b.op("Transpose", context, perm=(0, 2, 1, 3)), (0, 0, config.width))
