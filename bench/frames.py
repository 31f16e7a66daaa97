"""Time control flow side by side with TensorFlow: ``python -m bench.frames``.

TensorFlow lives in an environment of its own, which ``make bench-tf`` makes; with another one:

    python -m bench.frames --tensorflow PATH_TO_ITS_PYTHON

Where it is not installed, its column stays empty. Each engine runs in a process of its own, and
engines take turns; a ratio is the median of the turns' ratios. Writes ``bench/frames.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.tf_graphs import Flow, Type

from bench.devices import two_devices, waiting
from bench.frames_trial import Job
from bench.run import machine

HERE = Path(__file__).parent
SCRIPT = HERE / "frames_trial.py"
TENSORFLOW = HERE.parent / ".venv-tf" / "bin" / "python"
TURNS = 3
TIMEOUT_S = 300
ITERATIONS, LONG_CHAIN, WAITS, WAIT_S = 2000, 1000, 64, 5e-3
EXECUTORS = ("auto", "frames")


@dataclass(frozen=True)
class Case:
    """A graph and a run of it. ``per``: how many of what ``unit`` names a run has; ``scale``: how
    many units a second has. ``target``: what the ratio of each executor to TensorFlow shall be at
    most."""

    name: str
    unit: str
    graph: bytes
    feeds: Mapping[str, tuple[str, float]]
    fetch: str
    per: int = 1
    scale: float = 1e6
    executors: Sequence[str] = EXECUTORS
    options: Mapping[str, Any] = field(default_factory=dict)
    target: float | None = None


def loop(variables: int) -> tuple[bytes, str]:
    """``while i < n`` that adds to each of ``variables``, as tf.while_loop writes it."""
    g = Flow()
    g.placeholder("n", "int32")
    zero = g.const(np.int32(0), "zero")
    exits = [g.loop("while", zero, "n")]
    for k in range(1, variables):

        def step(value: str, k: int = k) -> str:
            one = g.const(np.int32(k), f"while/constant{k}", "^while/i/body")
            return g.op("AddV2", value, one, name=f"while/add{k}")

        exits.append(g.carry("while", f"v{k}", zero, step))
    total = g.op("AddN", *exits, name="total", N=variables)
    return g.bytes(), total


def unraised() -> tuple[bytes, str]:
    """A loop that reads the index output of a Merge, for which no structured loop has a value."""
    g = Flow()
    g.placeholder("n", "int32")
    zero = g.const(np.int32(0), "zero")
    g.loop("while", zero, "n")
    total = g.carry("while", "v", zero, lambda v: g.op("AddV2", v, "while/i/merge:1"))
    return g.bytes(), total


def pushing() -> tuple[bytes, str]:
    """A loop with a side effect: it pushes each number to a stack."""
    g = Flow()
    g.placeholder("n", "int32")
    zero = g.const(np.int32(0), "zero")
    g.const(np.int32(-1), "size")
    g.node("StackV2", "size", name="stack", elem_type=Type("int32"), stack_name="numbers")
    g.loop("while", zero, "n")
    handle = g.enter("stack", frame="while", constant=True, T="resource")
    pushed = g.op("StackPushV2", handle, "while/i/body", name="push")
    total = g.carry("while", "v", zero, lambda v: g.op("AddV2", v, pushed))
    return g.bytes(), total


def network(*, switched: bool) -> tuple[bytes, str]:
    """MobileNetV1 at 96 x 96 without its classifier; ``switched``: all of it behind one output of a
    Switch that no Merge follows, so that it cannot be raised."""
    g, rng = Flow(), np.random.default_rng(0)
    g.placeholder("p", "bool")
    g.placeholder("x", "float32")
    image = g.const(rng.normal(size=(1, 96, 96, 3)).astype(np.float32), "image")
    last = g.op("Mul", image, "x", name="scaled", T="float32")
    if switched:
        last = g.switch(last, "p", "switch", T="float32") + ":1"

    def layer(op: str, *shape: int, stride: int = 1) -> str:
        weights = rng.normal(size=shape) * (2 / np.prod(shape[:2]) / shape[2]) ** 0.5
        filters = g.const(weights.astype(np.float32))
        attrs = {"strides": [1, stride, stride, 1], "padding": "SAME", "data_format": "NHWC"}
        made = g.node(op, last, filters, T=Type("float32"), dilations=[1] * 4, **attrs)
        bias = g.const(np.full(shape[3] if op == "Conv2D" else shape[2], 0.1, np.float32))
        made = g.node("BiasAdd", made, bias, T=Type("float32"))
        return g.node("Relu6", made, T=Type("float32"))

    last = layer("Conv2D", 3, 3, 3, 32, stride=2)
    blocks = [(32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    for inputs, outputs, stride in [*blocks, *[(512, 512, 1)] * 5, (512, 1024, 2), (1024, 1024, 1)]:
        last = layer("DepthwiseConv2dNative", 3, 3, inputs, 1, stride=stride)
        last = layer("Conv2D", 1, 1, inputs, outputs)
    axes = g.const(np.array([1, 2], np.int32))
    last = g.node("Mean", last, axes, name="y", T=Type("float32"), Tidx=Type("int32"))
    return g.bytes(), last


def chain(n: int) -> tuple[bytes, str]:
    """``x + x + ...``, of scalars."""
    g = Flow()
    last = g.placeholder("x", "float32")
    for i in range(n):
        last = g.op("AddV2", last, "x", name=f"add{i}", T="float32")
    return g.bytes(), last


def small() -> bytes:
    g = Flow()
    g.const(np.float32(3), "constant")
    g.node("Neg", g.placeholder("x", "float32"), name="negated", T=Type("float32"))
    return g.bytes()


def cases() -> list[Case]:
    n = {"n": ("int32", ITERATIONS)}
    rows = [
        Case("while, 1 variable", "us an iteration", *_run(loop(1), n), ITERATIONS, target=2.5),
        Case("while, 4 variables", "us an iteration", *_run(loop(4), n), ITERATIONS),
        Case(
            "while that stays on frames",
            "us an iteration",
            *_run(unraised(), n),
            ITERATIONS,
            target=2.5,
        ),
        Case(
            "while with a side effect",
            "us an iteration",
            *_run(pushing(), n),
            ITERATIONS,
            target=2.5,
        ),
        Case(
            "while on 2 devices",
            "us an iteration",
            *_run(two_devices(), n),
            ITERATIONS,
            options={"devices": 2},
            target=2.5,
        ),
        Case(
            "while on 2 devices, a user's kernels",
            "us an iteration",
            *_run(two_devices(), n),
            ITERATIONS,
            options={"devices": 2, "users": True},
        ),
        Case(
            f"chain of {LONG_CHAIN} additions",
            "us a node",
            *_run(chain(LONG_CHAIN), {"x": ("float32", 1.0)}),
            LONG_CHAIN,
            options={"calls": 10},
            target=1.0,
        ),
        Case("run of a constant", "us", small(), {}, "constant", options={"calls": 2000}),
        Case(
            "run with one feed",
            "us",
            small(),
            {"x": ("float32", 1.0)},
            "negated",
            options={"calls": 2000},
        ),
    ]
    fed = {"x": ("float32", 1.0), "p": ("bool", True)}
    for name, switched in (("MobileNetV1", False), ("MobileNetV1 behind a Switch", True)):
        graph = network(switched=switched)
        rows.append(Case(name, "ms", *_run(graph, fed), scale=1e3, options={"calls": 10}))
    for parallel in (1, 2, 4, 8, 16, 32):
        graph = waiting(parallel)
        rows.append(
            Case(
                f"{WAITS} waits of 5 ms, {parallel} at once",
                "ms",
                *_run(graph, {"n": ("int32", WAITS)}),
                scale=1e3,
                target=1.1,
                options={"wait_s": WAIT_S, "parallel": parallel, "repetitions": 3},
            )
        )
    return rows


def _run(
    graph: tuple[bytes, str], feeds: Mapping[str, tuple[str, float]]
) -> tuple[bytes, Mapping[str, tuple[str, float]], str]:
    return graph[0], feeds, graph[1]


@dataclass
class Row:
    """What was measured of a case: units of it by engine, one for each turn; which executor ran
    what "auto" chose; and why an engine has none."""

    case: Case
    values: dict[str, list[float]] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def median(self, engine: str) -> float | None:
        turns = self.values.get(engine)
        return statistics.median(turns) if turns else None

    def ratio(self, engine: str) -> float | None:
        """Of ours to TensorFlow's, turn by turn."""
        ours, theirs = self.values.get(engine, []), self.values.get("tensorflow", [])
        ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
        return statistics.median(ratios) if ratios else None


