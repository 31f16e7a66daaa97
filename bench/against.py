"""Time Penstock against another checkout of it: ``python -m bench.against CHECKOUT``.

The models are those of ``bench.versus`` and the TFLite files of ``bench.tflite``. Both take turns,
each in a process of its own, and the ratio of a model is that of the least times of a run, since
other processes can only add to a time. The compiled kernels of CHECKOUT must have been built, for
instance so::

    git worktree add ../before v0.1 && (cd ../before && python setup.py build_ext --inplace)
    python -m bench.against ../before --only silero resnet50 --threads 1
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tests.models.fetch import fetch, real_models

from bench.exports import CACHE
from bench.models import Model, models
from bench.tables import OURS, geometric_mean, heading, line, milliseconds
from bench.trial import ROOT, Job, Trial, measure

TURNS = 3
MOST = 1.05  # the ratio above which a row is marked
LONG = 50e-6  # seconds: of shorter runs a ratio is mostly noise


def subjects(only: Sequence[str]) -> Iterator[Model]:
    """All models, or those whose names have one of ``only`` in them."""
    lite = [Model(m.name, partial(fetch, m), m.feeds) for m in real_models(".tflite")]
    for model in [*models(), *lite]:
        if not only or any(part in model.name for part in only):
            yield model


def least(trials: Sequence[Trial]) -> float | None:
    """Seconds of the fastest run; None if a trial failed."""
    times = [trial.minimum for trial in trials if trial.minimum is not None]
    return min(times) if len(times) == len(trials) else None


def compare(job: Job, checkouts: Sequence[str], turns: int) -> list[list[Trial]]:
    """The trials of each checkout."""
    trials: list[list[Trial]] = [[] for _ in checkouts]
    for _ in range(turns):
        for own, checkout in zip(trials, checkouts, strict=True):
            own.append(measure(replace(job, checkout=checkout), CACHE))
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("checkout", type=Path, metavar="CHECKOUT", help="a folder with another checkout")
    add("--only", nargs="+", metavar="NAME", help="models whose names have one of these in them")
    add("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="1 2 by default")
    add("--turns", type=int, default=TURNS, help=f"{TURNS} by default")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    if not (checkout / "src" / "penstock").is_dir():
        parser.error(f"{checkout} has no src/penstock: name a folder with a checkout")
    ratios: dict[int, list[float | None]] = {threads: [] for threads in options.threads}
    for text in heading(
        f"The least time of a run, ms, here and in {checkout}.",
        ["model", "threads", "here", "there", "ratio", ""],
    ):
        print(text)
    with tempfile.TemporaryDirectory() as folder:
        for model in subjects(options.only or ()):
            try:
                path, feeds = model.path(), model.feeds()
            except (ImportError, OSError, RuntimeError) as error:
                print(line(model.name, "", "", "", "left out", str(error).splitlines()[0]))
                continue
            inputs = Path(folder, "feeds.npz")
            np.savez(inputs, *feeds.values())
            for threads in options.threads:
                job = Job(OURS, threads, str(path), list(feeds), str(inputs))
                both = compare(job, [str(ROOT), str(checkout)], options.turns)
                here, there = map(least, both)
                if here is None or there is None:
                    why = next(trial.error for own in both for trial in own if trial.error)
                    print(line(model.name, threads, "", "", "fails", why), flush=True)
                    continue
                ratios[threads].append(here / there)
                mark = "**" if here > MOST * there and here > LONG else ""
                times = milliseconds(here), milliseconds(there)
                print(line(model.name, threads, *times, f"{here / there:.3f}", mark), flush=True)
    for threads, of in ratios.items():
        mean = geometric_mean(of)
        if mean is not None:
            print(line(f"geometric mean of {len(of)}", threads, "", "", f"{mean:.3f}", ""))


if __name__ == "__main__":
    main()
