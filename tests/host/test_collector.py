"""Objects of plans are untracked, and freed by their last reference all the same."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from weakref import ref

import numpy as np
import pytest

from penstock.backends.base import HostBackend
from penstock.host import collector
from penstock.host.collector import untrack
from penstock.host.native import library
from penstock.ir.kernel import Kernel
from tests.support.onnx_text import compile_text
from tests.support.processes import end_of

pytestmark = pytest.mark.skipif(
    library() is None or not collector._TESTED,
    reason="there is no compiled module, or objects stay tracked",
)


@pytest.fixture(autouse=True)
def paused() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Record:
    """As a class of the package."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def method(self) -> None: ...


Record.__module__ = "penstock.plan.example"


class Foreign:
    """As one of another package, or of a user."""

    def __init__(self, part: object) -> None:
        self.part = part


def tracked(*objects: object) -> list[bool]:
    return [gc.is_tracked(x) for x in objects]


def test_untrack_reaches_what_containers_and_instances_hold():
    inner = Record()
    parts = [inner], {"a": [inner]}, partial(print, [inner]), [[1]].append
    root = Record(*parts)
    untrack(root)
    assert not any(tracked(root, inner, *parts, root.parts, parts[1]["a"], parts[2].args[0]))


def test_untrack_walks_through_functions_and_methods_that_stay_tracked():
    inner, owner = [Record()], Record()

    def function() -> object:
        return inner

    method = owner.method
    untrack(Record(function, method))
    assert all(tracked(function, function.__closure__[0], method))
    assert not any(tracked(function.__closure__, inner, inner[0], owner))


def test_untrack_leaves_modules_alone():
    namespace = {"__name__": "a module", "table": [Record()]}
    exec("def function(): ...", namespace)
    program: dict[str, object] = {"table": [Record()]}
    exec("def function(): ...", program)
    untrack(Record(namespace.pop("function"), program.pop("function")))
    assert all(tracked(namespace, namespace["table"]))
    assert not any(tracked(program, program["table"]))


def test_untrack_leaves_objects_of_others_and_what_they_hold():
    foreign = Foreign([Record()])
    untrack(Record(foreign))
    assert all(tracked(foreign, foreign.part, foreign.part[0]))


def test_untrack_leaves_objects_that_are_older():
    old = [Record()]
    gc.collect()
    untrack(Record(old))
    assert all(tracked(old, old[0]))


def test_untracked_objects_are_freed_by_their_last_reference():
    class Part(Record): ...

    Part.__module__ = Record.__module__
    parts = [Part([i]) for i in range(3)]
    dead = [ref(part) for part in parts]
    root = Record(parts, {"last": parts[-1]})
    untrack(root)
    del parts, root
    assert [part() for part in dead] == [None] * 3


def test_untracked_dict_is_tracked_again_when_it_changes():
    table: dict[str, object] = {"a": Record()}
    untrack(table)
    assert not gc.is_tracked(table)
    table["b"] = [table]
    dead = ref(table["a"])
    del table
    gc.collect()
    assert sys.version_info >= (3, 14) or dead() is None


def test_untrack_does_not_disturb_threads_that_make_tuples():
    """Python refuses to shorten a tuple that anyone else has, as a list of all objects would."""
    stop, failures = threading.Event(), []

    def make_tuples() -> None:
        try:
            while not stop.is_set():
                assert len(tuple(i for i in range(777))) == 777
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make_tuples) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        untrack(Record([Record()]))
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


