"""Time single operations on Penstock's kernels, oneDNN's and peers': ``python -m bench.kernels``.

The operations are drawn from models (``bench.kernel_cases``). Each engine and number of threads has
a process, and they take turns with each case; the least of the turns counts, since others on the
machine only ever slow a run down. Everything is measured and written to ``bench/kernels.md``. It
can be measured in pieces (``bench.turns``), for instance:

    python -m bench.kernels --only conv recurrent --threads 1 --keep kernels.json --within 200

``--sample N`` takes N of the cases, and ``--collect`` draws others from models, as the environment
of the zoo's exporters writes them, or any others:

    python -m bench.kernels --collect .cache/models .cache/zoo-1/torchvision

"penstock-native" has the backends native and numpy, "onednn" the primitives of ``bench.onednn``;
cases that oneDNN does not compute have no ratio to it. A kernel's time is that of its step, called
alone as the primitive is, without steps that bring tensors into another layout: in a network the
kernel before writes the layout that is wanted. Convolutions and other operations on images are
therefore timed on images with their channels innermost, which Penstock's kernels prefer, but for
images of few channels that they read, which enter a network as they are; oneDNN's may be in the
layout that it chooses. Runs are of the operation alone, on images with their channels
before their rows.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path

import numpy as np
import onnx

from bench import kernel_collect
from bench.exports import CACHE
from bench.kernel_cases import SHARES, Case, draw, read, write
from bench.peers import installed
from bench.tables import OURS, Row, disagreement, geometric_mean, heading, line
from bench.trial import Trial
from bench.turns import UNFINISHED, Pieces, Rows, add_options, turns_of, turns_of_all
from bench.versus import HERE, described
from bench.zoo.store import load_arrays, save_arrays
from bench.zoo.worker import Job, Outcome, Worker
from penstock.ops.internal.transfer import REORDER
from penstock.tuning.machine_peak import machine_peak

NATIVE, ONEDNN = "penstock-native", "onednn"
REFERENCE = "onnxruntime"  # whose outputs ours are compared with
PEERS = (REFERENCE, "openvino")
ENGINES = (NATIVE, ONEDNN, OURS, *PEERS)
LAYOUT, TRANSPOSE = REORDER.full_name, "Transpose"  # steps that are not the kernel
PAGE = "kernels.md"
THREADS = (1, 2)
TURNS = 3
SECONDS = 0.03
MOST, WORST = 1.05, 10
TOLERANCE, TOLERANCE_OF_CODES = 1e-3, 2e-2
# Families whose operations are multiplications and additions of float32: what the peak is of.
_COUNTED = ("conv", "product", "attention", "recurrent")


@dataclass(frozen=True)
class Figures:
    """What a row says: seconds of a run by engine, and of the kernels by engine of ours;
    ``is_numpy``: no native kernel is available, and NumPy's is timed in its place."""

    case: Case
    threads: int
    runs: dict[str, float]
    kernels: dict[str, float]
    flops: int
    is_numpy: bool
    difference: float | None

    @property
    def to_onednn(self) -> float | None:
        """The time of our kernels to that of oneDNN's."""
        return _ratio(self.kernels.get(NATIVE), self.kernels.get(ONEDNN))

    @property
    def to_peer(self) -> float | None:
        """A run on our kernels to one on the best peer."""
        return _ratio(self.runs.get(NATIVE), min(self._peers, default=None))

    @property
    def worst(self) -> float:
        """The larger of both ratios."""
        return max([r for r in (self.to_onednn, self.to_peer) if r is not None], default=0.0)

    @property
    def _peers(self) -> list[float]:
        return [seconds for engine, seconds in self.runs.items() if engine in PEERS]

    @property
    def flops_per_s(self) -> float | None:
        counted = self.case.family.startswith(_COUNTED) and "8-bit" not in self.case.family
        seconds = self.kernels.get(NATIVE)
        return self.flops / seconds if counted and seconds else None

    def ratio_to(self, engine: str) -> float | None:
        """A run on our kernels to one on another engine."""
        if engine == ONEDNN and ONEDNN not in self.kernels:
            return None
        return _ratio(self.runs.get(NATIVE), self.runs.get(engine))


