"""Many clients at once: ``python -m bench.soak [SECONDS [CLIENTS]]``.

Each client is a thread that runs models of all kinds, of changing shapes, on sessions that all
share: linear, dataflow and parallel, by ``run`` and ``submit``, with deadlines, failures, other
fetches and trims between. Results are compared with those computed alone beforehand. Prints memory
every few seconds; fails on any error, and if memory grows by more than a twentieth after the first
10 seconds.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

import penstock as ps
from bench.cases import branches, inception, loop, steps

info = helper.make_tensor_value_info
SETTLED = 10  # seconds
MOST_GROWTH = 1.05


def shapes() -> onnx.ModelProto:
    """A model of any number of rows, one of which is picked: it fails if there are too few."""
    nodes = [
        helper.make_node("Sin", ["x"], ["a"]),
        helper.make_node("Mul", ["a", "x"], ["b"]),
        helper.make_node("Softmax", ["b"], ["c"], axis=1),
        helper.make_node("Gather", ["c", "row"], ["y"]),
    ]
    ports = (
        [info("x", TensorProto.FLOAT, ["N", "M"]), info("row", TensorProto.INT64, [])],
        [info("y", TensorProto.FLOAT, ["M"])],
    )
    graph = helper.make_graph(nodes, "shapes", *ports)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def resident() -> int:
    """Bytes of the process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Soak:
    def __init__(self) -> None:
        models = {
            "steps": steps(50),
            "loop": loop(),
            "shapes": shapes(),
            "branches": branches(3, 2, 96),
            "inception": inception(1, 192, 7),
        }
        limits = ps.Limits(max_plans_bytes=32 * 2**20)
        self.sessions = {
            (name, executor): ps.compile(model, executor=executor, limits=limits)
            for name, model in models.items()
            for executor in ("linear", "dataflow", "parallel", "auto")
        }
        rng = np.random.default_rng(0)

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        self.feeds = {
            "steps": [{"v0": draw(16)}],
            "loop": [{"x0": draw(16), "n": np.array(n)} for n in (0, 1, 7, 100)],
            "shapes": [
                {"x": draw(n, m), "row": np.array(n - 1)} for n in (1, 3, 40) for m in (2, 64, 500)
            ],
            "branches": [{"x": draw(96, 96)}],
            "inception": [{"x": draw(1, 192, 7, 7)}],
        }
        self.wanted = {
            name: [list(self.sessions[name, "linear"].run(f).values()) for f in feeds]
            for name, feeds in self.feeds.items()
        }
        self.errors: list[str] = []
        self.runs = 0
        self.end = threading.Event()

    def client(self, seed: int) -> None:
        choose = random.Random(seed)
        while not self.end.is_set():
            try:
                self.turn(choose)
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                return

    def turn(self, choose: random.Random) -> None:
        name, executor = choose.choice(list(self.sessions))
        session = self.sessions[name, executor]
        i = choose.randrange(len(self.feeds[name]))
        feeds = self.feeds[name][i]
        timeout = choose.choice([None, 600.0])
        draw = choose.random()
        if draw < 0.02 and name == "shapes":
            try:
                session.run(feeds | {"row": np.array(1000)}, timeout=timeout)
            except ps.RunError:
                return
            raise AssertionError("a row that is not there was found")
        if draw < 0.03:
            session.trim()
        run = session.run if draw < 0.7 else lambda *a, **k: session.submit(*a, **k).result()
        outputs = list(run(feeds, timeout=timeout).values())
        for got, want in zip(outputs, self.wanted[name][i], strict=True):
            if not np.allclose(got, want, rtol=1e-4, atol=1e-5):
                raise AssertionError(f"{name} on {executor}: {np.abs(got - want).max()} off")
        self.runs += 1


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    clients = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    soak = Soak()
    begin = time.monotonic()
    settled = 0
    with ThreadPoolExecutor(clients) as pool:
        for seed in range(clients):
            pool.submit(soak.client, seed)
        while (now := time.monotonic() - begin) < seconds and not soak.errors:
            time.sleep(min(5.0, seconds / 6))
            held = resident()
            settled = settled if now < SETTLED else settled or held
            threads = sum(t.name.startswith("penstock") for t in threading.enumerate())
            print(
                f"{now:5.1f} s: {soak.runs} runs, {held / 2**20:.0f} MiB, {threads} workers",
                flush=True,
            )
        soak.end.set()
    growth = resident() / settled if settled else 1.0
    print(f"{clients} clients, {soak.runs} runs, {len(soak.errors)} errors, growth {growth:.3f}")
    for error in soak.errors[:5]:
        print(error)
    sys.exit(bool(soak.errors) or growth > MOST_GROWTH)


if __name__ == "__main__":
    main()
