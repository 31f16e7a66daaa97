"""The graph of GPT-2: learned positions, LayerNormalization, and one layer of Gelu.

The interface is that of ``decoder``. Checkpoints have matrices as [inputs, outputs], GGUF files as
[outputs, inputs].
"""

from __future__ import annotations

from penstock.core.records import NamedTuple
from penstock.core.types import INT64
from penstock.frontends.weights.configuration import MOST_LAYERS, activation_of
from penstock.frontends.weights.decoder import (
    activated,
    head,
    output_logits,
    past_inputs,
    present_outputs,
)
from penstock.frontends.weights.settings import Settings
from penstock.frontends.weights.tensors import TensorStore
from penstock.frontends.weights.writer import ModelWriter
from penstock.ir.graph import Value


class Gpt2Configuration(NamedTuple):
    layers: int
    width: int
    inner: int
    heads: int
    epsilon: float
    scale: float
    activation: str = "gelu_tanh"
    transposed: bool = False


def gpt2_configuration(settings: Settings) -> Gpt2Configuration:
    """Return the configuration in a ``config.json``."""
    layers, width, heads = (settings.count(key) for key in ("n_layer", "n_embd", "n_head"))
    if layers > MOST_LAYERS or width % heads:
        raise settings.wrong("n_head", heads, f"a divisor of n_embd = {width}")
    scaled = settings.flag("scale_attn_weights", True)
    if settings.flag("scale_attn_by_inverse_layer_idx"):
        raise settings.wrong("scale_attn_by_inverse_layer_idx", True, "false")
    return Gpt2Configuration(
        layers,
        width,
        settings.optional_count("n_inner") or 4 * width,
        heads,
        settings.number("layer_norm_epsilon", 1e-5),
        (width // heads) ** -0.5 if scaled else 1.0,
        activation_of(settings, "activation_function", "gelu_new"),
    )


def write_gpt2(store: TensorStore, config: Gpt2Configuration) -> ModelWriter:
    """Write the graph. Raises ``InvalidModel`` for weights that do not fit it."""
    b = ModelWriter(store)
    ids = b.input("input_ids", INT64, ("batch", "rows"))
    positions = b.input("position_ids", INT64, ("batch", "rows"))
    caches = past_inputs(b, config.layers, config.heads, config.width // config.heads)
    b.section("embedding")
    x = b.embedding(ids, "token_embd", config.width)
    x = b.op("Add", x, b.embedding(positions, "position_embd", config.width))
    presents = []
    for i in range(config.layers):
        y, present = _attention(b, x, i, config, caches[i])
        x = b.op("Add", x, y)
        presents.append(present)
        b.section(f"layers.{i}.feed_forward")
        x = b.op("Add", x, _feed_forward(b, x, f"blk.{i}", config))
    b.section("head")
    x = b.layer_norm(x, "output_norm", config.width, config.epsilon)
    output_logits(b, head(b, x, config.width, tied="output.weight" not in b.store))
    present_outputs(b, presents, config.heads, config.width // config.heads)
    return b


def _attention(
    b: ModelWriter, x: Value, layer: int, config: Gpt2Configuration, past: tuple[Value, Value]
) -> tuple[Value, list[Value]]:
    b.section(f"layers.{layer}.attention")
    width, name = config.width, f"blk.{layer}"
    x = b.layer_norm(x, f"{name}.attn_norm", width, config.epsilon)
    packed = b.linear(x, f"{name}.attn_qkv", width, 3 * width, transposed=config.transposed)
    settings: dict[str, int | float] = {
        "q_num_heads": config.heads,
        "kv_num_heads": config.heads,
        "is_causal": 1,
        "scale": config.scale,
    }
    parts = [*b.split(packed, [width] * 3), None, *past]
    y, *present = b.several("Attention", parts, 3, settings)
    return b.linear(y, f"{name}.attn_output", width, width, transposed=config.transposed), present


def _feed_forward(b: ModelWriter, x: Value, name: str, config: Gpt2Configuration) -> Value:
    width, inner, transposed = config.width, config.inner, config.transposed
    x = b.layer_norm(x, f"{name}.ffn_norm", width, config.epsilon)
    x = b.linear(x, f"{name}.ffn_up", width, inner, transposed=transposed)
    x = activated(b, x, config.activation)
    return b.linear(x, f"{name}.ffn_down", inner, width, transposed=transposed)
