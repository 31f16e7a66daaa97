"""Time Penstock against another checkout of it: ``python -m bench.against CHECKOUT``.

The models are those of ``bench.versus`` and the TFLite files of ``bench.tflite``, or, with
``--zoo``, the cases of models that ``python -m bench.zoo generate`` made. Both take turns, each in
a process of its own, and the ratio of a model is that of the least times of a run, since other
processes can only add to a time. The compiled kernels of CHECKOUT must have been built, for
instance so::

    git worktree add ../before v0.1 && (cd ../before && python setup.py build_ext --inplace)
    python -m bench.against ../before --only silero resnet50 --threads 1
    python -m bench.against ../before --zoo torchvision/ timm/ --threads 1
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from tests.models.fetch import fetch, real_models

from bench.exports import CACHE
from bench.models import Model, models
from bench.tables import OURS, geometric_mean, heading, line, milliseconds
from bench.trial import ROOT, Job, measure
from bench.zoo import worker as zoo
from bench.zoo.store import entries

TURNS = 3
MOST = 1.05  # the ratio above which a row is marked
SECONDS = 0.03  # of timing of a case of the zoo in a turn
LONG = 50e-6  # seconds: of shorter runs a ratio is mostly noise


def subjects(only: Sequence[str]) -> Iterator[Model]:
    """All models, or those whose names have one of ``only`` in them."""
    lite = [Model(m.name, partial(fetch, m), m.feeds) for m in real_models(".tflite")]
    for model in [*models(), *lite]:
        if not only or any(part in model.name for part in only):
            yield model


@dataclass(frozen=True)
class Compared:
    """The seconds of the fastest run of a model, or of a case of one, in both checkouts; or why
    there are none."""

    name: str
    threads: int
    here: float | None = None
    there: float | None = None
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        return self.here / self.there if self.here and self.there else None

    @property
    def line(self) -> str:
        if self.here is None or self.there is None:
            return line(self.name, self.threads, "", "", "fails", self.error)
        ratio = self.here / self.there
        mark = "**" if ratio > MOST and self.here > LONG else ""
        times = milliseconds(self.here), milliseconds(self.there)
        return line(self.name, self.threads, *times, f"{ratio:.3f}", mark)


def of_models(
    only: Sequence[str], checkouts: Sequence[str], threads: Sequence[int], turns: int
) -> Iterator[Compared]:
    """Models of other benchmarks, a new process for each turn."""
    with tempfile.TemporaryDirectory() as folder:
        for model in subjects(only):
            try:
                path, feeds = model.path(), model.feeds()
            except (ImportError, OSError, RuntimeError) as error:
                yield Compared(model.name, 0, error=f"left out: {str(error).splitlines()[0]}")
                continue
            inputs = Path(folder, "feeds.npz")
            np.savez(inputs, *feeds.values())
            for number in threads:
                job = Job(OURS, number, str(path), list(feeds), str(inputs))
                yield of_model(model.name, job, checkouts, turns)


def of_model(name: str, job: Job, checkouts: Sequence[str], turns: int) -> Compared:
    """The trials of both checkouts in turn."""
    times: list[list[float]] = [[] for _ in checkouts]
    for _ in range(turns):
        for own, checkout in zip(times, checkouts, strict=True):
            trial = measure(replace(job, checkout=checkout), CACHE)
            if trial.minimum is None:
                return Compared(name, job.threads, error=trial.error)
            own.append(trial.minimum)
    here, there = map(min, times)
    return Compared(name, job.threads, here, there)


def of_zoo(
    names: Sequence[str], checkouts: Sequence[str], threads: Sequence[int], turns: int
) -> Iterator[Compared]:
    """Models whose GROUP/NAME has one of ``names`` in it, in processes that last."""
    with ExitStack() as stack:
        workers = {
            number: [
                stack.enter_context(closing(zoo.Worker(OURS, number, CACHE, checkout)))
                for checkout in checkouts
            ]
            for number in threads
        }
        for entry in entries(names):
            if entry.error:
                continue
            cases = {case: str(entry.case(case)) for case in entry.cases}
            job = zoo.Job(str(entry.path), entry.inputs, cases, seconds=SECONDS, loads=1)
            for number, both in workers.items():
                outcomes = [[worker.work(job) for worker in both] for _ in range(turns)]
                errors = [o.error for of_turn in outcomes for o in of_turn if o.error]
                for case in cases:
                    name = f"{entry.group}/{entry.name} {case}"
                    if errors:
                        yield Compared(name, number, error=errors[0])
                        continue
                    here, there = (
                        min(of_turn[i].runs[case] for of_turn in outcomes) for i in range(2)
                    )
                    yield Compared(name, number, here, there)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("checkout", type=Path, metavar="CHECKOUT", help="a folder with another checkout")
    add("--only", nargs="+", metavar="NAME", help="models whose names have one of these in them")
    add("--zoo", nargs="*", metavar="NAME", help="models of the zoo whose GROUP/NAME has one in it")
    add("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="1 2 by default")
    add("--turns", type=int, default=TURNS, help=f"{TURNS} by default")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    if not (checkout / "src" / "penstock").is_dir():
        parser.error(f"{checkout} has no src/penstock: name a folder with a checkout")
    both = [str(ROOT), str(checkout)]
    if options.zoo is None:
        compared = of_models(options.only or (), both, options.threads, options.turns)
    else:
        compared = of_zoo(options.zoo, both, options.threads, options.turns)
    heads = ["model", "threads", "here", "there", "ratio", ""]
    for text in heading(f"The least time of a run, ms, here and in {checkout}.", heads):
        print(text)
    rows = []
    for row in compared:
        print(row.line, flush=True)
        rows.append(row)
    for threads in options.threads:
        ratios = [row.ratio for row in rows if row.threads == threads and row.ratio]
        mean = geometric_mean(ratios)
        if mean is not None:
            print(line(f"geometric mean of {len(ratios)}", threads, "", "", f"{mean:.3f}", ""))


if __name__ == "__main__":
    main()
