"""Clusters beside Ray alone: ``python -m bench.cluster``; needs ``penstock-runtime[ray]``.

Each figure stands beside what it is compared with, measured in turn in one run: a hop of 600 KB
over two workers, whose parts do nothing or have a kernel each, beside a compiled graph of Ray whose
actors do nothing; a pipeline of the halves of a convolutional network beside one worker; an
iteration of a loop across two workers beside two calls of an actor. ``--kills N`` says how many
workers are killed under many clients. Forecasts are what ``SimulatedCluster`` says of runs, beside
runs of 2 and 4 workers, whose kernels wait as for devices. All may be measured in pieces:

    python -m bench.cluster --only hop loop --keep cluster.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from bench.devices import two_devices
from bench.waiting_operation import DOMAIN, register
from penstock.build import GraphBuilder
from penstock.ir.graph import Model

HERE = Path(__file__).parent
HOP_FLOATS = 150_000  # 600 KB
IN_FLIGHT = 100
ROUNDS = 3
TURNS = 200
ITERATIONS = 500
RUNS = 1000
CLIENTS = 50
WAIT_FLOATS = 25_000
FEED = "x"
NOTE = """
Layers of the chain and the towers wait, as for devices, so that 4 workers need no more than 2
cores. The convolutional network computes, on cores that all workers share (`cores=`).
"""


class Idle:
    """An actor that gives back what it gets."""

    def echo(self, x: Any) -> Any:
        return x


def milliseconds(call: Callable[[], object], turns: int = TURNS) -> float:
    """The median time of a call, after some to warm up."""
    times = []
    for i in range(turns + 20):
        start = time.perf_counter()
        call()
        if i >= 20:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def medians(ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float]:
    """The medians of two figures that are measured in turn."""
    pairs = [(ours(), theirs()) for _ in range(ROUNDS)]
    one, other = zip(*pairs, strict=True)
    return statistics.median(one), statistics.median(other)


def split(model: Model) -> dict[str, str]:
    """``place=`` with the halves of a model's nodes on two workers."""
    nodes = model.graph.nodes
    half = len(nodes) // 2
    return {f"node:{n.name}": f"/job:worker/task:{int(i >= half)}" for i, n in enumerate(nodes)}


def chain(floats: int, op: str = "Neg") -> Model:
    """Two nodes, one after the other."""
    b = GraphBuilder()
    h = b.input(FEED, np.float32, [floats])
    for _ in range(2):
        h = b.op(op, h)
    b.output("y", h)
    return b.model()


def network(layers: int = 12) -> Model:
    """An image classifier: a stem, convolutions that are all alike, and a mean."""
    b, rng = GraphBuilder(), np.random.default_rng(0)

    def conv(x: Any, channels: int, **attrs: Any) -> Any:
        weights = (rng.random((64, channels, 3, 3), np.float32) - 0.5) / channels
        return b.op("Relu", b.op("Conv", x, b.constant(weights), pads=[1, 1, 1, 1], **attrs))

    h = conv(b.input(FEED, np.float32, [1, 3, 224, 224]), 3, strides=[4, 4])
    for _ in range(layers):
        h = conv(h, 64)
    b.output("y", b.op("GlobalAveragePool", h))
    return b.model()


def hop(cluster: ps.Cluster, op: str) -> tuple[float, float]:
    """Milliseconds of a value over two workers, with a node of an operation on each, and of Ray's
    compiled graph."""
    import ray
    from ray.dag import InputNode

    model, x = chain(HOP_FLOATS, op), np.ones(HOP_FLOATS, np.float32)
    session = ps.compile(model, cluster=cluster, place=split(model))
    actors = [ray.remote(num_cpus=0)(Idle).remote() for _ in range(2)]
    with InputNode() as fed:
        graph = actors[1].echo.bind(actors[0].echo.bind(fed)).experimental_compile()
    figures = medians(
        lambda: milliseconds(lambda: session.run({FEED: x})),
        lambda: milliseconds(lambda: ray.get(graph.execute(x))),
    )
    graph.teardown()
    return figures


def loop(cluster: ps.Cluster) -> tuple[float, float]:
    """Milliseconds of an iteration across two workers, and of two calls of an actor."""
    import ray

    source, ended = two_devices()
    model = ps.load(source)
    for node in model.graph.nodes:
        node.device = node.device.replace("/device:CPU:", "/job:worker/task:")
    session = ps.compile(model, cluster=cluster)
    feeds = {session.inputs[0].name: np.int32(ITERATIONS)}
    actor = ray.remote(num_cpus=0)(Idle).remote()
    return medians(
        lambda: milliseconds(lambda: session.run(feeds, [ended]), 3) / ITERATIONS,
        lambda: 2 * milliseconds(lambda: ray.get(actor.echo.remote(0))),
    )


