"""Texts of unequal lengths: a job of many, and a server for single ones, padded or not.

``python -m bench.unequal [--texts 512] [--turns 2] [--threads 1]`` writes bench/unequal.md: an
encoder of the sizes of MiniLM with a mean over the mask, random weights, and lognormal lengths of 3
to 512 tokens. Each engine is a process of its own, in turn. ONNX Runtime and OpenVINO get batches
of 32, padded to the longest of each, as fastembed and sentence-transformers make them: in the order
of arrival, or sorted by length before. Penstock gets the same batches; and each text as a request
of its own, joined by ``penstock.Replicas``.

``python -m bench.unequal ENGINE ORDER FILE THREADS COUNT`` prints the figures of one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from bench.exports import CACHE
from bench.run import machine
from bench.trial import ROOT, resident
from bench.zoo.torch_export import declare_torchvision

PAGE = Path(__file__).parent / "unequal.md"
BATCH, WORDS, LONGEST = 32, 30522, 512
SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
ORDERS = ("arrival", "sorted")
ENGINES = ("penstock", "onnxruntime", "openvino")
TOKENS = 8192  # of a batch of Penstock's server

Texts = list[np.ndarray]
Answer = Callable[[dict[str, np.ndarray]], Any]


def encoder() -> Path:
    """The ONNX file of the encoder, written if it is not there yet."""
    path = CACHE / "minilm-mean.onnx"
    if path.exists():
        return path
    import torch

    declare_torchvision()
    from transformers import BertConfig, BertModel

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(BertConfig(**SIZES), add_pooling_layer=False)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            rows = self.bert(ids, mask).last_hidden_state
            kept = mask.unsqueeze(-1).float()
            return (rows * kept).sum(1) / kept.sum(1).clamp(min=1e-9)

    torch.manual_seed(0)
    ids = torch.randint(3, WORDS, (2, 12))
    names, axes = ["input_ids", "attention_mask"], {0: "batch", 1: "length"}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(
        Encoder().eval(),
        (ids, torch.ones_like(ids)),
        str(path),
        input_names=names,
        output_names=["embedding"],
        dynamic_axes=dict.fromkeys(names, axes),
        opset_version=17,
        dynamo=False,
    )
    return path


def texts_of(count: int) -> Texts:
    """Texts as numbers of words."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(3.6, 0.8, count)).astype(int).clip(3, LONGEST)
    return [rng.integers(3, WORDS, length) for length in lengths]


def padded(texts: Texts) -> dict[str, np.ndarray]:
    """The feeds of a batch, padded to its longest text."""
    lengths = np.array([len(text) for text in texts])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    ids = np.zeros_like(mask)
    ids[mask != 0] = np.concatenate(texts)
    return {"input_ids": ids, "attention_mask": mask}


def batches(texts: Texts) -> Iterator[dict[str, np.ndarray]]:
    for at in range(0, len(texts), BATCH):
        yield padded(texts[at : at + BATCH])


def load(engine: str, path: str, threads: int) -> Answer:
    """A function that runs a batch on an engine."""
    if engine == "penstock":
        import penstock as ps

        return ps.compile(path, threads=threads, cache=False).run
    if engine == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options)
        return lambda feeds: session.run(None, feeds)
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",  # else bfloat16, where the processor has it
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    return lambda feeds: compiled(feeds)[0]


def job(engine: str, order: str, path: str, threads: int, texts: Texts) -> float:
    """Seconds for all texts, batch by batch."""
    texts = sorted(texts, key=len) if order == "sorted" else texts
    run = load(engine, path, threads)
    run(padded(texts[:2]))
    begin = perf_counter()
    for feeds in batches(texts):
        run(feeds)
    return perf_counter() - begin


def serve(path: str, threads: int, texts: Texts) -> float:
    """Seconds for all texts, each a request of its own to Penstock's replicas."""
    import penstock as ps

    requests = [padded([text]) for text in texts]
    options: dict[str, Any] = {"max_batch": BATCH, "max_batch_tokens": TOKENS, "threads": threads}
    with ps.Replicas(path, 1, queue=len(texts), cache=False, **options) as replicas:
        begin = perf_counter()
        for future in [replicas.submit(feeds) for feeds in requests]:
            future.result()
        return perf_counter() - begin


def trial(engine: str, order: str, path: str, threads: int, count: int) -> dict[str, float]:
    """The figures of this process: seconds, and the most bytes that it had."""
    texts = texts_of(count)
    if order == "server":
        seconds = serve(path, threads, texts)
    else:
        seconds = job(engine, order, path, threads, texts)
    return {"seconds": seconds, "peak": resident("VmHWM") or 0}


def measured(engine: str, order: str, arguments: list[str]) -> dict[str, float]:
    """The figures of a process of its own."""
    command = [sys.executable, "-m", "bench.unequal", engine, order, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": arguments[1]}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.decode().splitlines()[-1])
    return figures


def main() -> None:
    if sys.argv[1:2] and not sys.argv[1].startswith("-"):
        engine, order, path, threads, count = sys.argv[1:]
        sys.stdout.write(json.dumps(trial(engine, order, path, int(threads), int(count))) + "\n")
        return
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    arguments = [str(encoder()), str(options.threads), str(options.texts)]
    jobs = [("penstock", "server"), *[(e, order) for order in ORDERS for e in ENGINES]]
    best: dict[tuple[str, str], dict[str, float]] = {}
    for _ in range(options.turns):
        for key in jobs:
            figures = measured(*key, arguments)
            best[key] = min(best.get(key, figures), figures, key=lambda f: f["seconds"])
            sys.stderr.write(f"{key}: {figures}\n")
    PAGE.write_text(page(best, options.texts, options.threads, options.turns))


def page(
    best: dict[tuple[str, str], dict[str, float]], count: int, threads: int, turns: int
) -> str:
    """The page of the benchmark."""
    texts = texts_of(count)
    tokens = sum(map(len, texts))
    rows = sum(feeds["input_ids"].size for feeds in batches(texts))
    lines = [
        "# Texts of unequal lengths",
        "",
        f"Measured on {date.today().isoformat()} by `python -m bench.unequal`: {machine()}.",
        f"{count} texts of {tokens:,} tokens, {rows:,} rows in padded batches of {BATCH} by",
        f"arrival; threads: {threads}; the least of {turns} turns, engines in turn; float32. Plans",
        "for new lengths are compiled in the time. The ratio is that of texts a second to the best",
        "other engine in the same order; of the server, to that by arrival.",
        "",
        "| order | engine | texts a second | ratio | peak memory, MB |",
        "|---|---|---|---|---|",
    ]
    for (engine, order), figures in best.items():
        peers = [
            f["seconds"] for (e, o), f in best.items()
            if e != "penstock" and o == ("arrival" if order == "server" else order)
        ]  # fmt: skip
        ratio = f"{min(peers) / figures['seconds']:.2f}" if engine == "penstock" else ""
        speed, peak = count / figures["seconds"], figures["peak"] / 1e6
        lines.append(f"| {order} | {engine} | {speed:,.1f} | {ratio} | {peak:,.0f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
