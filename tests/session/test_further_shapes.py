"""A session's plan for a further shape is the one that a session which meets no other shape makes,
and costs less than the first."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.zoo.sample import samples
from onnx import numpy_helper

import penstock as ps
from penstock.compiler import stages
from penstock.core.errors import PenstockError
from penstock.core.types import TensorType
from penstock.ir.graph import Model
from tests.session.test_artifact import assert_same, image, net_model
from tests.session.test_opening import calls_of, open_model
from tests.support.onnx_text import model_from_text
from tests.support.random_graphs import feeds_for, seeded
from tests.support.sweeps import sweep

EXECUTORS = ("linear", "dataflow", "parallel", "streams", "frames", "interpret", "auto")
MOST_CALLS = 520
"""for a further shape, of each node of a network of convolutions"""
Feeds = dict[str, Any]


@pytest.fixture(autouse=True)
def no_measured_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))


def described(session: ps.Session) -> tuple[Any, ...]:
    """Return the steps of the last plan with kernels, its slots, their offsets, its program."""
    plan, executor = session.inspect.plan, session.inspect.executor
    steps = [
        (
            *(step.node.op.full_name, step.node.name, step.backend, step.inputs, step.outputs),
            *(step.into, step.workspace, step.copied),
            None if step.kernel is None else getattr(step.kernel.binder, "implementation", ""),
        )
        for step in plan.walk()
    ]
    slots = [(slot.name, slot.type, slot.kind, slot.strides, slot.base) for slot in plan.slots]
    arena = executor.arena_plan
    places = None if arena is None else (arena.order, arena.offsets, arena.size)
    return steps, slots, places, getattr(executor, "source", "").partition("\n")[2]


def check(model: Any, before: Feeds, feeds: Feeds, **options: Any) -> None:
    """Compare the plan of a session that has seen the shapes ``before``, perhaps in vain, with that
    of one that has not."""
    with ps.compile(model, **options) as fresh, ps.compile(model, **options) as further:
        with suppress(PenstockError):  # the model rejects this shape
            further.run(before)
        wanted = fresh.run(feeds)
        assert_same(further.run(feeds), wanted)
        if options.get("executor") not in ("frames", "interpret"):
            assert described(further) == described(fresh)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_plan_of_further_shape_is_that_of_a_new_session(executor: str) -> None:
    check(net_model(), image(2), image(5), executor=executor)


@pytest.mark.parametrize("seed", sweep(range(200), 40))
def test_plan_of_further_shape_of_random_graph_is_that_of_a_new_session(seed: int) -> None:
    graph = seeded(seed)
    for value in graph.inputs:
        assert isinstance(value.type, TensorType)
        value.type = TensorType(value.type.dtype, (None,) * (value.type.rank or 0))
    feeds = feeds_for(seed)
    before = {name: np.repeat(x, 1 + seed % 3, 0) if x.ndim else x for name, x in feeds.items()}
    check(Model({"random": graph}, "random"), before, feeds, executor="linear")


ZOO = {sample.name: zoo for sample, *zoo in samples() if sample.name.startswith("torch-modules")}


@pytest.mark.parametrize("name", sweep(ZOO, 12))
def test_plan_of_further_shape_of_zoo_is_that_of_a_new_session(name: str) -> None:
    model, feeds = ZOO[name]
    before = {key: np.repeat(x, 2, 0) if x.ndim else x for key, x in feeds.items()}
    check(model, before, feeds, executor="linear")


def convolutions(count: int) -> bytes:
    """A network of any number of images, with ``count`` pairs of a convolution and its activation."""
    lines = [f"c{i} = Conv<pads=[1,1,1,1]>(r{i - 1 if i else ''}, k) " for i in range(count)]
    body = "".join(f"{line} r{i} = Relu(c{i})\n" for i, line in enumerate(lines))
    text = f"net (float[N, 4, 8, 8] r) => (float[N, 4, 8, 8] r{count - 1}) {{ {body} }}"
    model = model_from_text(text)
    kernel = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(kernel, "k"))
    return bytes(model.SerializeToString())


def calls_of_further(model: bytes) -> int:
    """Count calls of Python functions for the second shape of a model."""
    with ps.compile(model, threads=1) as session:
        session.run({"r": np.ones((1, 4, 8, 8), np.float32)})
        return calls_of(session.run, {"r": np.ones((2, 4, 8, 8), np.float32)})


def test_calls_for_each_node_of_a_further_shape_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "ALWAYS_CHECKED", False)
    few, many = convolutions(10), convolutions(30)
    open_model(few, {"r": np.ones((2, 4, 8, 8), np.float32)})  # what happens once in a process
    assert calls_of_further(many) - calls_of_further(few) <= MOST_CALLS * 40
