"""The graph of a decoder like Llama, with the variations of related models.

::

    input_ids, position_ids -> embedding -> layers -> norm -> head -> logits

    layer   x + attention(norm(x)), then x + feed_forward(norm(x))
    attention      rotary(q), rotary(k), v; keys and values behind those of past_key_values.N
    feed_forward   down(activation(gate(x)) * up(x)), or a mixture of such experts

The interface is that of Hugging Face's exports with a past: ``input_ids`` and ``position_ids``
[batch, rows], ``past_key_values.N.key`` and ``.value`` [batch, kv_heads, past, head_size] to
``logits`` [batch, rows, vocabulary], ``present.N.key`` and ``.value``.
"""

from __future__ import annotations

from penstock.core.types import FLOAT32, INT64
from penstock.frontends.weights.configuration import DecoderConfiguration
from penstock.frontends.weights.experts import mixture_of
from penstock.frontends.weights.rotary import Rotary
from penstock.frontends.weights.tensors import TensorStore
from penstock.frontends.weights.writer import ModelWriter
from penstock.ir.graph import LONG_FROM, Value
from penstock.ops.common.shape_rules import element_number

Angles = dict[int, tuple[Value, Value]]
"""cosines and sines [batch, rows, pairs], by the identity of their rotary embedding"""


def write_decoder(store: TensorStore, config: DecoderConfiguration) -> ModelWriter:
    """Write the graph of a decoder. Raises ``InvalidModel`` for weights that do not fit it."""
    b = ModelWriter(store)
    ids = b.input("input_ids", INT64, ("batch", "rows"))
    positions = b.input("position_ids", INT64, ("batch", "rows"))
    caches = past_inputs(b, config.layers, config.kv_heads, config.head_size)
    angles: Angles = {}
    for rotary in config.rotaries:
        if rotary is not None and id(rotary) not in angles:
            b.section("rotary")
            angles[id(rotary)] = rotary_angles(b, positions, rotary)
    b.section("embedding")
    x = b.embedding(ids, "token_embd", config.width)
    if config.embedding_scale != 1:
        x = b.op("Mul", x, b.constant(config.embedding_scale))
    presents = []
    for i in range(config.layers):
        y, present = _attention(b, x, i, config, angles, caches[i])
        x = _added(b, x, y, f"blk.{i}.post_attention_norm", config)
        presents.append(present)
        b.section(f"layers.{i}.feed_forward")
        y = _norm(b, x, f"blk.{i}.ffn_norm", config)
        if config.experts is not None and i in config.experts.layers:
            y = mixture_of(b, y, i, config.width, config.experts)
        else:
            y = _feed_forward(b, y, f"blk.{i}", config)
        x = _added(b, x, y, f"blk.{i}.post_ffw_norm", config)
    b.section("head")
    logits = head(b, _norm(b, x, "output_norm", config), config.width, config.tied)
    if config.final_softcap:
        cap = b.constant(config.final_softcap)
        logits = b.op("Mul", b.op("Tanh", b.op("Div", logits, cap)), cap)
    output_logits(b, logits)
    present_outputs(b, presents, config.kv_heads, config.head_size)
    return b


def past_inputs(
    b: ModelWriter, layers: int, kv_heads: int, head_size: int
) -> list[tuple[Value, Value]]:
    """Return the keys and values of the past of each layer."""
    shape = ("batch", kv_heads, "past", head_size)
    names = [[f"past_key_values.{i}.{part}" for part in ("key", "value")] for i in range(layers)]
    return [(b.input(key, FLOAT32, shape), b.input(value, FLOAT32, shape)) for key, value in names]


def present_outputs(
    b: ModelWriter, presents: list[list[Value]], kv_heads: int, head_size: int
) -> None:
    """Make the keys and values of each layer, including those of the past, outputs."""
    dims = ("batch", kv_heads, "total", head_size)
    for i, (key, value) in enumerate(presents):
        b.output(f"present.{i}.key", key, dims)
        b.output(f"present.{i}.value", value, dims)


def output_logits(b: ModelWriter, logits: Value) -> None:
    role = "output" if "output.weight" in b.store else "token_embd"
    b.output("logits", logits, ("batch", "rows", b.store.shape(f"{role}.weight")[0]))


def head(b: ModelWriter, x: Value, width: int, tied: bool) -> Value:
    """Return the scores of all tokens: by a separate matrix, or by that of the embedding."""
    role = "token_embd" if tied else "output"
    return b.linear(x, role, width, b.store.shape(f"{role}.weight")[0])


