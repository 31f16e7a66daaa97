"""Rows of one operation each, beside one other runtime: what ``bench.operators``, of ONNX Runtime's
operations, and ``bench.tflite_operators``, of LiteRT's, have in common.

Both engines run a case in turn, each in a process of its own that lasts for many cases. The least
time of all turns counts; with one thread it is that of the processor, which other processes have no
part in.
"""

from __future__ import annotations

import math
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from bench.tables import OURS, geometric_mean, heading, line
from bench.zoo import worker
from bench.zoo.store import load_arrays

SECONDS = 0.02


class SizedCase(Protocol):
    """A model of one operation, of one size, which its dims say."""

    @property
    def title(self) -> str: ...

    @property
    def size(self) -> str: ...

    @property
    def dims(self) -> Sequence[Any]: ...


@dataclass
class OperatorRow:
    """What was measured of a case: the seconds of a run by engine, and notes. Ratios to the
    ``reference`` that are above ``most`` are slow, but in runs that it takes less than ``short``
    seconds for."""

    case: Any
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    reference: ClassVar[str]
    most: ClassVar[float]
    short: ClassVar[float]

    @property
    def ratio(self) -> float | None:
        if self.seconds.keys() < {OURS, self.reference}:
            return None
        return self.seconds[OURS] / self.seconds[self.reference]

    @property
    def is_slow(self) -> bool:
        ratio = self.ratio
        return ratio is not None and ratio > self.most and self.seconds[self.reference] > self.short

    @property
    def figures(self) -> list[str]:
        """The cells of the size, of both times in us, and of the ratio."""
        size = f"{self.case.size}: {', '.join(map(str, self.case.dims))}"
        times = [shown(self.seconds.get(each), 1e6, ".4g") for each in (self.reference, OURS)]
        return [size, *times, shown(self.ratio, 1, ".2f")]

    @property
    def remarks(self) -> str:
        return "; ".join(self.notes).replace("|", "/")

    @property
    def line(self) -> str:
        return line(self.case.title, *self.figures, self.remarks)

    def add_turn(self, engine: str, seconds: float) -> None:
        """Keep the least time of a run."""
        self.seconds[engine] = min(seconds, self.seconds.get(engine, math.inf))

    def note(self, text: str) -> None:
        """Add a note, once for all turns."""
        if text not in self.notes:
            self.notes.append(text)


def shown(figure: float | None, scale: float, form: str) -> str:
    return "-" if figure is None else f"{figure * scale:{form}}"


class Sweep:
    """The processes of both engines, and the ``folder`` of the files that they read and write."""

    def __init__(
        self, start: Callable[[str, int], worker.Worker], reference: str, threads: int, folder: Path
    ) -> None:
        self.threads, self.folder = threads, folder
        self.workers = {engine: start(engine, threads) for engine in (reference, OURS)}

    def add(self, row: Any) -> None:
        """Add a turn of both engines."""
        raise NotImplementedError

    def turn(self, engine: str, row: OperatorRow, job: worker.Job) -> worker.Outcome | None:
        """The outcome of a turn, whose case is named "case"; None, with a note, where the engine
        refuses the model."""
        outputs = self.folder / engine
        outputs.mkdir(exist_ok=True)
        outcome = self.workers[engine].work(
            replace(
                job, outputs=str(outputs), seconds=SECONDS, loads=1, of_processor=self.threads == 1
            )
        )
        if outcome.error:
            row.note(f"{engine} refuses it: {shorten(outcome.error, 120)}")
            return None
        return outcome

    def outputs(self, engine: str) -> list[np.ndarray]:
        """Those of the engine's last turn."""
        return load_arrays(self.folder / engine / "case.npz", "output") or []

    def close(self) -> None:
        for each in self.workers.values():
            each.close()


AnyRow = TypeVar("AnyRow", bound=OperatorRow)


def measure(
    rows: Sequence[AnyRow], sweep_in: Callable[[Path], Sweep], turns: int
) -> Sequence[AnyRow]:
    """Fill ``rows``, all of which have their first turn before one has its second; ``sweep_in``
    gives the processes of a folder."""
    with tempfile.TemporaryDirectory() as folder:
        sweep = sweep_in(Path(folder))
        try:
            for turn in range(turns):
                for row in rows:
                    sweep.add(row)
                    if turn == turns - 1:
                        print(row.line, flush=True)
        finally:
            sweep.close()
    return rows


def means(
    rows: Sequence[OperatorRow], group: str, most: float, group_of: Callable[[Any], str]
) -> list[str]:
    """A table of the geometric means of groups of rows, which are of one ``group_of`` a case."""
    columns = [group, "rows", "with a ratio", f"<= {most}", "mean"]
    lines = heading("Geometric means of the ratios.", columns)
    for name in dict.fromkeys(group_of(row.case) for row in rows):
        members = [row for row in rows if group_of(row.case) == name]
        ratios = [row.ratio for row in members if row.ratio is not None]
        good = f"{sum(ratio <= most for ratio in ratios)}"
        mean = shown(geometric_mean(ratios), 1, ".3f")
        lines.append(line(name, len(members), len(ratios), good, mean))
    return lines


def slow_rows(
    rows: Sequence[OperatorRow], runtime: str, columns: Sequence[str], most: float, short: float
) -> list[str]:
    """A table of the slow rows, the slowest first."""
    slow = sorted((row for row in rows if row.is_slow), key=lambda row: -(row.ratio or 0))
    count = "1 row" if len(slow) == 1 else f"{len(slow)} rows"
    title = f"Over {most}, where {runtime} takes more than {short * 1e6:g} us: {count}."
    return heading(title, columns) + [row.line for row in slow]


def add_options(parser: ArgumentParser, turns: int, page: str) -> None:
    """The options of both commands."""
    add: Callable[..., Any] = parser.add_argument
    part = "operations whose names have one of these in them"
    add("--only", nargs="+", metavar="NAME", default=[""], help=part)
    add("--threads", type=int, default=1, metavar="N", help="1 by default")
    add("--turns", type=int, default=turns, help=f"{turns} by default")
    add("--write", action="store_true", help=f"write bench/{page}")
