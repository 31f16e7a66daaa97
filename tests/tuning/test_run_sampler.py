"""Costs from the runs of users, and what the measured costs of a plug-in's kernels decide."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from weakref import ref

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.compiler import stages
from penstock.executors.base import CompiledExecutor, LateSampler
from penstock.executors.frames.executor import FramesExecutor
from penstock.executors.linear import LinearExecutor
from penstock.executors.parallel import ParallelExecutor
from penstock.host.threads import Workers, core_budget
from penstock.host.threads import pool as workers_pool
from penstock.ir.kernel import Kernel
from penstock.tuning import run_sampler, trial
from penstock.tuning.measure import Cost, CostModel, GraphProfiler
from penstock.tuning.run_sampler import RunSampler
from penstock.tuning.trial import in_turns
from tests.support.costs import measured_variants
from tests.support.onnx_text import compile_text
from tests.support.tf_graphs import Builder
from tests.support.tf_loops import counting
from tests.support.timing import SOON, wait_until

SIX = """g (float[2] x) => (float[2] y) {
    a = Sin(x) b = Sin(a) c = Cos(x) d = Exp(x) e = Neg(x) f = Abs(x) y = Sum(b, c, d, e, f) }"""
X = {"x": np.array([0.5, 2], np.float32)}

needs_cores = pytest.mark.skipif(core_budget() < 2, reason="one core runs one thing at a time")


class Clock:
    """The time that kernels say they take, and nothing else; each thread has its own."""

    def __init__(self) -> None:
        self.here = threading.local()

    def __call__(self) -> float:
        return getattr(self.here, "now", 0.0)

    def passes(self, seconds: float) -> None:
        self.here.now = self() + seconds


class Company:
    """A kernel that is alone waits for a second one: none comes if they run one by one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.met = threading.Event()

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 2:
                self.met.set()
        assert self.met.wait(SOON)

    def __exit__(self, *exception: object) -> None:
        with self.lock:
            self.inside -= 1


