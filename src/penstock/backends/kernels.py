"""The kernels of one compilation: each backend is asked once for each node."""

from __future__ import annotations

from operator import attrgetter
from typing import TypeAlias

from penstock.backends.base import Backend, stack_kernel
from penstock.core.checkpoints import THREAD
from penstock.core.types import Type
from penstock.ir.contract import checked_kernel, is_own
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs
from penstock.ops.internal.transfer import STACK

_TYPE, _IS_CONSTANT = attrgetter("type"), attrgetter("is_constant")


Answer: TypeAlias = tuple[Kernel | None, Exception | None]
"""A kernel, None if the backend has none, and the error, if it raised one."""
NO_KERNEL: Answer = (None, None)
"""the one answer of a backend that has no kernel"""

_Question: TypeAlias = tuple[Attrs, list[Type], list[Value], Answer]
"""The answer for a node with these attributes, whose inputs and outputs have these types and
constants. A bare tuple: there are several for each node."""


class KernelTable:
    """The answers to ``Backend.kernel`` during one compilation, by backend and node.

    Fusion, placement and the plan ask for the kernels of the same nodes. The table passes each
    question on once, and again only if the types or constants of the node have changed since. It
    lives as long as the compilation: kernels that are not chosen go with it.
    """

    __slots__ = ("_answers",)

    def __init__(self) -> None:
        self._answers: dict[tuple[str, Node], _Question] = {}

    def kernel(self, backend: Backend, node: Node) -> Kernel | None:
        """The kernel of ``node`` on ``backend``; None if it has none. Raises what the backend
        raises, such as ``ShapeError`` for types that the operation never takes."""
        kernel, error = self.answer(backend, node)
        if error is not None:
            raise error
        return kernel

    def accepts(self, backend: Backend, node: Node) -> bool:
        """Whether ``backend`` has a kernel for ``node``, or an error that says why no run of the
        node can succeed. Never raises."""
        return self.answer(backend, node) is not NO_KERNEL

    def without_state(self) -> KernelTable:
        """A copy without the kernels of impure operations, which may keep state from call to call
        (a generator of random numbers): for runs that must leave no trace, such as measurements."""
        copy = KernelTable()
        copy._answers = {key: answer for key, answer in self._answers.items() if key[1].op.pure}
        return copy

    def answer(self, backend: Backend, node: Node) -> Answer:
        """The kernel of ``node`` on ``backend``, and what the backend raised: None for none."""
        key = (backend.name, node)
        known = self._answers.get(key)
        attrs, inputs = node.attrs, node.inputs
        # A node is asked about several times: no code of Python runs for each of its values.
        types = [*map(_TYPE, filter(None, (*inputs, *node.outputs)))]
        constants = [*filter(_IS_CONSTANT, filter(None, inputs))]
        # Values are compared by identity.
        if known and attrs is known[0] and types == known[1] and constants == known[2]:
            return known[3]
        if (run := THREAD.run) is not None:  # as in ``checkpoint``
            run.check()  # a library may take milliseconds to choose a kernel
        answer = NO_KERNEL
        of_inputs: list[Type | None] = [*types[: len(inputs)]]
        if None in inputs:
            of_inputs = [None if v is None else v.type for v in inputs]
        try:
            stacks = node.op is STACK
            kernel = stack_kernel(node, backend) if stacks else backend.kernel(node, of_inputs)
            if kernel is not None:
                if kernel.__class__ is not Kernel or not is_own(backend.__class__):
                    kernel = checked_kernel(node, kernel, backend)
                answer = kernel, None
        except Exception as raised:
            answer = None, raised.with_traceback(None)  # that would hold this table
        self._answers[key] = attrs, types, constants, answer
        return answer