def _ratio(own: float | None, other: float | None) -> float | None:
    return None if own is None or other is None else own / other


def figures(case: Case, row: Row) -> Figures:
    """The least of the turns of a row."""
    runs, kernels = {}, {}
    for engine, trials in row.trials.items():
        times = [trial.minimum for trial in trials if trial.minimum is not None]
        if times:
            runs[engine] = min(times)
        inside = [t.inside for t in trials if t.inside is not None]
        if inside:
            kernels[engine] = min(inside)
    own = row.trials.get(NATIVE, ())
    return Figures(
        case,
        row.threads,
        runs,
        kernels,
        max((trial.flops or 0 for trial in own), default=0),
        any(trial.backends not in (None, ["native"]) for trial in own),
        row.differences.get(NATIVE, (None,))[0],
    )


def trial_of(run: Outcome, within: Outcome, has_layout: bool) -> Trial:
    """What a turn of an engine measured: a run, and the time inside of kernels, which is that of
    the model ``within``, each called alone. With ``has_layout`` that transposes images."""
    if run.error or within.error:
        return Trial(error=run.error or within.error)
    every = within.spent.get("case", ())
    others = {LAYOUT, TRANSPOSE} if has_layout else {LAYOUT}
    spent = [each for each in every if each.operation not in others]
    if not spent:
        return Trial(minimum=run.runs["case"])
    return Trial(
        minimum=run.runs["case"],
        inside=sum(each.seconds for each in spent),
        flops=sum(each.flops for each in spent),
        backends=sorted({each.backend for each in spent}),
    )


class Sweep:
    """The processes, by engine and threads, and the files that they read."""

    def __init__(self, engines: Sequence[str], threads: Sequence[int], folder: Path) -> None:
        self.engines, self.folder = engines, folder
        self.workers = {
            (engine, number): Worker(engine, number, CACHE)
            for engine, number in product(engines, threads)
        }

    def add(self, case: Case, row: Row) -> None:
        """Add a turn of each engine; the first compares outputs as well."""
        turn = turns_of(row)
        alone = self._job("run", case.model(), case.feeds(), row.threads)
        within = self._job("within", *case.within(), row.threads) if case.has_layout else alone
        for engine, trials in row.trials.items():
            if trials and trials[-1].error:
                trials.append(trials[-1])
                continue
            (self.folder / engine).mkdir(exist_ok=True)
            profiled, worker = engine in (NATIVE, ONEDNN), self.workers[engine, row.threads]
            alone = replace(alone, profiled=profiled, alone=True)
            outputs = None if turn else str(self.folder / engine)
            run = observed = worker.work(replace(alone, outputs=outputs))
            if engine == NATIVE and case.has_layout:
                observed = worker.work(replace(within, profiled=True, alone=True))
            trials.append(trial_of(run, observed, case.has_layout))
        if not turn:
            self._compare(row)

    def _job(
        self, name: str, model: onnx.ModelProto, feeds: dict[str, np.ndarray], threads: int
    ) -> Job:
        """A job for any engine, and its files."""
        path, inputs = self.folder / f"{name}.onnx", self.folder / f"{name}.npz"
        onnx.save(model, path)
        save_arrays(inputs, feed=feeds.values())
        return Job(
            str(path),
            list(feeds),
            {"case": str(inputs)},
            seconds=SECONDS,
            loads=1,
            of_processor=threads == 1,
        )

    def _compare(self, row: Row) -> None:
        right = [e for e, trials in row.trials.items() if not trials[-1].error]
        outputs = {e: load_arrays(self.folder / e / "case.npz", "output") or [] for e in right}
        if REFERENCE in outputs:
            row.differences |= {
                engine: disagreement(arrays, outputs[REFERENCE])
                for engine, arrays in outputs.items()
                if engine != REFERENCE
            }

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def key_of(case: Case, threads: int) -> str:
    return f"{case.opset} {case.text}; threads: {threads}"


