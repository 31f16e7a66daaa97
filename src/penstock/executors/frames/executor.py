"""The frames executor: TensorFlow's control flow, with tagged tokens, dead values and frames.

A graph may consist of several parts, one for each device, whose runs share a barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from penstock.codegen.helpers import sent, unshared
from penstock.core.checkpoints import await_release
from penstock.core.errors import Cancelled
from penstock.core.limits import Limits
from penstock.core.records import dataclass, field
from penstock.core.types import RunValue, RunValues
from penstock.executors.base import Done, Executor, budget_of, outputs_of, quiet
from penstock.executors.control import Control
from penstock.executors.errors import run_error
from penstock.executors.frames.barrier import Barrier, Dispatch
from penstock.executors.frames.frame_graph import FrameGraph
from penstock.executors.frames.rendezvous import Rendezvous
from penstock.executors.frames.run import FramesRun
from penstock.host.fork import refuse_reentry
from penstock.host.threads import Workers
from penstock.ir.describe import describe_node
from penstock.ir.graph import Value
from penstock.ops.internal.segment import is_frame, is_segment
from penstock.plan.plan import StepTable

# Estimated bytes of a node of a frame graph, with its step.
_NODE_BYTES = 2000


@dataclass(frozen=True, eq=False)
class DevicePart:
    """The compiled part of a graph that runs on ``device``, with the device's ``workers`` (the host
    has the name "", and no workers if the caller's thread runs all kernels). ``inputs`` and
    ``outputs``: the indices of the part's inputs and outputs in the whole graph."""

    device: str
    graph: FrameGraph
    workers: Workers | None
    inputs: Sequence[int]
    outputs: Sequence[int]


class FrameFunctions(dict[str, FrameGraph]):
    """The compiled functions that a graph calls, by name. Calls refer to this mapping weakly, since
    a recursive function would otherwise form a reference cycle."""


