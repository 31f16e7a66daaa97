"""The arithmetic and the text of the model benchmark's tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.peers import ENGINES, PEERS
from bench.trial import Trial

OURS = "penstock"
LOADING_PEER = "onnxruntime"
MOST_RUN, MOST_MEAN, MOST_LOADING, MOST_MEMORY = 1.03, 0.90, 1.0, 1.0
LEAST_RATE = 1.0
MOST_OUTSIDE, LONG = 0.03, 2e-3
MOST_DISAGREEMENT = 1e-4
MEMORY_MODELS = ("resnet50", "bert-base")

Column = Sequence[float | None]  # a figure for each turn, None where there is none


@dataclass
class Row:
    """What was measured of one model with one number of threads: for each engine, a trial a turn.

    ``differences`` are those of ``disagreement`` between an engine's outputs and the reference's.
    """

    model: str
    threads: int
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    differences: dict[str, tuple[float, float]] = field(default_factory=dict)

    def column(self, engine: str, figure: Callable[[Trial], float | None]) -> Column:
        return [figure(trial) for trial in self.trials.get(engine, ())]

    def ratio(
        self, figure: Callable[[Trial], float | None], peers: Iterable[str] = PEERS
    ) -> float | None:
        """Ours to the least of the peers that were measured; None where there is no such."""
        if OURS not in self.trials:
            return None
        columns = [self.column(peer, figure) for peer in peers if peer in self.trials]
        return ratio(self.column(OURS, figure), columns)

    @property
    def run_ratio(self) -> float | None:
        return self.ratio(lambda trial: trial.median)

    @property
    def outside(self) -> float | None:
        """The part of our fastest runs that is outside of kernels."""

        def share(trial: Trial) -> float | None:
            if trial.inside is None or trial.minimum is None:
                return None
            return max(0.0, 1 - trial.inside / trial.minimum)

        return middle(self.column(OURS, share))

    @property
    def loading_ratio(self) -> float | None:
        return self.ratio(loading, [LOADING_PEER])

    @property
    def memory_ratio(self) -> float | None:
        return self.ratio(lambda trial: trial.peak, [p for p in PEERS if ENGINES[p].reads_files])


@dataclass
class ClientsRow:
    """Throughput of one model with ``clients`` client threads, by engine and its threads."""

    model: str
    clients: int
    trials: dict[tuple[str, int], list[Trial]] = field(default_factory=dict)

    def best(self, *, ours: bool) -> Column:
        """Runs a second in each turn, ours or of all peers, with the engine and the number of
        threads that were best then."""
        columns = [trials for (name, _), trials in self.trials.items() if (name == OURS) == ours]
        turns = zip(*columns, strict=False)
        return [max((t.rate for t in turn if t.rate), default=None) for turn in turns]

    @property
    def ratio(self) -> float | None:
        own, others = self.best(ours=True), self.best(ours=False)
        return ratio(own, [others]) if own and others else None


def loading(trial: Trial) -> float | None:
    """Seconds from the path of a model to its first outputs."""
    return None if trial.loaded is None or trial.first is None else trial.loaded + trial.first


def ratio(ours: Column, peers: Iterable[Column]) -> float | None:
    """The median over turns of ours to the least of the peers' in that turn; None without any."""
    ratios = []
    # Not strict: a turn that was cut short has no ratio.
    for own, *others in zip(ours, *peers, strict=False):
        there = [other for other in others if other is not None]
        if own is not None and there:
            ratios.append(own / min(there))
    return statistics.median(ratios) if ratios else None


