"""The counts of the scheduler: its inlined transitions equal those of the table, one by one."""

from __future__ import annotations

from enum import IntEnum

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from penstock.analysis.frames import Frames
from penstock.backends.numpy import NumpyBackend
from penstock.core.types import TensorType
from penstock.executors.frames.frame_graph import (
    DEATH,
    MERGE_CONTROL,
    MERGE_DATA,
    FrameGraph,
    FrameNode,
    NodeKernel,
    ValueNumbers,
)
from penstock.executors.frames.scheduler import CallInstance, TokenScheduler
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.registry import TENSORFLOW, find

# The table in the docstring of ``scheduler``, as functions.


class Readiness(IntEnum):
    """The state of a node after a token has arrived."""

    WAITS = 0
    RUNS = 1
    DIES = 2


def live_input(waits: int) -> tuple[int, Readiness]:
    """A live data or control input of an ordinary node arrives."""
    waits -= 1
    if not waits:
        return waits, Readiness.RUNS
    return waits, Readiness.DIES if waits == DEATH else Readiness.WAITS


def dead_input(waits: int) -> tuple[int, Readiness]:
    """A dead data or control input of an ordinary node arrives."""
    waits = (waits | DEATH) - 1
    return waits, Readiness.DIES if waits == DEATH else Readiness.WAITS


def merge_live_input(waits: int) -> tuple[int, Readiness]:
    """A live data input of a Merge arrives; only the first one counts."""
    if not waits & MERGE_DATA:
        return waits, Readiness.WAITS
    waits -= MERGE_DATA
    return waits, Readiness.WAITS if waits else Readiness.RUNS


def merge_dead_input(
    waits: int, dead: int, data_inputs: int, entering: bool
) -> tuple[int, int, Readiness]:
    """A dead data input of a Merge arrives, from an Enter if ``entering``.

    Return how many inputs the Merge still waits for, and how many of its data inputs are dead.
    """
    dead += 1
    if waits == MERGE_DATA and (entering or dead == data_inputs):
        return 0, dead, Readiness.DIES
    return waits, dead, Readiness.WAITS


def merge_control_input(waits: int, dead: int, data_inputs: int) -> tuple[int, Readiness]:
    """A control input of a Merge arrives, which may be dead."""
    waits -= MERGE_CONTROL
    if not waits:
        return waits, Readiness.RUNS
    if waits == MERGE_DATA and dead == data_inputs:
        return 0, Readiness.DIES
    return waits, Readiness.WAITS


NUMBER = TensorType(np.dtype(np.float32), ())


def compiled(op: str, data: int, controls: int) -> tuple[FrameGraph, list[FrameNode], FrameNode]:
    """A node that reads ``data`` nodes and waits for ``controls`` others; return these and it."""
    fed = Value("x", NUMBER)
    neg, merge = find("Neg"), find(op, TENSORFLOW if op == "Merge" else "")
    assert neg is not None
    assert merge is not None
    sources = [
        Node(neg, [fed], [Value(f"s{i}", NUMBER)], name=f"s{i}") for i in range(data + controls)
    ]
    read = [source.outputs[0] for source in sources[:data]]
    outputs = [Value("y", NUMBER), Value("index")][: 2 if op == "Merge" else 1]
    node = Node(merge, read, outputs, {"N": data}, name="y", control_inputs=sources[data:])
    graph = Graph([fed], [outputs[0]], [*sources, node], "g")
    backend = NumpyBackend()

    def kernel(node: Node):
        return NodeKernel(backend.kernel(node, [NUMBER] * len(node.inputs)), backend.name)

    def call(node: Node):
        raise AssertionError

    paths = Frames(graph).paths()
    frame_graph = FrameGraph(graph, paths, kernel, call, ValueNumbers(), workers=1)
    *compiled_sources, compiled_node = frame_graph.nodes[: len(sources) + 1]
    return frame_graph, compiled_sources, compiled_node


class Driver:
    """Sends the tokens of the sources of one node, in any order, to the scheduler."""

    def __init__(self, op: str, data: int, controls: int) -> None:
        graph, self.sources, self.node = compiled(op, data, controls)
        self.scheduler = TokenScheduler(None)
        call = CallInstance(graph)
        self.scheduler.begin(call, [np.float32(1)])
        self.iteration = call.iterations[0]
        self.scheduler.ready.clear()

    @property
    def waits(self) -> int:
        return self.iteration.waits[self.node.counter]

    @property
    def dead(self) -> int:
        return self.iteration.waits[self.node.counter + 1]

    def arrive(self, source: int, *, alive: bool) -> Readiness:
        """Let a source run or die, and return the new state of the node."""
        if alive:
            self.scheduler.send(self.sources[source], self.iteration, (np.float32(source),))
        else:
            self.scheduler.bury(self.sources[source], self.iteration)
        tokens = [dead for node, _, dead in self.scheduler.ready if node is self.node]
        self.scheduler.ready.clear()
        if not tokens:
            return Readiness.WAITS
        return Readiness.DIES if tokens == [True] else Readiness.RUNS


def arrivals(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, bool]]]:
    """The numbers of data and control inputs, and the order of arrivals with whether they live."""
    data, controls = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    order = draw(st.permutations(range(data + controls)))
    return data, controls, [(i, draw(st.booleans())) for i in order]


@given(data=st.data())
def test_scheduler_of_an_ordinary_node_equals_the_reference(data):
    count, controls, order = arrivals(data.draw)
    driver = Driver("Sum", count, controls)
    waits = driver.waits
    assert waits == count + controls
    for source, alive in order:
        waits, expected = (live_input if alive else dead_input)(waits)
        assert driver.arrive(source, alive=alive) is expected
        assert driver.waits == waits
    assert expected is (Readiness.RUNS if all(alive for _, alive in order) else Readiness.DIES)


@given(data=st.data())
def test_scheduler_of_a_merge_equals_the_reference(data):
    count, controls, order = arrivals(data.draw)
    driver = Driver("Merge", count, controls)
    waits, dead, fate = driver.waits, 0, Readiness.WAITS
    assert waits == MERGE_DATA + MERGE_CONTROL * controls
    for source, alive in order:
        if source >= count:
            waits, expected = merge_control_input(waits, dead, count)
        elif alive:
            waits, expected = merge_live_input(waits)
        else:
            waits, dead, expected = merge_dead_input(waits, dead, count, entering=False)
        assert driver.arrive(source, alive=alive) is expected
        assert (driver.waits, driver.dead) == (waits, dead)
        if expected is not Readiness.WAITS:
            assert fate is Readiness.WAITS  # it runs, or dies, once
            fate = expected
    live = any(alive for source, alive in order if source < count)
    assert fate is (Readiness.RUNS if live else Readiness.DIES)


def test_merge_of_a_dead_enter_dies_without_its_back_edge():
    assert merge_dead_input(MERGE_DATA, 0, 2, entering=True) == (0, 1, Readiness.DIES)
    assert merge_dead_input(MERGE_DATA, 0, 2, entering=False) == (1, 1, Readiness.WAITS)
    waiting = MERGE_DATA + MERGE_CONTROL
    assert merge_dead_input(waiting, 0, 2, entering=True) == (waiting, 1, Readiness.WAITS)
