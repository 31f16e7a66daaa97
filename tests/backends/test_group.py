"""Groups of backends: AllReduce and Broadcast whose values are on several of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from tests.support.device_backend import DelayedBackend
from tests.support.far_backend import FarBackend
from tests.support.onnx_text import compile_text

DOMAINS = {"penstock": 1}
X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
TEXT = """g (float[4, 4] x) => (float[4, 4] y, float[4, 4] z) {
    a = Sin(x) b = Cos(x) r, s = penstock.AllReduce(a, b) y = Exp(r) z = Tanh(s) }"""
PLACE = {"Sin": "one", "Exp": "one", "Cos": "two", "Tanh": "two", "AllReduce": ["one", "two"]}


def far(near: bool = False) -> list[FarBackend]:
    one, two = FarBackend("one"), FarBackend("two")
    if near:
        one.near = two.near = ("one", "two")
    return [one, two]


def compiled(text: str, backends, place, **options) -> ps.Session:
    return compile_text(
        text, domains=DOMAINS, backends=[*backends, "numpy"], place=place, **options
    )


def check(session: ps.Session, text: str = TEXT, feeds=None, counting=()) -> None:
    """``counting`` are backends whose counts are then those of one run."""
    feeds = {"x": X} if feeds is None else feeds
    wanted = compile_text(text, domains=DOMAINS, backends=["numpy"], executor="linear").run(feeds)
    session.run(feeds)  # nodes may be measured while a plan is compiled
    for backend in counting:
        backend.moved.clear()
        backend.ran.clear()
    for name, value in session.run(feeds).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6)


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "frames"])
def test_all_reduce_reads_and_leaves_values_on_its_members(executor):
    backends = far(near=True)
    session = compiled(TEXT, backends, PLACE, executor=executor)
    check(session, counting=backends)
    one, two = backends
    # Each member copies the operand of the other, and nothing passes the host but x, y and z.
    assert one.moved == two.moved == Counter(from_host=1, direct=1, to_host=1)
    assert (one.ran, two.ran) == (Counter(["Sin", "Sum", "Exp"]), Counter(["Cos", "Sum", "Tanh"]))
    assert "AllReduce(a <dynamic>, b <dynamic>) on one+two" in session.explain()


def test_members_that_do_not_copy_from_one_another_go_through_the_host():
    backends = far()
    check(compiled(TEXT, backends, PLACE, executor="linear"), counting=backends)
    assert all(b.moved == Counter(from_host=2, to_host=2) for b in backends)


def test_host_may_be_a_member():
    one, _ = far()
    place = {"Sin": "one", "Exp": "one", "AllReduce": ["one", "numpy"]}
    place |= {"Cos": "numpy", "Tanh": "numpy"}
    check(compiled(TEXT, [one], place, executor="linear"), counting=[one])
    assert one.moved == Counter(from_host=2, to_host=2)


def test_broadcast_begins_on_the_first_member():
    text = """g (float[4, 4] x) => (float[4, 4] y, float[4, 4] z) {
        a = Sin(x) r, s = penstock.Broadcast<copies = 2>(a) y = Exp(r) z = Tanh(s) }"""
    one, two = far(near=True)
    place = {"Sin": "one", "Exp": "one", "Tanh": "two", "Broadcast": ["one", "two"]}
    check(compiled(text, [one, two], place, executor="linear"), text, counting=[one, two])
    assert one.moved == Counter(from_host=1, direct=1, to_host=1)
    assert two.moved == Counter(direct=1, to_host=1)


def test_inputs_that_are_elsewhere_are_brought_to_their_members():
    one, two = far()
    text = """g (float[4, 4] x) => (float[4, 4] y) {
        a = Sin(x) r, s = penstock.AllReduce(x, a) y = Exp(s) }"""
    place = {"Sin": "one", "Exp": "one", "AllReduce": ["one", "two"]}
    check(compiled(text, [one, two], place, executor="linear"), text)


def test_constant_operand_is_copied_to_its_member_when_the_plan_is_compiled():
    one, two = far(near=True)
    text = """g (float[2] x) => (float[2] y) <float[2] c = {3, 4}> {
        r, s = penstock.AllReduce(x, c) y = Exp(s) }"""
    place = {"Exp": "two", "AllReduce": ["one", "two"]}
    session = compiled(text, [one, two], place, executor="linear")
    feeds = {"x": np.array([1, 2], np.float32)}
    check(session, text, feeds, counting=[one, two])
    assert two.moved == Counter(direct=1, to_host=1)


def test_loop_with_an_all_reduce_carries_its_values_on_the_members():
    text = """g (int64 n, bool go, float[4, 4] x) => (float[4, 4] y, float[4, 4] z) {
        y, z = Loop(n, go, x, x) <body = b (int64 i, bool c, float[4, 4] p, float[4, 4] q)
            => (bool d, float[4, 4] r, float[4, 4] s) {
                d = Identity(c) u = Sin(p) v = Cos(q) r, s = penstock.AllReduce(u, v) }> }"""
    one, two = far(near=True)
    place = {"Sin": "one", "Cos": "two", "AllReduce": ["one", "two"]}
    session = compiled(text, [one, two], place, executor="linear")
    for n in (0, 1, 5):
        feeds = {"n": np.int64(n), "go": np.bool_(True), "x": X}
        check(session, text, feeds, counting=[one, two])
        # The host is passed before the loop and behind it, not in its iterations.
        assert one.moved == two.moved == Counter(from_host=1, to_host=1) + Counter(direct=n)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (["one", "three"], "no backend 'three', it has 'one', 'two', 'numpy'"),
        (["one"], "several backends are needed"),
        (["one", "one"], "each with a memory of its own"),
        (["one", "late"], "has no backend 'late'"),
    ],
)
def test_group_of_wrong_members_is_refused(where, message):
    with pytest.raises(ps.InvalidInput, match=message):
        compiled(TEXT, far(), PLACE | {"AllReduce": where})


def test_members_with_streams_and_without_are_refused_together():
    late = DelayedBackend("late")
    with pytest.raises(ps.InvalidInput, match="some of them have streams"):
        compiled(TEXT, [*far(), late], PLACE | {"AllReduce": ["one", "late"]})
    with pytest.raises(ps.InvalidInput, match="nothing copies from late"):
        other = DelayedBackend("other")
        compiled(TEXT, [*far(), late, other], PLACE | {"AllReduce": ["late", "other"]})


@pytest.mark.parametrize("place", [{"Sin": ["one", "two"]}, {"AllReduce": ["one", "two", "numpy"]}])
def test_operation_that_a_group_cannot_run_is_named(place):
    with pytest.raises(ps.Unsupported, match=r"no kernel is available for it on one\+two"):
        compiled(TEXT, far(), place).run({"x": X})


def test_place_that_is_neither_a_name_nor_names_is_refused():
    with pytest.raises(TypeError, match="place"):
        compiled(TEXT, far(), {"AllReduce": 3})
    with pytest.raises(TypeError, match="place"):
        compiled(TEXT, far(), {"AllReduce": ["one", 2]})
