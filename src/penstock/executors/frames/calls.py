"""What is called while tokens move: functions that call themselves, and graphs that do.

Each function, and each graph of a node, has tokens of its own; who calls it waits for it as for a
kernel. A run keeps calls beside each other, not on Python's stack: how deep they go is a matter of
memory and of ``Limits.max_calls``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from penstock.analysis.frames import frame_of
from penstock.codegen.helpers import too_many
from penstock.executors.frames.tokens import Caller, Slots, Tokens, read
from penstock.ir.graph import Graph, Node, captures, clone
from penstock.ir.op import Kernel
from penstock.limits import Limits
from penstock.ops.onnx.control_flow import CONTROL

Call = Generator[tuple[Tokens, Sequence[Any]], Sequence[Any], Sequence[Any]]


class Calls:
    """Compiles graphs to tokens, and with them the functions that they call, each once.

    ``body`` gives a copy of the graph of a function, without dead code, and ``compile`` the kernel
    of an ordinary node.
    """

    def __init__(
        self,
        body: Callable[[str], Graph],
        compile: Callable[[Node], Kernel],
        limits: Limits,
    ) -> None:
        self._body = body
        self._compile = compile
        self._limits = limits
        self._tokens: dict[str, Tokens] = {}
        self._named: list[str] = []  # functions that are yet to be compiled
        self._asynchronous = False  # whether one of them has an asynchronous kernel

    def tokens(self, graph: Graph, slots: Slots | None = None) -> Tokens:
        """``graph``, which must be sorted, and all that it calls."""
        found = self._of(graph, slots)
        while self._named:
            name = self._named.pop()
            if name in self._tokens:
                continue
            made = self._tokens[name] = self._inner(self._body(name))
            made.function = name
        found.asynchronous |= self._asynchronous
        return found

    def _inner(self, graph: Graph) -> Tokens:
        """What is called is one step for observers."""
        tokens = self._of(graph)
        self._asynchronous |= tokens.asynchronous
        for item in tokens.items:
            item.step = None
        return tokens

    def _of(self, graph: Graph, slots: Slots | None = None) -> Tokens:
        paths = {node: frame.path for node, frame in frame_of(graph).items()}
        return Tokens(graph, paths, self._compile, self._call, slots)

    def _call(self, node: Node) -> Caller:
        if node.op.name == "Call":
            return self._function(node)
        return self._controlled(node)

    def _function(self, node: Node) -> Caller:
        """The call of a function, which may be the one that is just being compiled."""
        name = node.attrs["function"]
        self._named.append(name)
        known = self._tokens

        def call(*inputs: Any) -> Call:
            return (yield known[name], inputs)

        return call

    def _controlled(self, node: Node) -> Caller:
        """What an If or a loop does with its graphs, which also get what they read from outside."""
        places = {value: i for i, value in enumerate(read(node))}
        branches = {}
        for _, graph in node.graphs:
            outer = captures(graph)
            body = self._inner(clone(graph, [*graph.inputs, *outer]))
            branches[graph] = body, [places[value] for value in outer]
        steps, own, most = CONTROL[node.op.role], len(node.inputs), self._limits.max_iterations

        def call(*inputs: Any) -> Call:
            going = steps(node, inputs[:own])
            results: Sequence[Any] | None = None
            count = 0
            while True:
                try:
                    graph, given = going.send(results)  # type: ignore[arg-type]
                except StopIteration as end:
                    outputs: Sequence[Any] = end.value
                    return outputs
                # The one branch of an If, which has no inputs, is no iteration.
                if most is not None and count >= most and graph.inputs:
                    too_many(most, node.label)
                count += 1
                body, taken = branches[graph]
                results = yield body, [*given, *[inputs[i] for i in taken]]

        return call