# An object of a type that does not allow it is a crash when it is freed.
FREED = """
import gc
from penstock.host import collector

class Own:
    def __init__(self, part=None): self.part = part
Own.__module__ = "penstock.plan.example"

makers = {
    list: lambda: [Own()], tuple: lambda: (Own(),), dict: lambda: {"a": Own()}, Own: Own,
    collector.OrderedDict: lambda: collector.OrderedDict(a=Own()),
    collector.deque: lambda: collector.deque([Own()]),
    collector.partial: lambda: collector.partial(print, Own()),
    collector.ref: lambda: collector.ref(Own, print),
    collector.BuiltinFunctionType: lambda: [Own()].append,
    type(collector.RLock()): collector.RLock,
}
assert makers.keys() == {*collector._ALLOW, Own}
for maker in makers.values():
    for i in range(100):
        gc.disable()
        held = [maker() for _ in range(10)]
        collector.untrack(held)
        assert not any(map(gc.is_tracked, held))
        gc.enable()
        held.pop()
        if i % 10 == 0:
            gc.collect()
gc.disable()
nested = Own()
for _ in range(100_000):
    nested = Own([nested])
collector.untrack(nested)
nested = None
"""


def test_objects_of_all_types_that_are_untracked_can_be_freed():
    result = subprocess.run(
        [sys.executable, "-c", FREED], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")


CONVOLUTIONS = """g (float[1, 2, 8, w] x) => (float[1, 3, 8, w] y) {
    f = Constant<value = float[3, 2, 3, 3] {F}> ()
    h = Constant<value = float[3, 3, 1, 1] {H}> ()
    a = Conv <pads = [1, 1, 1, 1]> (x, f) b = Relu (a) c = Conv (b, h) d = Sigmoid (c)
    m = Tanh (c) s = Mul (d, m) t = Transpose (s)
    p = Transpose (t) e = Elu (p) q = Add (e, s) r = MaxPool <kernel_shape = [1, 1]> (q)
    y = Conv (r, h)
}"""
MOST_TRACKED = {"numpy": 205, "native": 35}
"""objects of a further plan; one of a recognizer of text, of 78 steps, leaves 76 of 6,000. NumPy's
kernels are closures, which stay tracked."""


def tracked_by_a_plan(backend: str) -> float:
    """The objects that the collector tracks for each further plan of a session."""
    text = CONVOLUTIONS
    for name, count in {"{F}": 54, "{H}": 9}.items():
        text = text.replace(name, "{" + ", ".join(str(n % 7 - 3) for n in range(count)) + "}")
    session = compile_text(text, executor="linear", threads=1, backends=[backend])

    def run(width: int) -> None:
        for _ in range(3):  # shapes that no other run used would share a plan with open dims
            session.run({"x": np.ones((1, 2, 8, width), np.float32)})

    def tracked() -> int:
        for _ in range(4):  # one more untracks tuples of tuples that the one before has untracked
            gc.collect()
        return len(gc.get_objects())

    for width in (7, 8, 9):
        run(width)
    before, count = tracked(), 4
    for width in range(16, 16 + count):
        run(width)
    after = tracked()
    assert session.stats.plans_made == 3 + count
    return (after - before) / count


# In a process of its own, where no other test leaves anything that comes or goes meanwhile.
@pytest.mark.costly
@pytest.mark.parametrize("backend", MOST_TRACKED)
def test_plan_of_a_further_shape_leaves_few_objects_to_the_collector(backend):
    program = "from tests.host.test_collector import tracked_by_a_plan as tracked\n"
    added = float(end_of(program + f"print(tracked({backend!r}))"))
    assert added <= MOST_TRACKED[backend]


class Custom(HostBackend):
    """A backend of a user, whose kernels may refer to the session that has them."""

    name = "custom"

    def kernel(self, node, types):
        return Kernel(lambda x: np.sqrt(x)) if node.op.name == "Sqrt" else None


@pytest.mark.parametrize("custom", [True, False])
def test_plan_with_kernels_of_users_stays_tracked(custom):
    place = {"Sqrt": "custom" if custom else "numpy"}
    session = compile_text(
        "g (float[n] x) => (float[n] y) { y = Sqrt(x) }",
        executor="linear",
        backends=[Custom(), "numpy"],
        place=place,
    )
    for n in (2, 3):
        session.run({"x": np.ones(n, np.float32)})
    assert gc.is_tracked(session.inspect.plan) is custom
