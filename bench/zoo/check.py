"""Run the models of the zoo on Penstock and ONNX Runtime, and compare answers and times.

Each engine and number of threads has a process; they take turns with each model, and ratios are
medians of the turns' ratios. Findings are kept in the cache folder, one line of JSON a model, so
that a later check of some models replaces theirs alone.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.tables import LOADING_PEER, OURS, disagreement
from bench.zoo.store import CACHE, Entry, flat, load_arrays, read_feeds
from bench.zoo.worker import Job, Outcome, Spent, Worker

FINDINGS = CACHE / "findings.jsonl"
SECONDS = 0.03  # of timing of each case, engine and turn
TURNS = 3
THREADS = (1, 0)  # 0: as many as an engine takes by default; 1 must be there


@dataclass
class Finding:
    """What was found of one model.

    ``refused`` and ``peer_refused`` are errors. Differences are between outputs, relative to the
    largest element, the worst of all cases: ``difference`` from ONNX Runtime, and of each engine
    from the library that the model comes from, or where its answers are not known and the engines
    differ, from ONNX Runtime without optimizations. ``ratios`` are Penstock
    to ONNX Runtime by case and threads ("row 1", "batch default"), of the fastest runs, and for
    "load": from the path to the first outputs, of the processor; ``times`` are the medians, in
    seconds, of both. ``steps`` are those that take longest, by case.
    """

    group: str
    name: str
    refused: str | None = None
    peer_refused: str | None = None
    difference: float | None = None
    from_library: float | None = None
    peer_from_library: float | None = None
    tolerance: float = 0.0
    ratios: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.group}/{self.name}"

    @property
    def wrong(self) -> bool:
        """Penstock is off from ONNX Runtime and from the library, and ONNX Runtime is not, or half as
        far. Labels of classes that tie may differ, too: a rounding error decides among them."""
        ours = self.from_library
        if self.refused or (self.peer_refused and ours is None):
            return False
        if self.peer_refused:
            return ours is not None and ours > self.tolerance
        if self.difference is None or self.difference <= self.tolerance:
            return False
        peer = self.peer_from_library
        if ours is None or peer is None:
            return True
        return ours > self.tolerance and (peer <= self.tolerance or ours > 2 * peer)


class Check:
    """The processes of both engines, for each number of threads. Without ``seconds`` nothing is
    timed."""

    def __init__(
        self, turns: int, seconds: float, folder: Path, threads: Sequence[int] = THREADS
    ) -> None:
        self.turns = turns
        self.threads = threads
        self.seconds = seconds
        self.folder = folder
        self.workers = {
            (engine, number): Worker(engine, number, CACHE)
            for number in threads
            for engine in (OURS, LOADING_PEER)
        }

    def __enter__(self) -> Check:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.close()

    def finding(self, entry: Entry) -> Finding:
        cases = {case: str(entry.case(case)) for case in entry.cases}
        job = Job(str(entry.path), entry.inputs, cases, seconds=self.seconds)
        outcomes: dict[tuple[str, int], list[Outcome]] = {key: [] for key in self.workers}
        for turn in range(self.turns):
            for (engine, number), worker in self.workers.items():
                outcomes[engine, number].append(worker.work(self._part(job, engine, number, turn)))
            if any(latest.error for *_, latest in outcomes.values()):
                break
        errors = {
            engine: o.error for (engine, _), several in outcomes.items() for o in several if o.error
        }
        finding = Finding(entry.group, entry.name, errors.get(OURS), errors.get(LOADING_PEER))
        finding.tolerance = entry.tolerance
        first = outcomes[OURS, 1][0]
        finding.steps = {c: longest(spent, first.runs[c]) for c, spent in first.spent.items()}
        self._compare_answers(entry, finding)
        if self.seconds and not finding.refused and not finding.peer_refused:
            self._compare_times(entry.cases, outcomes, finding)
        return finding

    def _part(self, job: Job, engine: str, number: int, turn: int) -> Job:
        """What one process is to do in a turn: the first also keeps outputs and times steps."""
        if turn or number != 1:
            return job
        (self.folder / engine).mkdir(exist_ok=True)
        profiled = engine == OURS and self.seconds > 0
        return replace(job, outputs=str(self.folder / engine), profiled=profiled)

    def _compare_answers(self, entry: Entry, finding: Finding) -> None:
        for case in entry.cases:
            outputs = {
                engine: load_arrays(self.folder / engine / f"{case}.npz", "output") or []
                for engine, error in ((OURS, finding.refused), (LOADING_PEER, finding.peer_refused))
                if not error
            }
            answers = entry.answers(case)
            if len(outputs) == 2:
                found = difference(outputs[OURS], outputs[LOADING_PEER], same_types=True)
                finding.difference = max(finding.difference or 0.0, found)
                if answers is None and found > finding.tolerance:
                    answers = unoptimized(entry, case)
            if answers is not None and OURS in outputs:
                found = difference(outputs[OURS], answers)
                finding.from_library = max(finding.from_library or 0.0, found)
            if answers is not None and LOADING_PEER in outputs:
                found = difference(outputs[LOADING_PEER], answers)
                finding.peer_from_library = max(finding.peer_from_library or 0.0, found)

    def _compare_times(
        self, cases: Sequence[str], outcomes: dict[tuple[str, int], list[Outcome]], finding: Finding
    ) -> None:
        for number in self.threads:
            for case in cases:
                self._add(finding, f"{case} {number or 'default'}", [
                    [outcome.runs[case] for outcome in outcomes[engine, number]]
                    for engine in (OURS, LOADING_PEER)
                ])  # fmt: skip
        self._add(finding, "load", [
            [o.loaded or math.nan for o in outcomes[engine, 1]]
            for engine in (OURS, LOADING_PEER)
        ])  # fmt: skip

    @staticmethod
    def _add(finding: Finding, title: str, columns: Sequence[Sequence[float]]) -> None:
        ours, theirs = columns
        finding.ratios[title] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        finding.times[title] = [statistics.median(ours), statistics.median(theirs)]


def unoptimized(entry: Entry, case: str) -> list[np.ndarray] | None:
    """What ONNX Runtime answers where it runs the nodes as they are, if it does."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(str(entry.path), options)
        return flat(session.run(None, read_feeds(entry.inputs, entry.case(case))))
    except Exception:  # its errors have no class of their own
        return None


