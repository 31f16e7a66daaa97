"""AllReduce and Broadcast over several devices of torch, on streams of each."""

from __future__ import annotations

import random

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from tests.support.torch_kernels import needs_torch

pytestmark = needs_torch

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)


def devices(count: int, late: bool):
    from penstock.backends.torch.backend import TorchBackend
    from tests.support.torch_device import LateRuntime

    names = ["torch", *[f"torch:{i}" for i in range(1, count)]]
    return [
        TorchBackend("cpu", name=name, runtime=LateRuntime() if late else None) for name in names
    ]


def random_model(rng: random.Random, count: int):
    """A graph of elementwise operations on ``count`` devices and of collectives, and the place of
    each of its nodes."""
    b = GraphBuilder()
    x = b.input("x", np.float32, [4, 4])
    names = ["torch", *[f"torch:{i}" for i in range(1, count)]]
    lanes = [[x] for _ in names]
    place: dict[str, str | list[str]] = {}
    for n in range(12):
        name, choice = f"n{n}", rng.random()
        if choice < 0.3:
            reduction = rng.choice(["mean", "max", "min"])
            operands = [rng.choice(lane) for lane in lanes]
            given = {"reduction": reduction, "domain": "penstock", "outputs": count, "name": name}
            results = b.op("AllReduce", *operands, **given)
            place[f"node:{name}"] = names
        elif choice < 0.45:
            given = {"copies": count, "domain": "penstock", "outputs": count, "name": name}
            results = b.op("Broadcast", rng.choice(lanes[0]), **given)
            place[f"node:{name}"] = names
        else:
            k = rng.randrange(count)
            one = b.op(rng.choice(["Sin", "Cos", "Tanh"]), rng.choice(lanes[k]), name=name)
            results, place[f"node:{name}"] = [None] * count, names[k]
            results[k] = one
        for lane, result in zip(lanes, results, strict=True):
            lane += [] if result is None else [result]
    for k, lane in enumerate(lanes):
        b.output(f"y{k}", lane[-1])
        b.output(f"z{k}", rng.choice(lane))
    return b.model(), place


def check(session: ps.Session, wanted: dict[str, np.ndarray], runs: int = 2) -> None:
    for _ in range(runs):
        for name, value in session.run({"x": X}).items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("executor", ["linear", "parallel", "streams"])
@pytest.mark.parametrize("seed", range(6))
def test_random_collectives_on_two_and_three_devices_equal_numpy(seed, executor, late):
    rng = random.Random(seed)
    count = 2 + seed % 2
    model, place = random_model(rng, count)
    wanted = ps.compile(model, backends=["numpy"], executor="linear").run({"x": X})
    options = {"expert": ps.ExpertOptions(max_streams=8)} if executor == "streams" else {}
    kept = {node.name for node in model.graph.nodes}
    place = {key: where for key, where in place.items() if key.removeprefix("node:") in kept}
    session = ps.compile(
        model, backends=devices(count, late), place=place, executor=executor, **options
    )
    check(session, wanted)


TEXT_PLACE = {
    "Sin": "torch",
    "Cos": "torch:1",
    "AllReduce": ["torch", "torch:1"],
    "Exp": "torch",
    "Tanh": "torch:1",
}


def all_reduce():
    b = GraphBuilder()
    x = b.input("x", np.float32, [4, 4])
    r, s = b.op("AllReduce", b.op("Sin", x), b.op("Cos", x), domain="penstock", outputs=2)
    b.output("y", b.op("Exp", r))
    b.output("z", b.op("Tanh", s))
    return b.model()


WANTED = {"y": np.exp(np.sin(X) + np.cos(X)), "z": np.tanh(np.sin(X) + np.cos(X))}


def test_all_reduce_is_on_a_stream_of_each_device_and_waits_for_the_other():
    backends = devices(2, late=True)
    session = ps.compile(
        all_reduce(),
        backends=backends,
        place=TEXT_PLACE,
        executor="streams",
        expert=ps.ExpertOptions(max_streams=8),
    )
    check(session, WANTED, runs=5)
    signals = session.inspect.executor.tasks.signals
    assert {*signals.devices} == {"torch", "torch:1"}
    on = {step.node.op.name: streams for step, streams in signals.on.items()}
    waiting = {
        step.node.op.name: [(s, signals.events[k]) for s, k in signals.behind.get(step, ())]
        for step in signals.on
    }
    (first,), (second,) = on["Sin"], on["Cos"]
    assert sorted(on["AllReduce"]) == sorted([first, second])
    assert sorted(waiting["AllReduce"]) == sorted([(first, second), (second, first)])
    assert (on["Exp"], on["Tanh"]) == ((first,), (second,))
    # The results of both devices are there when both streams have come so far.
    assert waiting["Exp"] == [(first, second)]
    assert waiting["Tanh"] == [(second, first)]


@pytest.mark.parametrize("executor", ["linear", "streams"])
def test_values_of_an_all_reduce_cross_between_devices_alone(executor):
    session = ps.compile(
        all_reduce(), backends=devices(2, late=False), place=TEXT_PLACE, executor=executor
    )
    check(session, WANTED)
    attrs = [s.node.attrs for s in session.inspect.plan.walk() if s.node.op.name == "Transfer"]
    moves = sorted((a["source"], a["target"]) for a in attrs)
    # The input to both devices, and the output of each; the kernel itself copies the operands.
    host = {"host", "numpy"}
    assert sum(source in host for source, _ in moves) == sum(target in host for _, target in moves)
    assert len(moves) == 4


def test_all_outputs_of_an_all_reduce_are_equal_to_the_last_bit():
    b = GraphBuilder()
    xs = [b.input(f"x{k}", np.float32, [1000]) for k in range(3)]
    names = ["torch", "torch:1", "torch:2"]
    for k, y in enumerate(b.op("AllReduce", *xs, domain="penstock", outputs=3)):
        b.output(f"y{k}", y)
    session = ps.compile(b.model(), backends=devices(3, late=True), place={"AllReduce": names})
    rng = np.random.default_rng(0)
    feeds = {f"x{k}": rng.standard_normal(1000).astype(np.float32) * 10.0**k for k in range(3)}
    first, *others = session.run(feeds).values()
    assert all(np.array_equal(first, other) for other in others)
    np.testing.assert_allclose(first, sum(feeds.values()), rtol=1e-5)


def test_tensors_that_are_fed_and_returned_stay_on_their_devices():
    import torch

    session = ps.compile(all_reduce(), backends=devices(2, late=False), place=TEXT_PLACE)
    results = session.run({"x": torch.from_numpy(X)}, returns="torch")
    for name, value in results.items():
        assert isinstance(value, torch.Tensor)
        np.testing.assert_allclose(value.numpy(), WANTED[name], rtol=1e-5)


def test_saved_session_with_a_group_runs_again(tmp_path):
    backends, place = ["torch", "numpy"], {"AllReduce": ("torch", "numpy")}
    session = ps.compile(all_reduce(), backends=backends, place=place)
    check(session, WANTED)
    session.save(tmp_path / "saved.penstock")
    opened = ps.open(tmp_path / "saved.penstock")
    check(opened, WANTED)
    assert "torch+numpy" in opened.effective.backends