class SlowBackend(NumpyBackend):
    """Kernels of small tensors that take 20 ms by ``clock``, and have ``company`` if told to."""

    name = "slow"

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock
        self.company: AbstractContextManager = nullcontext()

    def kernel(self, node, types) -> Kernel:
        kernel = super().kernel(node, types)

        def run(*inputs):
            if self.clock is not None:
                self.clock.passes(0.02)
            with self.company:
                return kernel.function(*inputs)

        return Kernel(run)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of profiles and samplers."""
    made = Clock()
    monkeypatch.setattr("penstock.observers.profile.perf_counter_ns", lambda: int(made() * 1e9))
    monkeypatch.setattr(run_sampler, "perf_counter", made)
    return made


@needs_cores
@pytest.mark.parametrize("executor", ["parallel", "streams", "auto"])
def test_measured_costs_of_small_tensors_decide(cache, clock, monkeypatch, executor):
    backend = SlowBackend(clock)
    options = {"executor": executor, "backends": [backend]}
    before = compile_text(SIX, **options)
    before.run(X)
    assert isinstance(before.inspect.executor, LinearExecutor)
    monkeypatch.setitem(stages.TRIED, executor, inf)  # kernels take no time but by the clock
    before.profile(X)
    after = compile_text(SIX, **options)
    for session in (before, after):
        backend.company = nullcontext()
        for _ in range(1 + 2 * trial.PAIRS):
            session.run(X)
        assert isinstance(session.inspect.executor, ParallelExecutor)
        wait_until_free(workers_pool())
        assert session.inspect.forecast(2).makespan < 0.6 * session.inspect.forecast(2).serial
        backend.company = Company()
        np.testing.assert_array_equal(session.run(X)["y"], wanted(X["x"]))


def wanted(x):
    return np.sin(np.sin(x)) + np.cos(x) + np.exp(x) - x + np.abs(x)


@needs_cores
def test_estimate_of_a_plug_in_decides_what_was_not_measured(cache, monkeypatch):
    class Estimating(SlowBackend):
        name = "estimating"

        def seconds(self, node):
            return 0.02

    measured = []
    measure = GraphProfiler.measure_briefly
    monkeypatch.setattr(
        GraphProfiler, "measure_briefly", lambda self: measured.append(self) or measure(self)
    )
    compile_text(SIX, executor="parallel", backends=[SlowBackend()], shapes={})
    assert not measured
    compile_text(SIX, executor="parallel", backends=[Estimating()], shapes={})
    assert measured


def wait_until_free(pool: Workers) -> None:
    """Wait for workers about to leave the run before: the next run would not ask for them."""
    wait_until(lambda: pool._free == pool.threads)


def run_until_settled(session: ps.Session, pool: Workers) -> None:
    """Run until both ways were tried, or one is not worth a try."""
    linear = session.inspect.executor
    assert isinstance(linear, LinearExecutor)
    for _ in range(40):
        if linear.sampler is None and session.inspect.executor is linear:
            return
        session.run(X)
        wait_until_free(pool)


@needs_cores
@pytest.mark.parametrize("executor", ["auto", "parallel", "streams"])
def test_runs_that_were_sampled_make_a_plan_parallel(cache, clock, monkeypatch, executor):
    monkeypatch.setitem(stages.TRIED, executor, inf)  # kernels take no time but by the clock
    pool = Workers("sampler", 2)
    backend = SlowBackend(clock)
    session = compile_text(SIX, executor=executor, backends=[backend], pool=pool)
    session.run(X)
    run_until_settled(session, pool)
    session.run(X)
    assert isinstance(session.inspect.executor, ParallelExecutor)
    assert measured_variants(cache / "costs.sqlite")["slow"].keys() >= {"Sin", "Cos", "Exp"}
    wait_until_free(pool)
    backend.company = Company()
    np.testing.assert_array_equal(session.run(X)["y"], wanted(X["x"]))
    wait_until_free(pool)
    backend.company = Company()
    np.testing.assert_array_equal(session.submit(X).result(SOON)["y"], wanted(X["x"]))
    pool.close()


@needs_cores
@pytest.mark.parametrize("executor", ["auto", "parallel", "streams"])
def test_plan_that_was_tried_and_was_slower_stays_in_order(cache, clock, monkeypatch, executor):
    monkeypatch.setitem(stages.TRIED, executor, 0.0)  # no schedule is that fast
    pool = Workers("sampler", 2)
    session = compile_text(SIX, executor=executor, backends=[SlowBackend(clock)], pool=pool)
    session.run(X)
    run_until_settled(session, pool)
    session.run(X)
    assert isinstance(session.inspect.executor, LinearExecutor)
    assert measured_variants(cache / "costs.sqlite")["slow"].keys() >= {"Sin", "Cos", "Exp"}
    pool.close()


@needs_cores
@pytest.mark.parametrize("parallel", [4, 1])
def test_runs_that_were_sampled_let_iterations_overlap(cache, clock, monkeypatch, parallel):
    """A loop of TensorFlow's is raised until it is known that its kernels take long."""
    monkeypatch.setitem(stages.TRIED, "auto", inf)
    monkeypatch.setattr("penstock.executors.frames.run.perf_counter", clock)

    class SlowNeg(SlowBackend):
        def kernel(self, node, types):
            plain = node.op.name != "Neg"
            return (super(SlowBackend, self) if plain else super()).kernel(node, types)

    pool = Workers("sampler", 2)
    backend = SlowNeg(clock)
    b = Builder()
    total = counting(b, b.placeholder("n", "int32"), parallel)
    session = ps.compile(b.bytes(), backends=[backend], expert=ps.ExpertOptions(pool=pool))
    feeds = {"n": np.int32(6)}
    for _ in range(40):
        assert session.run(feeds, [total])[total] == 15
        wait_until_free(pool)
    (executor,) = session._plans.executors()
    if parallel == 1:
        assert isinstance(executor, LinearExecutor)
        assert executor.sampler is None
    else:
        assert isinstance(executor, FramesExecutor)
        backend.company = Company()
        assert session.run(feeds, [total])[total] == 15
    pool.close()


@needs_cores
def test_plan_of_little_work_is_timed_and_nothing_else(cache, clock):
    pool = Workers("sampler", 2)
    backend = SlowBackend()  # whose kernels take no time by the clock
    session = compile_text(SIX, executor="auto", backends=[backend], pool=pool)
    session.run(X)
    run_until_settled(session, pool)
    assert session.inspect.executor.name == "linear"
    assert not pool.threads
    assert not (cache / "costs.sqlite").exists()
    pool.close()