def rotary_angles(b: ModelWriter, positions: Value, rotary: Rotary) -> tuple[Value, Value]:
    """Return cosines and sines [batch, rows, pairs] of the angles at positions [batch, rows]."""
    frequencies = b.constant(rotary.frequencies)
    if rotary.long_frequencies is not None:
        b.metadata[LONG_FROM] = str(rotary.original)
        last = b.op("ReduceMax", positions, keepdims=0)
        is_long = b.op("GreaterOrEqual", last, rotary.original)
        frequencies = b.op("Where", is_long, b.constant(rotary.long_frequencies), frequencies)
    real = b.op("Cast", positions, to=element_number("float32"))
    angles = b.op("Mul", b.op("Unsqueeze", real, (2,)), frequencies)
    cosines, sines = b.op("Cos", angles), b.op("Sin", angles)
    if rotary.magnitude != 1:
        magnitude = b.constant(rotary.magnitude)
        cosines, sines = b.op("Mul", cosines, magnitude), b.op("Mul", sines, magnitude)
    return cosines, sines


def _norm(b: ModelWriter, x: Value, role: str, config: DecoderConfiguration) -> Value:
    return b.norm(x, role, config.width, config.epsilon, config.norm_offset)


def _added(b: ModelWriter, x: Value, y: Value, norm: str, config: DecoderConfiguration) -> Value:
    """Return ``x + y``, or ``x + norm(y)``."""
    return b.op("Add", x, _norm(b, y, norm, config) if config.sandwich else y)


def _attention(
    b: ModelWriter,
    x: Value,
    layer: int,
    config: DecoderConfiguration,
    angles: Angles,
    past: tuple[Value, Value],
) -> tuple[Value, list[Value]]:
    b.section(f"layers.{layer}.attention")
    x = _norm(b, x, f"blk.{layer}.attn_norm", config)
    q, k, v = _queries_keys_values(b, x, layer, config)
    if config.qk_norm:
        q = _head_norm(b, q, f"blk.{layer}.attn_q_norm", config)
        k = _head_norm(b, k, f"blk.{layer}.attn_k_norm", config)
    rotary = config.rotaries[layer]
    if rotary is not None:
        turning = 0 if rotary.size == config.head_size else rotary.size
        q, k = (
            b.op(
                "RotaryEmbedding",
                *(heads, *angles[id(rotary)]),
                num_heads=count,
                interleaved=int(config.interleaved),
                rotary_embedding_dim=turning,
            )
            for heads, count in ((q, config.heads), (k, config.kv_heads))
        )
    settings: dict[str, int | float] = {
        "q_num_heads": config.heads,
        "kv_num_heads": config.kv_heads,
        "is_causal": 1,
        "scale": config.scale,
    }
    if config.softcap:
        settings["softcap"] = config.softcap
    if config.windows[layer]:
        settings["left_window_size"] = config.windows[layer] - 1  # keys before that of the query
    y, *present = b.several("Attention", [q, k, v, None, *past], 3, settings)
    width = config.heads * config.head_size
    return b.linear(y, f"blk.{layer}.attn_output", width, config.width), present


def _queries_keys_values(
    b: ModelWriter, x: Value, layer: int, config: DecoderConfiguration
) -> list[Value]:
    sizes = [n * config.head_size for n in (config.heads, config.kv_heads, config.kv_heads)]
    if config.fused:
        return b.split(b.linear(x, f"blk.{layer}.attn_qkv", config.width, sum(sizes)), sizes)
    roles = [f"blk.{layer}.attn_{name}" for name in "qkv"]
    for role, size in zip(roles, sizes, strict=True):
        if config.qkv_bias:
            b.store.get(f"{role}.bias", (size,))  # raises if it is missing
    return [b.linear(x, role, config.width, size) for role, size in zip(roles, sizes, strict=True)]


def _head_norm(b: ModelWriter, x: Value, role: str, config: DecoderConfiguration) -> Value:
    """Divide each head of ``x`` [batch, rows, heads * size] by its root mean square."""
    heads = b.op("Reshape", x, (0, 0, -1, config.head_size))
    y = b.norm(heads, role, config.head_size, config.epsilon, config.norm_offset)
    return b.op("Reshape", y, (0, 0, -1))


def _feed_forward(b: ModelWriter, x: Value, layer: str, config: DecoderConfiguration) -> Value:
    width, inner = config.width, config.inner
    if config.fused:
        gate, up = b.split(b.linear(x, f"{layer}.ffn_up", width, 2 * inner), [inner, inner])
    else:
        gate, up = (b.linear(x, f"{layer}.ffn_{name}", width, inner) for name in ("gate", "up"))
    y = b.op("Mul", activated(b, gate, config.activation), up)
    return b.linear(y, f"{layer}.ffn_down", inner, width)


def activated(b: ModelWriter, x: Value, activation: str) -> Value:
    """Apply an activation of ``configuration.ACTIVATIONS``."""
    if activation == "silu":
        return b.op("Swish", x, alpha=1.0)
    if activation == "relu":
        return b.op("Relu", x)
    return b.op("Gelu", x, approximate="tanh" if activation == "gelu_tanh" else "none")
