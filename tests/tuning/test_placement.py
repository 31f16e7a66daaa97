"""Which backend runs what, and the transfers between them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.host.native import library
from penstock.plan.plan import Plan
from penstock.tuning import trial
from penstock.tuning.measure import CostModel
from tests.executors.conformance import ExecutorConformance
from tests.support.cost_models import EqualCosts, ScatteredCosts
from tests.support.far_backend import FarBackend
from tests.support.onnx_text import compile_text
from tests.support.timing import SOON

#   x -- Exp -- a -+- Neg -- b -+- Add -- y
#                  +- Sin -- c -+
DIAMOND = "g (float[N] x) => (float[N] y) { a = Exp(x) [left] b = Neg(a) c = Sin(a) y = Add(b, c) }"


def diamond(*backends, text=DIAMOND, **options) -> ps.Session:
    return compile_text(text, backends=backends, **{"cost_model": CostModel(), **options})


def transfers(plan: Plan) -> Counter[tuple[str, str]]:
    return Counter(
        (step.node.inputs[0].name, step.node.attrs["target"])
        for step in plan.walk()
        if step.node.op.name == "Transfer"
    )


X = np.array([1, 2, 3], np.float32)
Y = np.sin(np.exp(X)) - np.exp(X)


@pytest.fixture(params=["linear", "dataflow", "parallel"])
def executor(request) -> str:
    return request.param


def test_one_transfer_for_each_value_and_memory(executor):
    far = FarBackend()
    place = {"Neg": "far", "Sin": "far"}
    session = diamond(
        "numpy", far, executor=executor, place={**place, "Exp": "numpy", "Add": "numpy"}
    )
    np.testing.assert_array_equal(session(X), Y)
    #  a goes there once for both readers, b and c come back
    assert transfers(session.inspect.plan) == {
        ("a", "far"): 1,
        ("b", "numpy"): 1,
        ("c", "numpy"): 1,
    }
    assert far.ran == {"Neg": 1, "Sin": 1}
    assert far.moved == {"from_host": 1, "to_host": 2}


def test_value_that_stays_on_its_backend_is_not_transferred(executor):
    far = FarBackend()
    session = diamond(far, executor=executor)
    np.testing.assert_array_equal(session(X), Y)
    assert far.moved == {"from_host": 1, "to_host": 1}
    assert far.ran == {"Exp": 1, "Neg": 1, "Sin": 1, "Add": 1}


def test_backends_that_share_memory_need_no_transfers(executor):
    near, far = FarBackend("near", memory="device"), FarBackend("far", memory="device")
    session = diamond(
        near,
        far,
        executor=executor,
        place={"Exp": "near", "Neg": "far", "Sin": "near", "Add": "far"},
    )
    np.testing.assert_array_equal(session(X), Y)
    assert sum(transfers(session.inspect.plan).values()) == 2
    assert near.ran + far.ran == {"Exp": 1, "Neg": 1, "Sin": 1, "Add": 1}


def test_between_two_memories_values_go_through_the_host(executor):
    one, two = FarBackend("one"), FarBackend("two")
    session = diamond(
        one, two, executor=executor, place={"Exp": "one", "Neg": "two", "Sin": "two", "Add": "one"}
    )
    np.testing.assert_array_equal(session(X), Y)
    assert transfers(session.inspect.plan) == {
        ("x", "one"): 1,
        ("a", "host"): 1,
        ("a/host", "two"): 1,
        ("b", "host"): 1,
        ("b/host", "one"): 1,
        ("c", "host"): 1,
        ("c/host", "one"): 1,
        ("y", "host"): 1,
    }


def test_a_node_is_placed_by_its_name_before_its_operation():
    far = FarBackend()
    session = diamond(
        "numpy",
        far,
        place={"Neg": "numpy", "node:left": "far", "Exp": "numpy", "Sin": "numpy", "Add": "numpy"},
    )
    session(X)
    assert far.ran == {"Neg": 1}


def test_constants_are_brought_there_once():
    far = FarBackend()
    text = "g (float[3] x) => (float[3] y) <float[3] k = {1, 2, 3}> { a = Mul(x, k) y = Add(a, k) }"
    session = diamond(far, text=text)
    for _ in range(3):
        np.testing.assert_array_equal(session(X), X * [1, 2, 3] + [1, 2, 3])
    assert far.moved == {"from_host": 1 + 3, "to_host": 3}


def test_graphs_inside_take_and_give_values_in_the_hosts_memory(executor):
    far = FarBackend(operations=["Exp", "Neg", "Mul"])
    text = """g (float[3] x, int64 n, bool c) => (float[3] y) {
        a = Exp(x)
        b = Loop (n, , a) <body = l (int64 i, bool d, float[3] v) => (bool e, float[3] w)
            { e = Identity(d) f = Neg(v) w = Mul(f, a) }>
        y = If (c) <then_branch = t () => (float[3] p) { p = Identity(a) },
                    else_branch = u () => (float[3] q) { q = Add(a, b) }>
    }"""
    place = {"Exp": "far", "Neg": "far", "Mul": "far"}
    session = diamond("numpy", far, text=text, executor=executor, place=place)
    a = np.exp(X)
    for n in range(3):
        b = a.copy()
        for _ in range(n):
            b = -b * a
        n = np.array(n)
        np.testing.assert_array_equal(session(X, n, np.array(False)), a + b)
        np.testing.assert_array_equal(session(X, n, np.array(True)), a)


def test_unsupported_operations_are_listed_all_at_once():
    with pytest.raises(ps.Unsupported) as caught:
        diamond(FarBackend(operations=["Exp"]), shapes={"x": [3]})
    assert {each.operation for each in caught.value.operations} == {"Neg", "Sin", "Add"}
    assert "far" in str(caught.value)
    with pytest.raises(ps.Unsupported, match="Neg: no kernel is available for it on far"):
        diamond("numpy", FarBackend(operations=["Exp"]), place={"Neg": "far"}, shapes={"x": [3]})


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"Neg": "cuda"}, "no such backend, it has 'numpy'"),
        ({"Nge": "numpy"}, "'Nge', but the model has no such operation; it has Add, Exp, Neg, Sin"),
        ({"node:middle": "numpy"}, "'node:middle', but the model has no such node"),
    ],
)
def test_names_in_place_that_mean_nothing(place, message):
    with pytest.raises(ps.InvalidInput, match=message):
        diamond("numpy", place=place)


def test_two_backends_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two of one name"):
        diamond(FarBackend(), FarBackend())
    with pytest.raises(ValueError, match="'cuda' is not one of native, numpy"):
        diamond("cuda")


class TimedBackend(FarBackend):
    """One whose kernels take ``seconds_each`` by ``clock``, a list of one number."""

    def __init__(self, name: str, seconds_each: float, clock: list[float]) -> None:
        super().__init__(name)
        self.seconds_each = seconds_each
        self.clock = clock

    def kernel(self, node, types):
        created = super().kernel(node, types)

        def function(*inputs):
            self.clock[0] += self.seconds_each
            return created.function(*inputs)

        return type(created)(function, view=created.view)


@pytest.mark.parametrize("faster", ["one", "other"])
def test_placement_follows_measured_costs(tmp_path, monkeypatch, faster):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))  # costs of its own
    monkeypatch.setattr(trial, "_LEAST_SECONDS", SOON)  # runs are not stopped on a busy machine
    clock = [0.0]
    monkeypatch.setattr("penstock.observers.profile.perf_counter_ns", lambda: int(clock[0] * 1e9))
    one, other = backends = [
        TimedBackend(name, 0.001 if name == faster else 0.02, clock) for name in ("one", "other")
    ]
    session = diamond(*backends, cost_model=None)
    np.testing.assert_array_equal(session(X), Y)
    assert one.ran and other.ran  # while they were measured
    assert {step.backend for step in session.inspect.plan.steps} == {faster}
    slower = other if faster == "one" else one
    before = slower.ran.total()
    again = diamond(*backends, cost_model=None)
    np.testing.assert_array_equal(again(X), Y)
    assert slower.ran.total() == before  # what is known is not measured again


@pytest.mark.skipif(library() is None, reason="there are no compiled kernels")
def test_numpy_is_estimated_only_where_it_may_be_faster(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))  # no measured costs
    asked = Counter()

    def counted(self, node):
        asked[node.op.name] += 1
        return 0.0  # NumPy wins wherever it is asked, however fast it is on this processor

    monkeypatch.setattr(NumpyBackend, "seconds", counted)
    session = compile_text("""g (float[64, 64] x, double[64, 64] z) => (float[64, 64] y, double[64, 64] t) {
        p = MatMul (x, x) s = Softmax <axis = -1> (p) y = MatMul (s, x) t = Tanh (z) }""")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 64))
    got = session.run({"x": x.astype(np.float32), "z": x})
    np.testing.assert_allclose(got["t"], np.tanh(x))
    assert asked.keys() == {"Tanh"}
    placed = {step.node.op.name: step.backend for step in session.inspect.plan.steps}
    assert placed == {"MatMul": "native", "Softmax": "native", "Tanh": "numpy"}


def test_tasks_of_another_backend_run_on_its_own_threads():
    far = FarBackend(workers=2)
    place = {"Neg": "far", "Sin": "far"}
    session = diamond("numpy", far, executor="parallel", place=place, cost_model=EqualCosts())
    np.testing.assert_array_equal(session(X), Y)
    assert session.inspect.executor.name == "parallel"
    assert far.on_threads
    assert all(name.startswith("penstock-far") for name in far.on_threads)


class OnTwoBackends(ExecutorConformance):
    """All that holds for one backend holds for two with memories of their own."""

    sampled = True

    def compile(self, source, **options) -> ps.Session:
        backends = [FarBackend("one"), "numpy", FarBackend("two", workers=2)]
        costs = ScatteredCosts()
        return super().compile(source, backends=backends, cost_model=costs, **options)


class TestLinearOnTwoBackends(OnTwoBackends):
    executor = "linear"


class TestDataflowOnTwoBackends(OnTwoBackends):
    executor = "dataflow"


class TestParallelOnTwoBackends(OnTwoBackends):
    executor = "parallel"
    leaves_threads = True
