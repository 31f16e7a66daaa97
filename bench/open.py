"""Where loading, compiling and the first run of models spend their time:
``python -m bench.open [MODEL.onnx ...]``.

Each model is opened in processes of its own, after imports and after a first model of another kind.
By default these are twelve of the small ones of ``tests/models/zoo.zip``. Writes the shares into
``bench/open.md``.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from bench.cases import chain
from penstock.cli.shapes import all_shapes

HERE = Path(__file__).parent
REPORT = HERE / "open.md"
SAMPLE = HERE.parent / "tests/models/zoo.zip"
BEGIN, END = "<!-- shares: python -m bench.open -->\n", "<!-- end -->\n"
TURNS = 5

MODELS = [
    *[f"scikit-learn/{name}" for name in ("KNeighborsRegressor_double", "MLPRegressor_double")],
    *[f"scikit-learn/{name}" for name in ("DecisionTreeRegressor", "SVC_linear")],
    *[f"scikit-learn/{name}" for name in ("KernelPCA", "StackingClassifier_array")],
    *[f"torch-modules/{name}" for name in ("Conv2d_same_dynamo", "RNN_script")],
    *[f"torch-modules/{name}" for name in ("RMSNorm_dynamo", "Softshrink_dynamo")],
    "lightgbm/LGBMRegressor_n_estimators_20",
    "derived/torch-modules-mlp_script__qdq_s8s8",
]
STAGES = ("load", "simplify", "fuse", "place", "lower", "plan", "schedule", "write", "bind", "run")


class Clock:
    """The processor time spent in each stage, without that in stages inside of it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.stack = ["run"]
        self.since = process_time()

    def switch(self) -> None:
        now = process_time()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.switch()
            self.stack.append(stage)
            try:
                return function(*arguments, **options)
            finally:
                self.switch()
                self.stack.pop()

        return call

    def replace(self, owner: Any, name: str, stage: str) -> None:
        setattr(owner, name, self.timed(stage, getattr(owner, name)))


def watch(clock: Clock) -> None:
    """Let the clock see the stages of all sessions."""
    from penstock.compiler import lowering, scheduling, stages
    from penstock.compiler.compiler import Compiler
    from penstock.passes.lowering.assign_backends import AssignBackends
    from penstock.passes.lowering.fuse import Fuse
    from penstock.session import opening

    clock.replace(opening, "load", "load")
    clock.replace(Compiler, "structure", "simplify")
    clock.replace(lowering, "optimize", "simplify")
    clock.replace(Fuse, "run", "fuse")
    clock.replace(AssignBackends, "run", "place")
    clock.replace(lowering, "run_passes", "lower")
    clock.replace(stages, "compile_plan", "plan")
    clock.replace(stages, "plan_arena", "schedule")
    clock.replace(scheduling, "arrange", "schedule")
    clock.replace(stages, "write_program", "write")
    clock.replace(stages, "LinearExecutor", "bind")


def opened(name: str) -> dict[str, float]:
    """The seconds of each stage of opening a model and running it once, in this process."""
    import penstock as ps

    warm = chain(3).SerializeToString()
    ps.compile(warm).run({"v0": np.ones(16, np.float32)})
    if Path(name).is_file():
        data = Path(name).read_bytes()
        model = ps.load(data)
        types = {value.name: value.type for value in model.graph.inputs}
        dims = all_shapes(model, (), {})
        feeds = {key: np.ones(dims[key], types[key].dtype) for key in dims}
    else:
        with zipfile.ZipFile(SAMPLE) as archive:
            data = archive.read(f"{name}.onnx")
            entries = json.loads(archive.read("index.json"))
            inputs = next(entry["inputs"] for entry in entries if entry["name"] == name)
            arrays = np.load(io.BytesIO(archive.read(f"{name}.npz")), allow_pickle=False)
            feeds = {key: arrays[f"arr_{i}"] for i, key in enumerate(inputs)}
    clock = Clock()
    watch(clock)
    clock.since = process_time()
    ps.compile(data).run(feeds)
    clock.switch()
    return dict(clock.seconds)


def measured(name: str) -> dict[str, float]:
    """The stages of the fastest of some processes."""
    command = [sys.executable, "-m", "bench.open", "--one", name]
    runs = []
    for _ in range(TURNS):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return min(runs, key=lambda seconds: sum(seconds.values()))


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [f"| model | ms | {' | '.join(STAGES)} |", "|---|---|" + "---|" * len(STAGES)]
    for name, seconds in rows.items():
        total = sum(seconds.values())
        shares = [f"{seconds.get(stage, 0.0) / total:.0%}" for stage in STAGES]
        lines.append(f"| {name} | {total * 1e3:.1f} | {' | '.join(shares)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.open",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", metavar="MODEL.onnx")
    parser.add_argument("--one", action="store_true", help="open one model in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(opened(options.models[0])))
        return
    rows = {name: measured(name) for name in options.models or MODELS}
    text = REPORT.read_text()
    head, _, rest = text.partition(BEGIN)
    REPORT.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
