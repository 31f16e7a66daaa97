"""Compilation of a graph with frames: its parts and the functions that it calls, each once.

Each function, and each graph of a node that contains frames, becomes a separate ``FrameGraph``; a
node that calls it waits for it as for a kernel. Calls are kept in a set, not on Python's stack,
so that only memory and ``Limits.max_calls`` bound their depth.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from penstock.analysis.frames import Frames
from penstock.codegen.helpers import too_many
from penstock.core.limits import Limits
from penstock.core.records import dataclass, replace
from penstock.core.types import RunValue, RunValues, TensorType
from penstock.executors.base import Done, Executor
from penstock.executors.control import Control
from penstock.executors.errors import explained
from penstock.executors.frames.executor import DevicePart, FramesExecutor, InnerPrograms
from penstock.executors.frames.frame_graph import (
    CallSteps,
    FrameGraph,
    NodeKernel,
    StartCall,
    ValueNumbers,
    all_inputs,
    isolate,
)
from penstock.executors.frames.frame_writer import FrameForm, write_frame
from penstock.executors.linear import LinearExecutor
from penstock.host.threads import Workers, core_budget, pool
from penstock.ir.contract import Guard
from penstock.ir.graph import FramePath, Graph, GraphPart, Node, Value, captures
from penstock.ir.kernel import Kernel
from penstock.ir.op import Role
from penstock.ops.internal.segment import is_frame, is_segment
from penstock.ops.onnx.control_flow import CONTROL
from penstock.ops.result_bytes import SMALL_BYTES, counted
from penstock.plan.tasks import are_asynchronous


@dataclass(frozen=True)
class NodeCompilers:
    """The compilers of the nodes of a graph with frames. ``kernel`` compiles an ordinary node and
    returns its kernel and the name of its backend, or None. Then ``executor`` compiles a graph with
    only this node; it also compiles the graph of a segment. ``function`` copies a function's graph
    without dead code, ``copy`` copies a node's graph with new inputs, and ``form`` returns the form
    of a frame that is one node."""

    kernel: Callable[[Node], tuple[Kernel, str] | None]
    executor: Callable[[Graph], Executor]
    function: Callable[[str], Graph]
    copy: Callable[[Graph, list[Value]], Graph]
    form: Callable[[Node], FrameForm]


class FrameGraphBuilder:
    """Builds the executor of one graph. ``workers``: the maximum number of concurrent kernels."""

    def __init__(self, compilers: NodeCompilers, limits: Limits, workers: int) -> None:
        self._workers = workers
        self._compilers = compilers
        self._limits = limits
        self._inner = InnerPrograms()
        self._called: list[str] = []  # functions that still have to be compiled
        self._constants: list[Value | np.ndarray] = []
        self._asynchronous = False  # whether a called graph has an asynchronous kernel

    def build(
        self,
        graph: Graph,
        parts: Sequence[GraphPart],
        devices: int = 1,
        observed: Callable[[], FramesExecutor] | None = None,
    ) -> FramesExecutor:
        """Build the executor of the ``parts`` of a sorted ``graph``. ``devices``: the number of
        devices that share the host's cores. ``observed`` builds the executor of observed runs."""
        numbers = ValueNumbers()
        outputs = list(graph.outputs)
        compiled: list[DevicePart] = []
        for part in parts:
            for i, value in zip(part.inputs, part.graph.inputs, strict=True):
                numbers.share(value, graph.inputs[i])
            for i, value in zip(part.outputs, part.graph.outputs, strict=True):
                outputs[i] = value
            whole = self._whole(part.graph, part.paths, numbers)
            workers = self._pool_of(part.device, devices)
            compiled.append(DevicePart(part.device, whole, workers, part.inputs, part.outputs))
        steps = [step for part in compiled for step in part.graph.steps]
        table = numbers.table(graph.name, steps, graph.inputs, outputs, self._constants)
        return FramesExecutor(compiled, table, self._limits, self._inner, observed)

    def _whole(
        self, graph: Graph, paths: Mapping[Node, FramePath], numbers: ValueNumbers
    ) -> FrameGraph:
        """Compile a graph, or a part of it, and the functions that it calls."""
        frame_graph = self._compiled(graph, paths, numbers)
        # A loop, not a recursion: functions may be recursive, and nested to any depth.
        while self._called:
            name, functions = self._called.pop(), self._inner.functions
            if name not in functions:
                functions[name] = self._callee(self._compilers.function(name))
                functions[name].function = name
        frame_graph.asynchronous |= self._asynchronous
        return frame_graph

    def _callee(self, graph: Graph) -> FrameGraph:
        """Compile a graph that a node calls. Observers do not see its steps."""
        frame_graph = self._compiled(graph, Frames(graph).paths(), ValueNumbers())
        self._asynchronous |= frame_graph.asynchronous
        for node in frame_graph.nodes:
            node.step = None
        return frame_graph

    def _compiled(
        self, graph: Graph, paths: Mapping[Node, FramePath], numbers: ValueNumbers
    ) -> FrameGraph:
        for node in graph.walk():
            self._constants += [v for v in node.inputs if v is not None and v.is_constant]
            self._constants += [x for x in node.attrs.values() if isinstance(x, np.ndarray)]
        workers = self._workers
        return FrameGraph(graph, paths, self._kernel, self._call, numbers, workers)

    def _kernel(self, node: Node) -> NodeKernel:
        """Return the kernel of a node. A segment, or a node without a kernel, runs in a separate
        executor, whose inputs are the node's inputs followed by the captures of its graphs."""
        if is_frame(node):
            form = self._compilers.form(node)
            compiled = write_frame(form, self._kernel, self._limits.max_iterations)
            self._inner.texts.append(compiled.source)
            return compiled
        answer = None if is_segment(node) else self._compilers.kernel(node)
        if answer is not None:
            kernel, name = answer
            return NodeKernel(self._counted(node, kernel), name)
        graph, indices = (node.attrs["body"], None) if is_segment(node) else isolate(node)
        inner = self._compilers.executor(graph)
        self._inner.executors.append(inner)
        run = inner.run
        direct = None
        if indices is None and isinstance(inner, LinearExecutor):
            direct = inner.direct()

        def function(control: Control, *inputs: RunValue) -> tuple[RunValue, ...]:
            return run(inputs if indices is None else [inputs[i] for i in indices], control)

        backend = next((step.backend for step in inner.table.walk() if step.backend), "")
        if are_asynchronous(inner.table.steps) or getattr(inner, "asynchronous", False):

            def begin(control: Control, done: Done, *inputs: RunValue) -> None:
                own = inputs if indices is None else [inputs[i] for i in indices]
                inner.run_async(own, control, done)

            return NodeKernel(Kernel(function, begin=begin), backend, inner.table)
        if direct is None:
            return NodeKernel(Kernel(function), backend, inner.table)
        called, program = direct
        explain = partial(explained, program=program)
        return NodeKernel(Kernel(called), backend, inner.table, explain)

    def _counted(self, node: Node, kernel: Kernel) -> Kernel:
        """Charge the kernel's results to the run's budget, unless all are known to be small."""
        if not self._limits.count_runs or all(map(_is_small, node.outputs)):
            return kernel
        if isinstance(kernel.function, Guard):
            kernel.function.function = counted(
                node, kernel.function.function, kernel.memory.checks_budget
            )
            return kernel
        return replace(kernel, function=counted(node, kernel.function, kernel.memory.checks_budget))

    def _call(self, node: Node) -> StartCall:
        """Return a function that begins calls of a node's function, or of its graphs."""
        if node.op.role is not Role.CALL:
            return self._call_graphs(node)
        name = node.attrs["function"]
        self._called.append(name)
        functions = weakref.proxy(self._inner.functions)  # the executor keeps them alive

        def call(*inputs: RunValue) -> CallSteps:
            return (yield functions[name], inputs)

        return call

    def _call_graphs(self, node: Node) -> StartCall:
        """Return a function that begins runs of an If or a loop. Its arguments are the node's
        inputs followed by the captures of its graphs."""
        indices = {value: i for i, value in enumerate(all_inputs(node))}
        bodies = {}
        for _, graph in node.graphs:
            outer = captures(graph)
            body = self._callee(self._compilers.copy(graph, [*graph.inputs, *outer]))
            bodies[graph] = body, [indices[value] for value in outer]
        steps, own, most = CONTROL[node.op.role], len(node.inputs), self._limits.max_iterations

        def call(*inputs: RunValue) -> CallSteps:
            requests = steps(node, inputs[:own])
            results: RunValues | None = None
            count = 0
            while True:
                try:
                    graph, arguments = requests.send(results)  # type: ignore[arg-type]
                except StopIteration as end:
                    outputs: RunValues = end.value
                    return outputs
                # A branch of an If has no inputs, and does not count as an iteration.
                if most is not None and count >= most and graph.inputs:
                    too_many(most, node.label)
                count += 1
                body, captured = bodies[graph]
                results = yield body, [*arguments, *[inputs[i] for i in captured]]

        return call

    def _pool_of(self, device: str, devices: int) -> Workers | None:
        """Return the threads of the host or a virtual device; None if the caller's runs all."""
        if not device:
            return pool() if self._workers > 1 else None
        share = max(1, min(core_budget(), self._workers) // devices)
        return pool(device.rpartition("/device:")[2].lower(), share)


def _is_small(value: Value | None) -> bool:
    """Whether a value is known to be so small that its bytes need not be counted."""
    type_ = None if value is None else value.type
    return isinstance(type_, TensorType) and type_.static and type_.nbytes <= SMALL_BYTES