def middle(column: Column) -> float | None:
    there = [figure for figure in column if figure is not None]
    return statistics.median(there) if there else None


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Of those that are there."""
    logs = [math.log(each) for each in ratios if each is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


def disagreement(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> tuple[float, float]:
    """How far outputs are from others, relative: by norm, and by element; the largest of each.

    By norm: the largest difference in an array to the largest of its wanted elements. By element:
    each difference to the wanted element, or to a thousandth of the largest where that is more.
    Infinite where shapes differ, or one is no number or infinite and the other is not.
    """
    if len(got) != len(want):
        return math.inf, math.inf
    by_norm = by_element = 0.0
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape:
            return math.inf, math.inf
        a, b = a.astype(np.float64), b.astype(np.float64)
        numbers = np.isfinite(b)
        if not np.array_equal(a[~numbers], b[~numbers], equal_nan=True):
            return math.inf, math.inf
        a, b = a[numbers], b[numbers]
        difference, largest = np.abs(a - b), np.abs(b).max(initial=0.0)
        if not difference.any():
            continue
        if not np.isfinite(a).all() or not largest:
            return math.inf, math.inf
        by_norm = max(by_norm, float(difference.max() / largest))
        relative = difference / np.maximum(np.abs(b), largest / 1000)
        by_element = max(by_element, float(relative.max()))
    return by_norm, by_element


def report(rows: Sequence[Row], throughputs: Sequence[ClientsRow]) -> list[str]:
    """All tables, in Markdown."""
    engines = [e for e in (OURS, *PEERS) if any(e in row.trials for row in rows)]
    readers = [e for e in engines if ENGINES[e].reads_files]
    lines: list[str] = []
    if rows:
        lines += run_table(rows, engines) + outside_table(rows)
        lines += loading_table(rows, readers)
        lines += memory_table(rows, readers) + difference_table(rows, engines)
    if throughputs:
        lines += clients_table(throughputs)
    return lines


def run_table(
    rows: Sequence[Row],
    engines: Sequence[str],
    title: str = "A run",
    most: float = MOST_RUN,
    most_mean: float = MOST_MEAN,
) -> list[str]:
    def cell(row: Row, engine: str) -> str:
        median = middle(row.column(engine, lambda trial: trial.median))
        minimum = [t.minimum for t in row.trials.get(engine, ()) if t.minimum is not None]
        if median is None:
            return missing(row, engine)
        return f"{milliseconds(median)} ({milliseconds(min(minimum))})"

    lines = heading(
        f"{title}, ms: median of the turns' medians (and the least); the ratio is to the best "
        "peer.",
        ["model", "threads", *engines, "ratio", "at most", "reached"],
    )
    for row in rows:
        cells = [cell(row, engine) for engine in engines]
        lines.append(line(row.model, row.threads, *cells, *judged(row.run_ratio, most)))
    blanks = [""] * len(engines)
    for threads in sorted({row.threads for row in rows}):
        ratios = [row.run_ratio for row in rows if row.threads == threads]
        mean = f"geometric mean of {len(ratios) - ratios.count(None)} of {len(ratios)}"
        lines.append(line(mean, threads, *blanks, *judged(geometric_mean(ratios), most_mean)))
    return lines


def outside_table(rows: Sequence[Row]) -> list[str]:
    lines = heading(
        "The part of a run that is outside of kernels: the fastest run, less each kernel at its "
        f"best. To be small where a run takes more than {LONG * 1e3:g} ms.",
        ["model", "threads", "outside", "at most", "reached"],
    )
    for row in rows:
        fastest = middle(row.column(OURS, lambda trial: trial.minimum))
        if row.outside is not None and fastest is not None and fastest >= LONG:
            lines.append(line(row.model, row.threads, *judged(row.outside, MOST_OUTSIDE)))
    return lines


def loading_table(rows: Sequence[Row], engines: Sequence[str]) -> list[str]:
    def cell(row: Row, engine: str) -> str:
        loaded = middle(row.column(engine, lambda trial: trial.loaded))
        first = middle(row.column(engine, lambda trial: trial.first))
        if loaded is None or first is None:
            return missing(row, engine)
        return f"{milliseconds(loaded)} + {milliseconds(first)}"

    def imported(engine: str) -> str:
        times = [t.imported for row in rows for t in row.trials.get(engine, ())]
        median = middle(times)
        return "-" if median is None else f"{engine} {milliseconds(median)}"

    lines = heading(
        "Loading a model + its first run, ms, after imports "
        f"({', '.join(map(imported, engines))}); the ratio is of the sums, to {LOADING_PEER}.",
        ["model", "threads", *engines, "ratio", "at most", "reached"],
    )
    for row in rows:
        cells = [cell(row, engine) for engine in engines]
        lines.append(line(row.model, row.threads, *cells, *judged(row.loading_ratio, MOST_LOADING)))
    return lines


def memory_table(rows: Sequence[Row], engines: Sequence[str]) -> list[str]:
    def cell(row: Row, engine: str) -> str:
        peak = middle(row.column(engine, lambda trial: trial.peak))
        return missing(row, engine) if peak is None else f"{peak / 2**20:.1f}"

    lines = heading(
        "Peak of resident memory over that after imports, MiB; the ratio is to the leanest peer.",
        ["model", "threads", *engines, "ratio", "at most", "reached"],
    )
    for row in rows:
        cells = [cell(row, engine) for engine in engines]
        most = MOST_MEMORY if row.model in MEMORY_MODELS else None
        lines.append(line(row.model, row.threads, *cells, *judged(row.memory_ratio, most)))
    return lines


def difference_table(rows: Sequence[Row], engines: Sequence[str]) -> list[str]:
    def cell(row: Row, engine: str) -> str:
        if engine not in row.differences:
            return missing(row, engine)
        return " / ".join(f"{each:.1e}" for each in row.differences[engine])

    lines = heading(
        "Largest relative difference from Penstock's NumPy backend: of an output's largest element "
        "/ of each element, those below a thousandth of the largest counting as that.",
        ["model", "threads", *engines, "at most", "reached"],
    )
    for row in rows:
        cells = [cell(row, engine) for engine in engines]
        by_norm = row.differences.get(OURS, (None,))[0]
        _, *verdict = judged(by_norm, MOST_DISAGREEMENT)
        lines.append(line(row.model, row.threads, *cells, *verdict))
    return lines


def clients_table(rows: Sequence[ClientsRow]) -> list[str]:
    configurations = sorted(
        {key for row in rows for key in row.trials}, key=lambda k: (k[0] != OURS, k)
    )
    columns = [f"{engine}:{threads}" for engine, threads in configurations]

    def cell(row: ClientsRow, configuration: tuple[str, int]) -> str:
        rate = middle([trial.rate for trial in row.trials.get(configuration, ())])
        return "fails" if rate is None else f"{rate:.4g}"

    lines = heading(
        "Runs a second of several client threads on one session, by engine and its threads; the "
        "ratio is of our best to the best of all peers.",
        ["model", "clients", *columns, "ratio", "at least", "reached"],
    )
    for row in rows:
        cells = [cell(row, configuration) for configuration in configurations]
        lines.append(
            line(row.model, row.clients, *cells, *judged(row.ratio, LEAST_RATE, more=True))
        )
    return lines


def milliseconds(seconds: float) -> str:
    """Three digits, or all those before the point."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def missing(row: Row, engine: str) -> str:
    return "fails" if row.trials.get(engine) else "-"


def judged(figure: float | None, bound: float | None, more: bool = False) -> tuple[str, str, str]:
    """The cells of a figure, what it is to be at most (or at least), and whether it is."""
    shown = "-" if figure is None else f"{figure:.3f}"
    if bound is None:
        return shown, "", ""
    if figure is None:
        return shown, f"{bound:g}", "-"
    reached = figure >= bound if more else figure <= bound
    return shown, f"{bound:g}", "yes" if reached else "**no**"


def heading(title: str, columns: Sequence[str]) -> list[str]:
    return ["", title, "", line(*columns), "|" + "---|" * len(columns)]


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
