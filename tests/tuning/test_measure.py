"""Costs of nodes and transfers that are measured on the machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.executors.linear import LinearExecutor
from penstock.tuning import cost_table as cost_table_module
from penstock.tuning import trial
from penstock.tuning.cost_table import cost_table
from penstock.tuning.measure import CostModel, threads_of
from tests.support.costs import measured_variants
from tests.support.far_backend import FarBackend
from tests.support.onnx_text import compile_text

X = np.array([1, 2, 3], np.float32)


#   x -- Exp -- a -+- Neg -- b -+- Add -- y
#                  +- Sin -- c -+
DIAMOND = "g (float[N] x) => (float[N] y) { a = Exp(x) b = Neg(a) c = Sin(a) y = Add(b, c) }"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def compiled(text: str = DIAMOND, **options) -> ps.Session:
    return compile_text(text, **options)


def test_measured_nodes_are_not_measured_again():
    far = FarBackend("far", ["Exp", "Sin"])
    compiled(backends=["numpy", far]).run({"x": X})
    ran = far.ran.total()
    assert ran
    # In this process or another one, which reads the file.
    cost_table_module._TABLES.clear()
    second = FarBackend("far", ["Exp", "Sin"])
    session = compiled(backends=["numpy", second])
    session.run({"x": X})
    on_far = sum(
        step.backend == "far" and step.node.op.name != "Transfer"
        for step in session.inspect.plan.steps
    )
    assert second.ran.total() == on_far


def test_nodes_that_fail_while_measured_are_estimated():
    far = FarBackend("far", ["Gather", "Neg"])
    text = "g (float[3] x, int64[1] i) => (float[1] y) { a = Neg(x) y = Gather(a, i) }"
    session = compiled(text, backends=["numpy", far])
    with pytest.raises(ps.RunError, match="Gather"):
        session.run({"x": X, "i": np.array([5])})
    assert session.run({"x": X, "i": np.array([1])})["y"] == -2


def test_transfer_costs_are_interpolated_by_bytes():
    table = cost_table()
    table.record_transfer("numpy", "far", 1000, 1e-3)
    table.record_transfer("numpy", "far", 3000, 2e-3)
    known = CostModel([])
    assert known.transfer("numpy", "far", 2000) == pytest.approx(1.5e-3)
    assert known.transfer("far", "numpy", 2000) > 0  # estimated


def test_costs_are_measured_with_the_recorded_threads(monkeypatch):
    seen = []
    backend = NumpyBackend()
    monkeypatch.setattr(NumpyBackend, "threads", property(lambda self: state[0]))
    monkeypatch.setattr(NumpyBackend, "set_threads", lambda self, n: state.__setitem__(0, n))
    state = [4]
    kernel_of = backend.kernel

    def watched(self, node, types):
        kernel = kernel_of(node, types)

        def function(*inputs):
            seen.append(state[0])
            return kernel.function(*inputs)

        return type(kernel)(function)

    monkeypatch.setattr(NumpyBackend, "kernel", watched)
    text = "g (float[64, 64] x) => (float[64, 64] y) { y = MatMul(x, x) }"
    session = compiled(text, backends=["numpy"])
    session.profile({"x": np.eye(64, dtype=np.float32)}, runs=2)
    # Each with one to warm up; the plan itself with observers and without.
    assert seen == [1] * 3 + [4] * 3 + [4] * 6
    machine = measured_variants(cost_table().path)
    assert sorted(key.split(",")[0] for key in machine["numpy"]["MatMul"]) == [
        "1 threads",
        "4 threads",
    ]


class OfCaller(NumpyBackend):
    """One whose kernels have threads of the calling thread."""

    name = "own"
    threads_of_caller = True

    def kernel(self, node, types):
        return super().kernel(node, types) if node.op.name == "Neg" else None


def test_numpy_beside_library_with_caller_threads_is_measured_with_one(monkeypatch):
    """As it runs there: of two sets of threads each waits, spinning, on the other's cores."""
    monkeypatch.setattr(NumpyBackend, "threads", property(lambda self: 4))
    monkeypatch.setattr(NumpyBackend, "set_threads", lambda self, threads: None)
    own, numpy = OfCaller(), NumpyBackend()
    assert [threads_of(b, [own, numpy], False) for b in (own, numpy)] == [4, 1]
    assert threads_of(numpy, [numpy], False) == 4
    assert threads_of(own, [own, numpy], True) == 1
    compiled(backends=[own, numpy]).profile({"x": X}, runs=1)
    machine = measured_variants(cost_table().path)
    assert {key.split(",")[0] for key in machine["numpy"]["Neg"]} == {"1 threads"}
    assert {key.split(",")[0] for key in machine["own"]["Neg"]} == {"1 threads", "4 threads"}


