"""Arenas of real models against their lower bounds, and resident memory against ONNX Runtime's.

``python -m bench.memory ENGINE MODEL FEEDS THREADS`` prints the bytes of one process that runs a
file on the arrays of an .npz file.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tests.models.fetch import fetch, real_models

import penstock as ps
from bench.peers import ENGINES
from bench.trial import ROOT, resident


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


RUNS = 5


def resident_rows() -> list[str]:
    """A Markdown table: resident memory after a few runs, each engine in a process of its own."""
    rows = [
        "",
        f"Resident memory after {RUNS} runs on one thread, MiB, with interpreter and libraries.",
        "For the largest models the ratio should be at most 1.1.",
        "",
        "| model | Penstock | ONNX Runtime | ratio |",
        "|---|---|---|---|",
    ]
    for name, path, feeds in _models():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "feeds.npz"
            np.savez(file, **feeds)
            own, peer = (resident_memory(engine, path, file) for engine in _COMPARED)
        rows.append(f"| {name} | {own / 2**20:,.0f} | {peer / 2**20:,.0f} | {own / peer:.2f} |")
    return rows


_COMPARED = ("penstock", "onnxruntime")


def resident_memory(engine: str, model: Path, feeds: Path, threads: int = 1) -> int:
    """Bytes of a process after it has loaded a model and run it a few times."""
    command = [sys.executable, "-m", "bench.memory", engine, str(model), str(feeds), str(threads)]
    return int(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)


def _print_resident(engine: str, model: str, feeds: str, threads: str) -> None:
    with np.load(feeds) as arrays:
        run = ENGINES[engine](int(threads)).load(Path(model))
        inputs = dict(arrays)
    for _ in range(RUNS):
        run(inputs)
    print(resident("VmRSS"))


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


if __name__ == "__main__":
    _print_resident(*sys.argv[1:])
