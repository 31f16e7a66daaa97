"""What runs that share a process and its memory take: priorities, budgets, profiles, equal bits.

``python -m bench.shared [--seconds 20] [--texts 400]`` writes bench/shared.md, with the encoder of
``bench.unequal``. Each figure is of a process of its own; ratios are of two states that take turns.

``python -m bench.shared WHAT FILE SECONDS TEXTS`` prints the figures of one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

import penstock as ps
from bench.run import machine
from bench.trial import ROOT, resident
from bench.unequal import WORDS, batches, encoder, texts_of

PAGE = Path(__file__).parent / "shared.md"
# Rows and tokens of the runs of a high priority, and of those of a low one beside them.
LOADS = (((1, 64), (8, 128)), ((4, 128), (8, 128)), ((8, 128), (16, 128)))
STATES: dict[str, dict[str, Any]] = {"plain": {}, "reproducible": {"reproducible": True}}
Figures = dict[str, Any]


def feeds_of(rows: int, tokens: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(3, WORDS, (rows, tokens))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def timed(run: Callable[[], object], seconds: float, every: float = 0.0) -> np.ndarray:
    """The seconds of runs, one each ``every`` seconds."""
    times, end = [], perf_counter() + seconds
    while perf_counter() < end:
        begin = perf_counter()
        run()
        times.append(perf_counter() - begin)
        sleep(max(0.0, every - times[-1]))
    return np.array(times)


@contextmanager
def busy(sessions: list[ps.Session], feeds: dict[str, np.ndarray]) -> Any:
    """Runs each of some sessions without end on a thread; gives their numbers of runs."""
    counts, stop = [0] * len(sessions), threading.Event()

    def work(i: int) -> None:
        while not stop.is_set():
            sessions[i].run(feeds)
            counts[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sessions))]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def priorities(path: str, seconds: float, texts: int) -> Figures:
    """Runs of a high priority beside two sessions of a low one, to what both have alone. What runs
    one behind another take is no measure of those with pauses between them, after which caches are
    cold and cores asleep."""
    found: Figures = {}
    for of_high, of_low in LOADS:
        high, low = feeds_of(*of_high), feeds_of(*of_low)
        session = ps.compile(path, priority=5, cache=False)
        others = [ps.compile(path, cache=False) for _ in range(2)]
        for one, feeds in ((session, high), *[(other, low) for other in others]):
            timed(partial(one.run, feeds), 1.0)
        in_row = timed(partial(session.run, high), seconds / 2)
        every = max(0.15, 5 * float(np.median(in_row)))
        alone = timed(partial(session.run, high), seconds, every)
        with busy(others, low) as counts:
            sleep(seconds / 2)
            undisturbed = sum(counts) / (seconds / 2)
            before = sum(counts)
            beside = timed(partial(session.run, high), seconds, every)
            left = (sum(counts) - before) / seconds
        found[f"{of_high} beside {of_low}"] = {
            "row_ms": 1e3 * float(np.median(in_row)),
            "alone_ms": 1e3 * float(np.median(alone)),
            "median": float(np.median(beside) / np.median(alone)),
            "late": float(np.percentile(beside, 99) / np.percentile(alone, 99)),
            "low": left / undisturbed,
            "share": float(np.mean(alone)) / every,
        }
    return found


def memory(path: str, seconds: float, texts: int) -> Figures:
    """A job of texts within budgets: texts a second, and the most bytes beside the start's."""
    work = [*batches(texts_of(texts))]
    ids = max([feeds["input_ids"] for feeds in work], key=np.size)
    # Of a plan that computes all rows, which has to fit for one that leaves some out.
    largest = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    with ps.compile(path, cache=False) as session:
        session.run(largest)
        weights, whole = session.memory.weights, session.memory.arenas
    found: Figures = {}
    for name, bound in (("none", None), ("twice", 2.2), ("once", 1.1)):
        budget = None if bound is None else int(weights + bound * whole) + (1 << 20)
        command = ["job", path, str(budget or 0), str(texts)]
        found[name] = {"budget": budget, **measured(command)}
    return found


