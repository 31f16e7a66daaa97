"""The sizes of a decoder and its variations, as read from a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.core.errors import InvalidModel
from penstock.core.records import NamedTuple, dataclass
from penstock.frontends.weights.rotary import Rotary, rotary_of
from penstock.frontends.weights.settings import Settings, unsupported

MOST_LAYERS = 10_000
_MOST_SIZE = 1 << 16
EXPORT = "export the model with optimum-cli export onnx"


class Experts(NamedTuple):
    """Mixtures of experts: each token passes ``used`` of ``total`` experts, with ``inner`` features
    each; ``normalized``: their shares add up to 1; ``layers`` are the layers that have experts."""

    total: int
    used: int
    inner: int
    normalized: bool
    layers: frozenset[int]


@dataclass(frozen=True, eq=False)
class DecoderConfiguration:
    """``rotaries`` and ``windows`` are by layer: None for a layer without positions, 0 for one that
    sees all keys. ``norm_offset`` is added to weights of norms. ``sandwich``: norms also follow
    attention and feed-forward. ``fused``: one product computes queries, keys and values, and
    one gate and up. ``interleaved``: adjacent features form a pair, not features of two halves."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    scale: float
    rotaries: Sequence[Rotary | None]
    windows: Sequence[int]
    activation: str = "silu"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    softcap: float = 0.0
    final_softcap: float = 0.0
    sandwich: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    fused: bool = False
    interleaved: bool = False
    tied: bool = False
    experts: Experts | None = None


class DecoderFamily(NamedTuple):
    """The variations of decoders of one type. ``defaults``: values of settings that a configuration
    may omit."""

    qk_norm: bool = False
    qkv_bias: bool = False
    gemma: bool = False
    fused: bool = False
    defaults: Mapping[str, object] = {}


