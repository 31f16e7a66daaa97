"""Time Penstock and ONNX Runtime side by side: ``python -m bench.run [CASE ...]``.

Engines take turns, each run in a process of its own; the ratio of a row is the median of the
ratios of its turns. Writes ``bench/results.md``.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from bench.memory import memory_rows, resident_rows
from penstock.host.threads import core_budget

HERE = Path(__file__).parent
TURNS = 5


@dataclass(frozen=True)
class Row:
    """A figure: the case, its unit (seconds times ``scale``), and the ratio to reach."""

    case: str
    title: str
    unit: str
    scale: float
    most: float


ROWS = [
    Row("chain", "chain of 1,000 Add/Mul on 16 floats, per node", "us", 1e6, 0.75),
    Row("loop", "Loop of 10,000 iterations, Mul and Add on 16 floats, each", "us", 1e6, 0.5),
    Row("call", "session.run of a one-node model", "us", 1e6, 1.0),
    Row("compile_10000", "compile a chain of 10,000 nodes and run it once", "s", 1, 10),
    Row("import", "import", "ms", 1e3, 1.0),
]


@dataclass(frozen=True)
class Figure:
    """One engine's time, and what it is to stay below."""

    case: str
    engine: str
    title: str
    unit: str
    scale: float
    most: float


FIGURES = [
    Figure("three", "penstock:parallel", "parallel: a chain of 3 steps", "us", 1e6, 15),
    Figure("while", "penstock:parallel", "parallel: a Loop of 10 iterations", "us", 1e6, 30),
    Figure("steps", "penstock:dataflow", "dataflow: a step of a chain of 1,000", "us", 1e6, 1.5),
]

# What several workers bring: the case, the engine, those whose best is the measure, and the most.
# Engines with "1" at the end have one thread.
RACES = [
    (
        "branches",
        "six branches of four products of 384 x 384",
        "penstock:parallel",
        ["penstock:linear 1"],
        0.56,
    ),
    ("branches", "the same, for comparison", "onnxruntime:parallel", ["onnxruntime:1"], None),
    (
        "inception",
        "four modules of four branches of convolutions",
        "penstock:auto",
        ["penstock:linear", "onnxruntime:2", "onnxruntime:parallel"],
        1.0,
    ),
    (
        "inception",
        "the same, among ours",
        "penstock:auto",
        ["penstock:linear", "penstock:linear 1"],
        1.0,
    ),
    (
        "two",
        "two branches of eight products of 384 x 384",
        "penstock:streams",
        ["penstock:linear 1"],
        0.56,
    ),
    (
        "inception",
        "four modules of four branches of convolutions",
        "penstock:streams",
        ["penstock:linear", "penstock:parallel"],
        1.0,
    ),
    *(
        (
            "slow",
            "six kernels of 20 ms on small tensors, after 30 runs",
            f"penstock:{executor}",
            ["penstock:linear"],
            0.55,
        )
        for executor in ("parallel", "streams", "auto")
    ),
    *(
        (
            "waits",
            "three asynchronous waits of 50 ms",
            f"penstock:{executor}",
            ["penstock:frames"],
            1.1,
        )
        for executor in ("auto", "dataflow", "parallel", "streams")
    ),
    (
        "user_streams",
        "a run on each of eight user streams that wait 50 ms for a device, against one",
        "penstock:streams 8",
        ["penstock:streams 1"],
        1.2,
    ),
    (
        "loop",
        "an iteration of a Loop of 10,000, on one stream",
        "penstock:streams",
        ["penstock:linear"],
        2.0,
    ),
]

GROWTH = 12  # times as long for ten times the nodes, at most


def measure(engine: str, case: str) -> float:
    command = [sys.executable, "-m", "bench.engine", engine, case]
    # What an earlier process, or the user, has profiled is no part of what is measured.
    with tempfile.TemporaryDirectory() as costs:
        environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1", "PENSTOCK_CACHE": costs}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd=HERE.parent
        )
    if done.returncode:
        raise SystemExit(f"{engine} {case} failed:\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(result["median"], float)
    return result["median"]


def compare(row: Row) -> str:
    ours, theirs = [], []
    for _ in range(TURNS):
        ours.append(measure("penstock", row.case))
        theirs.append(measure("onnxruntime", row.case))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    a, b = (statistics.median(times) * row.scale for times in (ours, theirs))
    verdict = "yes" if ratio <= row.most else "**no**"
    line = f"| {row.title}, {row.unit} | {a:.3g} | {b:.3g} | {ratio:.2f} | {row.most} | {verdict} |"
    print(line, flush=True)
    return line


def figure(row: Figure) -> str:
    time = statistics.median(measure(row.engine, row.case) for _ in range(TURNS)) * row.scale
    verdict = "yes" if time <= row.most else "**no**"
    line = f"| {row.title}, {row.unit} | {time:.3g} | {row.most} | {verdict} |"
    print(line, flush=True)
    return line


def race(case: str, title: str, engine: str, rivals: list[str], most: float | None) -> str:
    turns = [[measure(each, case) for each in (engine, *rivals)] for _ in range(TURNS)]
    ratio = statistics.median(own / min(others) for own, *others in turns)
    times = [statistics.median(column) * 1e3 for column in zip(*turns, strict=True)]
    theirs = ", ".join(f"{r} {t:.3g}" for r, t in zip(rivals, times[1:], strict=True))
    verdict = "" if most is None else "yes" if ratio <= most else "**no**"
    goal = "" if most is None else most
    line = f"| {title} | {engine} {times[0]:.3g} | {theirs} | {ratio:.3f} | {goal} | {verdict} |"
    print(line, flush=True)
    return line


def growth() -> str:
    small = statistics.median(measure("penstock", "compile_10000") for _ in range(3))
    large = statistics.median(measure("penstock", "compile_100000") for _ in range(3))
    ratio = large / small
    line = (
        f"| the same for 100,000 nodes, s, against 10,000 | {large:.3g} | {small:.3g} (ours) | "
        f"{ratio:.2f} | {GROWTH} | {'yes' if ratio <= GROWTH else '**no**'} |"
    )
    print(line, flush=True)
    return line


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        pass
    packages = ("penstock-runtime", "numpy", "onnxruntime")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{cpu}, {core_budget()} cores; Python {platform.python_version()}, {versions}"


def main() -> None:
    wanted = set(sys.argv[1:])
    lines = [
        "# Benchmark",
        "",
        f"Measured on {date.today().isoformat()} by `make bench`: {machine()}.",
        "One thread each. Engines in turn, each in its own process, medians of "
        f"{TURNS} turns; the ratio is the median of the turns' ratios. Whole models are in "
        "`models.md`; what is not reached, and what was tried, in `open.md`.",
        "",
        "| what | Penstock | ONNX Runtime | ratio | at most | reached |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    lines += [compare(row) for row in ROWS if not wanted or row.case in wanted]
    if not wanted or "growth" in wanted:
        lines.append(growth())
    sections = [
        ["", "| what | Penstock | at most | reached |", "|---|---|---|---|"],
        [figure(row) for row in FIGURES if not wanted or row.case in wanted],
        ["", "Milliseconds, on two cores; a 1 behind an engine: one thread.", ""],
        ["| what | engine | against | ratio to the best | at most | reached |", "|" + "---|" * 6],
        [race(*row) for row in RACES if not wanted or row[0] in wanted],
    ]
    lines += [line for section in sections for line in section]
    if not wanted or "memory" in wanted:
        rows = memory_rows() + resident_rows()
        print("\n".join(rows))
        lines += rows
    if not wanted:
        (HERE / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
