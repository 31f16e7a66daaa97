"""Loops on devices: carried values stay there, and iterations overlap as far as signals allow.

The device (``device_backend.py``) is late at random, and refuses values that are read too early.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.build import GraphBuilder
from tests.support.device_backend import DelayedBackend
from tests.support.expert import with_expert
from tests.support.onnx_text import compile_text
from tests.support.timing import SOON, wait_until

X = np.linspace(-1, 1, 4, dtype=np.float32)
OPERATIONS = {"Sin", "Cos", "Tanh", "Mul", "Reshape", "RandomNormalLike", "Add"}


class HeldBackend(DelayedBackend):
    """Operations that are ``held`` wait in their stream until ``opened``; ``begun`` counts them and
    all others."""

    def __init__(self, *held: str) -> None:
        super().__init__(operations=OPERATIONS, most=2e-4)
        self.held = held
        self.opened = threading.Event()
        self.opened.set()
        self.begun: Counter[str] = Counter()

    def began(self, name: str) -> None:
        self.begun[name] += 1
        if name in self.held:
            assert self.opened.wait(SOON)

    def begin(self, session: ps.Session, turns: int, **options) -> Future[Any]:
        """Start a run in which the operations are held."""
        feeds = {"n": np.int64(turns), "x": X}
        session.run(feeds)  # costs are measured before the first one
        self.begun.clear()
        self.opened.clear()
        return session.submit(feeds, **options)


def compiled(text: str, backend: DelayedBackend, **options) -> ps.Session:
    place = {name: "late" for name in OPERATIONS if f"{name}(" in text}
    options = {"max_streams": 6} | options
    return compile_text(
        text, executor="streams", backends=[backend, "numpy"], place=place, **options
    )


def loop(body: str, carried: str, initial: str = "x", results: str = "") -> str:
    """A model: a Loop of n turns that carries values ``va``, ``vb`` and so on, computed as ``wa``,
    ``wb`` and so on."""
    names = carried.split()
    inside = ", ".join(f"float[4] v{name}" for name in names)
    after = ", ".join(f"float[4] w{name}" for name in names)
    outputs = ", ".join(f"y{name}" for name in names)
    return f"""g (int64 n, float[4] x) => ({", ".join(f"float[4] y{n}" for n in names)}) {{
        {outputs} = Loop <body = b (int64 i, bool c, {inside}) => (bool c, {after}) {{
            {body} }}> (n, , {", ".join([initial] * len(names))}) }}"""


def check(session: ps.Session, text: str, *turns: int) -> None:
    reference = compile_text(text, executor="linear", backends=["numpy"])
    for n in turns or (0, 1, 2, 3, 8):
        feeds = {"n": np.int64(n), "x": X}
        found, wanted = session.run(feeds), reference.run(feeds)
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, err_msg=f"{n} turns")


INDEPENDENT = loop("wa = Sin(va) wb = Cos(vb)", "a b")


def test_iteration_begins_before_all_of_the_last_has_ended():
    backend = HeldBackend("Cos")
    session = compiled(INDEPENDENT, backend)
    run = backend.begin(session, 6)
    # Cos of the first iteration has not ended, and Sin of the second begins; one more waits.
    wait_until(lambda: backend.begun == {"Sin": 2, "Cos": 1})
    assert not run.done()
    backend.opened.set()
    run.result(SOON)
    assert backend.begun == {"Sin": 6, "Cos": 6}
    assert list(session.inspect.executor.tasks.signals.overlap.awaited) == []
    check(session, INDEPENDENT)


def test_reader_of_a_carried_value_waits_for_the_step_that_computed_it_alone():
    # Tanh reads what Sin has carried; after Sin there is a Cos, on its stream, which has not ended.
    text = loop("wa = Sin(va) wb = Cos(wa) wc = Tanh(va)", "a b c")
    backend = HeldBackend("Cos")
    session = compiled(text, backend)
    run = backend.begin(session, 3)
    wait_until(lambda: backend.begun["Tanh"] == 2 and backend.begun["Cos"] == 1)
    assert not run.done()
    backend.opened.set()
    run.result(SOON)
    check(session, text)


def test_carried_values_on_a_device_are_exchanged_without_a_copy():
    text = loop("wa = Sin(vb) wb = Cos(va) wc = Tanh(vd) wd = Mul(vc, vc)", "a b c d")
    backend = DelayedBackend(operations=OPERATIONS, most=2e-4)
    session = compiled(text, backend)
    check(session, text)
    moved = []
    for n in (1, 2, 9):
        before = backend.moved.copy()
        session.run({"n": np.int64(n), "x": X})
        moved.append(backend.moved - before)
    assert moved[0] == moved[1] == moved[2] == {"from_host": 1, "to_host": 4}
    assert "copyto" not in session.source
    assert "own(" not in session.source


def test_values_that_change_places_are_handed_on_with_their_events():
    # a and b swap places, so that either stream may have computed what c reads.
    text = loop("wa = Sin(vb) wb = Identity(va) wc = Tanh(va) wd = Cos(vd)", "a b c d")
    session = compiled(text, DelayedBackend(operations=OPERATIONS))
    check(session, text)
    check(session, text, 4, 5, 6, 7)


def test_host_of_a_loop_waits_for_no_more_than_it_needs():
    backend = DelayedBackend(operations=OPERATIONS)
    session = compiled(INDEPENDENT, backend)
    session.run({"n": np.int64(2), "x": X})
    overlap = session.inspect.executor.tasks.signals.overlap
    # Two streams: what each has ended in an iteration, and in that before.
    assert (len(overlap.ends), overlap.awaited) == (2, {})
    assert [len(signals) for signals in overlap.last.values()] == [2]


@pytest.mark.parametrize(
    "body",
    [
        "h = Neg(va) wa = Sin(h)",  # copied from the host each time, from rewritten memory
        "r = RandomNormalLike(va) wa = Mul(r, r)",  # with effects
    ],
)
def test_iterations_do_not_overlap_where_the_host_could_overwrite_or_order_matters(body):
    session = compiled(loop(body, "a"), DelayedBackend(operations=OPERATIONS))
    assert session.run({"n": np.int64(3), "x": X})["ya"].shape == (4,)
    assert not session.inspect.executor.tasks.signals.overlap.ends


MORE = [
    # A condition that is computed on the device, and brought to the host each time.
    """g (int64 n, float[4] x) => (float[4] y, float[4] z) {
        y, z = Loop <body = b (int64 i, bool c, float[4] v, float[4] u) =>
                (bool d, float[4] w, float[4] t) {
            w = Sin(v) t = Cos(u) m = ReduceMax <keepdims = 0> (w)
            l = Constant <value_float = 0.5> () d = Greater(m, l) }> (n, , x, x) }""",
    # Rows that are collected on the host.
    """g (int64 n, float[4] x) => (float[4] y, float[k, 4] z) {
        y, z = Loop <body = b (int64 i, bool c, float[4] v) => (bool c, float[4] w, float[4] r) {
            w = Sin(v) r = Cos(v) }> (n, , x) }""",
    # A loop in a loop, and a value that both read.
    """g (int64 n, float[4] x) => (float[4] y, float[4] z) {
        k = Tanh(x)
        y, z = Loop <body = b (int64 i, bool c, float[4] v, float[4] u) =>
                (bool c, float[4] w, float[4] t) {
            s = Sin(v) t = Cos(u)
            w = Loop <body = p (int64 j, bool e, float[4] q) => (bool e, float[4] r) {
                o = Mul(q, k) f = Sin(s) r = Add(o, f) }> (n, , v) }> (n, , x, x) }""",
    # A branch in a loop.
    """g (int64 n, float[4] x) => (float[4] y) {
        y = Loop <body = b (int64 i, bool c, float[4] v) => (bool c, float[4] w) {
            two = Constant <value_int = 2> () m = Mod(i, two) odd = Cast <to = 9> (m)
            w = If (odd) <then_branch = t () => (float[4] p) { a = Sin(v) d = Cos(v) p = Mul(a, d) },
                          else_branch = e () => (float[4] q) { q = Tanh(v) }> }> (n, , x) }""",
    # Rows of a value of the host.
    """g (int64 n, float[4] x) => (float[4] y, float[4, 4] z) {
        h = Neg(x) t = Constant <value_ints = [4, 1]> () k = Expand(h, t)
        shape = Constant <value_ints = [4, 4]> () rows = Expand(h, shape)
        y, z = Scan <num_scan_inputs = 1, body = b (float[4] v, float[4] r) =>
                (float[4] w, float[4] o) {
            s = Sin(r) w = Mul(v, s) o = Cos(w) }> (x, rows) }""",
]


@pytest.mark.parametrize("text", MORE)
def test_loops_that_overlap_in_part_compute_what_numpy_does(text):
    session = compiled(text, DelayedBackend(operations=OPERATIONS))
    check(session, text)
    assert session.inspect.executor.tasks.signals.devices


def test_stopped_run_of_an_overlapping_loop_leaves_the_next_one_sound():
    backend = HeldBackend("Cos")
    session = compiled(INDEPENDENT, backend)
    cancel = ps.CancelToken()
    run = backend.begin(session, 50, cancel=cancel)
    wait_until(lambda: backend.begun["Sin"] == 2)
    cancel.cancel()
    with pytest.raises(ps.Cancelled):
        run.result(SOON)
    backend.opened.set()
    check(session, INDEPENDENT)


@given(st.data())
def test_random_loops_on_a_device_equal_numpy(data):
    b = GraphBuilder()
    x, n = b.input("x", np.float32, [4]), b.input("n", np.int64, [])
    count = data.draw(st.integers(1, 4))
    names = st.sampled_from(["Sin", "Cos", "Tanh", "Mul", "Add", "Neg", "Identity"])
    plans = [
        (data.draw(names), data.draw(st.integers(0, 7)), data.draw(st.integers(0, 7)))
        for _ in range(data.draw(st.integers(1, 8)))
    ]
    picks = [data.draw(st.integers(0, 11)) for _ in range(count)]

    def body(i, *carried):
        values = [*carried]
        for name, p, q in plans:
            pair = [values[p % len(values)], values[q % len(values)]]
            values.append(b.op(name, *pair[: 1 + (name in ("Mul", "Add"))]))
        return [values[-1 - pick % len(values)] for pick in picks]

    results = b.loop(body, *[x + float(k) for k in range(count)], times=n)
    for k, value in enumerate(results if count > 1 else [results]):
        b.output(f"y{k}", value)
    model = b.model()
    used = {name for name, *_ in plans} & OPERATIONS
    options = {"place": dict.fromkeys(used, "late"), "max_streams": 5}
    backend = DelayedBackend(operations=OPERATIONS, most=2e-4)
    session = ps.compile(
        model, executor="streams", backends=[backend, "numpy"], **with_expert(options)
    )
    reference = ps.compile(model, executor="linear", backends=["numpy"])
    for turns in (0, 1, 2, 5):
        feeds = {"x": X, "n": np.int64(turns)}
        found, wanted = session.run(feeds), reference.run(feeds)
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6)