def markdown(rows: Rows, cases: Sequence[Case], peak: float, busy: float) -> list[str]:
    """The page; ``peak``: operations of a core in a second, of which the rows may show more."""
    keys = {key_of(c, n): (c, n) for n, c in product(THREADS, cases)}
    every = [figures(c, rows[key]) for key, (c, n) in keys.items() if key in rows]
    # Others have operations that are counted and left out: those on padding.
    fastest = [
        f.flops_per_s
        for f in every
        if f.threads == 1 and f.flops_per_s and f.case.family == "product many rows"
    ]
    peak = max([peak, *fastest])
    lines = [
        "# Kernels",
        "",
        f"Measured on {date.today().isoformat()} by `python -m bench.kernels`: {described()}.",
        "Engines in turn, each in its own process; times are the least of all turns, of the "
        "processor where there is one thread: the machine was not idle. "
        f"{turns_of_all(rows, keys)} Load average at the end: {busy:.1f}.",
        f"Peak of a core: {peak / 1e9:.0f} GFLOP/s in float32.",
    ]
    for threads in dict.fromkeys(f.threads for f in every):
        group = [f for f in every if f.threads == threads]
        lines += family_table(group, threads, peak)
        for name in SHARES:
            lines += worst_table([f for f in group if f.case.family == name], name, peak)
        lines += problem_table(group, rows)
    return lines


def family_table(every: Sequence[Figures], threads: int, peak: float) -> list[str]:
    """A line for each family, and one for all."""
    others = [e for e in (ONEDNN, OURS, *PEERS) if any(e in f.runs for f in every)]
    lines = heading(
        f"Threads: {threads}. Geometric means of the time of native kernels to oneDNN's, and of a "
        "run on them to one of the others; behind them, the share of the cases whose ratio is at "
        f"most {MOST:g}. The share of the peak is the median of the family's.",
        ["family", "cases", "by NumPy", "by oneDNN", "kernel to oneDNN's", f"<= {MOST:g}"]
        + [f"run to {engine}" for engine in others]
        + ["run to best peer", f"<= {MOST:g}", "share of peak"],
    )
    names = [name for name in SHARES if any(f.case.family == name for f in every)]
    groups = {name: [f for f in every if f.case.family == name] for name in names}
    for name, group in [*groups.items(), ("all", list(every))]:
        onednn = [f.to_onednn for f in group]
        runs = [[f.ratio_to(engine) for f in group] for engine in others]
        best = [f.to_peer for f in group]
        lines.append(
            line(
                name,
                len(group),
                sum(f.is_numpy for f in group),
                len(onednn) - onednn.count(None),
                _mean(onednn),
                _share(onednn),
                *map(_mean, runs),
                _mean(best),
                _share(best),
                "-" if name == "all" else _of_peak(group, peak),
            )
        )
    return lines


def worst_table(group: Sequence[Figures], name: str, peak: float) -> list[str]:
    """The cases of a family in which native kernels are slowest beside the best of the others."""
    slow = sorted((f for f in group if f.worst > MOST), key=lambda f: -f.worst)[:WORST]
    if not slow:
        return []
    lines = heading(
        f"{name}: the worst, us: of kernels, and of runs in brackets.",
        ["operation", "nodes", "native", "oneDNN", *PEERS, "to oneDNN", "to peer", "of peak"],
    )
    for f in slow:
        own = [_pair(f.kernels.get(e), f.runs.get(e)) for e in (NATIVE, ONEDNN)]
        peers = [_pair(None, f.runs.get(engine)) for engine in PEERS]
        own[0] = f"NumPy: {own[0]}" if f.is_numpy else own[0]
        ratios = [_shown(f.to_onednn), _shown(f.to_peer)]
        cells = [f.case.count, *own, *peers, *ratios, _of_peak([f], peak)]
        lines.append(line(f.case.described(), *cells))
    return lines


