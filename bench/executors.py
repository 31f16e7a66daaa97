"""Parallel and auto against linear on every third-party model: ``python -m bench.executors``.

Executors take turns, each run in a process of its own; a ratio is the median of the turns' ratios.
With a model and an executor as arguments, times just these.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.models.fetch import fetch, real_models

import penstock as ps

TURNS = 3
SECONDS = 0.7


def measure(name: str, executor: str) -> tuple[float, str]:
    """Seconds of a run, and who ran it; in this process."""
    (model,) = [each for each in real_models() if each.name == name]
    feeds = model.feeds()
    session = ps.compile(fetch(model), executor=executor)
    for _ in range(3):
        session.run(feeds)
    times = []
    begin = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begin < SECONDS:
        start = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - start)
    return statistics.median(times), session.inspect.executor.name


def apart(name: str, executor: str) -> tuple[float, str]:
    command = [sys.executable, "-m", "bench.executors", name, executor]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    seconds, used = json.loads(done.stdout)
    return seconds, used


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(measure(*sys.argv[1:])))
        return
    print("| model | linear, ms | parallel / linear | auto / linear | auto is |")
    print("|---|---|---|---|---|")
    for model in real_models():
        turns = [
            [apart(model.name, executor) for executor in ("linear", "parallel", "auto")]
            for _ in range(TURNS)
        ]
        linear = statistics.median(turn[0][0] for turn in turns)
        ratios = [statistics.median(turn[i][0] / turn[0][0] for turn in turns) for i in (1, 2)]
        print(
            f"| {model.name} | {linear * 1e3:.3g} | {ratios[0]:.2f} ({turns[0][1][1]}) "
            f"| {ratios[1]:.2f} | {turns[0][2][1]} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