def pipeline(cluster: ps.Cluster, alone: ps.Cluster) -> tuple[float, float]:
    """Milliseconds of a run of a network, of many in flight: on two workers, and on one."""
    model, x = network(), np.ones((1, 3, 224, 224), np.float32)
    sessions = [
        ps.compile(model, cluster=cluster, place=split(model)),
        ps.compile(model, cluster=alone),
    ]

    for session in sessions:
        in_flight(session, x)
    return medians(lambda: in_flight(sessions[0], x), lambda: in_flight(sessions[1], x))


def sent_again(cluster: ps.Cluster) -> int:
    """Bytes of graphs that are sent in runs after the first one."""
    model, x = chain(100), np.ones(100, np.float32)
    session = ps.compile(model, cluster=cluster, place=split(model))
    session.run({FEED: x})
    before = cluster.sent_graph_bytes
    for _ in range(RUNS):
        session.run({FEED: x})
    return cluster.sent_graph_bytes - before


def killed(kills: int) -> tuple[int, int, float]:
    """Workers killed under clients: requests without an answer or with a wrong one, requests with
    several, and the longest time from a kill to the next answer in seconds."""
    model, ended, wrong = chain(1000), Counter[tuple[int, int]](), []
    stop = threading.Event()
    begun: Counter[int] = Counter()
    with ps.Cluster(2, retries=100) as cluster:
        session = ps.compile(model, cluster=cluster, place=split(model))
        session.run({FEED: np.zeros(1000, np.float32)})

        def client(number: int) -> None:
            x = np.full(1000, number, np.float32)
            while not stop.is_set():
                begun[number] += 1
                key, told = (number, begun[number]), threading.Event()

                def done(outputs: Any, error: Any, key: Any = key, told: Any = told) -> None:
                    ended[key] += 1
                    if error is not None or not np.array_equal(outputs["y"], x):
                        wrong.append(key)
                    told.set()

                session.run_async(done, {FEED: x})
                if not told.wait(60):
                    wrong.append(key)

        threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        longest = 0.0
        for i in range(kills):
            time.sleep(0.3)
            process, start = cluster.processes[i % 2], time.perf_counter()
            os.kill(process, signal.SIGKILL)
            while cluster.processes[i % 2] == process:
                time.sleep(0.001)
            before = len(ended)
            while len(ended) < before + CLIENTS and time.perf_counter() - start < 60:
                time.sleep(0.001)
            longest = max(longest, time.perf_counter() - start)
        stop.set()
        for thread in threads:
            thread.join()
    lost = len(wrong) + sum(begun.values()) - len(ended)
    return lost, sum(count > 1 for count in ended.values()), longest


def waiting(nodes: list[tuple[list[int], float]]) -> Model:
    """Nodes that wait: each has the numbers of those that it reads, none of which reads the feed,
    and its seconds. The last one gives the output; one that reads several adds them up first."""
    b = GraphBuilder()
    x = b.input(FEED, np.float32, [WAIT_FLOATS])
    values: list[Any] = []
    for reads, seconds in nodes:
        h = values[reads[0]] if reads else x
        for i in reads[1:]:
            h = h + values[i]
        values.append(b.op("Wait", h, domain=DOMAIN, seconds=seconds))
    b.output("y", values[-1])
    return b.model()


def waiting_models() -> dict[str, tuple[str, Model]]:
    """Models for forecasts, and what each is to be placed for."""
    rng = np.random.default_rng(7)
    layers = [([i - 1] if i else [], float(s)) for i, s in enumerate(rng.uniform(2e-3, 9e-3, 16))]
    towers: list[tuple[list[int], float]] = [([], 4e-3)]
    for i in range(4):
        for j in range(3):
            towers.append(([0 if not j else len(towers) - 1], 4e-3 + 1e-3 * i + 5e-4 * j))
    towers.append(([3, 6, 9, 12], 3e-3))
    return {
        "a chain of 16 layers": ("throughput", waiting(layers)),
        "four towers of 3 layers, joined": ("latency", waiting(towers)),
    }


