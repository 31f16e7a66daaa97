"""Arenas of real models against their lower bounds."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
from tests.models.fetch import fetch, real_models

import penstock as ps


def memory_rows() -> list[str]:
    """A Markdown table: the arena of each model, its lower bound and their ratio."""
    rows = [
        "",
        "Arenas, KiB: memory planned for all values and workspaces of a run. The lower bound is",
        "the largest sum of bytes that are alive at once in the order in which the steps run.",
        "",
        "| model | arena | lower bound | ratio |",
        "|---|---|---|---|",
    ]
    ratios = []
    for name, path, feeds in _models():
        session = ps.compile(path, executor="linear")
        session.run(feeds)
        arena_plan = session.latest.arena_plan
        if not arena_plan.lower_bound:
            continue
        ratios.append(arena_plan.size / arena_plan.lower_bound)
        size, bound = arena_plan.size / 1024, arena_plan.lower_bound / 1024
        rows.append(f"| {name} | {size:,.1f} | {bound:,.1f} | {ratios[-1]:.4f} |")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    rows.append(
        f"| geometric mean (at most 1.01) | | | {mean:.4f} |\n"
        f"| largest (at most 1.05) | | | {max(ratios):.4f} |"
    )
    return rows


def _models() -> list[tuple[str, Path, dict[str, np.ndarray]]]:
    models = [(model.name, fetch(model), model.feeds()) for model in real_models()]
    exported = _resnet50()
    if exported is not None:
        x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
        models.append(("ResNet-50 (transformers)", exported, {"x": x}))
    return models


def _resnet50() -> Path | None:
    """ResNet-50 exported from transformers with random weights, where torch is installed."""
    try:
        import torch
        from transformers import ResNetConfig, ResNetForImageClassification
    except ImportError:
        print("ResNet-50 is left out: install the bench-torch extra and torch==2.13.0 for it")
        return None

    class Logits(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).logits

    torch.manual_seed(0)
    model = Logits(ResNetForImageClassification(ResNetConfig()).eval())
    path = Path(tempfile.mkdtemp()) / "resnet50.onnx"
    torch.onnx.export(
        model,
        (torch.zeros(1, 3, 224, 224),),
        str(path),
        input_names=["x"],
        output_names=["logits"],
        opset_version=17,
        dynamo=False,
    )
    return path