_GEMMA: Mapping[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
FAMILIES: Mapping[str, DecoderFamily] = {
    "llama": DecoderFamily(),
    "mistral": DecoderFamily(defaults={"sliding_window": 4096, "num_key_value_heads": 8}),
    "qwen2": DecoderFamily(qkv_bias=True, defaults={"sliding_window": 4096}),
    "qwen3": DecoderFamily(qk_norm=True, defaults={"sliding_window": 4096, "head_dim": 128}),
    "qwen3_moe": DecoderFamily(qk_norm=True, defaults={"sliding_window": 4096}),
    "gemma2": DecoderFamily(gemma=True, defaults={**_GEMMA, **_CAPS}),
    "gemma3_text": DecoderFamily(
        gemma=True, qk_norm=True, defaults={**_GEMMA, "rope_theta": 1_000_000.0}
    ),
    "phi3": DecoderFamily(fused=True, defaults={"rms_norm_eps": 1e-5}),
    "smollm3": DecoderFamily(defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True}),
}
"""families by ``model_type``"""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""the activations of graphs by their names in configurations"""


def decoder_configuration(settings: Settings, model_type: str) -> DecoderConfiguration:
    """Return the configuration of a decoder of ``FAMILIES``. ``InvalidModel``, ``Unsupported``."""
    family = FAMILIES[model_type]
    settings = Settings(settings.label, settings.values, settings.prefix, family.defaults)
    layers, heads = settings.count("num_hidden_layers"), settings.count("num_attention_heads")
    if layers > MOST_LAYERS:
        raise settings.wrong("num_hidden_layers", layers, f"a number up to {MOST_LAYERS}")
    width = settings.count("hidden_size")
    head_size = checked_size(
        settings, "head_dim", settings.optional_count("head_dim") or width // heads
    )
    scale = head_size**-0.5
    if family.gemma:
        scale = settings.positive("query_pre_attn_scalar") ** -0.5
        if settings.flag("use_bidirectional_attention"):
            feature = "attention to later positions (use_bidirectional_attention)"
            raise unsupported(feature, EXPORT, settings.label)
    return DecoderConfiguration(
        layers,
        width,
        settings.count("intermediate_size"),
        heads,
        settings.optional_count("num_key_value_heads") or heads,
        head_size,
        settings.number("rms_norm_eps", 1e-6),
        scale,
        _rotaries(settings, model_type, layers, head_size),
        _windows(settings, model_type, layers),
        _activation(settings, family),
        norm_offset=float(family.gemma),
        embedding_scale=width**0.5 if family.gemma else 1.0,
        softcap=settings.number("attn_logit_softcapping", 0.0) if model_type == "gemma2" else 0.0,
        final_softcap=settings.number("final_logit_softcapping", 0.0) if family.gemma else 0.0,
        sandwich=family.gemma,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or settings.flag("attention_bias"),
        fused=family.fused,
        tied=settings.flag("tie_word_embeddings"),
        experts=_experts(settings, layers) if model_type == "qwen3_moe" else None,
    )


def checked_size(settings: Settings, key: str, size: int) -> int:
    """Return the size of a head. Raises ``InvalidModel`` for a size that no file has."""
    if not 0 < size <= _MOST_SIZE:
        raise settings.wrong(key, size, f"a size of heads from 1 to {_MOST_SIZE}")
    return size


def _activation(settings: Settings, family: DecoderFamily) -> str:
    if family.gemma:
        return activation_of(settings, "hidden_activation", "gelu_pytorch_tanh")
    return activation_of(settings, "hidden_act", "silu")


def activation_of(settings: Settings, key: str, default: str) -> str:
    name = settings.get(key) or default
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise unsupported(
            f"activation {name!r:.40}", f"{', '.join(ACTIVATIONS)} are; {EXPORT}", settings.label
        )
    return ACTIVATIONS[name]


def _experts(settings: Settings, layers: int) -> Experts:
    key = "num_experts" if settings.get("num_experts") is not None else "num_local_experts"
    count, used = settings.count(key), settings.count("num_experts_per_tok", 8)
    if used > count:
        raise settings.wrong("num_experts_per_tok", used, f"at most {count}")
    step = settings.count("decoder_sparse_step", 1)
    dense = settings.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise settings.wrong("mlp_only_layers", dense, "a list of layers")
    chosen = frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    inner = settings.count("moe_intermediate_size")
    if activation_of(settings, "hidden_act", "silu") != "silu":
        feature = f"hidden_act {settings.get('hidden_act')!r:.40} of experts"
        raise unsupported(feature, f"silu is; {EXPORT}", settings.label)
    return Experts(count, used, inner, settings.flag("norm_topk_prob"), chosen)


def _windows(settings: Settings, model_type: str, layers: int) -> list[int]:
    """Return how many keys queries of each layer see at most, 0 for all."""
    window = settings.optional_count("sliding_window")
    if not window:
        return [0] * layers
    if model_type in ("mistral", "phi3"):
        return [window] * layers
    if not model_type.startswith("gemma") and not settings.flag("use_sliding_window"):
        return [0] * layers
    if model_type == "qwen3_moe":  # its max_window_layers is not read
        return [window] * layers
    types = layer_types(settings, model_type, layers)
    return [window if kind == "sliding_attention" else 0 for kind in types]


def layer_types(settings: Settings, model_type: str, layers: int) -> list[object]:
    """Return the type of attention of each layer."""
    types = settings.elements("layer_types", layers)
    if types is not None:
        unknown = [x for x in types if x not in ("sliding_attention", "full_attention")]
        if unknown:
            raise unsupported(f"layer type {unknown[0]!r:.40}", EXPORT, settings.label)
        return [*types]
    if model_type.startswith("gemma"):
        period = 2 if model_type == "gemma2" else settings.count("sliding_window_pattern", 6)
        sliding = [bool((i + 1) % period) for i in range(layers)]
    elif model_type == "smollm3":
        sliding = [not turns for turns in _turning(settings, layers)]
    else:
        first = settings.number("max_window_layers", 28)
        sliding = [i >= first for i in range(layers)]
    return ["sliding_attention" if x else "full_attention" for x in sliding]


def _turning(settings: Settings, layers: int) -> list[bool]:
    """Return whether each layer has a rotary embedding, for SmolLM3."""
    flags = settings.elements("no_rope_layers", layers)
    step = settings.count("no_rope_layer_interval", 4)
    return [bool((i + 1) % step) if flags is None else bool(flags[i]) for i in range(layers)]


def _rotaries(
    settings: Settings, model_type: str, layers: int, head_size: int
) -> list[Rotary | None]:
    longest = settings.count("max_position_embeddings", 32768)
    given = settings.inner("rope_parameters") or settings.inner("rope_scaling")
    values: Mapping[str, object] = {} if given is None else given.values
    both = {"full_attention", "sliding_attention"} & values.keys()
    common = {key: settings.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    if model_type == "phi3":
        # Older configurations have it beside the scaling.
        original = settings.get("original_max_position_embeddings")
        common["original_max_position_embeddings"] = original

    def rotary(own: object, more: Mapping[str, object]) -> Rotary:
        if not isinstance(own, Mapping):
            raise settings.wrong("rope_parameters", own, "a group of settings")
        known = {key: x for key, x in (common | {**more}).items() if x is not None}
        parameters = {**known, **{key: x for key, x in own.items() if x is not None}}
        share = parameters.get("partial_rotary_factor", 1.0)
        if share != 1 and model_type != "phi3":
            feature = f"rotation of a part of each head (partial_rotary_factor {share!r:.40})"
            raise unsupported(feature, EXPORT, settings.label)
        try:
            if not isinstance(share, int | float) or not 0 < share <= 1:
                raise ValueError(f"its partial_rotary_factor is {share!r:.40}")
            return rotary_of(parameters, int(head_size * share), longest)
        except (ArithmeticError, ValueError) as error:
            raise InvalidModel(f"{settings.label}: {error}; export the model to ONNX") from error

    if model_type == "gemma3_text":
        local = {"rope_theta": settings.number("rope_local_base_freq", 10_000.0)}
        full = rotary(values.get("full_attention", {}) if both else values, {})
        sliding = rotary(values.get("sliding_attention", {}), local)
        types = layer_types(settings, model_type, layers)
        return [sliding if kind == "sliding_attention" else full for kind in types]
    every = rotary(values, {})
    if model_type == "smollm3":
        return [every if turns else None for turns in _turning(settings, layers)]
    return [every] * layers