@needs_cores
def test_no_run_is_added_by_sampling(cache, clock):
    pool = Workers("sampler", 2)
    backend = Counting(clock)
    ran = backend.ran
    session = compile_text(SIX, executor="auto", backends=[backend], pool=pool)
    for number in range(1, 40):
        session.run(X)
        wait_until_free(pool)
        assert ran == {
            "Sin": 2 * number,
            **dict.fromkeys(("Cos", "Exp", "Neg", "Abs", "Sum"), number),
        }
    pool.close()


@needs_cores
def test_plan_whose_longest_chain_takes_all_its_time_is_measured_twice(cache, clock, monkeypatch):
    """Runs that are measured have one thread, and there are several others between two of them."""
    number, measured = 0, []
    run = run_sampler._measured
    monkeypatch.setattr(
        run_sampler, "_measured", lambda *arguments: measured.append(number) or run(*arguments)
    )
    chain = " ".join(f"c{i + 1} = Sin(c{i})" for i in range(12))
    text = f"g (float[2] c0) => (float[2] y) {{ {chain} a = Neg(c0) y = Add(a, c12) }}"
    pool = Workers("sampler", 2)
    session = compile_text(text, executor="auto", backends=[SlowBackend(clock)], pool=pool)
    while number < 40:
        session.run({"c0": X["x"]})
        number += 1
    assert measured == [4, 9]
    assert session.inspect.executor.sampler is None
    assert not pool.threads
    pool.close()


