"""Rows measured turn by turn, in pieces that a file keeps from one call of a command to the next.

In a turn of a row each engine runs once, in a process of its own, so that a turn is what may be
compared. All rows have their first turn before one has its second: what has been measured after
some time tells about all of them::

    python -m bench.sequences --keep rows.json --within 60   # and again, until it exits with 0
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import numpy as np

from bench.exports import CACHE
from bench.peers import REFERENCE
from bench.tables import Row, disagreement
from bench.trial import Job, Trial, measure

Rows = dict[str, Row]  # by what tells a row from the others of its table
SAVING_S = 5.0  # between two writes of the file, which many rows make long
UNFINISHED = 75  # exit status: turns are missing, call again (EX_TEMPFAIL of sysexits.h)


def add_turn(
    row: Row,
    job: Job,
    title: str,
    wanted: Sequence[np.ndarray] | None = None,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Add a trial of each engine of ``row``, and print it.

    Each runs ``job`` beside what ``beside`` starts. An engine that failed in one turn fails in the
    others, and is not run. With the reference's outputs, ``wanted``, those of an engine's first
    turn are compared.
    """
    turn = 1 + turns_of(row)
    outputs = Path(job.feeds).with_name("outputs.npz")
    print(f"{title}, turn {turn}, ms:", end="", flush=True)
    for engine, trials in row.trials.items():
        compare = wanted is not None and engine not in row.differences
        own = replace(job, engine=engine, outputs=str(outputs) if compare else None)
        trial = next_trial(trials, own, beside)
        print(f" {engine} {shown(trial.median, 1e3)}", end="", flush=True)
        if trial.late is not None:
            print(f" / {shown(trial.late, 1e3)}", end="", flush=True)
        if compare and wanted is not None and not trial.error:
            row.differences[engine] = disagreement(_arrays(outputs), wanted)
    latest = replace(row, trials={e: trials[-1:] for e, trials in row.trials.items()})
    print(f"; ratio {shown(latest.run_ratio)}", flush=True)
    if turn == 1:
        complain(row.trials)


def next_trial(
    trials: list[Trial], job: Job, beside: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Trial:
    """Another trial; an engine that failed in one turn fails in the others, and is not run."""
    if trials and trials[-1].error:
        trials.append(trials[-1])
    else:
        with beside():
            trials.append(measure(job, CACHE))
    return trials[-1]


def reference(model: str, job: Job) -> list[np.ndarray] | None:
    """The outputs of a run by Penstock's NumPy backend; None if that fails."""
    outputs = Path(job.feeds).with_name("reference.npz")
    trial = measure(replace(job, engine=REFERENCE, outputs=str(outputs), once=True), CACHE)
    if trial.error:
        print(f"{model}: no reference: {trial.error}", flush=True)
        return None
    return _arrays(outputs)


def turns_of(row: Row) -> int:
    """The number of turns that all engines of a row have had."""
    return min((len(trials) for trials in row.trials.values()), default=0)


def _arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as stored:
        return list(stored.values())


def complain(trials: dict[str, list[Trial]]) -> None:
    for engine, trials_of_engine in trials.items():
        for error in {trial.error for trial in trials_of_engine if trial.error}:
            print(f"  {engine} fails: {error}", flush=True)


def shown(figure: float | None, scale: float = 1.0) -> str:
    return "-" if figure is None else f"{figure * scale:.3g}"


def add_options(parser: ArgumentParser, turns: int) -> None:
    """The options of commands that measure in pieces."""
    add = parser.add_argument
    add("--turns", type=int, default=turns, help=f"that each row is to have; {turns} by default")
    add("--keep", type=Path, metavar="FILE", help="add to the turns that this file holds")
    add(
        "--within",
        type=float,
        metavar="SECONDS",
        help=f"begin no turn that would end later; exit with {UNFINISHED} if turns are missing",
    )
    add("--write", action="store_true", help="write the page, even if rows or turns are missing")


class Pieces:
    """The rows measured so far: those of a file, if one is named, and those of this call."""

    def __init__(self, options: Namespace) -> None:
        self.file: Path | None = options.keep
        self.rows = read(self.file) if self.file else {}
        self._turns: int = options.turns
        self._within: float | None = options.within

    def measure(self, keys: Sequence[str], add: Callable[[str, Rows], None]) -> bool:
        """Call ``add`` for a turn of a row, which is to be in ``rows`` then, until all rows of
        ``keys`` have had theirs: True; or until there is no time left for another: False."""
        begin, longest, saved = time.monotonic(), 0.0, -SAVING_S
        try:
            for turn, key in product(range(1, self._turns + 1), keys):
                if key in self.rows and turns_of(self.rows[key]) >= turn:
                    continue
                now = time.monotonic()
                if self._within is not None and now - begin + longest > self._within:
                    return False
                add(key, self.rows)
                longest = max(longest, time.monotonic() - now)
                if now - saved >= SAVING_S:
                    self._save()
                    saved = now
            return True
        finally:
            self._save()

    def _save(self) -> None:
        if self.file:
            write(self.rows, self.file)

    def complete(self, threads: Mapping[str, int], engines: Collection[str]) -> bool:
        """Whether each of these rows has all its turns, with this number of threads and with these
        engines."""
        rows = self.rows
        return all(
            key in rows
            and rows[key].threads == number
            and list(rows[key].trials) == list(engines)
            and turns_of(rows[key]) >= self._turns
            for key, number in threads.items()
        )


def read(file: Path) -> Rows:
    """The rows of a file that ``write`` has written; none if there is no such file."""
    if not file.exists():
        return {}
    return {
        key: Row(
            row["model"],
            row["threads"],
            {e: [Trial(**t) for t in trials] for e, trials in row["trials"].items()},
            {e: (by_norm, by_element) for e, (by_norm, by_element) in row["differences"].items()},
        )
        for key, row in json.loads(file.read_text()).items()
    }


def write(rows: Rows, file: Path) -> None:
    """Write ``file`` as a whole or, if this is stopped, not at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps({key: asdict(row) for key, row in rows.items()}, indent=1) + "\n")
    part.rename(file)


def turns_of_all(rows: Rows, keys: Collection[str]) -> str:
    """How many of the rows ``keys`` were measured, and in how many turns, for people."""
    numbers = [turns_of(rows[key]) for key in keys if key in rows]
    least, most = min(numbers, default=0), max(numbers, default=0)
    turns = f"{most}" if least == most else f"{least} to {most}"
    missing = len(keys) - len(numbers)
    return f"Turns of a row: {turns}." + (f" Not measured (-): {missing} rows." if missing else "")