def difference(
    got: Sequence[np.ndarray], want: Sequence[np.ndarray], same_types: bool = False
) -> float:
    """How far outputs are from others: of numbers, the largest difference to the largest element;
    of labels, which are whole numbers and strings, the part of them that differ.

    Infinite where shapes differ or, with ``same_types``, element types do.
    """
    if len(got) != len(want):
        return math.inf
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if same_types and a.dtype.kind != "U" and a.dtype != b.dtype:
            return math.inf
        if a.size != b.size or (same_types and a.shape != b.shape):
            return math.inf
        a = a.reshape(b.shape)
        if "f" in a.dtype.kind + b.dtype.kind or a.dtype.itemsize == 1:
            worst = max(worst, disagreement([a], [b])[0] if a.dtype.kind != "U" else math.inf)
        elif a.size:
            worst = max(worst, float(np.mean(a.astype(str) != b.astype(str))))
    return worst


def longest(spent: Iterable[Spent], seconds: float) -> str:
    """The operations that take longest, and their parts of a run, which takes ``seconds``."""
    parts: dict[str, float] = defaultdict(float)
    for each in spent:
        parts[each.operation] += each.seconds / seconds
    parts["between steps"] = max(0.0, 1 - sum(parts.values()))
    names = sorted(parts, key=lambda name: -parts[name])[:3]
    return ", ".join(f"{name} {parts[name]:.0%}" for name in names if parts[name] >= 0.1)


def check(
    entries: Iterable[Entry],
    turns: int = TURNS,
    seconds: float = SECONDS,
    threads: Sequence[int] = THREADS,
) -> list[Finding]:
    """Findings of all ``entries`` that have a model, added to those in the cache folder."""
    findings = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Check(turns, seconds, Path(folder), threads) as bench,
    ):
        for entry in entries:
            if entry.error:
                continue
            finding = bench.finding(entry)
            findings.append(finding)
            with FINDINGS.open("a") as file:
                file.write(json.dumps(asdict(finding)) + "\n")
            print(described(finding), flush=True)
    return findings


def kept() -> list[Finding]:
    """The latest finding of each model."""
    lines = FINDINGS.read_text().splitlines() if FINDINGS.exists() else []
    latest = {found.key: found for found in (Finding(**json.loads(line)) for line in lines)}
    return [latest[key] for key in sorted(latest)]


def described(finding: Finding) -> str:
    """A finding in a line."""
    if finding.refused:
        return f"{finding.key}: refused: {finding.refused}"
    verdict = "WRONG" if finding.wrong else "right"
    if finding.peer_refused:
        return f"{finding.key}: {verdict}; {LOADING_PEER} refuses it: {finding.peer_refused}"
    ratios = ", ".join(f"{title} {ratio:.2f}" for title, ratio in finding.ratios.items())
    return f"{finding.key}: {verdict} ({finding.difference:.1e}); {ratios}"