@dataclass(frozen=True, eq=False)
class InnerPrograms:
    """The programs that the nodes of a graph's parts run: the ``functions`` that they call, the
    ``executors`` of segments, and the source ``texts`` of frames that are one node."""

    functions: FrameFunctions = field(default_factory=FrameFunctions)
    executors: list[Executor] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class FramesExecutor:
    """Runs a graph, which may have TensorFlow's control flow, in one or more parts.

    Nodes run as tokens reach them, without a planned order or planned memory, except in segments
    and in frames that are one node (``inner``). ``table`` has the steps of all parts. ``observed``
    compiles an executor for runs with observers; None if this executor is for such runs.
    """

    name = "frames"
    arena_plan = None
    tasks = None
    hands_over = False

    def __init__(
        self,
        parts: Sequence[DevicePart],
        table: StepTable,
        limits: Limits,
        inner: InnerPrograms,
        observed: Callable[[], FramesExecutor] | None,
    ) -> None:
        self.parts = parts
        self.table = table
        self._limits = limits
        self._programs = inner
        self._inner = inner.executors
        self._observed = observed
        self._listens = any(part.graph.asynchronous for part in parts)

    @property
    def source(self) -> str:
        """The nodes and frames of each device; then programs of segments and of frames."""
        lines: list[str] = []
        for part in self.parts:
            lines += [f"# {part.device}"] if part.device else []
            for node in part.graph.nodes:
                if node.node is not None:
                    lines.append(f"{node.frame.name or '-'}: {node.node!r}")
                    frame = node.node.attrs["body"].nodes if is_frame(node.node) else ()
                    lines += [f"{node.node.name}: {inner!r}" for inner in frame]
        lines += [
            text.rstrip() for text in (*(e.source for e in self._inner), *self._programs.texts)
        ]
        return "\n".join(lines) + "\n"

    @property
    def threads(self) -> int:
        return max((inner.threads for inner in self._inner), default=1)

    @property
    def plan_bytes(self) -> int:
        nodes = sum(len(part.graph.nodes) for part in self.parts)
        return _NODE_BYTES * nodes + sum(inner.plan_bytes for inner in self._inner)

    @property
    def arena_bytes(self) -> int:
        return sum(inner.arena_bytes for inner in self._inner)

    @property
    def run_bytes(self) -> int:
        return sum(inner.run_bytes for inner in self._inner)

    def observed(self) -> FramesExecutor:
        return self if self._observed is None else self._observed()

    def trim(self) -> None:
        for inner in self._inner:
            inner.trim()

    def run(self, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        control = self._counting(control)
        if any(part.workers is not None for part in self.parts):
            refuse_reentry()
        # The caller works on the run first, and waits for this lock when it has no more work.
        ended = threading.Lock()
        ended.acquire()
        barrier = Barrier(control, ended.release)
        try:
            quiet(self._begin, barrier, inputs)
            await_release(ended)
        except BaseException:  # an interrupt; other threads end the run
            control.set(Cancelled("the run was interrupted"))
            raise
        return self._end(barrier)

    def run_async(self, inputs: RunValues, control: Control, done: Done) -> None:
        self.begin(inputs, control, done)

    def begin(
        self,
        inputs: RunValues,
        control: Control,
        done: Done,
        rendezvous: Rendezvous | None = None,
        dispatch: Dispatch | None = None,
    ) -> Barrier:
        """Begin a run as ``run_async``, perhaps of a part whose other parts are in other processes.
        The parts exchange values by ``rendezvous``; ``dispatch`` resumes this one (``Barrier``)."""

        def end() -> None:
            try:
                outputs = self._end(barrier)
            except BaseException as error:
                done(None, error)
            else:
                done(outputs, None)

        barrier = Barrier(self._counting(control), end, rendezvous, dispatch)
        quiet(self._begin, barrier, inputs)
        return barrier

    def _counting(self, control: Control) -> Control:
        """Return the control of a run, with a budget if the run must count its allocations."""
        # ``NEVER`` is shared by all runs, but a part that fails sets its run's control.
        control, limits = control.own(), self._limits
        if control.budget is None and limits.count_runs:
            plans = [inner.arena_plan for inner in self._inner]
            arenas = sum([plan.size for plan in plans if plan is not None])
            control.budget = budget_of(limits, arenas)
        return control

    def _begin(self, barrier: Barrier, inputs: RunValues) -> None:
        """Create a run of each part, and begin to work on these."""
        observe, limits = self._observed is None, self._limits
        runs = [
            FramesRun(p.graph, [inputs[i] for i in p.inputs], p.workers, observe, limits, barrier)
            for p in self.parts
        ]
        barrier.begin(runs, listens=self._listens or barrier.is_remote)

    def _end(self, barrier: Barrier) -> tuple[RunValue, ...]:
        """Return the outputs of a run that is over, or raise the error that it ended with."""
        runs, barrier.parts = barrier.parts, ()  # breaks a cycle: parts refer to the barrier
        error, barrier.error = barrier.error, None
        if error is not None:
            for run in runs:
                run.release()
            try:
                raise error
            finally:
                del error, run, runs  # the traceback refers to this frame
        outputs: list[RunValue] = [None] * len(self.table.outputs)
        # A value may share memory with a feed, a constant or another output, so the caller gets
        # a copy. Sending a value to another process copies it anyway.
        own = sent if barrier.is_remote else unshared
        for part, run in zip(self.parts, runs, strict=True):
            fetched = part.graph.graph.outputs
            for i, value, result in zip(part.outputs, fetched, run.outputs(), strict=True):
                try:
                    outputs[i] = outputs_of(own, result, barrier.control)
                except MemoryError as lack:
                    raise run_error(_producer(value), lack) from lack
        return tuple(outputs)


def _producer(value: Value) -> str:
    """Describe the node, or the node within a segment, that computes a fetched value."""
    node = value.producer
    if node is not None and is_segment(node):
        node = node.attrs["body"].outputs[node.outputs.index(value)].producer
    return f"the output {value.name!r}" if node is None else describe_node(node)
