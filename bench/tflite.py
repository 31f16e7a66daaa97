"""Time Penstock, LiteRT and onert on TFLite models: ``python -m bench.tflite [NAME ...]``.

Engines take turns, each in a process of its own; the figures are the least of all turns, since
other processes can only add to a time. A run of Penstock or LiteRT is fed and its outputs are
fetched; of onert the run alone is timed. Opening a model ends with its first run; a convolution is
opened before, so that imports do not count.
Writes ``bench/tflite.md``; ``python -m bench.tflite --trial ENGINE THREADS MODEL FEEDS`` is a turn.
``python -m bench.tflite --operators`` times single operators: see ``bench.tflite_operators``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tests.models.fetch import fetch, real_models
from tests.support.tflite_cases import Case, cases
from tests.support.tflite_models import model, subgraph

from bench import tflite_operators
from bench.peers import LiteRt
from bench.run import machine

HERE = Path(__file__).parent
TURNS = 3
SECONDS = 0.5  # of timing, a turn
SAMPLE = 2e-3  # seconds: shorter runs are timed several at a time
PEERS = {"litert": "ai_edge_litert", "onert": "onert"}
GOALS = {"net": 1.0, "control": 1.0, "quant": 1.2, "open": 1.5}
SMALL = {
    "net": ("mini_detector", "mini_lstm_while", "mini_mobilenet_v2", "mini_resnet"),
    "control": (
        "if_basic",
        "while_converted_rnn",
        "while_count",
        "while_fibonacci",
        "while_nested",
    ),
    "quant": ("mini_mobilenet_v2_int8", "mini_resnet_int8"),
}
"""cases of the corpus, with the last run of each, or for loops the one of ten iterations"""

Feeds = dict[str, np.ndarray]
Run = Callable[[], object]


class Subject(NamedTuple):
    """A model, what it is fed, and what its ratio to the fastest peer should be at most."""

    name: str
    path: Path
    feeds: Feeds
    goal: float


def subjects() -> Iterator[Subject]:
    for category, names in SMALL.items():
        for case in cases("net" if category == "quant" else category):
            if case.name in names:
                run = case.data["runs"][_which(case)]
                yield Subject(case.name, case.path, case.feeds(run), GOALS[category])
    for real in real_models(".tflite"):
        goal = GOALS["quant" if real.package == "pymicro-wakeword" else "net"]
        yield Subject(real.name, fetch(real), real.feeds(), goal)


def _which(case: Case) -> int:
    return 2 if case.name == "while_count" else -1


# Engines: what opens a model and runs it on feeds.


def penstock(path: str, threads: int, feeds: Feeds) -> Run:
    import penstock as ps

    session = ps.compile(path, threads=threads, cache=False)
    return lambda: session.run(feeds)


def litert(path: str, threads: int, feeds: Feeds) -> Run:
    run = LiteRt(threads).load(Path(path), {name: array.shape for name, array in feeds.items()})
    return lambda: run(feeds)


def onert(path: str, threads: int, feeds: Feeds) -> Run:
    from onert import infer

    session = infer.session(path)
    session.infer(list(feeds.values()))
    return session.session.run


ENGINES = {"penstock": penstock, "litert": litert, "onert": onert}


def _tiny() -> bytes:
    """A convolution, which is opened first, as what that imports is not part of opening a model."""
    weights = {"w": np.ones((2, 3, 3, 2), np.float32), "b": np.ones(2, np.float32)}
    options = {"stride_w": 1, "stride_h": 1, "fused_activation_function": 1}
    conv = ("CONV_2D", ["x", "w", "b"], ["y"], ("Conv2DOptions", options))
    y = {"shape": [1, 4, 4, 2]}
    return model([subgraph({"x": ("float32", [1, 4, 4, 2])}, [conv], ["y"], weights, y=y)])


def trial(engine: str, threads: str, path: str, feeds: str) -> None:
    """Print the seconds until the first run has ended, and of a run, as JSON."""
    with np.load(feeds) as arrays:
        given = dict(arrays)
    with tempfile.NamedTemporaryFile(suffix=".tflite") as file:
        file.write(_tiny())
        file.flush()
        image = np.zeros((1, 4, 4, 2), np.float32)
        with contextlib.suppress(ValueError):  # engines that do not run it have imported less
            ENGINES[engine](file.name, int(threads), {"x": image})()
    start = time.perf_counter()
    run = ENGINES[engine](path, int(threads), given)
    run()
    opened, best = time.perf_counter() - start, math.inf
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or best == math.inf:
        count = 1 if best == math.inf else max(1, int(SAMPLE / best))
        start = time.perf_counter()
        for _ in range(count):
            run()
        best = min(best, (time.perf_counter() - start) / count)
    print(json.dumps([opened, best]))


# The table.


def measure(engine: str, threads: int, subject: Subject, feeds: str) -> tuple[float, float] | None:
    """The seconds of one turn; None if the engine does not run the model."""
    module = ["-m", "bench.tflite", "--trial"]
    command = [sys.executable, *module, engine, str(threads), str(subject.path), feeds]
    with tempfile.TemporaryDirectory() as costs:
        ruy = {"RUY_THREADS": str(threads), "XNNPACK_THREADS": str(threads)}
        environment = {**os.environ, "PENSTOCK_CACHE": costs, **ruy}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # imports that are left do not compile
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd=HERE.parent
        )
    if done.returncode and engine == "penstock":
        raise SystemExit(f"{engine} {subject.name} failed:\n{done.stderr}")
    if done.returncode:
        return None
    opened, run = json.loads(done.stdout.splitlines()[-1])
    return opened, run


def row(subject: Subject, threads: int, peers: list[str]) -> tuple[str, float]:
    """A line of the table, and the ratio of the runs."""
    least: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        feeds = f"{folder}/feeds.npz"
        np.savez(feeds, **subject.feeds)  # type: ignore[arg-type]
        for _ in range(TURNS):
            for engine in ("penstock", *peers):
                seconds = measure(engine, threads, subject, feeds)
                if seconds is not None:
                    before = least.get(engine, seconds)
                    least[engine] = min(before[0], seconds[0]), min(before[1], seconds[1])
    ours = least.pop("penstock")
    runs = {engine: run for engine, (_, run) in least.items()}
    ratio = ours[1] / min(runs.values())
    texts = [f"{runs[peer] * 1e6:.1f}" if peer in runs else "" for peer in peers]
    opened = f"{ours[0] * 1e3:.1f} | {least['litert'][0] * 1e3:.1f}"
    verdict = "yes" if ratio <= subject.goal else "**no**"
    cells = [subject.name, str(threads), f"{ours[1] * 1e6:.1f}", *texts, f"{ratio:.2f}"]
    line = f"| {' | '.join(cells)} | {subject.goal} | {verdict} | {opened} |"
    print(line, flush=True)
    return line, ratio


def main(wanted: list[str]) -> None:
    chosen = [subject for subject in subjects() if not wanted or subject.name in wanted]
    if unknown := {*wanted} - {subject.name for subject in chosen}:
        names = ", ".join(subject.name for subject in subjects())
        sys.exit(f"no such models: {', '.join(sorted(unknown))}; there are: {names}")
    peers = [peer for peer, module in PEERS.items() if importlib.util.find_spec(module)]
    versions = ", ".join(f"{PEERS[peer]} {version(PEERS[peer])}" for peer in peers)
    lines = [
        "# TFLite",
        "",
        f"Measured on {date.today().isoformat()} by `make bench-tflite`: {machine()}, {versions}.",
        f"Least of {TURNS} turns, engines in turn, each in its own process. The ratio is that of a",
        "run to the fastest peer's; a model is opened, and run once, after another one. Load",
        f"average {os.getloadavg()[2]:.1f}: with more than the cores, two threads say little.",
        "",
        f"| model | threads | Penstock, us | {', us | '.join(peers)}, us | ratio | at most "
        "| reached | opened, ms | LiteRT, ms |",
        "|---" * (8 + len(peers)) + "|",
    ]
    print("\n".join(lines))
    ratios = []
    for subject in chosen:
        for threads in (1, 2):
            line, ratio = row(subject, threads, peers)
            lines.append(line)
            ratios.append(ratio)
    lines.append(f"\nGeometric mean of the ratios: {math.exp(np.log(ratios).mean()):.2f}.")
    print(lines[-1])
    if not wanted:
        (HERE / "tflite.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trial"]:
        trial(*sys.argv[2:])
    elif sys.argv[1:2] == ["--operators"]:
        tflite_operators.main(sys.argv[2:])
    else:
        parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
        parser.add_argument("models", nargs="*", metavar="NAME", help="all, if none is named")
        main(parser.parse_args().models)