class Counting(SlowBackend):
    """Counts the runs of kernels."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.ran: Counter[str] = Counter()

    def kernel(self, node, types):
        kernel = super().kernel(node, types)

        def run(*inputs):
            self.ran[node.op.name] += 1
            return kernel.function(*inputs)

        return Kernel(run)


class CountingLong(Counting):
    """One that says that kernels take long."""

    def seconds(self, node):
        return 0.02


@needs_cores
@pytest.mark.parametrize("executor", ["parallel", "streams"])
def test_first_answer_comes_after_two_more_runs_at_most(cache, executor):
    backend = CountingLong()
    session = compile_text(SIX, executor=executor, backends=[backend])
    session.run(X)
    assert 1 < backend.ran["Cos"] <= trial.BUDGET
    before = backend.ran["Cos"]
    for _ in range(30):
        session.run(X)
    assert backend.ran["Cos"] == before + 30


@needs_cores
def test_autotune_measures_in_more_runs(cache):
    backend = CountingLong()
    session = compile_text(SIX, executor="parallel", backends=[backend], autotune=True)
    session.run(X)
    assert backend.ran["Cos"] > trial.BUDGET


@needs_cores
def test_runs_of_an_opened_session_are_sampled_from_the_second_one_on(cache, tmp_path):
    session = compile_text(SIX, executor="auto", threads=2)
    session.run(X)
    session.save(tmp_path / "six.penstock")
    opened = ps.open(tmp_path / "six.penstock", threads=2)
    samplers = []
    for _ in range(3):
        np.testing.assert_array_equal(opened.run(X)["y"], session.run(X)["y"])
        samplers.append(opened.inspect.executor.sampler)
    assert list(map(type, samplers)) == [LateSampler, RunSampler, RunSampler]
    assert samplers[2] is samplers[1] and samplers[1].owner() is not None


@needs_cores
def test_measuring_that_takes_longer_than_its_budget_is_left_to_later_runs(cache, monkeypatch):
    def too_long(executor, values, runs, left):
        raise ps.DeadlineExceeded("it takes as long as it likes")

    monkeypatch.setattr(trial, "profile_briefly", too_long)
    backend = CountingLong()
    session = compile_text(SIX, executor="parallel", backends=[backend])
    session.run(X)
    assert backend.ran["Cos"] == 2
    assert isinstance(session.inspect.executor, LinearExecutor)
    assert session.inspect.executor.sampler is not None


@needs_cores
@pytest.mark.parametrize("executor", ["auto", "parallel", "streams"])
def test_choice_of_workers_is_judged_again(cache, clock, monkeypatch, executor):
    """Tasks that were faster when they were tried are given up once they are slower."""
    monkeypatch.setitem(stages.TRIED, executor, inf)
    monkeypatch.setattr(trial, "FEWEST", 8)
    pool = Workers("sampler", 2)
    session = compile_text(SIX, executor=executor, backends=[SlowBackend(clock)], pool=pool)
    session.run(X)
    run_until_settled(session, pool)
    assert isinstance(session.inspect.executor, ParallelExecutor)
    run = ParallelExecutor.run

    def slower(self, inputs, control):
        clock.passes(1.0)
        return run(self, inputs, control)

    monkeypatch.setattr(ParallelExecutor, "run", slower)
    monkeypatch.setattr(trial, "in_turns", partial(in_turns_with, 1.0))
    for _ in range(60):
        session.run(X)
    assert isinstance(session.inspect.executor, LinearExecutor)
    assert session.inspect.executor.sampler is not None
    pool.close()


@needs_cores
@pytest.mark.parametrize("executor", ["parallel", "streams"])
@pytest.mark.parametrize("margin", [0.0, inf], ids=["lost", "won"])
def test_executor_that_loses_a_trial_is_let_go(cache, clock, monkeypatch, executor, margin):
    monkeypatch.setitem(stages.TRIED, executor, inf)
    pool = Workers("sampler", 2)
    session = compile_text(SIX, executor=executor, backends=[SlowBackend(clock)], pool=pool)
    session.run(X)
    run_until_settled(session, pool)
    assert isinstance(session.inspect.executor, ParallelExecutor)
    made, init = [ref(session.inspect.executor)], CompiledExecutor.__init__

    def kept_in_sight(self, *arguments, **options):
        made.append(ref(self))
        init(self, *arguments, **options)

    monkeypatch.setattr(CompiledExecutor, "__init__", kept_in_sight)
    monkeypatch.setattr(trial, "in_turns", partial(in_turns_with, margin))
    for _ in range(trial.FEWEST + 2 * trial.PAIRS + 2):  # one trial
        session.run(X)
    used = session.inspect.executor
    assert isinstance(used, LinearExecutor if margin else ParallelExecutor)
    assert [own() for own in made if own() is not None] == [used]
    assert len(made) == 2
    assert used.sampler is not None
    pool.close()


def in_turns_with(margin, other, pairs, _):
    return in_turns(other, pairs, margin)


@pytest.mark.parametrize("options", [{"executor": "linear"}, {"cost_model": CostModel()}])
def test_sessions_that_say_how_to_run_are_not_sampled(options):
    session = compile_text(SIX, backends=["numpy"], shapes={}, **options)
    assert session.inspect.executor.sampler is None


def test_chains_are_not_sampled():
    session = compile_text("g (float[2] x) => (float[2] y) { a = Sin(x) y = Exp(a) }", shapes={})
    assert session.inspect.executor.sampler is None


class OtherBackend(SlowBackend):
    """Slower with all threads, faster with one."""

    name = "other"


class ThreadedCosts:
    """What was measured: on one backend, all threads make kernels faster, on the other they do not."""

    def cost(self, node, backend, threads):
        return Cost(0.02 if backend.name == "slow" and threads != 1 else SECONDS[backend.name])


SECONDS = {"slow": 0.04, "other": 0.025}


@needs_cores
@pytest.mark.parametrize(
    ("executor", "name"),
    [("linear", "slow"), ("dataflow", "slow"), ("parallel", "other"), ("auto", "other")],
)
def test_branches_on_workers_are_placed_by_the_costs_of_one_thread(executor, name):
    backends = [SlowBackend(), OtherBackend()]
    costs = ThreadedCosts()
    session = compile_text(SIX, executor=executor, backends=backends, cost_model=costs, shapes={})
    assert {step.backend for step in session.inspect.plan.steps} == {name}
    chain = "g (float[2] x) => (float[2] y) { a = Sin(x) y = Exp(a) }"
    session = compile_text(chain, executor=executor, backends=backends, cost_model=costs, shapes={})
    assert {step.backend for step in session.inspect.plan.steps} == {"slow"}
    placed = compile_text(
        SIX,
        executor=executor,
        backends=backends,
        cost_model=costs,
        shapes={},
        place={"Sin": "slow"},
    )
    assert {s.backend for s in placed.inspect.plan.steps if s.node.op.name == "Sin"} == {"slow"}
