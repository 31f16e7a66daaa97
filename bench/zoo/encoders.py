"""Encoders of texts for the tests, ``tests/models/encoders.zip``: of transformers, with random weights,
by both of torch's exporters, with batch and length open.

Each is exported as it is, or with what sentence-transformers puts behind it: the mean of the rows
that the mask has, or the first row. What they should answer is not in the archive: the tests ask ONNX
Runtime. To write it anew: ``python -m bench.zoo.encoders``.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.zoo import torch_export, transformers_models

if TYPE_CHECKING:
    import torch

FILE = Path(__file__).parents[2] / "tests" / "models" / "encoders.zip"
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "dim": 16,
    "intermediate_size": 32, "max_position_embeddings": 40, "d_model": 16, "n_layers": 2, "d_kv": 8,
    "n_heads": 2, "hidden_dim": 32, "num_layers": 2, "num_heads": 2, "d_ff": 32, "embedding_size": 16,
    "head_dim": 8,
}  # fmt: skip
TEXT = "input_ids", "attention_mask"
TYPED = *TEXT, "token_type_ids"

# The family, the model's class after it, inputs, what is behind it, implementations of attention,
# exporters, and what its configuration has beside SIZES.
_BOTH, _FORMS = ("script", "dynamo"), ("", "eager")
_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
# As DeBERTa v3 has it.
_BUCKETS = {
    **_RELATIVE, "share_att_key": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm",
    "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
_LOCAL = {"global_attn_every_n_layers": 2, "local_attention": 8}
ENCODERS: list[
    tuple[str, str, Sequence[str], str, Sequence[str], Sequence[str], dict[str, Any]]
] = [
    ("Bert", "Model", TYPED, "", _FORMS, _BOTH, {}),
    ("Bert", "Model", TYPED, "mean", _FORMS, _BOTH, {}),
    ("Bert", "Model", TYPED, "first", _FORMS[:1], _BOTH, {}),
    ("Bert", "ForSequenceClassification", TYPED, "", _FORMS[:1], _BOTH[:1], {}),
    ("Bert", "ForTokenClassification", TEXT, "", _FORMS[:1], _BOTH[1:], {}),
    ("Roberta", "Model", TEXT, "mean", _FORMS[:1], _BOTH, {}),
    ("DistilBert", "Model", TEXT, "mean", _FORMS, _BOTH, {}),
    ("MPNet", "Model", TEXT, "mean", _FORMS[:1], _BOTH, {}),
    ("Albert", "Model", TYPED, "", _FORMS[:1], _BOTH[:1], {}),
    ("ModernBert", "Model", TEXT, "mean", _FORMS, _BOTH, _LOCAL),
    ("T5", "EncoderModel", TEXT, "mean", _FORMS[:1], _BOTH[:1], {}),
    ("CLIPText", "Model", TEXT, "", _FORMS[:1], _BOTH, {}),
    ("RoFormer", "Model", TYPED, "mean", _FORMS[:1], _BOTH, {}),
    ("SqueezeBert", "Model", TYPED, "mean", _FORMS[:1], _BOTH[:1], {}),
    ("NomicBert", "Model", TYPED, "mean", _FORMS[:1], _BOTH, {}),
    ("Qwen3", "Model", TEXT, "", _FORMS[:1], _BOTH, {}),
    ("DebertaV2", "Model", TEXT, "mean", _FORMS[:1], _BOTH[1:], _RELATIVE),
    ("ConvBert", "Model", TYPED, "", _FORMS[:1], _BOTH[1:], {}),
    ("DebertaV2", "Model", TEXT, "", _FORMS[:1], _BOTH, _BUCKETS),
    ("Deberta", "Model", TEXT, "mean", _FORMS[:1], _BOTH, {**_RELATIVE, "talking_head": True}),
    ("Deberta", "Model", TYPED, "first", _FORMS[:1], _BOTH[1:], _RELATIVE),
]


def encoders() -> Iterator[tuple[str, bytes]]:
    """Names and bytes of all models."""
    for family, last, names, behind, forms, exporters, own in ENCODERS:
        for form in forms:
            for exporter in exporters:
                parts = [family + last, form, behind, exporter]
                module = _module(family, last, names, behind, form, own)
                yield "_".join(filter(None, parts)), _exported(module, names, exporter)


def _module(
    family: str, last: str, names: Sequence[str], behind: str, form: str, own: Mapping[str, Any]
) -> torch.nn.Module:
    import torch

    inner = transformers_models.build(family, family + last, {**SIZES, **own}, form).eval()

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *inputs: torch.Tensor) -> Any:
            feeds = dict(zip(names, inputs, strict=True))
            outputs = self.inner(**feeds)
            if not behind:
                return tuple(v for v in outputs.values() if isinstance(v, torch.Tensor))[:2]
            rows = outputs.last_hidden_state
            mask = feeds["attention_mask"].unsqueeze(-1).float()
            mean = (rows * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean if behind == "mean" else rows[:, 0], dim=1)

    return Encoder().eval()


def _exported(module: torch.nn.Module, names: Sequence[str], exporter: str) -> bytes:
    import torch

    ids = torch.randint(3, SIZES["vocab_size"], (2, 12))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    given = dict(zip(TYPED, (ids, mask, torch.zeros_like(ids)), strict=True))
    arguments, file = tuple(given[name] for name in names), io.BytesIO()
    if exporter == "script":
        axes = {name: {0: "batch", 1: "length"} for name in names}
        options: dict[str, Any] = {"dynamo": False, "opset_version": 17, "dynamic_axes": axes}
        torch.onnx.export(module, arguments, file, input_names=list(names), **options)
    else:
        open_ = torch.export.Dim.DYNAMIC
        shapes = {"inputs": tuple({0: open_, 1: open_} for _ in names)}
        options = {"dynamo": True, "dynamic_shapes": shapes, "verbose": False}
        torch.onnx.export(module, arguments, file, input_names=list(names), **options)
    return bare(file.getvalue())


def bare(model: bytes) -> bytes:
    """A model without the lines of Python that its nodes come from, most of its bytes."""
    import onnx

    parsed = onnx.load_model_from_string(model)
    for part in (parsed.graph, *parsed.graph.node, *parsed.graph.value_info, *parsed.functions):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return parsed.SerializeToString()


def write(file: Path, models: Iterator[tuple[str, bytes]], compression: int) -> None:
    """Write an archive of models, with the same weights each time."""
    import torch

    torch_export.declare_torchvision()
    torch.manual_seed(0)
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, model in models:
            archive.writestr(f"{name}.onnx", model)
            sys.stderr.write(f"{name} {len(model)}\n")


if __name__ == "__main__":
    write(FILE, encoders(), zipfile.ZIP_DEFLATED)
