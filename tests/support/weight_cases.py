"""Small models of weights: checkpoints and GGUF files with weights that follow from their names.

``tests/models/make_weight_cases.py`` recorded what ``transformers`` gives for them, in
``tests/models/weights.zip``, whose entries are a ``WeightCase`` each.
"""

from __future__ import annotations

import base64
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.artifact.tensor_file import save_arrays
from penstock.frontends.weights.block_codes import FORMATS
from penstock.frontends.weights.names import file_names

FILE = Path(__file__).parents[1] / "models" / "weights.zip"
BLOCKS = FILE.with_name("gguf_blocks.json")


def weights_of(shapes: Mapping[str, Sequence[int]], *, offset: bool) -> dict[str, np.ndarray]:
    """Random weights, for each tensor the same wherever they are made. Those of norms are about 1,
    or with ``offset`` about 0."""
    weights = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        scale = 0.2 if len(shape) > 1 else 0.3
        is_norm = ("norm" in name.lower() or ".ln_" in name) and name.endswith("weight")
        centre = float(is_norm and not offset)
        weights[name] = (rng.standard_normal(shape) * scale + centre).astype(np.float32)
    return weights


def random_blocks(name: str, rows: int, columns: int) -> np.ndarray:
    """Bytes of a matrix of blocks, whose scales are small numbers."""
    size, block, *_ = FORMATS[name]
    rng = np.random.default_rng(columns)
    data = rng.integers(0, 256, rows * columns // size * block.itemsize, dtype=np.uint8)
    blocks = data.view(block)
    for factor in [name for name in ("scale", "least") if name in (block.names or ())]:
        shares = 2.0 ** -rng.integers(7, 12, len(blocks))
        blocks[factor] = (shares / (32 if size == 256 else 1)).astype(np.float16)
    return data


@dataclass(frozen=True)
class WeightCase:
    """``config`` is the ``config.json``; ``inputs`` what a run was fed, ``expected`` its result."""

    config: dict[str, object]
    shapes: dict[str, list[int]]
    inputs: dict[str, np.ndarray]
    expected: np.ndarray

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def is_encoder(self) -> bool:
        return "attention_mask" in self.inputs

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return weights_of(self.shapes, offset=self.model_type.startswith("gemma"))

    def write(self, folder: Path) -> Path:
        """The folder of a checkpoint."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_arrays(folder / "model.safetensors", self.weights, {"format": "pt"})
        return folder

    def gguf(self) -> GgufWriter:
        """The model as llama.cpp converts it."""
        return _converted(self)


def cases() -> dict[str, WeightCase]:
    """All recorded cases, by name."""
    with zipfile.ZipFile(FILE) as archive:
        return {name: _case(json.loads(archive.read(name))) for name in archive.namelist()}


def _case(content: Mapping[str, object]) -> WeightCase:
    inputs = {name: np.array(x, np.int64) for name, x in content["inputs"].items()}  # type: ignore
    expected = decoded_array(content["expected"])  # type: ignore[arg-type]
    return WeightCase(content["config"], content["shapes"], inputs, expected)  # type: ignore


def encoded_array(array: np.ndarray) -> dict[str, object]:
    text = base64.b64encode(array.astype("<f4").tobytes()).decode()
    return {"shape": list(array.shape), "elements": text}


def decoded_array(content: Mapping[str, object]) -> np.ndarray:
    data = base64.b64decode(str(content["elements"]))
    return np.frombuffer(data, "<f4").reshape(content["shape"])  # type: ignore[arg-type]


# GGUF.

TYPES = {
    "F32": 0,
    "F16": 1,
    "BF16": 30,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
}


@dataclass
class GgufWriter:
    """A file in the making: values by key, and tensors as (shape, type, bytes) by name."""

    metadata: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], str, bytes]] = field(default_factory=dict)

    def add(self, name: str, array: np.ndarray, kind: str = "F32") -> None:
        self.tensors[name] = array.shape, kind, np.ascontiguousarray(array).tobytes()

    def add_blocks(self, name: str, shape: tuple[int, ...], kind: str, data: bytes) -> None:
        self.tensors[name] = shape, kind, data

    def bytes(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        for key, value in self.metadata.items():
            head += _text(key) + _value(value)
        body = b""
        for name, (shape, kind, data) in self.tensors.items():
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            head += _text(name) + dims + struct.pack("<IQ", TYPES[kind], len(body))
            body += data + bytes(-len(data) % 32)
        return head + bytes(-len(head) % 32) + body


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    """The type of a value, and the value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    assert isinstance(value, list)
    elements = [_value(element) for element in value]
    return (
        struct.pack("<I", 9)
        + elements[0][:4]
        + struct.pack("<Q", len(elements))
        + b"".join([element[4:] for element in elements])
    )


ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "mistral": "llama"}
_KEYS = {
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "n_layer": "block_count",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_ROLES = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "attn_q_norm"),
    *("attn_k_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp"),
    *("post_attention_norm", "post_ffw_norm"),
)


def _converted(case: WeightCase) -> GgufWriter:
    config, weights = case.config, case.weights
    architecture = ARCHITECTURES.get(case.model_type, case.model_type)
    writer = GgufWriter({"general.architecture": architecture})
    for key, own in _KEYS.items():
        if config.get(key) is not None:
            writer.metadata[f"{architecture}.{own}"] = config[key]
    rotary = config.get("rope_parameters") or {}
    theta = rotary.get("full_attention", rotary).get("rope_theta")  # type: ignore[attr-defined]
    if theta is not None:
        writer.metadata[f"{architecture}.rope.freq_base"] = float(theta)
    name_of = file_names(case.model_type, weights)
    layers = int(config.get("num_hidden_layers") or config["n_layer"])  # type: ignore[call-overload]
    roles = ["token_embd", "output_norm", "output", "position_embd"]
    roles += [f"blk.{i}.{role}" for i in range(layers) for role in _ROLES]
    for name in [f"{role}.{kind}" for role in roles for kind in ("weight", "bias")]:
        if name_of(name) in weights:
            writer.add(name, _as_converted(name, weights[name_of(name)], case, architecture))
    for i in range(layers if architecture == "qwen3moe" else 0):
        for role in ("gate", "up", "down"):
            of_experts = [
                weights[f"model.layers.{i}.mlp.experts.{e}.{role}_proj.weight"]
                for e in range(int(config["num_local_experts"]))  # type: ignore[call-overload]
            ]
            writer.add(f"blk.{i}.ffn_{role}_exps.weight", np.stack(of_experts))
    return writer


def _as_converted(name: str, x: np.ndarray, case: WeightCase, architecture: str) -> np.ndarray:
    if architecture == "gpt2" and x.ndim == 2 and name.startswith("blk"):
        return x.T
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return x + 1
    if architecture in ("llama", "smollm3") and ("attn_q." in name or "attn_k." in name):
        key = "num_attention_heads" if "attn_q." in name else "num_key_value_heads"
        return _interleaved(x, int(case.config[key]))  # type: ignore[call-overload]
    return x


def _interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads in the order in which those that turn together are neighbours."""
    rows = len(x)
    return x.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)