Measure = Callable[[Job], Mapping[str, Any]]


def measured(python: Path | None) -> Measure:
    """Does jobs in processes: TensorFlow's with this interpreter."""

    def measure(job: Job) -> Mapping[str, Any]:
        own = job.engine != "tensorflow"
        assert own or python is not None
        command = [sys.executable if own else str(python), str(SCRIPT), json.dumps(asdict(job))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return {"error": f"no end within {TIMEOUT_S} s"}
        if done.returncode:
            return {"error": (done.stderr.strip().splitlines() or ["?"])[-1]}
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    return measure


def measure_case(
    case: Case, folder: Path, measure: Measure, peers: Sequence[str], turns: int
) -> Row:
    """Measure the engines in turn, ``turns`` times; skip one that has failed."""
    path = folder / "graph.pb"
    path.write_bytes(case.graph)
    row = Row(case)
    engines = [*[f"penstock:{executor}" for executor in case.executors], *peers]
    for _ in range(turns):
        for engine in engines:
            if engine in row.errors:
                continue
            job = Job(engine, str(path), dict(case.feeds), case.fetch, **case.options)
            result = measure(job)
            if "error" in result:
                row.errors[engine] = result["error"]
                continue
            seconds = statistics.median(result["seconds"])
            row.values.setdefault(engine, []).append(seconds / case.per * case.scale)
            row.by[engine] = result["by"]
    return row


def markdown(rows: Sequence[Row], turns: int, missing: str | None) -> list[str]:
    """The report; ``missing``: why there is no TensorFlow, if there is none."""
    versions = {row.by["tensorflow"] for row in rows if "tensorflow" in row.by}
    lines = [
        "# Control flow",
        "",
        f"Measured on {date.today().isoformat()} by `make bench-tf`: {machine()}"
        + "".join(f", {each}" for each in sorted(versions))
        + ".",
        "Graphs of TensorFlow's primitives, run as they are. Engines in turn, each in its own "
        f"process, medians of {turns} turns; a ratio is the median of the turns' ratios.",
    ]
    if missing:
        lines += ["", missing]
    lines += [
        "",
        "| what | unit | TensorFlow | auto | ratio | frames | ratio | target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    notes: list[str] = []
    for row in rows:
        cells = [row.case.name, row.case.unit, _shown(row.median("tensorflow"))]
        for executor in EXECUTORS:
            engine = f"penstock:{executor}"
            cells += [_shown(row.median(engine)), _shown(row.ratio(engine))]
        cells.append("" if row.case.target is None else f"{row.case.target:.3g}")
        lines.append(f"| {' | '.join(cells)} |")
        if row.by.get("penstock:auto") == "frames":
            notes.append(f"{row.case.name}: auto runs it on frames.")
        notes += [f"{row.case.name}, {each}: {why}" for each, why in row.errors.items()]
    return [*lines, *[line for note in notes for line in ("", note)]]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def absent(python: Path) -> str | None:
    """Why there is no TensorFlow to measure, if there is none."""
    if not python.exists():
        return f"TensorFlow is left out: there is no {python}; `make bench-tf` installs it."
    probe = [
        str(python),
        "-c",
        "import importlib.util as u, sys; sys.exit(not u.find_spec('tensorflow'))",
    ]
    if subprocess.run(probe, capture_output=True).returncode:
        return f"TensorFlow is left out: {python} has none; `make bench-tf` installs one."
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Time control flow side by side with TensorFlow.")
    parser.add_argument("--tensorflow", type=Path, default=TENSORFLOW, metavar="PYTHON")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--only", nargs="*", default=None, help="words in the names of cases")
    options = parser.parse_args()
    missing = absent(options.tensorflow)
    if missing:
        print(missing, file=sys.stderr)
    peers = [] if missing else ["tensorflow"]
    measure = measured(options.tensorflow)
    wanted = [
        case
        for case in cases()
        if options.only is None or any(word in case.name for word in options.only)
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in wanted:
            rows.append(measure_case(case, Path(folder), measure, peers, options.turns))
            print("\n".join(markdown(rows[-1:], options.turns, None)[7:]), flush=True)
    if options.only is None:
        (HERE / "frames.md").write_text("\n".join(markdown(rows, options.turns, missing)) + "\n")


if __name__ == "__main__":
    main()
