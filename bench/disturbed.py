"""Time runs with two threads while a core comes and goes: ``python -m bench.disturbed``.

Each engine runs each model in a process of its own, engines in turn: alone on the machine, beside
a process that takes the second core away half of the time in slices of 5 ms, and beside one that
takes all of it (``bench.disturber``). Medians and 99th percentiles of single runs are written to
``bench/disturbed.md`` when all of them have been measured, which may be done in pieces:

    python -m bench.disturbed --only mobilenetv2 --share 0.5 --keep disturbed.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from itertools import product
from pathlib import Path

import numpy as np

from bench.disturber import disturbed
from bench.exports import CACHE
from bench.models import models
from bench.peers import installed
from bench.tables import OURS, Row, heading, judged, line, middle, milliseconds, missing
from bench.trial import Job, Trial, measure
from bench.versus import HERE, described

MODELS = ("mobilenetv2", "resnet50", "minilm", "lstm")
SHARES = {0.0: "none", 0.5: "half a core", 1.0: "a core"}
MOST_MEDIAN = {0.0: 1.03, 0.5: 1.05, 1.0: 1.05}
MOST_LATE = 1.1
ENGINES = (OURS, "onnxruntime", "openvino")
THREADS, TURNS, SECONDS = 2, 3, 3.0

Measured = dict[tuple[str, float], Row]


def measured(model: str, share: float, turns: int, seconds: float, threads: int) -> Row:
    """The trials of one model beside one disturber."""
    (chosen,) = [m for m in models() if m.name == model]
    path, feeds = chosen.path(), chosen.feeds()
    row = Row(model, threads, {engine: [] for engine in ENGINES if installed(engine)})
    with tempfile.TemporaryDirectory() as folder:
        inputs = str(Path(folder) / "feeds.npz")
        np.savez(inputs, *feeds.values())
        for turn in range(turns):
            print(f"{model}, taken: {SHARES[share]}, turn {turn + 1}, ms:", end="", flush=True)
            for engine, trials in row.trials.items():
                job = Job(engine, threads, str(path), list(feeds), inputs, seconds=seconds)
                with disturbed(share):
                    trials.append(trial := measure(job, CACHE))
                print(f" {engine} {_cell([trial])}{trial.error or ''}", end="", flush=True)
            print(flush=True)
    return row


def markdown(rows: Measured, turns: int) -> list[str]:
    engines = list(next(iter(rows.values())).trials)
    lines = [
        "# Runs while a core comes and goes",
        "",
        f"Measured on {date.today().isoformat()}: {described()}.",
        f"Two threads; engines in turn, each in its own process; turns: {turns}. What is taken "
        "away: nothing, the second core half of the time in slices of 5 ms, or always, by a "
        "process of equal priority.",
    ]
    lines += heading(
        "A run, ms: median / 99th percentile; ratios, each the median of the turns' ratios, are to "
        "the best peer.",
        ["model", "taken", *engines, "median", "at most", "reached", "99 %", "at most", "reached"],
    )
    for (model, share), row in rows.items():
        cells = [_cell(row.trials[engine]) or missing(row, engine) for engine in engines]
        median = judged(row.run_ratio, MOST_MEDIAN[share])
        late = judged(row.ratio(lambda trial: trial.late), MOST_LATE)
        lines.append(line(model, SHARES[share], *cells, *median, *late))
    return lines


def _cell(trials: Sequence[Trial]) -> str:
    median, late = middle([t.median for t in trials]), middle([t.late for t in trials])
    return (
        "" if median is None or late is None else f"{milliseconds(median)} / {milliseconds(late)}"
    )


def kept(file: Path) -> Measured:
    """The rows of a file that ``keep`` has written; none if there is no such file."""
    if not file.exists():
        return {}
    return {
        (model, share): Row(
            model, threads, {e: [Trial(**t) for t in each] for e, each in trials.items()}
        )
        for model, share, threads, trials in json.loads(file.read_text())
    }


def keep(rows: Measured, file: Path) -> None:
    written = [
        (model, share, r.threads, {e: [asdict(t) for t in each] for e, each in r.trials.items()})
        for (model, share), r in rows.items()
    ]
    file.write_text(json.dumps(written, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.disturbed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", choices=MODELS, default=MODELS, help="some models")
    add("--share", type=float, nargs="+", choices=SHARES, default=list(SHARES), help="some shares")
    add("--threads", type=int, default=THREADS, help=f"of each engine; {THREADS} by default")
    add("--turns", type=int, default=TURNS, help=f"{TURNS} by default")
    add("--seconds", type=float, default=SECONDS, help=f"of a trial; {SECONDS:g} by default")
    add("--keep", type=Path, metavar="FILE", help="read what was measured before, and add to it")
    arguments = parser.parse_args()
    rows = kept(arguments.keep) if arguments.keep else {}
    for model, share in product(arguments.only, arguments.share):
        settings = arguments.turns, arguments.seconds, arguments.threads
        rows[model, share] = measured(model, share, *settings)
        if arguments.keep:
            keep(rows, arguments.keep)
    every = list(product(MODELS, SHARES))
    rows = {key: rows[key] for key in every if key in rows}
    lines = markdown(rows, arguments.turns)
    print("\n".join(["", *lines]))
    complete = len(rows) == len(every) and {r.threads for r in rows.values()} == {THREADS}
    if complete and all(len(row.trials) == len(ENGINES) for row in rows.values()):
        (HERE / "disturbed.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
