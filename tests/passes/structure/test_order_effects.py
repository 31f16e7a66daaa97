"""Nodes with side effects run in the order of the model, on every executor."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from penstock.core.types import FLOAT32, INT64, TensorType
from penstock.host.threads import Workers
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.common.shape_rules import same_type
from penstock.ops.registry import operator, standard
from penstock.passes.structure.order_effects import order_effects
from tests.executors.test_parallel import OfAllSteps
from tests.support.cost_models import EqualCosts
from tests.support.expert import with_expert
from tests.support.tf_graphs import Builder, Type

DOMAIN = "com.example"
EXECUTORS = ("auto", "linear", "dataflow", "parallel", "streams", "frames", "interpret")
LOG: list[int] = []
RUNNING: list[int] = []
"""how many kernels of Log or Draw ran when one began, itself included"""
_count = 0
_lock = threading.Lock()


def _recorded(x: np.ndarray, label: int = 0) -> np.ndarray:
    """``x``, after 1 ms; others that run meanwhile are seen."""
    global _count
    with _lock:
        _count += 1
        RUNNING.append(_count)
    time.sleep(0.001)
    with _lock:
        _count -= 1
        LOG.append(label)
    return x + np.float32(0)


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


@pytest.mark.parametrize("executor", EXECUTORS)
def test_effects_of_random_models_run_one_by_one_in_the_order_of_the_file(executor, pool):
    feeds = {"x": np.ones(2, np.float32), "flag": np.array(True)}
    for seed in range(12):
        effects = EffectsModel(seed)
        session = compiled(effects.model, executor, pool)
        for _ in range(2):
            LOG.clear()
            session.run(feeds)
            assert effects.expected == LOG, seed
    assert max(RUNNING) == 1
