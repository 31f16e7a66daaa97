"""Networks with random weights, made by transformers and exported by torch; nothing is downloaded.

``make(name)`` builds the torch module, which torch itself is timed on; ``export(name)`` writes it
as an ONNX file into the cache folder, once. ``python -m bench.exports [NAME ...]`` exports those
named, or all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

# A file of another version of this module or its exporters is another model: raise the number.
CACHE = Path(__file__).parent.parent / ".cache" / "exports-1"
OPSET = 18
IMAGE = (1, 3, 224, 224)
Inputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Recipe:
    """How to make a network: ``build`` makes it, ``call`` runs it on positional inputs.

    ``inputs`` are names with shapes; integers are below ``below``, where that is not zero, and
    masks and types of tokens are ones and zeros.
    """

    build: Callable[[], torch.nn.Module]
    call: Callable[..., torch.Tensor]
    inputs: dict[str, tuple[int, ...]]
    below: int = 0

    def feeds(self) -> Inputs:
        """Inputs by name, the same each time."""
        rng = np.random.default_rng(0)
        constants = {"attention_mask": 1, "token_type_ids": 0}
        return {
            name: np.full(shape, constants[name])
            if name in constants
            else rng.integers(0, self.below, shape)
            if self.below
            else rng.standard_normal(shape).astype(np.float32)
            for name, shape in self.inputs.items()
        }


def _resnet50() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return _settled(ResNetForImageClassification(ResNetConfig(num_labels=1000)))


def _mobilenetv2() -> torch.nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return _settled(MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000)))


def _settled(model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with the statistics of one random batch in its batch normalizations.

    With those that it is made with, signals of random weights fade layer by layer, and rounding
    errors of the last ones say nothing.
    """
    import torch

    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0  # the last batch counts, alone
    with torch.no_grad():
        model.train()(torch.randn(4, *IMAGE[1:]))
    return model


def _bert(**sizes: int) -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**sizes), add_pooling_layer=False)


def _vit_tiny() -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
    return ViTForImageClassification(ViTConfig(num_labels=1000, **sizes))


def _gpt2_small() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def _whisper_tiny() -> torch.nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    # What WhisperConfig has by default is Whisper-tiny.
    return WhisperEncoder(WhisperConfig())


def _lstm() -> torch.nn.Module:
    import torch

    return torch.nn.LSTM(input_size=256, hidden_size=256, num_layers=2, batch_first=True)


TOKENS = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 128))

RECIPES = {
    "resnet50": Recipe(_resnet50, lambda m, x: m(x).logits, {"pixel_values": IMAGE}),
    "mobilenetv2": Recipe(_mobilenetv2, lambda m, x: m(x).logits, {"pixel_values": IMAGE}),
    "bert-base": Recipe(_bert, lambda m, *x: m(*x).last_hidden_state, TOKENS, 30522),
    "minilm": Recipe(
        lambda: _bert(hidden_size=384, num_hidden_layers=6, intermediate_size=1536),
        lambda m, *x: m(*x).last_hidden_state,
        TOKENS,
        30522,
    ),
    "vit-tiny": Recipe(_vit_tiny, lambda m, x: m(x).logits, {"pixel_values": IMAGE}),
    "gpt2-small": Recipe(_gpt2_small, lambda m, x: m(x).logits, {"input_ids": (1, 64)}, 50257),
    "whisper-tiny-encoder": Recipe(
        _whisper_tiny, lambda m, x: m(x).last_hidden_state, {"input_features": (1, 80, 3000)}
    ),
    "lstm": Recipe(_lstm, lambda m, x: m(x)[0], {"x": (1, 100, 256)}),
}

BATCHES = {"resnet50-32": replace(RECIPES["resnet50"], inputs={"pixel_values": (32, *IMAGE[1:])})}
"""larger batches, for GPUs"""


def recipe_of(name: str) -> Recipe:
    """The recipe of a network, or of one of the ``BATCHES``."""
    return BATCHES[name] if name in BATCHES else RECIPES[name]


def make(name: str) -> torch.nn.Module:
    """The network, ready to be run; its inputs, in the order of the recipe, to one output."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    recipe = recipe_of(name)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = recipe.build()

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return recipe.call(self.inner, *inputs)

    torch.manual_seed(0)
    return Network().eval().requires_grad_(False)


def export(name: str) -> Path:
    """The path of the network's ONNX file, written if it is not there yet."""
    path = CACHE / f"{name}.onnx"
    if path.exists():
        return path
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    torch.onnx.export(
        make(name),
        tuple(map(torch.from_numpy, recipe_of(name).feeds().values())),
        str(part),
        input_names=list(recipe_of(name).inputs),
        output_names=["output"],
        opset_version=OPSET,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    part.replace(path)
    return path


def main() -> None:
    for name in sys.argv[1:] or RECIPES:
        print(export(name), flush=True)


if __name__ == "__main__":
    main()
