"""More networks for ``bench.quantize``, of other makers than those of ``bench.exports``: small ones
of transformers with random weights, written by torch's exporter of TorchScript.

``python -m bench.quantize_exports`` writes those that are not there yet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.exports import CACHE, OPSET

Shapes = Mapping[str, tuple[int, ...]]
IMAGE: Shapes = {"pixel_values": (1, 3, 224, 224)}
WORDS: Shapes = {"input_ids": (1, 64)}
SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}

NETWORKS: Mapping[str, tuple[str, str, dict[str, Any], Shapes]] = {
    "ts-efficientnet": (
        *("EfficientNetConfig", "EfficientNetForImageClassification"),
        {"image_size": 224, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
        IMAGE,
    ),
    "ts-regnet": ("RegNetConfig", "RegNetForImageClassification", {}, IMAGE),
    "ts-convnext": (
        *("ConvNextConfig", "ConvNextForImageClassification"),
        *({"depths": [2, 2, 4, 2], "hidden_sizes": [48, 96, 192, 384]}, IMAGE),
    ),
    "ts-mobilenetv1": ("MobileNetV1Config", "MobileNetV1ForImageClassification", {}, IMAGE),
    "ts-mobilevit": (
        *("MobileViTConfig", "MobileViTForImageClassification"),
        *({"image_size": 256}, {"pixel_values": (1, 3, 256, 256)}),
    ),
    "ts-poolformer": (
        *("PoolFormerConfig", "PoolFormerForImageClassification"),
        *({"hidden_sizes": [32, 64, 160, 256]}, IMAGE),
    ),
    "ts-resnet18": (
        *("ResNetConfig", "ResNetForImageClassification"),
        {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]},
        IMAGE,
    ),
    "ts-segformer": (*("SegformerConfig", "SegformerForImageClassification"), *({}, IMAGE)),
    "ts-deit": ("DeiTConfig", "DeiTForImageClassification", SMALL, IMAGE),
    "ts-distilbert": (
        *("DistilBertConfig", "DistilBertModel"),
        *({"dim": 256, "hidden_dim": 1024, "n_layers": 4, "n_heads": 4}, WORDS),
    ),
    "ts-roberta": ("RobertaConfig", "RobertaModel", SMALL, WORDS),
    "ts-electra": ("ElectraConfig", "ElectraModel", SMALL, WORDS),
}
"""by name: the classes of the configuration and of the model, what the configuration changes, and
the inputs"""


def path_of(name: str) -> Path:
    return CACHE / f"{name}.onnx"


def feeds_of(name: str) -> dict[str, np.ndarray]:
    rng, shapes = np.random.default_rng(0), NETWORKS[name][3]
    return {
        key: rng.integers(0, 20_000, shape)
        if key == "input_ids"
        else rng.standard_normal(shape).astype(np.float32)
        for key, shape in shapes.items()
    }


def export(name: str) -> Path:
    """The file of a network, written if it is not there yet."""
    path = path_of(name)
    if path.exists():
        return path
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    config, kind, changes, _ = NETWORKS[name]
    torch.manual_seed(0)
    inner = getattr(transformers, kind)(getattr(transformers, config)(**changes))
    _settle(inner, torch, feeds_of(name))

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return self.inner(x, return_dict=False)[0]

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(
        Network().eval().requires_grad_(False),
        tuple(map(torch.from_numpy, feeds_of(name).values())),
        str(path),
        input_names=list(feeds_of(name)),
        output_names=["output"],
        opset_version=OPSET - 1,
        dynamo=False,
    )
    return path


def _settle(model: Any, torch: Any, feeds: Mapping[str, np.ndarray]) -> None:
    """Give batch normalizations the statistics of a random batch, as ``bench.exports`` does."""
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    if not norms:
        return
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(4, *next(iter(feeds.values())).shape[1:]))
    model.eval()


def main() -> None:
    names: Callable[[], list[str]] = lambda: sys.argv[1:] or list(NETWORKS)  # noqa: E731
    for name in names():
        try:
            print(export(name), flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main()
