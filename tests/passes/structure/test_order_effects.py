"""Nodes with side effects run in the order of the model, on every executor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from penstock.host.threads import Workers
from penstock.ir.graph import Node
from penstock.ops.common.shape_rules import same_type
from penstock.ops.registry import TENSORFLOW, find, operator
from penstock.passes.structure.order_effects import order_effects
from tests.executors.test_parallel import OfAllSteps
from tests.support.cost_models import EqualCosts
from tests.support.expert import with_expert
from tests.support.random_frames import RandomGraph
from tests.support.sweeps import scaled
from tests.support.tf_graphs import Builder, Type

DOMAIN = "com.example"
EXECUTORS = ("auto", "linear", "dataflow", "parallel", "streams", "frames", "interpret")
LOG: list[int] = []
RUNNING: list[int] = []
"""how many kernels with effects ran when one began, itself included"""
_count = 0
_began = threading.Condition()
_patience_s = 0.001


def _recorded(x: np.ndarray, label: int = 0) -> np.ndarray:
    """A copy of ``x``; waits a little for another such kernel to begin meanwhile."""
    global _count
    with _began:
        _count += 1
        RUNNING.append(_count)
        _began.notify_all()
        _began.wait_for(lambda: max(RUNNING) > 1, _patience_s)
        _count -= 1
        LOG.append(label)
    return x.copy()


@operator("LogEffect", domain=DOMAIN, infer=same_type, pure=False)
def log_effect(node: Node, types: Any) -> ps.ops.Kernel:
    label = node.attrs["label"]
    return ps.ops.Kernel(lambda x: _recorded(x, label))


@operator("DrawEffect", domain=DOMAIN, infer=same_type, pure=False, traits={"any order"})
def draw_effect(node: Node, types: Any) -> ps.ops.Kernel:
    return ps.ops.Kernel(_recorded)


@pytest.fixture(autouse=True)
def nothing_recorded() -> None:
    LOG.clear()
    RUNNING.clear()


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    workers = Workers("effects", 4)
    yield workers
    workers.close()


def compiled(source: Any, executor: str, pool: Workers) -> ps.Session:
    """A session that runs as much at a time as its executor allows."""
    options: dict[str, Any] = {"executor": executor, "pool": pool, "backends": ["numpy"]}
    if executor == "parallel":
        options["grouping"] = OfAllSteps
    options["cost_model"] = EqualCosts()
    return ps.compile(source, **with_expert(options))


class EffectsModel:
    """A random ``model`` of nodes with effects, most of which read only the input, in branches and
    loops; ``expected``: their labels in the order of the file, if ``flag`` is fed with True."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.labels = 0
        self.builder = b = GraphBuilder()
        self.flag = b.input("flag", bool, [])
        values = [b.input("x", np.float32, [2])]
        self.expected = self.block(values, 2)
        b.output("y", b.op("Sum", *values))
        self.model = b.model()

    def block(self, known: list[Any], depth: int) -> list[int]:
        """Add nodes that read some of ``known``, and are added to it; return the order of effects
        if ``flag`` holds."""
        order: list[int] = []
        for _ in range(self.random.randint(2, 4)):
            kinds = ["log", "log", "compute"] + ["branch", "constant_branch", "loop"] * (depth > 0)
            order += getattr(self, self.random.choice(kinds))(known, depth)
        return order

    def log(self, known: list[Any], depth: int) -> list[int]:
        self.labels += 1
        read = self.random.choice(known)
        known.append(self.builder.op("LogEffect", read, domain=DOMAIN, label=self.labels))
        return [self.labels]

    def compute(self, known: list[Any], depth: int) -> list[int]:
        known.append(self.random.choice(known) * 0.5)
        return []

    def side(self, known: list[Any], depth: int, orders: list[list[int]]) -> Any:
        inner = known[:]
        orders.append(self.block(inner, depth - 1))
        return self.builder.op("Sum", *inner)

    def branch(self, known: list[Any], depth: int, condition: Any = None) -> list[int]:
        orders: list[list[int]] = []
        taken, other = (lambda: self.side(known, depth, orders) for _ in range(2))
        chosen = self.flag if condition is None else condition
        known.append(self.builder.cond(chosen, taken, other))
        return orders[0]

    def constant_branch(self, known: list[Any], depth: int) -> list[int]:
        return self.branch(known, depth, self.builder.constant(np.array(True)))

    def loop(self, known: list[Any], depth: int) -> list[int]:
        orders: list[list[int]] = []
        times = self.random.randint(0, 3)

        def body(i: Any, carried: Any) -> Any:
            return self.side([*known, carried], depth, orders) * 0.1

        known.append(self.builder.loop(body, self.random.choice(known), times=times))
        return orders[0] * times


