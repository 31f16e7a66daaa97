"""The model of a GGUF file, whose metadata contain its configuration and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock.core.errors import InvalidModel, quoted
from penstock.core.limits import Limits
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32
from penstock.frontends.common.weight_file import ConstantBudget
from penstock.frontends.weights.configuration import (
    EXPORT,
    MOST_LAYERS,
    DecoderConfiguration,
    Experts,
    checked_size,
)
from penstock.frontends.weights.decoder import write_decoder
from penstock.frontends.weights.gguf import read_gguf
from penstock.frontends.weights.gguf_metadata import metadata_texts
from penstock.frontends.weights.gpt2 import Gpt2Configuration, write_gpt2
from penstock.frontends.weights.rotary import Rotary, rotary_of
from penstock.frontends.weights.settings import Settings, unsupported
from penstock.frontends.weights.tensors import TensorStore
from penstock.ir.graph import Model


class _Architecture(NamedTuple):
    """Variations of decoders. ``period``: layers whose number is one below a multiple of it see all
    keys, the others those of a window. ``turning``: the same, for layers without rotary
    embedding."""

    qk_norm: bool = False
    qkv_bias: bool = False
    gemma: bool = False
    fused: bool = False
    interleaved: bool = False
    period: int = 0
    turning: int = 0
    large: int = 0  # the number of layers of the size whose scores have another factor


ARCHITECTURES = {
    # Rows of queries and keys are ordered so that adjacent features form a pair.
    "llama": _Architecture(interleaved=True),
    "smollm3": _Architecture(interleaved=True, turning=4),
    "qwen2": _Architecture(qkv_bias=True),
    "qwen3": _Architecture(qk_norm=True),
    "qwen3moe": _Architecture(qk_norm=True),
    "gemma2": _Architecture(gemma=True, period=2, large=46),
    "gemma3": _Architecture(gemma=True, qk_norm=True, period=6, large=62),
    "phi3": _Architecture(fused=True, period=1 << 30),
}
"""architectures by ``general.architecture``"""
# Parameters of scalings, by the ends of their keys.
_OF_SCALINGS = {"factor": "factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}


def load_gguf(source: str | bytes, limits: Limits, map_weights: bool) -> Model:
    """Return the model of a GGUF file. Raises ``InvalidModel``, ``Unsupported``."""
    label = "the GGUF file" if isinstance(source, bytes) else os.path.basename(source)
    file = read_gguf(source, label, map_weights)
    general = Settings(label, file.metadata)
    architecture = general.text("general.architecture")
    if general.get("split.count") not in (None, 0, 1):
        raise unsupported(
            "one of several files of a model", "join them with llama-gguf-split --merge", label
        )
    store = TensorStore(label, file.tensors, ConstantBudget(limits))
    settings = Settings(label, file.metadata, f"{architecture}.")
    if architecture == "gpt2":
        b = write_gpt2(store, _gpt2(settings))
    elif architecture in ARCHITECTURES:
        b = write_decoder(store, _decoder(settings, ARCHITECTURES[architecture], store))
    else:
        known = ", ".join([*ARCHITECTURES, "gpt2"])
        advice = f"graphs of {known} are made from weights; {EXPORT}"
        raise unsupported(f"architecture {quoted(architecture)}", advice, label)
    store.check_all_read()
    return b.model(None if isinstance(source, bytes) else source, metadata_texts(file.metadata))


def _gpt2(settings: Settings) -> Gpt2Configuration:
    width, heads = settings.count("embedding_length"), settings.count("attention.head_count")
    if width % heads:
        raise settings.wrong("attention.head_count", heads, f"a divisor of {width}")
    return Gpt2Configuration(
        _layers(settings),
        width,
        settings.count("feed_forward_length", 4 * width),
        heads,
        settings.number("attention.layer_norm_epsilon", 1e-5),
        (width // heads) ** -0.5,
        transposed=True,
    )


def _layers(settings: Settings) -> int:
    layers = settings.count("block_count")
    if layers > MOST_LAYERS:
        raise settings.wrong("block_count", layers, f"a number up to {MOST_LAYERS}")
    return layers


def _decoder(
    settings: Settings, architecture: _Architecture, store: TensorStore
) -> DecoderConfiguration:
    layers, width = _layers(settings), settings.count("embedding_length")
    heads = settings.count("attention.head_count")
    key = "attention.key_length"
    head_size = checked_size(settings, key, settings.optional_count(key) or width // heads)
    if settings.count("attention.value_length", head_size) != head_size:
        raise settings.wrong("attention.value_length", None, f"{head_size}")
    scale = head_size**-0.5
    if architecture.large == layers:
        scale = (width / heads) ** -0.5
    gemma = architecture.gemma
    return DecoderConfiguration(
        layers,
        width,
        settings.count("feed_forward_length", width),
        heads,
        settings.optional_count("attention.head_count_kv") or heads,
        head_size,
        settings.number("attention.layer_norm_rms_epsilon", 1e-6),
        settings.number("attention.scale", 0.0) or scale,
        _rotaries(settings, architecture, head_size, store),
        _windows(settings, architecture, layers),
        "gelu_tanh" if gemma else "silu",
        embedding_scale=width**0.5 if gemma else 1.0,  # 1 is added to weights of norms already
        softcap=settings.number("attn_logit_softcapping", 0.0),
        final_softcap=settings.number("final_logit_softcapping", 0.0),
        sandwich=gemma,
        qk_norm=architecture.qk_norm,
        qkv_bias=architecture.qkv_bias,
        fused=architecture.fused,
        interleaved=architecture.interleaved,
        tied="output.weight" not in store,
        experts=_experts(settings, layers),
    )


def _experts(settings: Settings, layers: int) -> Experts | None:
    count = settings.optional_count("expert_count")
    if not count:
        return None
    used = settings.count("expert_used_count")
    if used > count:
        raise settings.wrong("expert_used_count", used, f"at most {count}")
    key = "expert_feed_forward_length"
    if settings.get(key) is None:  # of Mixtral, whose layers have nothing but experts
        key = "feed_forward_length"
    return Experts(count, used, settings.count(key), True, frozenset(range(layers)))


def _windows(settings: Settings, architecture: _Architecture, layers: int) -> list[int]:
    window = settings.optional_count("attention.sliding_window")
    local = _local(settings, architecture, layers)
    return [window if is_local else 0 for is_local in local]


def _local(settings: Settings, architecture: _Architecture, layers: int) -> list[bool]:
    """Return which layers see the keys of a window only, if there is one."""
    period = architecture.period
    if not period:
        return [False] * layers
    key = "attention.sliding_window_pattern"
    if isinstance(settings.get(key), list):
        return [bool(x) for x in settings.elements(key, layers) or ()]
    if architecture.gemma:
        period = settings.count(key, period)
    return [bool((i + 1) % period) for i in range(layers)]


def _rotaries(
    settings: Settings, architecture: _Architecture, head_size: int, store: TensorStore
) -> Sequence[Rotary | None]:
    layers = _layers(settings)
    size = settings.count("rope.dimension_count", head_size)
    if size > head_size:
        raise settings.wrong("rope.dimension_count", size, f"at most {head_size}")
    theta = settings.number("rope.freq_base", 10_000.0)
    longest = settings.count("context_length", 32768)
    parameters: dict[str, float | str | Sequence[float] | None] = {"rope_theta": theta}
    factor = settings.get("rope.scaling.factor")
    kind = settings.get("rope.scaling.type") or ("none" if factor is None else "linear")
    if isinstance(kind, str) and kind != "none":
        original = settings.count("rope.scaling.original_context_length", longest)
        parameters |= {"rope_type": kind, "original_max_position_embeddings": original}
        for name, key in _OF_SCALINGS.items():
            if settings.get(f"rope.scaling.{key}") is not None:
                parameters[name] = settings.number(f"rope.scaling.{key}")
    try:
        if "rope_factors_long.weight" in store:  # of Phi-3
            original = settings.count("rope.scaling.original_context_length", longest)
            parameters |= {"rope_type": "longrope", "original_max_position_embeddings": original}
            for key in ("long", "short"):
                factors = store.get(f"rope_factors_{key}.weight", (size // 2,)).real()
                parameters[f"{key}_factor"] = factors.tolist()
            if settings.get("rope.scaling.attn_factor") is not None:
                parameters["attention_factor"] = settings.number("rope.scaling.attn_factor")
        every = rotary_of(parameters, size, longest)
        if "rope_freqs.weight" in store:  # of Llama 3
            divisors = store.get("rope_freqs.weight", (size // 2,)).real()
            every = Rotary((every.frequencies / divisors).astype(FLOAT32))
        if architecture.gemma and architecture.qk_norm:  # of Gemma 3, layers with a window
            local = {"rope_theta": settings.number("rope.freq_base_swa", 10_000.0)}
            sliding = rotary_of(local, size, longest)
            is_local = _local(settings, architecture, layers)
            return [sliding if own else every for own in is_local]
    except (ArithmeticError, ValueError) as error:
        raise InvalidModel(f"{settings.label}: {error}; convert the model anew") from error
    turning = architecture.turning
    return [every if not turning or (i + 1) % turning else None for i in range(layers)]
