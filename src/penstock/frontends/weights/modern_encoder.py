"""The graph of ModernBERT: norms before products, rotary positions, gates, windows in most layers.

::

    input_ids, attention_mask -> last_hidden_state [batch, rows, width]
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, INT64
from penstock.frontends.weights.configuration import EXPORT, MOST_LAYERS, activation_of
from penstock.frontends.weights.decoder import activated, rotary_angles
from penstock.frontends.weights.encoder import hidden_bias
from penstock.frontends.weights.relative_positions import positions_of
from penstock.frontends.weights.rotary import Rotary, rotary_of
from penstock.frontends.weights.settings import Settings, unsupported
from penstock.frontends.weights.tensors import TensorStore
from penstock.frontends.weights.writer import ModelWriter
from penstock.ir.graph import Value

MODERN_ENCODER = "modernbert"
_FULL, _WINDOW = "full_attention", "sliding_attention"
_THETAS = {_FULL: ("global_rope_theta", 160_000.0), _WINDOW: ("local_rope_theta", 10_000.0)}


class ModernConfiguration(NamedTuple):
    """``kinds``: for each layer, whether it reads all keys or those in a window; ``window``: the
    most positions between a query and such keys; ``rotaries``: rotations by kind."""

    width: int
    inner: int
    heads: int
    epsilon: float
    activation: str
    norm_bias: bool
    kinds: tuple[str, ...]
    window: int
    rotaries: Mapping[str, Rotary]


def modern_configuration(settings: Settings) -> ModernConfiguration:
    """Return the configuration in a ``config.json``."""
    layers, width = settings.count("num_hidden_layers", 22), settings.count("hidden_size", 768)
    heads = settings.count("num_attention_heads", 12)
    if layers > MOST_LAYERS or width % heads:
        raise settings.wrong("num_attention_heads", heads, f"a divisor of {width}")
    kinds = settings.elements("layer_types", layers)
    if kinds is None:
        every = settings.count("global_attn_every_n_layers", 3)
        kinds = [_WINDOW if i % every else _FULL for i in range(layers)]
    if not {*map(str, kinds)} <= {*_THETAS}:
        raise settings.wrong("layer_types", kinds, f"a list of {_FULL} and {_WINDOW}")
    own = settings.inner("rope_parameters")
    rotaries = {}
    for kind, (key, theta) in _THETAS.items():
        of_kind = own and own.inner(kind)
        if settings.get("rope_scaling") or (
            of_kind and of_kind.get("rope_type") not in (None, "default")
        ):
            raise unsupported(f"scaled positions of {kind}", EXPORT, settings.label)
        theta = settings.number(key, theta)
        theta = of_kind.number("rope_theta", theta) if of_kind else theta
        try:
            rotaries[kind] = rotary_of({"rope_theta": theta}, width // heads, 1)
        except ValueError as error:
            raise settings.wrong("rope_parameters", str(error), "a rotation") from error
    return ModernConfiguration(
        width,
        settings.count("intermediate_size", 1152),
        heads,
        settings.number("norm_eps", 1e-5),
        activation_of(settings, "hidden_activation", "gelu"),
        settings.flag("norm_bias"),
        tuple(map(str, kinds)),
        settings.count("local_attention", 128) // 2,
        rotaries,
    )


def write_modern_encoder(store: TensorStore, config: ModernConfiguration) -> ModelWriter:
    """Write the graph. Raises ``InvalidModel`` for weights that do not fit it."""
    b = ModelWriter(store)
    ids = b.input("input_ids", INT64, ("batch", "rows"))
    mask = b.input("attention_mask", INT64, ("batch", "rows"))
    b.section("embeddings")
    x = _norm(b, b.embedding(ids, "token_embd", config.width), "token_embd_norm", config)
    b.section("mask")
    bias = hidden_bias(b, mask)
    places = positions_of(b, ids)
    steps = b.op("Sub", b.op("Unsqueeze", places, (0,)), b.op("Unsqueeze", places, (1,)))
    is_near = b.op("LessOrEqual", b.op("Abs", steps), config.window)
    lowest = b.constant(float(np.finfo(FLOAT32).min))
    far = b.op("Where", is_near, b.constant(0.0), lowest)
    # Sums of two lowest numbers would be infinite.
    biases = {_FULL: bias, _WINDOW: b.op("Min", bias, far)}
    b.section("rotary")
    # Of one text: the positions of all are the same.
    rows = b.op("Unsqueeze", places, (0,))
    angles = {kind: rotary_angles(b, rows, config.rotaries[kind]) for kind in {*config.kinds}}
    for i, kind in enumerate(config.kinds):
        b.section(f"layers.{i}.attention")
        # The norm of the embedding is that of the first layer.
        y = _norm(b, x, f"blk.{i}.attn_norm", config) if i else x
        x = b.op("Add", x, _attention(b, y, biases[kind], angles[kind], f"blk.{i}", config))
        b.section(f"layers.{i}.feed_forward")
        y = _norm(b, x, f"blk.{i}.ffn_norm", config)
        y = b.linear(y, f"blk.{i}.ffn_up", config.width, 2 * config.inner)
        gated, gate = b.split(y, [config.inner, config.inner])
        y = b.op("Mul", activated(b, gated, config.activation), gate)
        x = b.op("Add", x, b.linear(y, f"blk.{i}.ffn_down", config.inner, config.width))
    b.section("head")
    x = _norm(b, x, "output_norm", config)
    b.output("last_hidden_state", x, ("batch", "rows", config.width))
    return b


def _norm(b: ModelWriter, x: Value, role: str, config: ModernConfiguration) -> Value:
    return b.layer_norm(x, role, config.width, config.epsilon, biased=config.norm_bias)


def _attention(
    b: ModelWriter,
    x: Value,
    bias: Value,
    angles: tuple[Value, Value],
    name: str,
    config: ModernConfiguration,
) -> Value:
    width, size = config.width, config.width // config.heads
    parts = b.split(b.linear(x, f"{name}.attn_qkv", width, 3 * width), [width] * 3)
    q, k, v = (
        b.op("Transpose", b.op("Reshape", part, (0, 0, config.heads, size)), perm=(0, 2, 1, 3))
        for part in parts
    )
    shape = b.op("Concat", b.op("Shape", x, start=0, end=2), b.constant(_half(size), INT64), axis=0)
    # RotaryEmbedding reads angles of each text.
    turns = [b.op("Expand", values, shape) for values in angles]
    q, k = (b.op("RotaryEmbedding", part, *turns) for part in (q, k))
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=(0, 1, 3, 2)))
    scores = b.op("Add", b.op("Mul", scores, b.constant(size**-0.5)), bias)
    context = b.op("MatMul", b.op("Softmax", scores, axis=-1), v)
    y = b.op("Reshape", b.op("Transpose", context, perm=(0, 2, 1, 3)), (0, 0, width))
    return b.linear(y, f"{name}.attn_output", width, width)


def _half(size: int) -> np.ndarray:
    return np.array([size // 2], np.int64)