@pytest.mark.parametrize("models", scaled(4, 12))
@pytest.mark.parametrize("executor", EXECUTORS)
def test_effects_of_random_models_run_one_by_one_in_the_order_of_the_file(executor, models, pool):
    feeds = {"x": np.ones(2, np.float32), "flag": np.array(True)}
    for seed in range(models):
        effects = EffectsModel(seed)
        session = compiled(effects.model, executor, pool)
        for _ in range(2):
            LOG.clear()
            session.run(feeds)
            assert effects.expected == LOG, seed
    assert max(RUNNING) == 1


@operator("TfLogEffect", domain=TENSORFLOW, infer=same_type, pure=False)
def tf_log_effect(node: Node, types: Any) -> ps.ops.Kernel:
    label = node.attrs["label"]
    return ps.ops.Kernel(lambda x: _recorded(x, label))


class EffectsOfTensorFlow(RandomGraph):
    """A random graph of branches in which each value is computed, and each branch ended, by a node
    with an effect, some of which wait for others by control edges: an Abs in the file."""

    def __init__(self, seed: int) -> None:
        self.labels = 0
        super().__init__(seed, uneven=False)

    def block(self, known: Any, depth: int, length: int) -> list[str]:
        return super().block(known, min(depth, 2), min(length, 4))

    def compute(self, values: Any, depth: int) -> str:
        return self.log(super().compute(values, depth))

    def log(self, *inputs: str) -> str:
        self.labels += 1
        return self.b.node("Abs", *inputs, name=f"log{self.labels}", T=Type("int32"))

    def constant(self, values: Any, depth: int) -> str:
        return self.log(self.some(values, 1)[0], f"^{self.some(values, 1)[0].split(':')[0]}")

    trigger = constant

    def loop(self, values: Any, depth: int) -> str:
        return self.branch(values, depth)

    def before(self, label: int, ran: set[int]) -> set[int]:
        """The effects that must come before one in a run in which those of ``ran`` came."""
        nodes = {node.name: node for node in self.b.proto.node}
        stack, found, seen = list(nodes[f"log{label}"].input), set[int](), set[str]()
        while stack:
            node = nodes[stack.pop().lstrip("^").partition(":")[0]]
            if node.name in seen:
                continue
            seen.add(node.name)
            taken = [name for name in node.input if node.op != "Merge" or int(name[3:]) in ran]
            stack += taken
            found |= {int(node.name[3:])} if node.op == "Abs" else set()
        return found


def with_effects(graph_def: bytes) -> ps.ir.graph.Model:
    """The model of a GraphDef, in which each Abs is a TfLogEffect."""
    model, op = ps.load(graph_def), find("TfLogEffect", TENSORFLOW)
    for node in model.graph.walk():
        if node.op.name == "Abs":
            node.op, node.attrs = op, {"label": int(node.name[3:])}
    return model


