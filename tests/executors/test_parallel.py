"""The parallel executor: with its own clustering, and with every step as a task."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.backends.numpy import NumpyBackend
from penstock.host.threads import Workers, core_budget
from penstock.observers.base import Observer
from penstock.plan.grouping import ClusteredGrouping
from penstock.plan.tasks import Grouping
from penstock.tuning.measure import CostModel
from tests.executors.conformance import ExecutorConformance
from tests.support.cost_models import EqualCosts
from tests.support.onnx_text import compile_text


class OfAllSteps(ClusteredGrouping):
    """Every step is a task, and worth a worker."""

    hand_over_s = 0.0
    promising = True
    makespan = 0.0
    serial = 1.0
    expands = Grouping.expands
    groups = Grouping.groups
    queue = Grouping.queue
    seconds = Grouping.seconds


class TestParallel(ExecutorConformance):
    executor = "parallel"


class EveryStepATask(ExecutorConformance):
    executor = "parallel"
    sampled = True
    threads = 4

    pool: Workers

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def threads_of_its_own(cls) -> Iterator[None]:
        cls.pool = Workers("test", cls.threads)
        yield
        cls.pool.close()

    def compile(self, source, **options):
        options.setdefault("cost_model", CostModel())
        return super().compile(source, pool=self.pool, grouping=OfAllSteps, **options)


class TestParallelStepByStep(EveryStepATask):
    threads = 4


class TestParallelOnOneThread(EveryStepATask):
    threads = 1


TWO_BRANCHES = """g (float[64, 64] x) => (float[64, 64] y) {
    a = MatMul(x, x) b = Exp(a) c = MatMul(x, x) d = Sin(c) y = Add(b, d) }"""


def workers() -> int:
    return sum(t.name.startswith("penstock-host") for t in threading.enumerate())


def test_workers_of_many_sessions_are_within_the_core_budget():
    sessions = [
        compile_text(TWO_BRANCHES, executor="parallel", backends=["numpy"], cost_model=EqualCosts())
        for _ in range(10)
    ]
    x = np.eye(64, dtype=np.float32)
    want = sessions[0](x)
    assert {session.inspect.executor.name for session in sessions} == {"parallel"}

    def client(seed: int) -> bool:
        choose = random.Random(seed)
        good = True
        for _ in range(20):
            session = choose.choice(sessions)
            futures = [session.submit({"x": x}) for _ in range(choose.randrange(3))]
            good &= np.array_equal(session(x), want)
            good &= all(np.array_equal(each.result(60)["y"], want) for each in futures)
        return good

    with ThreadPoolExecutor(16) as clients:
        assert all(clients.map(client, range(16)))
    assert workers() <= core_budget()


def test_parallel_run_restores_the_threads_of_kernels():
    before = NumpyBackend().threads
    session = compile_text(
        TWO_BRANCHES, executor="parallel", backends=["numpy"], cost_model=EqualCosts()
    )
    inside = []

    class Looks(Observer):
        def step_begin(self, run, step, inputs):
            inside.append(NumpyBackend().threads)

    session.run({"x": np.eye(64, dtype=np.float32)}, observers=[Looks()])
    assert set(inside) == {1}
    assert NumpyBackend().threads == before


def test_parallel_plan_reuses_memory_of_ordered_tasks():
    #   x -+- four of a kind -- Sum -- four of a kind -- Sum ...: one stage at a time
    lines, value = [], "x"
    for stage in range(6):
        parts = (f"MatMul({value}, x)", f"Sin({value})", f"Cos({value})", f"MatMul(x, {value})")
        lines += [f"m{stage}{i} = {part}" for i, part in enumerate(parts)]
        lines.append(f"s{stage} = Sum({', '.join(f'm{stage}{i}' for i in range(4))})")
        value = f"s{stage}"
    lines.append(f"y = Neg({value})")
    text = f"g (float[64, 64] x) => (float[64, 64] y) {{ {' '.join(lines)} }}"
    session = compile_text(text, executor="parallel", shapes={}, cost_model=EqualCosts())
    if core_budget() > 1:
        assert session.inspect.executor.name == "parallel"
    assert session.memory.arenas <= 6 * 64 * 64 * 4
    x = value = np.eye(64, dtype=np.float32)
    for _ in range(6):
        value = value @ x + np.sin(value) + np.cos(value) + x @ value
    np.testing.assert_array_equal(session(x), -value)