def job(path: str, budget: int, texts: int) -> Figures:
    """One job, in batches as they come."""
    work = [*batches(texts_of(texts))]
    options = {"memory": budget} if budget else {}
    session = ps.compile(path, cache=False, **options)
    session.run(work[0])
    start, begin = resident("VmRSS") or 0, perf_counter()
    marks = []
    for i, feeds in enumerate(work):
        session.run(feeds)
        if i >= len(work) // 2:
            marks.append(resident("VmRSS") or 0)
    seconds = perf_counter() - begin
    return {
        "texts_s": texts / seconds,
        "held": session.memory.weights + session.memory.arenas + session.memory.plans,
        "grown": (max(marks) - start) / 1e6,
        "spread": (max(marks) - min(marks)) / max(marks),
        "drift": float(np.mean(marks[len(marks) // 2 :]) / np.mean(marks[: len(marks) // 2]) - 1),
    }


def states(path: str, seconds: float, texts: int) -> Figures:
    """Runs of ``STATES``, and those of which some are profiled, to plain ones, in turn."""
    feeds, found = feeds_of(8, 64), {}
    sessions = {name: ps.compile(path, cache=False, **given) for name, given in STATES.items()}
    os.environ["PENSTOCK_TRACE"] = f"{path}.profile@1/100"
    sessions["profiled"] = ps.compile(path, cache=False)
    for session in sessions.values():
        session.run(feeds)
    for _ in range(3):
        for name, session in sessions.items():
            best = timed(partial(session.run, feeds), seconds / 9)
            found.setdefault(name, []).append(float(np.median(best)))
    return {name: min(times) / min(found["plain"]) for name, times in found.items()}


PARTS = {"priorities": priorities, "memory": memory, "states": states}


def measured(arguments: list[str]) -> Figures:
    """The figures of a process of its own."""
    command = [sys.executable, "-m", "bench.shared", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def page(found: Figures, seconds: float, texts: int) -> str:
    """The page of the benchmark."""
    lines = [
        "# Runs that share a process",
        "",
        f"Measured on {date.today().isoformat()} by `python -m bench.shared`: {machine()}.",
        f"The encoder of [texts of unequal lengths](unequal.md); {seconds:g} seconds a row,",
        f"{texts} texts in batches of 32 as they come.",
        "",
        "A session of priority 5 with a run every few of its own times, beside two of priority 0",
        "that run without end: its time one run behind another, and as often alone; its median and",
        "99th percentile to those that it has alone, as often; the runs of the others to those",
        "without it, and the part of the time that it computes.",
        "",
        "| rows and tokens | in a row, ms | alone, ms | median | 99 % | others | part |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found["priorities"].items():
        figures = [f"{row[key]:.2f}" for key in ("median", "late", "low", "share")]
        alone = f"{row['row_ms']:.1f} | {row['alone_ms']:.1f}"
        lines.append(f"| {name} | {alone} | {' | '.join(figures)} |")
    lines += [
        "",
        "The job within `memory=`: weights and 1.1 times the arena of its largest batch, padded,",
        "or twice that.",
        "",
        "Of the resident memory in the second half of the job: its spread, with the results of the",
        "batch; and by how much its mean in the last quarter exceeds that in the quarter before.",
        "",
        "| arenas | budget, MB | texts a second | to unbounded | held, MB | spread | drift |",
        "|---|---|---|---|---|---|---|",
    ]
    free = found["memory"]["none"]["texts_s"]
    for name, row in found["memory"].items():
        budget = "" if row["budget"] is None else f"{row['budget'] / 1e6:.0f}"
        speed, held = row["texts_s"], row["held"] / 1e6
        lines.append(
            f"| {name} | {budget} | {speed:.1f} | {speed / free:.2f} | {held:.0f} "
            f"| {row['spread']:.1%} | {row['drift']:+.1%} |"
        )
    lines += [
        "",
        "A run of 8 texts of 64 tokens to one of a plain session: "
        + ", ".join(f"{name} {ratio:.3f}" for name, ratio in found["states"].items())
        + ".",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["job"]:
        _, path, budget, count = arguments
        sys.stdout.write(json.dumps(job(path, int(budget), int(count))) + "\n")
        return
    if arguments[:1] and arguments[0] in PARTS:
        what, path, seconds, count = arguments
        sys.stdout.write(json.dumps(PARTS[what](path, float(seconds), int(count))) + "\n")
        return
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--texts", type=int, default=1024)
    options = parser.parse_args()
    given = [str(encoder()), str(options.seconds), str(options.texts)]
    found = {what: measured([what, *given]) for what in PARTS}
    PAGE.write_text(page(found, options.seconds, options.texts))


if __name__ == "__main__":
    main()
