"""One engine and one model in a process of its own: ``python -m bench.trial JOB``.

JOB is a ``Job`` as JSON; the last line printed is its ``Trial`` as JSON. ``measure`` starts such a
process.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.clients import throughput
from bench.peers import ENGINES, environment

ROOT = Path(__file__).parent.parent
TIMEOUT = 600  # seconds that a process may take
SECONDS = 1.0  # of timing
WARM_UP_SECONDS = 0.3
MOST_SAMPLES, LEAST_SAMPLES = 100, 5
STEPS = 64
LEAST_SAMPLE = 1e-3  # seconds: shorter runs are timed several at a time


@dataclass(frozen=True)
class Job:
    """What a process is to do.

    ``path`` is the model's. ``inputs`` are names in the order of the arrays of the .npz file
    ``feeds``; outputs are written to the .npz file ``outputs``, if there is one. With ``clients``,
    that many threads run the session at once; else runs are timed one by one. A job with ``once``
    ends after the first run. ``fed_back``: the inputs that are fed an output of the run before,
    with the index of the output, until the caches that they are have grown by ``STEPS`` rows.
    With ``seconds``, runs are timed one by one for so long, after as long a warm-up. ``checkout``
    is a folder of this project whose Penstock is measured instead of the one that is imported here.
    """

    engine: str
    threads: int
    path: str
    inputs: list[str]
    feeds: str
    outputs: str | None = None
    clients: int = 0
    once: bool = False
    fed_back: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    checkout: str | None = None


@dataclass(frozen=True)
class Trial:
    """What a process measured: seconds, bytes, and runs a second; None where it did not.

    ``imported`` is the time to import the engine, ``loaded`` from the path of the model to its
    session, ``first`` of its first run. ``median`` and ``minimum`` are of ``samples`` samples after
    a warm-up, per run, and so is ``late``, the 99th percentile, where runs are timed one by one.
    ``peak`` is the most resident memory after the import, over that before
    loading. ``inside`` is the time of a run in kernels, where the engine can tell, ``flops`` their
    floating-point operations, and ``backends`` those that they are of. ``error`` says why there is
    no more.
    """

    imported: float | None = None
    loaded: float | None = None
    first: float | None = None
    median: float | None = None
    minimum: float | None = None
    late: float | None = None
    samples: int = 0
    peak: int | None = None
    inside: float | None = None
    flops: int | None = None
    backends: list[str] | None = None
    rate: float | None = None
    error: str | None = None


def measure(job: Job, cache: Path) -> Trial:
    """Do ``job`` in a new process; failures are trials too."""
    command = [sys.executable, "-m", "bench.trial", json.dumps(asdict(job))]
    # What an earlier process, or the user, has profiled is no part of what is measured.
    with tempfile.TemporaryDirectory() as costs:
        variables = {**environment(cache, job.checkout), "PENSTOCK_CACHE": costs}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return Trial(error=f"took more than {TIMEOUT} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return Trial(error=f"exit status {done.returncode}: {lines[-1]}")
    return Trial(**json.loads(done.stdout.splitlines()[-1]))


def work(job: Job) -> Trial:
    """Do ``job`` in this process."""
    with np.load(job.feeds) as arrays:
        feeds = dict(zip(job.inputs, arrays.values(), strict=True))
    engine, imported = timed(lambda: ENGINES[job.engine](job.threads))
    reset_peak()
    before = resident("VmRSS")
    try:
        run, loaded = timed(lambda: engine.load(Path(job.path)))
        outputs, first = timed(lambda: run(feeds))
    except Exception as error:
        return Trial(imported, error=shortened(error))
    if job.outputs:
        np.savez(job.outputs, *outputs)
    trial = Trial(imported, loaded, first)
    if job.once:
        return trial
    if job.fed_back:
        times = decoded(run, feeds, job.fed_back)
        return replace(
            trial, median=statistics.median(times), minimum=min(times), samples=len(times)
        )
    if job.seconds:
        warm_up(lambda: run(feeds), job.seconds)
        times = one_by_one(lambda: run(feeds), job.seconds)
        return replace(
            trial,
            median=statistics.median(times),
            minimum=min(times),
            late=float(np.percentile(times, 99)),
            samples=len(times),
        )
    warm_up(lambda: run(feeds))
    if job.clients:
        throughput(lambda: run(feeds), job.clients, WARM_UP_SECONDS)
        return replace(trial, rate=throughput(lambda: run(feeds), job.clients, SECONDS))
    times = sample(lambda: run(feeds))
    after = resident("VmHWM")
    inside = getattr(engine, "inside", None)
    return replace(
        trial,
        inside=None if inside is None else inside(feeds),
        median=statistics.median(times),
        minimum=min(times),
        samples=len(times),
        peak=None if before is None or after is None else after - before,
    )


def warm_up(run: Callable[[], Any], seconds: float = WARM_UP_SECONDS) -> None:
    begin = time.perf_counter()
    runs = 0
    while runs < 3 or time.perf_counter() - begin < seconds:
        run()
        runs += 1


def sample(
    run: Callable[[], Any], seconds: float = SECONDS, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of a run, several times; where runs are short, each the mean of some in a row."""
    _, once = timed(run)
    number = max(1, math.ceil(LEAST_SAMPLE / once))
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < LEAST_SAMPLES or (len(times) < MOST_SAMPLES and time.perf_counter() < end):
        start = clock()
        for _ in range(number):
            run()
        times.append((clock() - start) / number)
    return times


def one_by_one(run: Callable[[], Any], seconds: float) -> list[float]:
    """The duration of each run in seconds; runs are repeated for ``seconds`` in all."""
    times: list[float] = []
    begin = now = time.perf_counter()
    while now - begin < seconds or len(times) < LEAST_SAMPLES:
        run()
        before, now = now, time.perf_counter()
        times.append(now - before)
    return times


def decoded(
    run: Callable[[dict[str, np.ndarray]], list[np.ndarray]],
    feeds: dict[str, np.ndarray],
    fed_back: dict[str, int],
) -> list[float]:
    """Seconds of a step, of the second sequence on: the first one warms up."""
    times: list[float] = []
    end = math.inf
    while len(times) < STEPS or time.perf_counter() < end:
        given = feeds
        for _ in range(STEPS):
            outputs, taken = timed(lambda given=given: run(given))
            given = {**given, **{name: outputs[i] for name, i in fed_back.items()}}
            times.append(taken)
        if math.isinf(end):
            times.clear()
            end = time.perf_counter() + SECONDS
    return times


def reset_peak() -> None:
    """Forget the peak of resident memory so far, where the system can.

    Elsewhere what importing needed for a moment counts. (``getrusage`` would not do: its peak
    outlives ``exec``, and is that of the parent at first.)
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> int | None:
    """Bytes of this process in memory, now (VmRSS) or at most (VmHWM); None but on Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def timed(job: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = job()
    return result, time.perf_counter() - start


def shortened(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 200 else f"{text[:200]}..."


if __name__ == "__main__":
    print(json.dumps(asdict(work(Job(**json.loads(sys.argv[1]))))))
