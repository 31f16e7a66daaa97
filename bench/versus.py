"""Time Penstock and its peers over whole models: ``python -m bench.versus``.

Each engine and number of threads runs in a process of its own, and engines take turns; ratios are
medians of the turns' ratios. Without options that choose, everything is measured, and, if no engine
and no model had to be left out, written to ``bench/models.md`` and ``bench/models.json``; a part of
it is only printed, for instance:

    python -m bench.versus --only resnet50 silero --engines penstock onnxruntime --threads 1

``python -m bench.start`` times processes from their start to the first answer of these models.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path

import numpy as np

from bench.models import Model, models
from bench.peers import ENGINES, PEERS, installed
from bench.run import machine
from bench.tables import OURS, ClientsRow, Row, geometric_mean, report
from bench.trial import Job
from bench.turns import add_turn, complain, next_trial, reference, shown

HERE = Path(__file__).parent
FEW_TURNS, TURNS = 3, 5
CLIENTS = (1, 2, 4, 16)
CLIENT_ENGINES = (OURS, "onnxruntime", "openvino-throughput")
# Besides those that ``machine`` names.
PACKAGES = ("onednn-cpu-gomp", "openvino", "torch", "transformers")


@dataclass(frozen=True)
class Options:
    """What is to be measured; ``complete``: all there is, so that the results are kept.

    ``file`` is for what was measured, as JSON.
    """

    models: Sequence[Model]
    engines: Sequence[str]
    threads: Sequence[int]
    clients: Sequence[int]
    turns: int
    file: Path | None
    complete: bool


class Bench:
    """The rows measured so far, in the order of the models."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.rows: list[Row] = []
        self.throughputs: list[ClientsRow] = []
        self.left_out: dict[str, str] = {}
        # Cores that others keep busy slow engines of several threads down most: they wait spinning.
        self.busy = os.getloadavg()[0]

    def measure(self, model: Model) -> None:
        """Add the rows of ``model``, or say why it is left out."""
        try:
            path, feeds = model.path(), model.feeds()
        except (ImportError, OSError, RuntimeError) as error:
            self.left_out[model.name] = str(error).splitlines()[0]
            print(f"{model.name} is left out: {self.left_out[model.name]}", flush=True)
            return
        inputs = self.folder / "feeds.npz"
        np.savez(inputs, *feeds.values())
        job = Job(OURS, 1, str(path), list(feeds), str(inputs), fed_back=model.fed_back)
        wanted = reference(model.name, job)
        for threads in self.options.threads:
            self._compare(model, replace(job, threads=threads), wanted)
        if model.clients:
            for clients in self.options.clients:
                self._throughput(model, replace(job, clients=clients))

    def _compare(self, model: Model, job: Job, wanted: list[np.ndarray] | None) -> None:
        engines = [e for e in self.options.engines if ENGINES[e].reads_files or model.exported]
        row = Row(model.name, job.threads, {engine: [] for engine in engines})
        self.rows.append(row)
        for _ in range(self.options.turns):
            add_turn(row, job, f"{model.name}, threads {job.threads}", wanted)

    def _throughput(self, model: Model, job: Job) -> None:
        # "openvino-throughput" is OpenVINO as it is set for many requests.
        chosen = [e for e in CLIENT_ENGINES if e.partition("-")[0] in self.options.engines]
        engines = [engine for engine in chosen if installed(engine)]
        configurations = list(product(engines, self.options.threads))
        row = ClientsRow(model.name, job.clients, {key: [] for key in configurations})
        self.throughputs.append(row)
        for turn in range(self.options.turns):
            print(f"{model.name}, clients {job.clients}, turn {turn + 1}, runs/s:", end="")
            for engine, threads in configurations:
                job = replace(job, engine=engine, threads=threads)
                trial = next_trial(row.trials[engine, threads], job)
                print(f" {engine}:{threads} {shown(trial.rate)}", end="", flush=True)
            print(flush=True)
        complain({f"{engine}:{threads}": t for (engine, threads), t in row.trials.items()})

    def markdown(self) -> list[str]:
        lines = [
            "# Models",
            "",
            f"Measured on {date.today().isoformat()}: {described()}.",
            "Engines in turn, each in its own process; a ratio is the median of the turns' ratios. "
            f"Turns: {self.options.turns}. Load average at the start: {self.busy:.1f}.",
        ]
        lines += [f"{name} is left out: {why}." for name, why in self.left_out.items()]
        return lines + report(self.rows, self.throughputs)

    def json(self) -> dict:
        """All that was measured: times in seconds, memory in bytes, rates in runs a second.

        Times of loading and memory are not to be compared where an engine does not read the file.
        """
        return {
            "date": date.today().isoformat(),
            "machine": described(),
            "turns": self.options.turns,
            "load_average": self.busy,
            "models": [
                {
                    "model": row.model,
                    "threads": row.threads,
                    "ratio": row.run_ratio,
                    "loading_ratio": row.loading_ratio,
                    "memory_ratio": row.memory_ratio,
                    "differences": {e: _finite(each) for e, each in row.differences.items()},
                    "trials": {e: [asdict(t) for t in each] for e, each in row.trials.items()},
                }
                for row in self.rows
            ],
            "geometric_means": {
                threads: geometric_mean(r.run_ratio for r in self.rows if r.threads == threads)
                for threads in self.options.threads
            },
            "clients": [
                {
                    "model": row.model,
                    "clients": row.clients,
                    "ratio": row.ratio,
                    "trials": {
                        f"{engine}:{threads}": [asdict(t) for t in each]
                        for (engine, threads), each in row.trials.items()
                    },
                }
                for row in self.throughputs
            ],
            "left_out": self.left_out,
        }


