"""Time runs with two threads while a core comes and goes: ``python -m bench.disturbed``.

Each engine runs each model in a process of its own, engines in turn: alone on the machine, beside
a process that takes the second core away half of the time in slices of 5 ms, and beside one that
takes all of it (``bench.disturber``). Medians and 99th percentiles of single runs are written to
``bench/disturbed.md``; it may be measured in pieces (``bench.turns``):

    python -m bench.disturbed --only mobilenetv2 --share 0.5 --keep disturbed.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path

import numpy as np

from bench.disturber import disturbed
from bench.models import models
from bench.peers import installed
from bench.tables import OURS, Row, heading, judged, line, middle, milliseconds, missing
from bench.trial import Job, Trial
from bench.turns import UNFINISHED, Pieces, Rows, add_options, add_turn, turns_of_all
from bench.versus import HERE, described

MODELS = ("mobilenetv2", "resnet50", "minilm", "lstm")
SHARES = {0.0: "none", 0.5: "half a core", 1.0: "a core"}
MOST_MEDIAN = {0.0: 1.03, 0.5: 1.05, 1.0: 1.05}
MOST_LATE = 1.1
ENGINES = (OURS, "onnxruntime", "openvino")
THREADS, TURNS, SECONDS = 2, 3, 3.0


def key_of(model: str, share: float) -> str:
    return f"{model}, {SHARES[share]}"


def add(model: str, share: float, job: Job, row: Row) -> None:
    """Add a turn of one model beside one disturber."""
    (chosen,) = [m for m in models() if m.name == model]
    path, feeds = chosen.path(), chosen.feeds()
    np.savez(job.feeds, *feeds.values())
    title = f"{model}, taken: {SHARES[share]}"
    job = replace(job, path=str(path), inputs=list(feeds))
    add_turn(row, job, title, beside=lambda: disturbed(share))


def markdown(rows: Rows) -> list[str]:
    lines = [
        "# Runs while a core comes and goes",
        "",
        f"Written on {date.today().isoformat()}: {described()}.",
        "Two threads; engines in turn, each in its own process. What is taken away: nothing, the "
        "second core half of the time in slices of 5 ms, or always, by a process of equal "
        "priority. " + turns_of_all(rows, [key_of(*each) for each in product(MODELS, SHARES)]),
    ]
    lines += heading(
        "A run, ms: median / 99th percentile; ratios, each the median of the turns' ratios, are to "
        "the best peer.",
        ["model", "taken", *ENGINES, "median", "at most", "reached", "99 %", "at most", "reached"],
    )
    for model, share in product(MODELS, SHARES):
        row = rows.get(key_of(model, share), Row(model, THREADS))
        cells = [_cell(row.trials.get(engine, ())) or missing(row, engine) for engine in ENGINES]
        median = judged(row.run_ratio, MOST_MEDIAN[share])
        late = judged(row.ratio(lambda trial: trial.late), MOST_LATE)
        lines.append(line(model, SHARES[share], *cells, *median, *late))
    return lines


def _cell(trials: Sequence[Trial]) -> str:
    median, late = middle([t.median for t in trials]), middle([t.late for t in trials])
    return (
        "" if median is None or late is None else f"{milliseconds(median)} / {milliseconds(late)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.disturbed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_option = parser.add_argument
    add_option("--only", nargs="+", metavar="NAME", choices=MODELS, default=MODELS, help="models")
    add_option("--share", type=float, nargs="+", choices=SHARES, default=list(SHARES), help="taken")
    add_option("--threads", type=int, default=THREADS, help=f"of each engine; {THREADS} by default")
    add_option("--seconds", type=float, default=SECONDS, help=f"of a trial; {SECONDS:g} by default")
    add_options(parser, TURNS)
    arguments = parser.parse_args()
    pieces = Pieces(arguments)
    chosen = {key_of(m, share): (m, share) for m, share in product(arguments.only, arguments.share)}
    engines = [engine for engine in ENGINES if installed(engine)]
    with tempfile.TemporaryDirectory() as folder:
        inputs = str(Path(folder) / "feeds.npz")
        job = Job(OURS, arguments.threads, "", [], inputs, seconds=arguments.seconds)

        def add_to(key: str, rows: Rows) -> None:
            model, share = chosen[key]
            row = rows.setdefault(key, Row(model, job.threads, {engine: [] for engine in engines}))
            add(model, share, job, row)

        finished = pieces.measure(list(chosen), add_to)
    lines = markdown(pieces.rows)
    print("\n".join(["", *lines]))
    every = {key_of(*each): THREADS for each in product(MODELS, SHARES)}
    if arguments.write or pieces.complete(every, ENGINES):
        (HERE / "disturbed.md").write_text("\n".join(lines) + "\n")
    sys.exit(0 if finished else UNFINISHED)


if __name__ == "__main__":
    main()
