"""What is called while tokens move: functions that call themselves, and graphs that do.

Each function, and each graph of a node, has tokens of its own; who calls it waits for it as for a
kernel. A run keeps calls beside each other, not on Python's stack: how deep they go is a matter of
memory and of ``Limits.max_calls``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from penstock.binding import too_many
from penstock.ir import Graph, Node, captures, clone
from penstock.limits import Limits
from penstock.ops.base import Kernel
from penstock.ops.control import CONTROL
from penstock.passes.frames import frame_of
from penstock.passes.prune import prune
from penstock.tokens import Caller, Slots, Tokens, read

Call = Generator[tuple[Tokens, Sequence[Any]], Sequence[Any], Sequence[Any]]


class Calls:
    """Compiles graphs to tokens, and with them the functions that they call, each once.

    ``compile`` gives the kernel of an ordinary node.
    """

    def __init__(
        self,
        functions: Mapping[str, Graph],
        compile: Callable[[Node], Kernel],
        limits: Limits,
    ) -> None:
        self._functions = functions
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
            body = clone(self._functions[name])
            prune(body)
            made = self._tokens[name] = self._inner(body)
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
        steps, own, most = CONTROL[node.op.name], len(node.inputs), self._limits.max_iterations

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