def test_costs_are_measured_in_planned_memory():
    """What allocates its results, or has them in another layout, takes longer than in most runs."""
    allocated = []

    class Watched(NumpyBackend):
        name = "watched"

        def kernel(self, node, types):
            kernel = super().kernel(node, types)

            def function(*inputs):
                allocated.append(node.op.name)
                return kernel.function(*inputs)

            return replace(kernel, function=function)

    compiled(backends=[Watched()], shapes={"x": [3]}).profile({"x": X}, runs=2)
    assert set(allocated) <= {"Add"}  # whose result leaves the run


@pytest.mark.parametrize("executor", ["linear", "dataflow"])
def test_cost_table_is_not_read_when_costs_decide_nothing(executor, monkeypatch):
    def refuse():
        raise AssertionError("no decision needs the table")

    monkeypatch.setattr(cost_table_module, "cost_table", refuse)
    compiled(executor=executor, backends=["numpy"]).run({"x": X})


def test_cost_table_is_not_read_for_a_chain(monkeypatch):
    monkeypatch.setattr(
        cost_table_module, "cost_table", lambda: pytest.fail("no decision needs the table")
    )
    chain = "g (float[2] x) => (float[2] y) { a = Sin(x) y = Exp(a) }"
    compile_text(chain, backends=["numpy"]).run({"x": np.ones(2, np.float32)})


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "auto", "frames"]
)
def test_session_of_backends_off_the_host_runs_and_is_profiled(executor):
    far, other = FarBackend("far"), FarBackend("other", ["MatMul"])
    session = compiled(executor=executor, backends=[other, far], autotune=True)
    wanted = compiled(backends=["numpy"]).run({"x": X})
    for name, value in session.run({"x": X}).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6)
    session.profile({"x": X}, runs=1)
    assert far.ran


def test_step_that_is_interrupted_in_one_run_is_measured_by_the_others(monkeypatch):
    text = "g (float[2] x) => (float[2] y) { a = Exp(x) y = Neg(a) }"
    session = compile_text(text, backends=["numpy"])
    executor, observed, values = session._parts().watched({"x": np.ones(2, np.float32)})
    calls = count()

    def clock() -> int:
        """A nanosecond a call, and a second within the first step of the fourth run."""
        call = next(calls)  # six a run: its begin, those of two steps and their ends, its end
        return call + (10**9 if call >= 3 * 6 + 2 else 0)

    monkeypatch.setattr("penstock.observers.profile.perf_counter_ns", clock)
    profile = trial.profile_in_turn(observed, executor, values, 9)
    assert next(calls) == 9 * 6
    assert profile.runs == 9
    assert profile.inside == pytest.approx(9 * 2e-9)
    assert profile.observed == pytest.approx(9 * 5e-9, abs=1e-12)


class Undecided(LinearExecutor):
    """An executor that chooses its number of threads during its first ``trials`` runs."""

    def __init__(self, trials: int) -> None:
        self.ran, self.trials = 0, trials

    @property
    def undecided(self) -> bool:
        return self.ran < self.trials

    def run(self, *arguments):
        self.ran += 1


@pytest.mark.parametrize(("trials", "most", "ran"), [(0, 9, 4), (7, 9, 11), (7, 2, 6)])
def test_runs_by_which_the_number_of_threads_is_chosen_are_not_timed(trials, most, ran):
    executor = Undecided(trials)
    assert len(trial.run_seconds(executor, [], 4, most)) == 4
    assert executor.ran == ran


def test_observed_runs_take_the_threads_of_most_runs():
    session = compile_text("g (float[64, 64] x) => (float[64, 64] y) { y = MatMul(x, x) }")
    executor, observed, _ = session._parts().watched({"x": np.ones((64, 64), np.float32)})
    assert not observed.undecided
    assert observed._share.tuner is executor._share.tuner
