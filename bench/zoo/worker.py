"""One engine in a process of its own, for many models: ``-m bench.zoo.worker ENGINE THREADS``.

It reads jobs from its standard input, each a line of JSON, and answers each with a line of JSON.
The process lasts, since importing an engine takes longer than all there is to measure of a small
model. ``Worker`` starts such a process, and another if that dies or takes too long.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers import ENGINES, Engine, OneDnn, Run, environment
from bench.trial import ROOT, sample, shortened, warm_up
from bench.zoo.store import Feeds, read_feeds, save_arrays

TIMEOUT = 120  # seconds that a job may take
MOST_LOADS, LOADING_SECONDS = 6, 0.15
MOST_JOBS = 100  # of one process, so that nothing that it keeps adds up
PROFILED_RUNS = 6
_PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(frozen=True)
class Job:
    """Load the model of ``path``, and run it once on each of ``cases``, files of feeds by name.

    Outputs are written to the folder ``outputs``, if there is one. Each case is then timed for
    ``seconds``, if that is not 0. ``profiled``: also tell which steps take the time, those of runs
    or, with ``alone``, each kernel called by itself. The model is loaded up to ``loads`` times. ``of_processor``: runs, which must have one thread, are timed by
    the processor's seconds, in which no other process has its turn. ``planned``: also tell which
    steps the last plan of Penstock's has.
    """

    path: str
    inputs: list[str]
    cases: dict[str, str]
    outputs: str | None = None
    seconds: float = 0.0
    profiled: bool = False
    alone: bool = False
    loads: int = MOST_LOADS
    of_processor: bool = False
    planned: bool = False


@dataclass(frozen=True)
class Spent:
    """What the steps of a backend that are one operation do in a run: their seconds, each at its
    best, and floating-point operations."""

    backend: str
    operation: str
    seconds: float
    flops: int


@dataclass
class Outcome:
    """Seconds of the processor from the path of the model to the outputs of its first case, and
    those of the fastest run, by case; where that takes its time, if Penstock was asked for it, and
    the backend and the operation of each step but views. ``error`` says what it could not do."""

    loaded: float | None = None
    runs: dict[str, float] = field(default_factory=dict)
    spent: dict[str, list[Spent]] = field(default_factory=dict)
    steps: list[tuple[str, str]] = field(default_factory=list)
    error: str | None = None

    @classmethod
    def read(cls, line: str) -> Outcome:
        """The outcome of a line of JSON."""
        outcome = cls(**json.loads(line))
        outcome.spent = {c: [Spent(**s) for s in each] for c, each in outcome.spent.items()}
        return outcome


class Worker:
    """A process that does jobs with one engine. It is stopped while it has none: the threads of some
    libraries wait for work by spinning, on a core that another engine is timed on. ``checkout`` is
    that of ``trial.Job``."""

    def __init__(self, engine: str, threads: int, cache: Path, checkout: str | None = None) -> None:
        self.checkout = checkout
        self.command = [sys.executable, "-m", "bench.zoo.worker", engine, str(threads)]
        self.cache = cache
        self.process: subprocess.Popen[str] | None = None
        self.jobs = 0

    def work(self, job: Job) -> Outcome:
        if self.process is None or self.jobs >= MOST_JOBS:
            self.restart()
        assert self.process is not None and self.process.stdin and self.process.stdout
        self.jobs += 1
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(asdict(job)) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT)
        line = self.process.stdout.readline() if ready else ""
        if line:
            self.process.send_signal(signal.SIGSTOP)
            return Outcome.read(line)
        error = f"took more than {TIMEOUT} s" if not ready else "the process died"
        self.close()
        return Outcome(error=error)

    def restart(self) -> None:
        self.close()
        self.jobs = 0
        self.costs = tempfile.TemporaryDirectory()
        # What an earlier process, or the user, has profiled is no part of what is measured.
        variables = {**environment(self.cache, self.checkout), "PENSTOCK_CACHE": self.costs.name}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            self.command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True,
            cwd=ROOT, env=variables,
        )  # fmt: skip

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()  # which ends a stopped process as well
            self.process.communicate()
            self.costs.cleanup()
        self.process = None


def do(engine: Engine, job: Job) -> Outcome:
    """Do ``job`` in this process."""
    outcome = Outcome()
    cases = {name: read_feeds(job.inputs, Path(path)) for name, path in job.cases.items()}
    gc.collect()
    try:
        first = next(iter(cases.values()))
        run, outcome.loaded = _load(engine, Path(job.path), first, job.loads)
        for name, feeds in cases.items():
            outputs = run(feeds)
            if job.outputs:
                save_arrays(Path(job.outputs, f"{name}.npz"), output=outputs)
        for name, feeds in cases.items():
            if job.seconds:
                outcome.runs[name] = _time(partial(run, feeds), job)
            if job.profiled:
                outcome.spent[name] = _spent(engine, feeds, job)
        if job.planned:
            outcome.steps = _steps(engine)
    except Exception as error:
        outcome.error = shortened(error)
    return outcome


def _load(engine: Engine, path: Path, feeds: Feeds, most: int) -> tuple[Run, float]:
    """The model, loaded and run once, up to ``most`` times where that is quick; with the least seconds of
    the processor. Others on the machine interrupt what takes longer than a time slice, so that the
    clock would compare how often an engine was interrupted."""
    times: list[float] = []
    while len(times) < most and sum(times) < LOADING_SECONDS:
        begin = time.process_time()
        run = engine.load(path)
        run(feeds)
        times.append(time.process_time() - begin)
    return run, min(times)


def _time(run: Callable[[], Any], job: Job) -> float:
    warm_up(run, job.seconds / 4)
    clock = time.process_time if job.of_processor else time.perf_counter
    gc.disable()
    try:
        # The least: what others do on the machine slows the longer runs down most.
        return min(sample(run, job.seconds, clock))
    finally:
        gc.enable()


def _spent(engine: Any, feeds: Feeds, job: Job) -> list[Spent]:
    """Where runs that take the seconds of a job together, or a few runs, spend their time."""
    if isinstance(engine, OneDnn):
        return [Spent("onednn", "case", engine.operation.seconds(job.seconds), 0)]
    from bench.zoo.alone import KernelsAlone
    from penstock.observers.profile import Profile
    from penstock.plan.step_facts import step_facts

    profile = KernelsAlone(job.seconds) if job.alone else Profile()
    runs, end = 1 if job.alone else PROFILED_RUNS, time.perf_counter() + job.seconds
    while profile.runs < runs or (not job.alone and time.perf_counter() < end):
        engine.session.run(feeds, observers=[profile])
    sums: dict[tuple[str, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for entry in profile:
        facts, times = step_facts(entry.step), entry.count / profile.runs
        key = facts.backend, entry.step.node.op.full_name
        spent, flops = sums[key]
        sums[key] = spent + entry.best * times, flops + round(facts.flops * times)
    return [Spent(*key, *both) for key, both in sums.items()]


def _steps(engine: Any) -> list[tuple[str, str]]:
    """The backend and the operation of each step that is no view, in the plan used last."""
    from penstock.plan.step_facts import step_facts

    steps = [each for each in engine.session.inspect.plan.steps if not each.node.op.view]
    return [(facts.backend, facts.operation) for facts in map(step_facts, steps)]


def _end_with_parent() -> None:
    """Have the system end this process with the one that started it: a stopped process would not
    notice that its standard input is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _end_with_parent()
    name, threads = sys.argv[1:]
    # Libraries may print: their lines must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = ENGINES[name](int(threads))
    gc.collect()
    gc.freeze()  # so that a collection before each job is short
    for line in sys.stdin:
        answers.write(json.dumps(asdict(do(engine, Job(**json.loads(line))))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