def forecasts(
    networks: dict[str, tuple[str, Model]], sizes: tuple[int, ...], cores: int | None = None
) -> list[str]:
    """Rows that compare what ``SimulatedCluster`` says of runs with what is measured: the time of a
    run, or between the ends of two if many are in flight. All workers share ``cores``, unless their
    kernels wait as for devices."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        for name, (objective, model) in networks.items():
            x = np.ones(model.graph.inputs[0].type.shape, np.float32)
            profile = ps.Profile()
            alone = ps.compile(model, threads=1)
            for i in range(12):
                alone.run({FEED: x}, observers=[profile] if i > 1 else [])
            profile.save(path)
            for workers in sizes:
                with ps.Cluster(workers, objective=objective, profile=path, cores=cores) as cluster:
                    session = ps.compile(model, cluster=cluster)
                    link = cluster.link_cost
                    simulated = ps.SimulatedCluster(
                        workers,
                        bandwidth=link.bandwidth,
                        latency=link.latency,
                        objective=objective,
                        profile=path,
                        cores=cores,
                    )
                    forecast = ps.compile(model, cluster=simulated).inspect.forecast_on_cluster()
                    session.run({FEED: x})
                    if objective == "latency":
                        said = forecast.makespan
                        times = [milliseconds(partial(session.run, {FEED: x}), 20)]
                    else:
                        said = forecast.interval
                        times = [in_flight(session, x) for _ in range(ROUNDS)]
                measured = statistics.median(times)
                what = "a run" if objective == "latency" else f"{IN_FLIGHT} in flight, each"
                what = f"forecast of {name}, {workers} workers, {what}; measured"
                ratio = said * 1e3 / measured
                rows.append(f"| {what} | {said * 1e3:.2f} ms | {measured:.2f} ms | {ratio:.2f} |")
    return rows


def in_flight(session: ps.Session, x: np.ndarray) -> float:
    """Milliseconds between the ends of runs, of many in flight."""
    start = time.perf_counter()
    for future in [session.submit({FEED: x}) for _ in range(IN_FLIGHT)]:
        future.result()
    return (time.perf_counter() - start) / IN_FLIGHT * 1e3


def forecast_of(name: str) -> list[str]:
    """The rows of forecasts of one model, on 2 and 4 workers."""
    if name == "network":
        return forecasts(
            {"a convolutional network": ("throughput", network())}, (2, 4), os.cpu_count()
        )
    waits = waiting_models()
    full = next(n for n in waits if name in n)
    return forecasts({full: waits[full]}, (2, 4))


def beside(name: str, figures: tuple[float, float]) -> list[str]:
    ours, theirs = figures
    return [f"| {name} | {ours:.2f} ms | {theirs:.2f} ms | {ours / theirs:.2f} |"]


def hop_rows() -> list[str]:
    rows = []
    for op, what in (("Identity", "whose parts do nothing"), ("Neg", "with a kernel on each")):
        name = f"one hop over two workers, 600 KB, {what}; Ray's compiled graph"
        with ps.Cluster(2) as cluster:
            rows += beside(name, hop(cluster, op))
    return rows


def loop_rows() -> list[str]:
    with ps.Cluster(2) as cluster:
        name = "an iteration of a loop across two workers; two calls of an actor"
        return beside(name, loop(cluster))


def pipeline_rows() -> list[str]:
    with ps.Cluster(2) as cluster, ps.Cluster(1) as alone:
        name = "a run of a network in halves, 100 in flight; one worker"
        return beside(name, pipeline(cluster, alone))


def bytes_rows() -> list[str]:
    with ps.Cluster(2) as cluster:
        again = sent_again(cluster)
    return [f"| bytes of graphs sent in {RUNS} runs after the first | {again} | | |"]


def kill_rows(kills: int) -> list[str]:
    lost, doubled, longest = killed(kills)
    name = f"{kills} workers killed under {CLIENTS} clients"
    return [
        f"| {name}: requests lost, answered twice | {lost}, {doubled} | | |",
        f"| the longest time from a kill until all had answers | {longest:.1f} s | | |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    pieces: dict[str, Callable[[], list[str]]] = {
        "hop": hop_rows,
        "loop": loop_rows,
        "pipeline": pipeline_rows,
        "bytes": bytes_rows,
        **{f"forecast-{m}": partial(forecast_of, m) for m in ("chain", "towers", "network")},
        "kills": lambda: kill_rows(arguments.kills),
    }
    add = parser.add_argument
    add("--kills", type=int, default=20, help="how many workers are killed")
    add("--only", nargs="+", metavar="PIECE", choices=pieces, default=list(pieces), help="some")
    add("--keep", type=Path, metavar="FILE", help="read what was measured before, and add to it")
    add("--write", action="store_true", help="write bench/cluster.md once all is measured")
    arguments = parser.parse_args()
    import ray

    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={
            "env_vars": {"PYTHONPATH": str(HERE.parent)},
            "worker_process_setup_hook": register,
        },
    )
    kept = arguments.keep
    measured: dict[str, list[str]] = {}
    if kept is not None and kept.exists():
        measured = json.loads(kept.read_text())
    for piece in arguments.only:
        measured[piece] = pieces[piece]()
        print("\n".join(measured[piece]), flush=True)
        if kept is not None:
            kept.write_text(json.dumps(measured))
    absent = pieces.keys() - measured
    if arguments.write and absent:
        parser.error(f"nothing is written before these have been measured: {', '.join(absent)}")
    if arguments.write:
        rows = [row for piece in pieces for row in measured[piece]]
        head = "| what; beside what | Penstock | beside | ratio |\n|---|---|---|---|\n"
        text = "# Clusters\n\n`python -m bench.cluster --write`, medians, measured in turn.\n\n"
        table = head + "\n".join(rows) + "\n"
        (HERE / "cluster.md").write_text(
            f"{text}{os.cpu_count()} cores, Ray {ray.__version__}.\n\n{table}{NOTE}"
        )


if __name__ == "__main__":
    main()
