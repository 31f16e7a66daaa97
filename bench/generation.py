"""Text generation, beside onnxruntime-genai and OpenVINO GenAI, which read the same files.

``python -m bench.generation [--turns 3] [--threads 1]`` writes bench/generation.md. Decoders have
random weights of 4 bits in blocks of 32; prompts are random tokens, and the likeliest token is
chosen. Each engine is a process of its own, in turn; a figure is the best of its turns. Needs an
environment with torch, transformers, gguf, onnxruntime-genai and openvino-genai.

``python -m bench.generation ENGINE MODEL THREADS`` prints the figures of one process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np

from bench.generation_models import SIZES, gguf_of, onnx_of
from bench.run import machine
from bench.trial import ROOT, resident

PAGE = Path(__file__).parent / "generation.md"
ENGINES = ("penstock", "onnxruntime-genai", "penstock-gguf", "openvino-genai")
SHORT, LONG, SHARED = 8, 512, 1000
CLIENTS, TOKENS = 8, 64

Figures = dict[str, float]


class Engine(Protocol):
    """Generates as many tokens behind each of some prompts as it is asked for, and returns the
    seconds up to the first token, and from there to the last."""

    def generate(self, prompts: Sequence[list[int]], count: int) -> tuple[float, float]: ...


class Penstock:
    """All prompts at once, each as a request of its own."""

    def __init__(self, path: str, threads: int, **options: object) -> None:
        from penstock.generation import Generator

        self.generator = Generator(path, threads=threads, **options)

    def generate(self, prompts: Sequence[list[int]], count: int) -> tuple[float, float]:
        begin, first = perf_counter(), [0.0]

        async def one(prompt: list[int]) -> None:
            pieces = self.generator.astream(prompt, max_tokens=count, ignore_end=True)
            async for _ in pieces:
                first[0] = first[0] or perf_counter()

        async def every() -> None:
            await asyncio.gather(*map(one, prompts))

        if len(prompts) > 1:
            asyncio.run(every())
        else:
            for _ in self.generator.stream(prompts[0], max_tokens=count, ignore_end=True):
                first[0] = first[0] or perf_counter()
        return first[0] - begin, perf_counter() - first[0]


class OnnxRuntime:
    """A batch of prompts of equal lengths."""

    def __init__(self, path: str, threads: int) -> None:
        import onnxruntime_genai as genai

        self._genai, config = genai, genai.Config(str(Path(path).parent))
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = genai.Model(config)

    def generate(self, prompts: Sequence[list[int]], count: int) -> tuple[float, float]:
        parameters = self._genai.GeneratorParams(self._model)
        length = len(prompts[0]) + count
        parameters.set_search_options(max_length=length, min_length=length, batch_size=len(prompts))
        generator, begin = self._genai.Generator(self._model, parameters), perf_counter()
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        first = perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        return first - begin, perf_counter() - first


class OpenVino:
    """A batch of prompts of equal lengths."""

    def __init__(self, path: str, threads: int) -> None:
        import openvino
        import openvino_genai

        self._genai, self._tensor = openvino_genai, openvino.Tensor
        self._pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)

    def generate(self, prompts: Sequence[list[int]], count: int) -> tuple[float, float]:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = count, True
        ids = np.array(prompts, np.int64)
        inputs = self._genai.TokenizedInputs(self._tensor(ids), self._tensor(np.ones_like(ids)))
        begin = perf_counter()
        metrics = self._pipeline.generate(inputs, config).perf_metrics
        first = metrics.get_ttft().mean / 1e3
        return first, perf_counter() - begin - first


def made(engine: str, model: str, threads: int) -> Engine:
    """An engine that has read a model."""
    if engine == "penstock":
        return Penstock(str(onnx_of(model)), threads)
    if engine == "penstock-gguf":
        return Penstock(str(gguf_of(model)), threads)
    if engine == "onnxruntime-genai":
        return OnnxRuntime(str(onnx_of(model)), threads)
    return OpenVino(str(gguf_of(model)), threads)


def trial(engine: str, model: str, threads: int) -> Figures:
    """The figures of this process."""
    rng, words, begin = np.random.default_rng(0), SIZES[model]["words"] - 1, perf_counter()

    def prompt(length: int) -> list[int]:
        return [int(token) for token in rng.integers(0, words, length)]

    run = made(engine, model, threads)
    run.generate([prompt(SHORT)], 100)
    figures = {"start": perf_counter() - begin}
    figures["step"] = min(run.generate([prompt(SHORT)], TOKENS)[1] / (TOKENS - 1) for _ in range(3))
    figures["first"] = min(run.generate([prompt(LONG)], 2)[0] for _ in range(3))
    together = [
        sum(run.generate([prompt(SHORT) for _ in range(CLIENTS)], TOKENS)) for _ in range(3)
    ]
    figures["together"] = CLIENTS * TOKENS / min(together)
    if isinstance(run, Penstock):
        for _ in range(2):  # the first compiles
            shared = prompt(SHARED)
            once = run.generate([[*shared, 1, 2, 3]], 2)[0]
            again = run.generate([[*shared, 4, 5, 6]], 2)[0] / once
        figures["again"] = again
    # Before lookup, which has two more generators.
    figures["peak"] = resident("VmHWM") or 0
    if isinstance(run, Penstock):
        figures["lookup"] = _lookup(engine, model, threads)
    return figures


def _lookup(engine: str, model: str, threads: int) -> float:
    """Tokens a second with prompt lookup, in a text that repeats, to those without."""
    path = str((onnx_of if engine == "penstock" else gguf_of)(model))
    speeds = []
    for draft in (None, "prompt"):
        run = Penstock(path, threads, draft=draft)
        forced = {"regex": "(abcdefghijklmnopqrstuvwxyz )+", "ignore_end": True, "max_tokens": 208}
        prompt = "abcdefghijklmnopqrstuvwxyz " * 3
        run.generator.generate(prompt, **forced)
        begin = perf_counter()
        count = run.generator.generate(prompt, **forced).generated_tokens
        speeds.append(count / (perf_counter() - begin))
    return speeds[1] / speeds[0]


def measured(engine: str, model: str, threads: int) -> Figures:
    """The figures of a process of its own."""
    command = [sys.executable, "-m", "bench.generation", engine, model, str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    if done.returncode:  # the others go on
        sys.stderr.write(done.stderr.decode()[-400:])
        return {}
    figures: Figures = json.loads(done.stdout.decode().splitlines()[-1])
    return figures


def main() -> None:
    if sys.argv[1:2] and not sys.argv[1].startswith("-"):
        engine, model, threads = sys.argv[1:]
        sys.stdout.write(json.dumps(trial(engine, model, int(threads))) + "\n")
        return
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    for model in SIZES:  # written if they are not there yet
        onnx_of(model)
        gguf_of(model)
    keys = [(engine, m, t) for m in SIZES for t in options.threads for engine in ENGINES]
    best: dict[tuple[str, str, int], Figures] = {}
    for _ in range(options.turns):
        for key in keys:
            figures = measured(*key)
            sys.stderr.write(f"{key}: {figures}\n")
            known = best.setdefault(key, figures)
            for name, figure in figures.items():
                more = name in ("together", "lookup")
                known[name] = (max if more else min)(known[name], figure)
    PAGE.write_text(page(best, options.turns))


def page(best: dict[tuple[str, str, int], Figures], turns: int) -> str:
    """The page of the benchmark."""
    peers = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime-genai", "openvino-genai"))
    today = date.today().isoformat()
    lines = [
        "# Text generation",
        "",
        f"Measured on {today} by `python -m bench.generation`: {machine()}, {peers}.",
        "Decoders of Llama's kind with random weights of 4 bits in blocks of 32, read from an ONNX",
        "file of onnxruntime-genai's builder or from a GGUF file (Q4_0). The likeliest token is",
        f"chosen; the best of {turns} turns, engines in turn.",
        "",
        "- start: from the beginning of loading to the end of 100 tokens;",
        "- step: of one request;",
        f"- first token: of a prompt of {LONG} tokens;",
        f"- together: {CLIENTS} requests of {TOKENS} tokens at once;",
        f"- again: a prompt whose first {SHARED} tokens were met before, to the first time;",
        '- lookup: tokens a second with `draft="prompt"` in a text that repeats, to those without.',
        "",
        "| model | threads | engine | start, s | step, ms | first token, s | together, tokens/s |"
        " again | lookup | peak, MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (engine, model, threads), own in best.items():
        if not own:
            continue
        more = [f"{own[name]:.2f}" if name in own else "" for name in ("again", "lookup")]
        figures = [
            f"{own['start']:.2f}",
            f"{own['step'] * 1e3:.2f}",
            f"{own['first']:.3f}",
            f"{own['together']:,.0f}",
            *more,
            f"{own['peak'] / 1e6:,.0f}",
        ]
        lines.append(f"| {model} | {threads} | {engine} | {' | '.join(figures)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
