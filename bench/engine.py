"""Time one case on one engine, in a process of its own: ``python -m bench.engine ENGINE CASE``.

Prints the median and the minimum of several repetitions, in seconds, as JSON.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.cases import chain, loop

X = np.linspace(-1, 1, 16, dtype=np.float32)


def penstock(model: bytes) -> Callable[[dict[str, np.ndarray]], Any]:
    import penstock as ps

    session = ps.compile(model)
    return session.run


def onnxruntime(model: bytes) -> Callable[[dict[str, np.ndarray]], Any]:
    import onnxruntime as ort

    ort.disable_telemetry_events()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


ENGINES = {"penstock": penstock, "onnxruntime": onnxruntime}


def repeat(job: Callable[[], Any], number: int, repetitions: int = 9) -> list[float]:
    """Seconds of one call of ``job``, measured over ``number`` calls, several times."""
    for _ in range(max(1, number // 10)):
        job()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(number):
            job()
        times.append((time.perf_counter() - start) / number)
    return times


def time_chain(engine: str) -> list[float]:
    run = ENGINES[engine](chain(1000).SerializeToString())
    return [t / 1000 for t in repeat(lambda: run({"v0": X}), 100)]


def time_loop(engine: str) -> list[float]:
    run = ENGINES[engine](loop().SerializeToString())
    feeds = {"x0": X, "n": np.array(10_000)}
    return [t / 10_000 for t in repeat(lambda: run(feeds), 3)]


def time_call(engine: str) -> list[float]:
    run = ENGINES[engine](chain(1).SerializeToString())
    return repeat(lambda: run({"v0": X}), 20_000)


def time_compile(engine: str, n: int) -> list[float]:
    """From the bytes of a model to a session that has run once.

    Once in a process: a second time, the memory is there already, which counts for more the
    smaller the model is.
    """
    ENGINES[engine](chain(2).SerializeToString())({"v0": X})
    model = chain(n).SerializeToString()
    start = time.perf_counter()
    ENGINES[engine](model)({"v0": X})
    return [time.perf_counter() - start]


def time_import(engine: str) -> list[float]:
    code = f"import time; t = time.perf_counter(); import {engine}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    return [
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]


CASES: dict[str, Callable[[str], list[float]]] = {
    "chain": time_chain,
    "loop": time_loop,
    "call": time_call,
    "compile_10000": lambda engine: time_compile(engine, 10_000),
    "compile_100000": lambda engine: time_compile(engine, 100_000),
    "import": time_import,
}


def main() -> None:
    engine, case = sys.argv[1:]
    times = CASES[case](engine)
    print(json.dumps({"median": statistics.median(times), "minimum": min(times)}))


if __name__ == "__main__":
    main()