@pytest.mark.costly
@pytest.mark.parametrize("models", scaled(7, 20))
@pytest.mark.parametrize("executor", EXECUTORS)
def test_effects_of_tensorflow_obey_data_and_control_edges(executor, models, pool):
    ran = 0
    for seed in range(models):
        effects = EffectsOfTensorFlow(seed)
        session = compiled(with_effects(effects.b.bytes()), executor, pool)
        for x in (3, -50):
            LOG.clear()
            try:
                session.run({"x": np.int32(x)}, effects.fetches)
            except ps.Unsupported as error:  # not raised
                assert "it has a side effect in a branch" in str(error)
                continue
            ran += 1
            for i, label in enumerate(LOG):
                assert effects.before(label, set(LOG)) <= set(LOG[:i]), (seed, x)
    assert ran > models // 5


@pytest.mark.parametrize("executor", ["parallel", "frames"])
@pytest.mark.parametrize("operation", ["DrawEffect", "TfLogEffect"])
def test_effects_without_an_order_run_at_the_same_time(executor, operation, pool, monkeypatch):
    monkeypatch.setattr("tests.passes.structure.test_order_effects._patience_s", 0.02)
    if operation == "TfLogEffect":
        b, shape = Builder(), ()
        b.placeholder("x", "float32")
        T = Type("float32")
        names = [b.node("Abs", "x", name=f"log{i}", T=T) for i in range(8)]
        b.node("AddN", *names, name="y", N=8, T=T)
        session = compiled(with_effects(b.bytes()), executor, pool)
    else:
        onnx, shape = GraphBuilder(), (2,)
        x = onnx.input("x", np.float32, [2])
        values = [onnx.op(operation, x * float(i), domain=DOMAIN) for i in range(8)]
        onnx.output("y", onnx.op("Sum", *values))
        session = compiled(onnx.model(), executor, pool)
    for _ in range(30):  # until it is known that the nodes are slow
        session.run({"x": np.ones(shape, np.float32)}, ["y"])
        if max(RUNNING) > 1:
            break
    assert max(RUNNING) > 1


@pytest.mark.parametrize("executor", EXECUTORS)
def test_effects_that_are_not_fetched_do_not_run(executor, pool):
    b = GraphBuilder()
    x = b.input("x", np.float32, [2])
    for label, name in enumerate("abc"):
        b.output(name, b.op("LogEffect", x, domain=DOMAIN, label=label))
    session = compiled(b.model(), executor, pool)
    session.run({"x": np.ones(2, np.float32)}, ["a", "c"])
    assert LOG == [0, 2]


def test_effect_waits_for_the_one_before_it_in_its_graph() -> None:
    b = GraphBuilder()
    x, flag = b.input("x", np.float32, [2]), b.input("flag", bool, [])

    def log(label: int) -> Any:
        return b.op("LogEffect", x, domain=DOMAIN, label=label)

    first = log(0)
    chosen = b.cond(flag, lambda: log(1) + log(2), lambda: x)
    b.output("y", b.op("Sum", first, chosen, log(3), b.op("DrawEffect", x, domain=DOMAIN)))
    graph = b.model().graph
    assert order_effects(graph)
    assert not order_effects(graph)
    waits = {
        node.attrs.get("label", node.op.name): [n.attrs.get("label", n.op.name) for n in before]
        for node in graph.walk()
        if (before := node.control_inputs)
    }
    assert waits == {2: [1], "If": [0], 3: ["If"]}


@pytest.mark.parametrize("executor", ["auto", "frames"])
def test_loop_over_several_devices_has_its_effects_in_order(executor, pool):
    b = GraphBuilder()
    x = b.input("x", np.float32, [2])

    def body(i: Any, carried: Any) -> Any:
        first, second = (b.op("LogEffect", x, domain=DOMAIN, label=i) for i in range(2))
        return b.op("Sum", carried, first, second)

    b.output("y", b.loop(body, x, times=4))
    model = b.model()
    for i, node in enumerate(model.graph.walk()):
        node.device = f"/device:CPU:{i % 2}"
    options = {"devices": {"cpu:0": "numpy", "cpu:1": "numpy"}, "pool": pool}
    session = ps.compile(model, **with_expert({"executor": executor, **options}))
    session.run({"x": np.ones(2, np.float32)})
    assert LOG == [0, 1] * 4
    assert max(RUNNING) == 1
