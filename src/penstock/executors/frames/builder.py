"""Compile a graph with frames, the functions that it calls, and its parts, each once.

Each function, and each graph of a node that contains frames, becomes a ``FrameGraph`` of its own; a
node that calls it waits for it as for a kernel. A run keeps calls side by side, not on Python's
stack, so that only memory and ``Limits.max_calls`` bound how deep they go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.analysis.frames import FramePath, Frames, GraphPart
from penstock.codegen.helpers import too_many
from penstock.executors.base import Executor
from penstock.executors.control import Control
from penstock.executors.frames.executor import DevicePart, FrameFunctions, FramesExecutor
from penstock.executors.frames.frame_graph import (
    CallSteps,
    FrameGraph,
    StartCall,
    ValueNumbers,
    all_inputs,
    isolate,
)
from penstock.host.threads import Workers, core_budget, pool
from penstock.ir.graph import Graph, Node, captures, clone
from penstock.ir.op import Kernel, Role
from penstock.limits import Limits
from penstock.ops.onnx.control_flow import CONTROL, is_control


class FrameGraphBuilder:
    """Builds the executor of one graph.

    ``kernel`` compiles an ordinary node on ``backend``, ``executor`` a graph without frames, whose
    types are not inferred yet. ``function`` returns a copy of a function's graph, without dead
    code.
    """

    def __init__(
        self,
        kernel: Callable[[Node], Kernel],
        executor: Callable[[Graph], Executor],
        function: Callable[[str], Graph],
        limits: Limits,
        backend: str,
    ) -> None:
        self._backend = backend
        self._kernel_of = kernel
        self._executor_of = executor
        self._function_graph = function
        self._limits = limits
        self._functions = FrameFunctions()
        self._called: list[str] = []  # functions that are yet to be compiled
        self._constants: list[np.ndarray] = []
        self._asynchronous = False  # whether one of the called graphs has an asynchronous kernel

    def build(self, graph: Graph, parts: Sequence[GraphPart], devices: int = 1) -> FramesExecutor:
        """The executor of the ``parts`` of ``graph``, which must be sorted. ``devices``: how many
        share the host's cores."""
        numbers = ValueNumbers()
        outputs = list(graph.outputs)
        compiled: list[DevicePart] = []
        for part in parts:
            for i, value in zip(part.inputs, part.graph.inputs, strict=True):
                numbers.share(value, graph.inputs[i])
            for i, value in zip(part.outputs, part.graph.outputs, strict=True):
                outputs[i] = value
            whole = self._whole(part.graph, part.paths, numbers)
            workers = _workers_of(part.device, devices)
            compiled.append(DevicePart(part.device, whole, workers, part.inputs, part.outputs))
        steps = [step for part in compiled for step in part.graph.steps]
        table = numbers.table(graph.name, steps, graph.inputs, outputs, self._constants)
        return FramesExecutor(compiled, table, self._limits, self._functions)

    def _whole(
        self, graph: Graph, paths: Mapping[Node, FramePath], numbers: ValueNumbers
    ) -> FrameGraph:
        """Compile a graph, or a part of it, and the functions that it calls."""
        frame_graph = self._compiled(graph, paths, numbers)
        while self._called:
            name = self._called.pop()
            if name not in self._functions:
                self._functions[name] = self._callee(self._function_graph(name))
                self._functions[name].function = name
        frame_graph.asynchronous |= self._asynchronous
        return frame_graph

    def _callee(self, graph: Graph) -> FrameGraph:
        """Compile a graph that is called, of which observers see no steps of its own."""
        frame_graph = self._compiled(graph, Frames(graph).paths(), ValueNumbers())
        self._asynchronous |= frame_graph.asynchronous
        for node in frame_graph.nodes:
            node.step = None
        return frame_graph

    def _compiled(
        self, graph: Graph, paths: Mapping[Node, FramePath], numbers: ValueNumbers
    ) -> FrameGraph:
        counts = self._limits.count_runs
        for node in graph.walk():
            arrays = [value.held for value in node.inputs if value is not None]
            arrays += node.attrs.values()
            self._constants += [x for x in arrays if isinstance(x, np.ndarray)]
        return FrameGraph(graph, paths, self._kernel, self._call, self._backend, numbers, counts)

    def _kernel(self, node: Node) -> Kernel:
        """The kernel of a node; if that has graphs without frames, an executor of its own runs it.
        Such a kernel takes what the graphs capture behind the inputs of the node."""
        if not is_control(node):
            return self._kernel_of(node)
        graph, indices = isolate(node)
        inner = self._executor_of(graph)

        def function(control: Control, *inputs: Any) -> Any:
            outputs = inner.run([inputs[i] for i in indices], control)
            return outputs[0] if len(outputs) == 1 else outputs

        return Kernel(function)

    def _call(self, node: Node) -> StartCall:
        """The call of a function, which may be the one that is being compiled."""
        if node.op.role is not Role.CALL:
            return self._call_graphs(node)
        name = node.attrs["function"]
        self._called.append(name)
        functions = weakref.proxy(self._functions)  # the executor has them

        def call(*inputs: Any) -> CallSteps:
            return (yield functions[name], inputs)

        return call

    def _call_graphs(self, node: Node) -> StartCall:
        """The calls of an If or a loop, whose graphs are also given what they capture."""
        indices = {value: i for i, value in enumerate(all_inputs(node))}
        bodies = {}
        for _, graph in node.graphs:
            outer = captures(graph)
            body = self._callee(clone(graph, [*graph.inputs, *outer]))
            bodies[graph] = body, [indices[value] for value in outer]
        steps, own, most = CONTROL[node.op.role], len(node.inputs), self._limits.max_iterations

        def call(*inputs: Any) -> CallSteps:
            requests = steps(node, inputs[:own])
            results: Sequence[Any] | None = None
            count = 0
            while True:
                try:
                    graph, arguments = requests.send(results)  # type: ignore[arg-type]
                except StopIteration as end:
                    outputs: Sequence[Any] = end.value
                    return outputs
                # The branch of an If, which has no inputs, is no iteration.
                if most is not None and count >= most and graph.inputs:
                    too_many(most, node.label)
                count += 1
                body, captured = bodies[graph]
                results = yield body, [*arguments, *[inputs[i] for i in captured]]

        return call


def _workers_of(device: str, devices: int) -> Workers:
    """The threads of the host, or of a virtual device: its share of the cores."""
    if not device:
        return pool()
    share = max(1, core_budget() // devices)
    return pool(device.rpartition("/device:")[2].lower(), share)