def _finite(numbers: Sequence[float]) -> list[float | str]:
    """For JSON, which has no infinity."""
    return [number if math.isfinite(number) else "infinite" for number in numbers]


def described() -> str:
    """The machine, and the versions of all that was measured."""
    return ", ".join([machine(), *_versions()])


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue


def parse() -> Options:
    parser = argparse.ArgumentParser(prog="python -m bench.versus", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--quick", action="store_true", help="few models, few turns, nothing written")
    add("--only", nargs="+", metavar="NAME", help="models whose names have one of these in them")
    add("--engines", nargs="+", choices=[OURS, *PEERS], help="all that are installed, by default")
    add("--threads", type=_numbers, metavar="N,N", help="of each engine; 1,2 by default")
    add("--clients", type=_numbers, metavar="N,N", help="also time throughput; all: 1,2,4,16")
    add("--turns", type=int, help=f"{TURNS} by default, {FEW_TURNS} for a part")
    add("--json", type=Path, metavar="FILE", help="write what was measured here, too")
    arguments = parser.parse_args()

    partial = (
        arguments.quick
        or arguments.only
        or arguments.engines
        or arguments.threads
        or arguments.clients
    )
    engines = arguments.engines or [engine for engine in (OURS, *PEERS) if _there(engine)]
    chosen = [
        model
        for model in models()
        if (model.quick or not arguments.quick)
        and (not arguments.only or any(part in model.name for part in arguments.only))
    ]
    if not chosen:
        parser.error("no such model; there are: " + ", ".join(m.name for m in models()))
    return Options(
        models=chosen,
        engines=engines,
        threads=arguments.threads or [1, 2],
        clients=arguments.clients or ([] if partial else CLIENTS),
        turns=arguments.turns or (FEW_TURNS if partial else TURNS),
        file=arguments.json,
        complete=not partial and len(engines) == len(PEERS) + 1,
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _there(engine: str) -> bool:
    available = installed(engine)
    if not available:
        print(f"{engine} is left out: it is not installed", flush=True)
    return available


def main() -> None:
    options = parse()
    stopped = False
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        try:
            for model in options.models:
                bench.measure(model)
        except KeyboardInterrupt:
            print("\nstopped", flush=True)
            stopped = True
    lines = bench.markdown()
    print("\n".join(["", *lines]))
    files = [options.file] if options.file else []
    if options.complete and not stopped and not bench.left_out:
        (HERE / "models.md").write_text("\n".join(lines) + "\n")
        files.append(HERE / "models.json")
    for file in files:
        file.write_text(json.dumps(bench.json(), indent=1) + "\n")
    sys.exit(130 if stopped else 0)


if __name__ == "__main__":
    main()
