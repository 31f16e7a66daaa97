"""Reference variables of TensorFlow 1 that are assigned before what was read of them is used.

The expected values are those of TensorFlow 2.21, which ran these GraphDefs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_graphs import Builder, Shape
from tests.support.tf_loops import INT, Names, add, cond, const, enter, while_loop

EXECUTORS = ("auto", "linear", "dataflow", "parallel", "streams", "frames", "interpret")


class Variable:
    """A graph ``b`` with a variable that ``init`` sets to 4; ``read`` is an Identity of it."""

    def __init__(self) -> None:
        self.b = b = Builder()
        b.node("VariableV2", name="v", dtype=INT, shape=Shape(()))
        b.node("Assign", "v", b.const(np.int32(4)), name="init", T=INT)
        self.read = b.node("Identity", "v", name="v/read", T=INT)

    def loop(self, body: Callable[[str, str, str], str], frame: str = "loop") -> str:
        """What five iterations of a loop make of 0. ``body`` takes the number of an iteration, the
        carried value, and an assignment that adds the number."""
        b = self.b
        limit = enter(b, frame, b.const(np.int32(5)), 1, True)
        reference = b.node(
            *("RefEnter", "v"), T=INT, frame_name=frame, is_constant=True, parallel_iterations=1
        )

        def inside(variables: Names) -> Names:
            i, total = variables
            assigned = b.node("AssignAdd", reference, i, T=INT)
            return [add(b, i, const(b, 1, i)), body(i, total, assigned)]

        def less(variables: Names) -> str:
            return b.node("Less", variables[0], limit, T=INT)

        return while_loop(b, frame, [b.const(np.int32(0))] * 2, less, inside, 1)[1]

    def entered(self, frame: str = "loop") -> str:
        return enter(self.b, frame, self.read, 1, True)


def loop_with_control_edge(v: Variable) -> str:
    read = v.entered()
    return v.loop(lambda i, total, assigned: add(v.b, read, const(v.b, 0, assigned)))


def loop_with_data_edge(v: Variable) -> str:
    read = v.entered()
    return v.loop(lambda i, total, assigned: add(v.b, total, add(v.b, read, assigned, "Mul")))


def branch_in_loop(v: Variable) -> str:
    read = v.entered()

    def body(i: str, total: str, assigned: str) -> str:
        late = add(v.b, i, const(v.b, 0, assigned))
        above = v.b.node("Greater", late, const(v.b, 2, i), T=INT)

        def twice(values: Names) -> str:
            return add(v.b, values[0], const(v.b, 2, values[0]), "Mul")

        def same(values: Names) -> str:
            return add(v.b, values[0], const(v.b, 0, values[0]))

        return add(v.b, total, cond(v.b, above, [read], twice, same))

    return v.loop(body)


def without_a_loop(v: Variable) -> str:
    v.b.node("AssignAdd", "v", v.b.const(np.int32(10)), name="more", T=INT)
    return add(v.b, v.read, const(v.b, 0, "more"))


def identity_of_what_was_read(v: Variable) -> str:
    v.b.node("AssignAdd", "v", v.b.const(np.int32(10)), name="more", T=INT)
    return v.b.node("Identity", v.read, "^more", T=INT)


def read_that_comes_before(v: Variable) -> str:
    before = add(v.b, v.read, v.b.const(np.int32(0)))
    v.b.node("AssignAdd", "v", v.b.const(np.int32(10)), f"^{before}", name="more", T=INT)
    return add(v.b, before, const(v.b, 0, "more"))


def assignment_of_another_shape(v: Variable) -> str:
    value = v.b.const(np.array([7, 8], np.int32))
    v.b.node("Assign", "v", value, f"^{v.read}", name="more", T=INT, validate_shape=False)
    return add(v.b, v.read, const(v.b, 0, "more"))


CASES = {
    loop_with_control_edge: 14,
    loop_with_data_edge: 386,
    branch_in_loop: 64,
    without_a_loop: 14,
    identity_of_what_was_read: 14,
    read_that_comes_before: 4,
    assignment_of_another_shape: 4,
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_value_of_a_reference_variable_is_that_of_when_it_is_used(case, executor) -> None:
    v = Variable()
    fetch = case(v)
    session = ps.compile(v.b.bytes(), executor=executor)
    for _ in range(2):
        session.run({}, [], ["init"])
        assert session.run({}, [fetch])[fetch] == CASES[case]


def test_graph_whose_reads_see_no_assignment_is_left_as_it_is() -> None:
    v = Variable()
    add(v.b, v.read, v.b.const(np.int32(1)))
    names = [node.name for node in ps.load(v.b.bytes()).graph.nodes]
    assert not any("#late" in name or "#handle" in name for name in names)


def test_loop_whose_condition_reads_the_variable_ends() -> None:
    v = Variable()
    read, reference = (
        v.entered(),
        v.b.node(
            *("RefEnter", "v"), T=INT, frame_name="loop", is_constant=True, parallel_iterations=1
        ),
    )

    def below(variables: Names) -> str:
        return v.b.node("Less", read, const(v.b, 9, variables[0]), T=INT)

    def body(variables: Names) -> Names:
        one = const(v.b, 1, variables[0])
        return [add(v.b, variables[0], const(v.b, 1, v.b.node("AssignAdd", reference, one, T=INT)))]

    (count,) = while_loop(v.b, "loop", [v.b.const(np.int32(0))], below, body, 1)
    for executor in EXECUTORS:
        session = ps.compile(v.b.bytes(), executor=executor)
        session.run({}, [], ["init"])
        if executor in ("auto", "frames"):
            assert session.run({}, [count], timeout=60)[count] == 5
        else:
            with pytest.raises(ps.Unsupported, match="in the condition of a loop"):
                session.run({}, [count], timeout=60)
