"""Time one case on one engine, in a process of its own: ``python -m bench.engine ENGINE CASE``.

An engine may say how it runs: ``penstock:parallel``, ``penstock:linear 1`` (threads of a run),
``penstock:streams 8`` (user streams, in the case of that name),
``onnxruntime:2`` (threads of one operator),
``onnxruntime:parallel`` (two operators at once, of one thread each).
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
import onnx

from bench.cases import branches, chain, inception, loop, plug_in, steps

X = np.linspace(-1, 1, 16, dtype=np.float32)


def penstock(model: bytes, how: str) -> Callable[[dict[str, np.ndarray]], Any]:
    import penstock as ps

    executor, _, threads = how.partition(" ")
    number = int(threads) if threads else None
    return ps.compile(model, executor=executor or "auto", threads=number).run


def onnxruntime(model: bytes, how: str) -> Callable[[dict[str, np.ndarray]], Any]:
    import onnxruntime as ort

    ort.disable_telemetry_events()
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(how) if how.isdigit() else 1
    if how == "parallel":
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
        options.inter_op_num_threads = 2
    options.log_severity_level = 4
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def load(engine: str, model: onnx.ModelProto) -> Callable[[dict[str, np.ndarray]], Any]:
    """What runs ``model`` on feeds."""
    name, _, how = engine.partition(":")
    make = {"penstock": penstock, "onnxruntime": onnxruntime}[name]
    return make(model.SerializeToString(), how)


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
    run = load(engine, chain(1000))
    return [t / 1000 for t in repeat(lambda: run({"v0": X}), 100)]


def time_loop(engine: str) -> list[float]:
    run = load(engine, loop())
    feeds = {"x0": X, "n": np.array(10_000)}
    return [t / 10_000 for t in repeat(lambda: run(feeds), 3)]


def time_call(engine: str) -> list[float]:
    run = load(engine, chain(1))
    return repeat(lambda: run({"v0": X}), 20_000)


def time_compile(engine: str, n: int) -> list[float]:
    """From the bytes of a model to a session that has run once.

    Once in a process: a second time, the memory is there already, which counts for more the
    smaller the model is.
    """
    load(engine, chain(2))({"v0": X})
    model = chain(n)
    start = time.perf_counter()
    load(engine, model)({"v0": X})
    return [time.perf_counter() - start]


def time_import(engine: str) -> list[float]:
    code = f"import time; t = time.perf_counter(); import {engine}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    return [
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]


def time_steps(engine: str, n: int) -> list[float]:
    """Of one step of a chain."""
    run = load(engine, steps(n))
    return [t / n for t in repeat(lambda: run({"v0": X}), 100_000 // n // 10)]


def time_while(engine: str) -> list[float]:
    run = load(engine, loop())
    feeds = {"x0": X, "n": np.array(10)}
    return repeat(lambda: run(feeds), 2_000)


def time_branches(engine: str) -> list[float]:
    run = load(engine, branches())
    x = np.random.default_rng(1).standard_normal((384, 384)).astype(np.float32)
    return repeat(lambda: run({"x": x}), 10)


def time_two(engine: str) -> list[float]:
    run = load(engine, branches(2, 8))
    x = np.random.default_rng(1).standard_normal((384, 384)).astype(np.float32)
    return repeat(lambda: run({"x": x}), 10)


def time_inception(engine: str) -> list[float]:
    run = load(engine, inception())
    x = np.random.default_rng(1).standard_normal((1, 192, 28, 28)).astype(np.float32)
    return repeat(lambda: run({"x": x}), 10)


def time_plug_in(engine: str, kernels: int, runs: int, kernel: Callable[..., Any]) -> list[float]:
    """Of independent steps on the small tensors of a backend of the user's own, after some runs."""
    import penstock as ps
    from penstock.backends.numpy import NumpyBackend

    class PlugIn(NumpyBackend):
        name = "plug-in"

        def kernel(self, node: Any, types: Any) -> Any:
            return kernel() if node.op.name == "Neg" else super().kernel(node, types)

    model, how = plug_in(kernels), engine.partition(":")[2]
    session = ps.compile(model, executor=how, backends=[PlugIn()])
    for _ in range(runs):
        session.run({"x": X})
    return repeat(lambda: session.run({"x": X}), 1)


def slow_kernel() -> Any:
    from penstock.ops import Kernel

    def function(x: np.ndarray) -> np.ndarray:
        time.sleep(0.02)
        return -x

    return Kernel(function)


def time_user_streams(engine: str) -> list[float]:
    """Of a run on each of some user streams at once, which waits for a device."""
    import penstock as ps
    from bench.waiting_device import WaitingBackend

    count = int(engine.rpartition(" ")[2])
    options = {"backends": [WaitingBackend(), "numpy"], "place": {"Neg": "waiting"}}
    session = ps.compile(plug_in(1), executor="streams", **options)
    streams = [ps.Stream() for _ in range(count)]

    def once() -> None:
        for run in [stream.run(session, {"x": X}) for stream in streams]:
            run.result()

    return repeat(once, 1)


def waiting_kernel() -> Any:
    from bench.frames_trial import Clock
    from penstock.ops import asynchronous

    clock = Clock()
    return asynchronous(lambda done, x: clock.call(0.05, lambda: done(-x)))


CASES: dict[str, Callable[[str], list[float]]] = {
    "chain": time_chain,
    "loop": time_loop,
    "call": time_call,
    "compile_10000": lambda engine: time_compile(engine, 10_000),
    "compile_100000": lambda engine: time_compile(engine, 100_000),
    "import": time_import,
    "three": lambda engine: [3 * t for t in time_steps(engine, 3)],
    "steps": lambda engine: time_steps(engine, 1000),
    "while": time_while,
    "branches": time_branches,
    "two": time_two,
    "inception": time_inception,
    "slow": lambda engine: time_plug_in(engine, 6, 30, slow_kernel),
    "user_streams": time_user_streams,
    "waits": lambda engine: time_plug_in(engine, 3, 1, waiting_kernel),
}


def main() -> None:
    engine, case = sys.argv[1:]
    times = CASES[case](engine)
    print(json.dumps({"median": statistics.median(times), "minimum": min(times)}))


if __name__ == "__main__":
    main()
