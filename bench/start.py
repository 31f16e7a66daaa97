"""Time from the start of a process to the first answer of a model, beside other runtimes:
``python -m bench.start [--only NAME ...] [--turns N]``.

Each process imports one engine, loads one model, runs it once with one thread, and ends. Engines
take turns; a figure is the least of all turns, after one turn that is not counted, so that files
and bytecode are in the cache of the system. What an engine can make ahead (a saved session, ONNX
Runtime's own format, OpenVINO's cache) is made before. ``first`` compiles a model that no process
has compiled before, ``again`` one whose session was kept. ``numpy`` imports NumPy and reads the
feeds alone, as all others do as well: what no engine can do without. Writes ``bench/start.md`` if
all models were measured.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np

from bench.models import Model, models
from bench.peers import environment
from bench.run import machine
from bench.tables import geometric_mean

REPORT = Path(__file__).with_name("start.md")
TIMEOUT = 300

_SESSION = "session = {}\noutputs = list(session.run(feeds).values())"
_RUNTIME = """
import onnxruntime
onnxruntime.disable_telemetry_events()
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 4
{}
session = onnxruntime.InferenceSession({!r}, options, providers=["CPUExecutionProvider"])
outputs = session.run(None, feeds)
"""
_OPENVINO = """
import sys
sys.modules["openvino_telemetry"] = None
import openvino
config = {{"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "CACHE_DIR": {!r}}}
outputs = list(openvino.Core().compile_model({!r}, "CPU", config)(feeds).values())
"""
_ORT_FORMAT = 'options.add_session_config_entry("session.save_model_format", "ORT")\n'
_UNCHANGED = "options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL"
_OPTIMIZED = "options.optimized_model_filepath = {!r}"
_ANSWERED = """
import os, time
os.write(1, b".")
status = open("/proc/self/status").read()
resident = int(status.partition("VmRSS:")[2].split()[0]) * 1024
total = sum(float(np.abs(y.astype(np.float64)).sum()) for y in outputs)
print("", time.process_time(), resident, total)
"""
OURS = ("open", "again", "first")
PEERS = ("onnxruntime", "optimized", "ort format", "openvino")
FLOOR = "numpy"
ENGINES = (*OURS, *PEERS, FLOOR)
LEGEND = """\
"open" is `penstock.open` of a saved session; "first" compiles a file that no process has compiled
before, "again" one whose session was kept; "optimized" is ONNX Runtime's optimized model, "ort
format" its own format; "openvino" has its cache; "numpy" imports NumPy and reads the feeds, which
all engines' processes do. The commands were measured with the smallest of the models."""
COMMANDS = {
    "import numpy": ["-c", "import numpy"],
    "import onnxruntime": ["-c", "import onnxruntime"],
    "penstock --help": ["-m", "penstock.cli", "--help"],
    "penstock info SMALL": ["-m", "penstock.cli", "info", "{}"],
}


@dataclass
class Start:
    """The least of some processes: seconds on the clock and of processors until the first answer,
    and bytes resident then. ``total`` is the sum of all magnitudes in the outputs."""

    seconds: float
    cpu: float
    resident: float
    total: float

    def least(self, other: Start) -> Start:
        resident = min(self.resident, other.resident)
        least = min(self.seconds, other.seconds), min(self.cpu, other.cpu)
        return Start(*least, resident, self.total)


@dataclass
class Row:
    """The starts of one model by engine; ``errors`` of those that fail."""

    model: str
    starts: dict[str, Start] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def ratio(self, ours: str, peers: Sequence[str], figure: str, beyond: str = "") -> float | None:
        """A figure of ours as a part of the least of peers, both less that of ``beyond``."""
        there = [getattr(self.starts[peer], figure) for peer in peers if peer in self.starts]
        if ours not in self.starts or not there or (beyond and beyond not in self.starts):
            return None
        floor = getattr(self.starts[beyond], figure) if beyond else 0.0
        return (getattr(self.starts[ours], figure) - floor) / (min(there) - floor)


def programs(path: str, folder: Path) -> dict[str, str]:
    """The program of each engine that loads the model and sets ``outputs``."""
    saved = str(folder / "model.penstock")
    optimized, own = str(folder / "optimized.onnx"), str(folder / "model.ort")
    compiled = f"penstock.compile({path!r}, threads=1"
    return {
        "open": "import penstock\n" + _SESSION.format(f"penstock.open({saved!r})"),
        "again": "import penstock\n" + _SESSION.format(f"{compiled})"),
        "first": "import penstock\n" + _SESSION.format(f"{compiled}, cache=False)"),
        "onnxruntime": _RUNTIME.format("", path),
        "optimized": _RUNTIME.format(_UNCHANGED, optimized),
        "ort format": _RUNTIME.format("", own),
        "openvino": _OPENVINO.format(str(folder / "openvino"), path),
        FLOOR: "outputs = list(feeds.values())",
        # What these three read.
        "save": "import penstock\n"
        + _SESSION.format(f"{compiled})")
        + f"\nsession.save({saved!r})\nsession.close()",
        "save optimized": _RUNTIME.format(_OPTIMIZED.format(optimized), path),
        "save ort format": _RUNTIME.format(_ORT_FORMAT + _OPTIMIZED.format(own), path),
    }


def inputs(feeds: Mapping[str, np.ndarray], folder: Path) -> str:
    """Lines of a program that read the feeds from files."""
    lines = ["import numpy as np", "feeds = {}"]
    for i, (name, array) in enumerate(feeds.items()):
        file = folder / f"feed{i}"
        array.tofile(file)
        read = f"np.fromfile({str(file)!r}, np.{array.dtype.name}).reshape({array.shape})"
        lines.append(f"feeds[{name!r}] = {read}")
    return "\n".join([*lines, ""])


def started(program: str, variables: Mapping[str, str]) -> Start | str:
    """Run a program in a process of its own; the last line of its error if it fails."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        bufsize=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    seconds = time.perf_counter() - begin
    out, err = process.communicate(timeout=TIMEOUT)
    if process.returncode:
        return (err.decode().strip().splitlines() or ["no message"])[-1]
    return Start(seconds, *map(float, out.split()))


def measured(model: Model, engines: Sequence[str], turns: int, folder: Path) -> Row:
    """The starts of one model."""
    texts, head = programs(str(model.path()), folder), inputs(model.feeds(), folder)
    variables = warm_environment(folder)
    row = Row(model.name)
    for name in ("save", "save optimized", "save ort format"):
        if isinstance(error := started(head + texts[name] + _ANSWERED, variables), str):
            row.errors[name] = error
    for turn in range(turns + 1):
        for engine in engines:
            if engine in row.errors:
                continue
            start = started(head + texts[engine] + _ANSWERED, variables)
            if isinstance(start, str):
                row.errors[engine] = start
            elif turn:
                row.starts[engine] = start.least(row.starts.get(engine, start))
    totals = {engine: start.total for engine, start in row.starts.items() if engine != FLOOR}
    first = next(iter(totals.values()), 0.0)
    if not np.allclose([*totals.values()], first, rtol=1e-2, atol=1e-3):
        row.errors["answers"] = f"magnitudes differ: {totals}"
    return row


def warm_environment(folder: Path) -> dict[str, str]:
    """Variables of processes that keep bytecode, whatever the environment says of it."""
    variables = {**environment(folder), "PENSTOCK_CACHE": str(folder)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**variables, "PYTHONPYCACHEPREFIX": str(folder.parent / "bytecode")}


def commands(small: str, turns: int, folder: Path) -> dict[str, float]:
    """The seconds of processor time of commands."""
    variables = warm_environment(folder)
    least = dict.fromkeys(COMMANDS, float("inf"))
    for turn in range(turns + 1):
        for name, arguments in COMMANDS.items():
            line = [sys.executable, *(part.format(small) for part in arguments)]
            begin = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(line, env=variables, check=True, stdout=subprocess.DEVNULL)
            end = resource.getrusage(resource.RUSAGE_CHILDREN)
            if turn:
                seconds = end.ru_utime - begin.ru_utime + end.ru_stime - begin.ru_stime
                least[name] = min(least[name], seconds)
    return least


def table(rows: Sequence[Row], engines: Sequence[str]) -> list[str]:
    """Milliseconds until the first answer, and ratios."""
    ratios = {
        "open / fastest": ("open", PEERS, "seconds"),
        "again / onnxruntime": ("again", ("onnxruntime",), "seconds"),
        "first / onnxruntime": ("first", ("onnxruntime",), "seconds"),
        "open, processor time": ("open", PEERS, "cpu"),
        "first, processor time": ("first", ("onnxruntime",), "cpu"),
        "open, processor time beyond numpy": ("open", PEERS, "cpu", FLOOR),
        "resident": ("open", ("onnxruntime",), "resident"),
    }
    heads = ["model", *engines, *ratios]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [f"{row.starts[e].seconds * 1e3:.0f}" if e in row.starts else "" for e in engines]
        figures = [row.ratio(*each) for each in ratios.values()]
        cells += ["" if figure is None else f"{figure:.2f}" for figure in figures]
        lines.append(f"| {row.model} | {' | '.join(cells)} |")
    means = [geometric_mean(row.ratio(*each) for row in rows) for each in ratios.values()]
    shown = ["" if mean is None else f"{mean:.2f}" for mean in means]
    lines.append(f"| geometric mean |{' |' * len(engines)} {' | '.join(shown)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models with one of these in it")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[*ENGINES])
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    names = arguments.only
    chosen = [m for m in models() if not names or any(part in m.name for part in names)]
    load, rows, small = os.getloadavg()[0], [], ""
    with tempfile.TemporaryDirectory() as bytecode:
        for model in chosen:
            with tempfile.TemporaryDirectory(dir=bytecode) as folder:
                try:
                    row = measured(model, arguments.engines, arguments.turns, Path(folder))
                except (ImportError, OSError, RuntimeError) as error:
                    print(f"{model.name} is left out: {error}", file=sys.stderr)
                    continue
            rows.append(row)
            print(table([row], arguments.engines)[2], flush=True)
            for engine, error in row.errors.items():
                print(f"  {engine}: {error}", flush=True)
            path = str(model.path())
            small = min(small or path, path, key=lambda name: Path(name).stat().st_size)
        with tempfile.TemporaryDirectory(dir=bytecode) as folder:
            times = commands(small, arguments.turns, Path(folder))
    lines = [
        "# From the start of a process to the first answer",
        "",
        f"Measured on {date.today().isoformat()} by `python -m bench.start`: {machine()}.",
        f"Milliseconds, one thread, least of {arguments.turns} turns, engines in turn. Load "
        f"average at the start: {load:.1f}. {LEGEND}",
        "",
        *table(rows, arguments.engines),
        "",
        "| command | processor time, ms | ratio |",
        "|---|---|---|",
    ]
    reference = times["import onnxruntime"]
    for name, seconds in times.items():
        lines.append(f"| `{name}` | {seconds * 1e3:.0f} | {seconds / reference:.2f} |")
    print("\n".join(lines))
    if len(rows) == len(models()) and {*arguments.engines} == {*ENGINES}:
        REPORT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
