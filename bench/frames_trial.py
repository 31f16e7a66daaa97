"""One engine and one graph of TensorFlow in a process of its own: ``PYTHON frames_trial.py JOB``.

JOB is a ``Job`` as JSON; the last line printed is an object with the seconds of a run, one for each
repetition, and what ran it. It is a script, and imports its engine only: TensorFlow's environment
has no Penstock.
"""

from __future__ import annotations

import heapq
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Runner = Callable[[], Any]


@dataclass(frozen=True)
class Job:
    """``engine``: "tensorflow", or "penstock:" and an executor. ``feeds``: by name an element type
    and a value. ``calls`` runs are timed together, ``repetitions`` times. ``wait_s``: seconds that
    each Neg takes without keeping a thread busy, if that is not 0; ``parallel``: how many
    iterations of such a loop go on at once. ``users``: whether kernels are those of a user's
    backend, which may wait for something, so that devices have parts of their own."""

    engine: str
    path: str
    feeds: dict[str, tuple[str, float]]
    fetch: str
    devices: int = 1
    calls: int = 1
    repetitions: int = 5
    wait_s: float = 0.0
    parallel: int = 1
    users: bool = False


class Clock:
    """One thread that calls functions when their time has come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        threading.Thread(target=self._work, daemon=True).start()

    def call(self, seconds: float, function: Callable[[], None]) -> None:
        with self._changed:
            self._count += 1
            heapq.heappush(self._queue, (time.perf_counter() + seconds, self._count, function))
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue or (left := self._queue[0][0] - time.perf_counter()) > 0:
                    self._changed.wait(left if self._queue else None)
                _, _, function = heapq.heappop(self._queue)
            function()


def penstock(job: Job, feeds: dict[str, np.ndarray]) -> tuple[Runner, str]:
    """Runs the graph once, and which executor does that."""
    import penstock as ps
    from penstock.backends.numpy import NumpyBackend
    from penstock.ops import asynchronous

    clock = Clock()

    class Waiting(NumpyBackend):
        def kernel(self, node: Any, types: Any) -> Any:
            if node.op.name != "Neg":
                return super().kernel(node, types)
            return asynchronous(lambda done, x: clock.call(job.wait_s, lambda: done(-x)))

    class Name(ps.Observer):
        name = ""

        def run_begin(self, run: Any) -> None:
            self.name = run.executor

    class Users(NumpyBackend):
        pass

    backends = [Waiting()] if job.wait_s else [Users()] if job.users else None
    devices = job.devices if job.devices > 1 else None
    executor = job.engine.partition(":")[2]
    session = ps.compile(job.path, executor=executor, backends=backends, devices=devices)
    name, fetches = Name(), [job.fetch]
    session.run(feeds, fetches, observers=[name])
    return lambda: session.run(feeds, fetches), name.name


def tensorflow(job: Job, feeds: dict[str, np.ndarray]) -> tuple[Runner, str]:
    """Runs the graph once, with all of TensorFlow's optimizations off: the graph as it is."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    tf1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        if job.wait_s:
            fetch = _waiting(tf, job)
        else:
            proto = tf1.GraphDef()
            with open(job.path, "rb") as file:
                proto.ParseFromString(file.read())
            tf1.import_graph_def(proto, name="")
            fetch = graph.get_tensor_by_name(_tensor(job.fetch))
    config = tf1.ConfigProto(
        device_count={"CPU": job.devices},
        inter_op_parallelism_threads=32 if job.wait_s else 0,  # each wait holds one
    )
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = tf1.OptimizerOptions.L0
    session = tf1.Session(graph=graph, config=config)
    fed = {graph.get_tensor_by_name(_tensor(name)): value for name, value in feeds.items()}
    return lambda: session.run(fetch, fed), f"tensorflow {tf.__version__}"


def _waiting(tf: Any, job: Job) -> Any:
    """The loop of ``job``, whose Neg sleeps: TensorFlow has no such operation, but calls Python."""
    tf1 = tf.compat.v1

    def slow(i: Any) -> Any:
        time.sleep(job.wait_s)
        return -i

    def body(i: Any, total: Any) -> Any:
        value = tf1.py_func(slow, [i], tf.int32)
        value.set_shape([])
        return i + 1, total - value

    n = tf1.placeholder(tf.int32, [], name="n")
    parallel = job.parallel
    _, total = tf1.while_loop(lambda i, total: i < n, body, [0, 0], parallel_iterations=parallel)
    return total


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"


ENGINES = {"penstock": penstock, "tensorflow": tensorflow}


def timed(job: Job) -> dict[str, Any]:
    """The seconds of one run, measured several times, and what ran."""
    feeds = {name: np.array(value, dtype) for name, (dtype, value) in job.feeds.items()}
    run, by = ENGINES[job.engine.partition(":")[0]](job, feeds)
    for _ in range(max(1, job.calls // 10)):
        run()
    seconds = []
    for _ in range(job.repetitions):
        start = time.perf_counter()
        for _ in range(job.calls):
            run()
        seconds.append((time.perf_counter() - start) / job.calls)
    return {"seconds": seconds, "by": by}


def main() -> None:
    print(json.dumps(timed(Job(**json.loads(sys.argv[1])))), flush=True)
    os._exit(0)  # threads of TensorFlow's may take their time to end


if __name__ == "__main__":
    main()
