"""Placement of nodes where values must be transferred: what transfers cost in loops and branches."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.base import Backend
from penstock.ir.graph import Node
from penstock.tuning.measure import Cost
from tests.support.far_backend import FarBackend
from tests.support.onnx_text import compile_text

X = np.linspace(-1, 1, 4, dtype=np.float32)
OPERATIONS = ("Sin", "Cos", "Tanh")


class Costs:
    """A node takes 300 us on the host and 50 us afar, a transfer a millisecond."""

    def cost(self, node: Node, backend: Backend, threads: int | None) -> Cost:
        return Cost(50e-6 if backend.name == "far" else 300e-6)

    def transfer(self, source: str, target: str, nbytes: int) -> float:
        return 1e-3


def placed(text: str, executor: str, **feeds) -> tuple[dict[str, str], FarBackend]:
    """The backend of each operation, and the backend afar after a run that equals NumPy's."""
    far = FarBackend(operations=OPERATIONS)
    options = {"backends": ["numpy", far], "cost_model": Costs()}
    session = compile_text(text, executor=executor, **options)
    feeds = {"x": X} | feeds
    found = session.run(feeds)
    wanted = compile_text(text, executor="linear", backends=["numpy"]).run(feeds)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)
    steps = [step for step in session.inspect.plan.walk() if step.node.op.name in OPERATIONS]
    return {step.node.op.name: step.backend for step in steps}, far


executors = pytest.mark.parametrize("executor", ["linear", "parallel"])


def loop(turns: int, before: str = "Identity", after: str = "Identity") -> str:
    """Sin as often, between other operations."""
    return f"""g (float[4] x) => (float[4] y) <int64 n = {{{turns}}}> {{
        v = {before}(x)
        w = Loop <body = b (int64 i, bool c, float[4] p) => (bool c, float[4] q) {{ q = Sin(p) }}>
            (n, , v)
        y = {after}(w) }}"""


@executors
@pytest.mark.parametrize(("turns", "where"), [(4, "numpy"), (40, "far")])
def test_loop_is_where_all_its_turns_and_the_transfers_around_it_take_least(turns, where, executor):
    # 300 us a turn on the host, or 50 us and two transfers of a millisecond in all
    places, far = placed(loop(turns), executor)
    assert places == {"Sin": where}
    assert far.moved == ({} if where == "numpy" else {"from_host": 1, "to_host": 1})


@executors
@pytest.mark.parametrize(("stays", "where"), [(True, "far"), (False, "numpy")])
def test_loop_that_collects_rows_is_where_they_stay(stays, where, executor, monkeypatch):
    # 300 us a turn on the host, or 50 us and three transfers in all; or else one in each turn
    if not stays:
        monkeypatch.setattr(FarBackend, "stack", None)
    text = """g (float[4] x) => (float[4] y, float[40, 4] rows) <int64 n = {40}> {
        y, rows = Loop <body = b (int64 i, bool c, float[4] p) => (bool c, float[4] q, float[4] q)
            { q = Sin(p) }> (n, , x) }"""
    places, far = placed(text, executor)
    assert places == {"Sin": where}
    assert far.moved == ({"from_host": 1, "stacked": 1, "to_host": 2} if stays else {})


@executors
def test_nodes_around_a_loop_are_where_it_carries_its_values(executor):
    # Alone, Cos and Tanh would not be worth their transfers.
    places, far = placed(loop(40, "Cos", "Tanh"), executor)
    assert set(places.values()) == {"far"}
    assert far.moved == {"from_host": 1, "to_host": 1}


@executors
def test_value_that_the_host_needs_in_each_turn_keeps_a_loop_there(executor):
    text = """g (float[4] x) => (float[4] y, float[40, 4] z) <int64 n = {40}> {
        y, z = Loop <body = b (int64 i, bool c, float[4] p) => (bool c, float[4] q, float[4] r) {
            q = Sin(p) r = Neg(q) }> (n, , x) }"""
    assert set(placed(text, executor)[0].values()) == {"numpy"}


@executors
def test_branches_are_where_their_outputs_are_read(executor):
    chain = " ".join(f"c{i + 1} = Tanh(c{i})" for i in range(12))
    text = f"""g (float[4] x, bool c) => (float[4] y) {{
        v = Tanh(x)
        c0 = If (c) <then_branch = t () => (float[4] p) {{ p = Sin(v) }},
                     else_branch = e () => (float[4] q) {{ q = Cos(v) }}>
        {chain} y = Identity(c12) }}"""
    places, far = placed(text, executor, c=np.array(True))
    assert set(places.values()) == {"far"}
    assert far.moved == {"from_host": 1, "to_host": 1}


@executors
@pytest.mark.parametrize(("turns", "where"), [(2, "numpy"), (5, "far")])
def test_loop_in_a_loop_counts_the_turns_of_both(turns, where, executor):
    text = f"""g (float[4] x) => (float[4] y) <int64 n = {{{turns}}}> {{
        y = Loop <body = b (int64 i, bool c, float[4] p) => (bool c, float[4] q) {{
            q = Loop <body = d (int64 j, bool e, float[4] r) => (bool e, float[4] s) {{
                s = Sin(r) }}> (n, , p) }}> (n, , x) }}"""
    assert placed(text, executor)[0] == {"Sin": where}


def test_condition_on_the_host_is_a_transfer_in_each_turn():
    # The limit is the largest integer: as many turns as count.
    text = """g (float[4] x) => (float[4] y) <int64 n = {9223372036854775807}, float low = {0.5}> {
        y = Loop <body = b (int64 i, bool c, float[4] p) => (bool d, float[4] q) {
            q = Sin(p) m = ReduceMax <keepdims = 0> (q) d = Greater(m, low) }> (n, , x) }"""
    assert placed(text, "linear")[0] == {"Sin": "numpy"}


@executors
@pytest.mark.parametrize("near", [False, True])
def test_copy_straight_between_two_devices_is_one_transfer(near, executor):
    class TwoDevices(Costs):
        """Cos takes 2 ms on the first device, which Sin needs, and 0.3 ms on the second."""

        def cost(self, node: Node, backend: Backend, threads: int | None) -> Cost:
            return Cost({"numpy": 10e-3, "one": 2e-3, "two": 0.3e-3}[backend.name])

    backends = FarBackend("one", ["Sin", "Cos"]), FarBackend("two", ["Cos"])
    backends[1].near = ["one"] if near else ()
    text = "g (float[4] x) => (float[4] y) { v = Sin(x) y = Cos(v) }"
    options = {"backends": ["numpy", *backends], "cost_model": TwoDevices()}
    session = compile_text(text, executor=executor, **options)
    np.testing.assert_allclose(session.run({"x": X})["y"], np.cos(np.sin(X)), rtol=1e-6)
    places = {step.node.op.name: step.backend for step in session.inspect.plan.walk()}
    assert (places["Sin"], places["Cos"]) == ("one", "two" if near else "one")
    assert backends[1].moved["direct"] == near