def problem_table(group: Sequence[Figures], rows: Rows) -> list[str]:
    """Cases that native kernels do not compute, whose outputs differ, or that an engine refuses."""
    lines, found = heading("Not as expected.", ["operation", "what"]), False
    for f in group:
        coded = any(dtype.itemsize == 1 for dtype, _ in f.case.types.values())
        most = TOLERANCE_OF_CODES if coded else TOLERANCE
        problems = []
        if f.is_numpy:
            problems.append("no native kernel")
        if f.difference is not None and not f.difference <= most:
            problems.append(f"differs from {REFERENCE} by {f.difference:.1e}")
        trials = rows[key_of(f.case, f.threads)].trials
        failed = {e: t[0].error for e, t in trials.items() if t and t[0].error and e != ONEDNN}
        problems += [f"{engine}: {error}" for engine, error in failed.items()]
        if problems:
            found = True
            lines.append(line(f.case.described(), "; ".join(problems).replace("|", "/")))
    return lines if found else []


def _of_peak(group: Iterable[Figures], peak: float) -> str:
    shares = [f.flops_per_s / (peak * f.threads) for f in group if f.flops_per_s]
    return f"{statistics.median(shares):.0%}" if shares else "-"


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _mean(ratios: Sequence[float | None]) -> str:
    return _shown(geometric_mean(ratios))


def _share(ratios: Sequence[float | None]) -> str:
    there = [ratio for ratio in ratios if ratio is not None]
    return f"{sum(r <= MOST for r in there) / len(there):.0%}" if there else "-"


def _pair(kernel: float | None, run: float | None) -> str:
    if run is None:
        return "-"
    return f"({run * 1e6:.4g})" if kernel is None else f"{kernel * 1e6:.4g} ({run * 1e6:.4g})"


def parse() -> Namespace:
    parser = ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    add: Callable = parser.add_argument
    add("--collect", nargs="+", metavar="MODEL", help="draw cases from files, or folders of them")
    add("--only", nargs="+", metavar="NAME", default=[""], help="families with one of these in it")
    add("--sample", type=int, metavar="N", help="N of the cases, of each family its share")
    add("--engines", nargs="+", choices=ENGINES, help="all that are installed, by default")
    add("--threads", type=int, nargs="+", metavar="N", default=THREADS, help="1 2 by default")
    add_options(parser, TURNS)
    return parser.parse_args()


def collect(names: Sequence[str]) -> None:
    """Draw cases from models, and write ``kernels.json``."""
    paths = kernel_collect.model_paths(names)
    found = kernel_collect.collect(paths)
    fixed = [kernel_collect.attention(*sizes) for sizes in kernel_collect.ATTENTION]
    chosen = draw([*found, *fixed])
    write(chosen, sorted({path.stem for path in paths}))
    print(f"{len(chosen)} of {len(found) + len(fixed)} cases")


def main() -> None:
    options = parse()
    if options.collect:
        collect(options.collect)
        return
    every = read()
    cases = [case for case in every if any(part in case.family for part in options.only)]
    cases = draw(cases, options.sample) if options.sample else cases
    if not cases:
        sys.exit("no such family; there are: " + ", ".join(SHARES))
    engines = [e for e in options.engines or ENGINES if installed(e)]
    chosen = {key_of(c, n): (c, n) for n, c in product(options.threads, cases)}
    peak = machine_peak(1).flops_per_s
    pieces = Pieces(options)
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(engines, options.threads, Path(folder))

        def add(key: str, rows: Rows) -> None:
            case, threads = chosen[key]
            row = rows.setdefault(key, Row(case.text, threads, {e: [] for e in engines}))
            sweep.add(case, row)

        try:
            finished = pieces.measure(list(chosen), add)
        finally:
            sweep.close()
    lines = markdown(pieces.rows, every, peak, os.getloadavg()[0])
    print("\n".join(["", *lines]))
    whole = {key_of(c, n): n for c, n in product(every, THREADS)}
    if options.write or pieces.complete(whole, ENGINES):
        (HERE / PAGE).write_text("\n".join(lines) + "\n")
    sys.exit(0 if finished else UNFINISHED)


if __name__ == "__main__":
    main()
