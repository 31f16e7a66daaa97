"""Where loading, compiling and the first run of models spend their time:
``python -m bench.open [MODEL ...]``; what they do, in counts: ``python -m bench.open --counts``.

Each model is opened in processes of its own, after imports; for times, after a first model of
another kind. By default these are twelve of the small ones of ``tests/models/zoo.zip``, for counts
with the networks of ``tests/models/tflite`` and what ``tests/models/fetch.py`` has fetched. Writes
the shares, or the counts, into ``bench/open.md``. ``--functions STAGE`` prints instead which
functions are called most often in a stage.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from tests.models.fetch import real_models

from bench.cases import chain
from bench.open_counts import COLUMNS, Calls, counted
from bench.open_stages import STAGES, Clock, watch
from penstock.cli.shapes import all_shapes

HERE = Path(__file__).parent
REPORT = HERE / "open.md"
SAMPLE = HERE.parent / "tests/models/zoo.zip"
BEGIN, END = "<!-- shares: python -m bench.open -->\n", "<!-- end -->\n"
COUNTS = "<!-- counts: python -m bench.open --counts -->\n"
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


def source_of(name: str) -> tuple[str | bytes, dict[str, np.ndarray]]:
    """A model, by its path or by its name in the sample, and what it is fed."""
    import penstock as ps

    path = Path(name)
    if not path.is_file():
        with zipfile.ZipFile(SAMPLE) as archive:
            entries = json.loads(archive.read("index.json"))
            inputs = next(entry["inputs"] for entry in entries if entry["name"] == name)
            arrays = np.load(io.BytesIO(archive.read(f"{name}.npz")), allow_pickle=False)
            feeds = {key: arrays[f"arr_{i}"] for i, key in enumerate(inputs)}
            return archive.read(f"{name}.onnx"), feeds
    for fetched in real_models(""):
        if fetched.path == path.absolute():
            return name, fetched.feeds()
    model = ps.load(name)
    types = {value.name: value.type for value in model.graph.inputs}
    dims = all_shapes(model, (), {})
    return name, {key: np.ones(dims[key], types[key].dtype) for key in dims}


def opened(name: str) -> dict[str, float]:
    """The seconds of each stage of opening a model and running it once, in this process."""
    import penstock as ps

    warm = chain(3).SerializeToString()
    ps.compile(warm).run({"v0": np.ones(16, np.float32)})
    source, feeds = source_of(name)
    clock = Clock()
    watch(clock)
    clock.since = process_time()
    ps.compile(source, cache=False).run(feeds)
    clock.switch()
    return dict(clock.seconds)


def in_process(*arguments: str) -> Any:
    """What a process of its own prints last."""
    command = [sys.executable, "-m", "bench.open", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str) -> dict[str, float]:
    """The stages of the fastest of some processes."""
    runs = [in_process("--one", name) for _ in range(TURNS)]
    return min(runs, key=lambda seconds: sum(seconds.values()))


def counts_table(names: Sequence[str]) -> str:
    """The counts of models, each opened in a process of its own."""
    lines = [
        "; ".join(f"{column}: {meaning}" for column, meaning in COLUMNS.items()) + ".",
        "",
        f"| model | {' | '.join(COLUMNS)} | calls | {' | '.join(STAGES)} |",
        "|---|" + "---|" * (len(COLUMNS) + 1 + len(STAGES)),
    ]
    for name in names:
        figures, calls = in_process("--counts", "--one", name)
        total = sum(calls.values())
        cells = [*figures.values(), total, *(calls[stage] for stage in STAGES)]
        short = name if len(Path(name).parts) < 3 else Path(name).name
        lines.append(f"| {short} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    return "\n".join([*lines, ""])


def measured_table(names: Sequence[str]) -> str:
    """The time of models, and the share of each stage."""
    rows = {name: measured(name) for name in names}
    lines = [f"| model | ms | {' | '.join(STAGES)} |", "|---|---|" + "---|" * len(STAGES)]
    for name, seconds in rows.items():
        total = sum(seconds.values())
        shares = [f"{seconds.get(stage, 0.0) / total:.0%}" for stage in STAGES]
        lines.append(f"| {name} | {total * 1e3:.1f} | {' | '.join(shares)} |")
    return "\n".join([*lines, ""])


def counted_in_this_process(name: str) -> tuple[dict[str, int], Calls]:
    return counted(*source_of(name))


def all_files() -> list[str]:
    """The networks of the corpus of TFLite, and the models that were fetched."""
    networks = sorted((HERE.parent / "tests/models/tflite/net").glob("*.tflite"))
    fetched = [model.path for model in real_models("") if model.path.is_file()]
    return [str(p) for p in (*networks, *fetched) if p.suffix in (".onnx", ".tflite")]


def write(begin: str, text: str) -> None:
    """Put a table into the report, behind the line ``begin``."""
    head, _, rest = REPORT.read_text().partition(begin)
    REPORT.write_text(f"{head}{begin}\n{text}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.open",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--counts", action="store_true", help="count instead of measuring")
    parser.add_argument("--functions", choices=STAGES, help="what is called most in this stage")
    parser.add_argument("--one", action="store_true", help="open one model in this process")
    options = parser.parse_args()
    if options.functions:
        for name in options.models:
            _, calls = counted_in_this_process(name)
            for count, function in calls.most_called(40, options.functions):
                print(f"{count:>7,} {function}")
    elif options.one and options.counts:
        figures, calls = counted_in_this_process(options.models[0])
        print(json.dumps([figures, calls.of_stages()]))
    elif options.one:
        print(json.dumps(opened(options.models[0])))
    elif options.models:
        made = counts_table(options.models) if options.counts else measured_table(options.models)
        print(made)
    elif options.counts:
        write(COUNTS, counts_table([*MODELS, *all_files()]))
    else:
        write(BEGIN, measured_table(MODELS))


if __name__ == "__main__":
    main()
