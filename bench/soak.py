"""Many clients at once: ``python -m bench.soak [SECONDS [CLIENTS [MODE ...]]]``.

Each client is a thread that does, in turn, what the modes say (all of them by default):

- runs: models of all kinds on sessions that all share, linear, dataflow and parallel, by ``run``
  and ``submit``, with deadlines, failures and trims between;
- shapes: inputs of random dims, on a session that all share;
- churn: sessions that are compiled, run once, and closed or just dropped;
- cancel: endless runs that a token or a deadline stops.

Results are compared with those computed alone beforehand, or by NumPy. Prints resident memory and
open descriptors every minute. Fails on any error, and if after the first minute (or third of the
time) memory grows by more than a twentieth or there are more descriptors.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

import penstock as ps
from bench.cases import branches, inception, loop, steps

info = helper.make_tensor_value_info
MODES = ("runs", "shapes", "churn", "cancel")
MINUTE = 60.0
MOST_GROWTH = 1.05
SAVED = Path(__file__).parents[1] / "tests" / "models" / "tf_saved" / "frozen"


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


def descriptors() -> int:
    """Open files of the process, but for those that clients are just reading: the least of some
    looks."""

    def look() -> int:
        time.sleep(0.01)  # clients go on
        return len(list(Path("/proc/self/fd").iterdir()))

    return min(look() for _ in range(20))


def softmax_row(x: np.ndarray, row: int) -> np.ndarray:
    """What the model of ``shapes`` computes."""
    powers = np.exp(np.sin(x[row]) * x[row])
    return powers / powers.sum()


class Soak:
    """``clients`` count ``runs`` and note ``errors`` until ``end`` is set."""

    def __init__(self, modes: Sequence[str]) -> None:
        self.modes = modes
        models = {
            "steps": steps(50),
            "loop": loop(),
            "shapes": shapes(),
            "branches": branches(3, 2, 96),
            "inception": inception(1, 192, 7),
        }
        limits = ps.Limits(max_plans_bytes=2**22)  # full within seconds
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
        self.small = steps(5)
        self.saved_feeds = [
            np.ones([d if isinstance(d, int) else 2 for d in port.type.shape], port.type.dtype)
            for port in ps.compile(SAVED).inputs
        ]
        self.errors: list[str] = []
        self.done = 0
        self.end = threading.Event()

    def client(self, seed: int) -> None:
        choose = random.Random(seed)
        while not self.end.is_set():
            try:
                getattr(self, choose.choice(self.modes))(choose)
                self.done += 1
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                return

    def shapes(self, choose: random.Random) -> None:
        rows, columns = choose.randint(1, 60), choose.randint(1, 60)
        x = np.linspace(-2, 2, rows * columns, dtype=np.float32).reshape(rows, columns)
        session = self.sessions["shapes", choose.choice(("linear", "auto"))]
        row = choose.randrange(rows)
        y = session.run({"x": x, "row": np.array(row)})["y"]
        if not np.allclose(y, softmax_row(x, row), rtol=1e-4, atol=1e-5):
            raise AssertionError(f"shape {x.shape}: {np.abs(y - softmax_row(x, row)).max()} off")

    def churn(self, choose: random.Random) -> None:
        if choose.random() < 0.5:
            session, feeds = ps.compile(SAVED), self.saved_feeds
        else:
            session, feeds = ps.compile(self.small), list(self.feeds["steps"][0].values())
        session(*feeds)
        if choose.random() < 0.5:
            session.close()

    def cancel(self, choose: random.Random) -> None:
        session = self.sessions["loop", choose.choice(("linear", "dataflow", "parallel"))]
        feeds = self.feeds["loop"][0] | {"n": np.array(2**60)}
        token = ps.CancelToken()
        timeout = choose.choice([0.01, 600.0])
        future = session.submit(feeds, cancel=token, timeout=timeout)
        if timeout > 1:
            time.sleep(choose.random() / 50)
            token.cancel()
        try:
            future.result()
        except (ps.Cancelled, ps.DeadlineExceeded):
            return
        raise AssertionError("an endless run has ended")

    def runs(self, choose: random.Random) -> None:
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


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    clients = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    soak = Soak(sys.argv[3:] or MODES)
    begin = time.monotonic()
    interval = min(MINUTE, seconds / 3)
    settled: tuple[int, int] | None = None
    with ThreadPoolExecutor(clients) as pool:
        for seed in range(clients):
            pool.submit(soak.client, seed)
        while (now := time.monotonic() - begin) < seconds and not soak.errors:
            time.sleep(min(interval, seconds - now))
            held, files = resident(), descriptors()
            settled = settled or (held, files)
            now = time.monotonic() - begin
            print(
                f"{now:5.0f} s: {soak.done} turns, {held / 2**20:.0f} MiB, {files} files",
                flush=True,
            )
        soak.end.set()
    assert settled is not None
    growth, more = held / settled[0], files - settled[1]
    flat = growth <= MOST_GROWTH and more <= 0
    print(
        f"{clients} clients, {soak.done} turns, {len(soak.errors)} errors, "
        f"{'flat' if flat else 'not flat'}: memory x {growth:.3f}, {more:+d} files"
    )
    for error in soak.errors[:5]:
        print(error)
    sys.exit(bool(soak.errors) or not flat)


if __name__ == "__main__":
    main()
