"""Arenas of real models against their lower bounds, and resident memory against ONNX Runtime's.

``python -m bench.memory [COUNT]`` compares the two after runs on COUNT images, 1,000 by default, of
random sizes, each of which makes a plan.
``python -m bench.memory ENGINE MODEL FEEDS THREADS COUNT`` prints the bytes of one process that
runs a file on the arrays of an .npz file, or if COUNT is not 0, on such images.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

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
        arena_plan = session.inspect.executor.arena_plan
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
        own, peer = _compared(path, feeds)
        rows.append(f"| {name} | {own / 2**20:,.0f} | {peer / 2**20:,.0f} | {own / peer:.2f} |")
    return rows


DETECTOR = "rapidocr/PP-OCRv6_det_small.onnx"


def shapes_row(count: int) -> str:
    """A line: resident memory while a detector of text runs on the second half of ``count``
    images, in the mean: free memory is given back now and then."""
    path, feeds = next(case[1:] for case in _real_models() if case[0] == DETECTOR)
    engines = ("penstock-shapes", "onnxruntime", "penstock")
    own, peer, default = [size / 2**20 for size in _compared(path, feeds, count, engines)]
    return (
        f"{DETECTOR}, {count} images of random sizes, MiB: Penstock with 32 MiB of plans "
        f"{own:,.0f}, with Limits as by default {default:,.0f}; ONNX Runtime {peer:,.0f}; ratio "
        f"{own / peer:.2f}"
    )


def _compared(
    path: Path,
    feeds: dict[str, np.ndarray],
    count: int = 0,
    engines: Sequence[str] = ("penstock", "onnxruntime"),
) -> list[int]:
    """Bytes of a process of each engine after it has loaded a model and run it on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "feeds.npz"
        np.savez(file, **feeds)
        commands = [
            [sys.executable, "-m", "bench.memory", engine, str(path), str(file), "1", str(count)]
            for engine in engines
        ]
        runs = [subprocess.run(c, capture_output=True, check=True, cwd=ROOT) for c in commands]
    return [int(run.stdout) for run in runs]


def _print_resident(engine: str, model: str, feeds: str, threads: str, count: str) -> None:
    with np.load(feeds) as arrays:
        run = ENGINES[engine](int(threads)).load(Path(model))
        inputs = dict(arrays)
    taken = []
    for images in _images(inputs, int(count)) if int(count) else [inputs] * RUNS:
        run(images)
        taken.append(resident("VmRSS"))
    print(round(fmean(taken[len(taken) // 2 :])) if int(count) else taken[-1])


def _images(inputs: dict[str, np.ndarray], count: int) -> Iterator[dict[str, np.ndarray]]:
    """Inputs with heights and widths of 32 to 512."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        size = tuple(32 * rng.integers(1, 17, 2))
        yield {name: np.resize(x, x.shape[:2] + size) for name, x in inputs.items()}


def _real_models() -> list[tuple[str, Path, dict[str, np.ndarray]]]:
    return [(model.name, fetch(model), model.feeds()) for model in real_models()]


def _models() -> list[tuple[str, Path, dict[str, np.ndarray]]]:
    models = _real_models()
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
    if len(sys.argv) > 2:
        _print_resident(*sys.argv[1:])
    else:
        print(shapes_row(int(*sys.argv[1:]) or 1000))
