"""The kernels of one compilation: each backend is asked once for each node."""

from __future__ import annotations

from operator import attrgetter

from penstock.backends.base import Backend, stack_kernel
from penstock.core.checkpoints import THREAD
from penstock.core.records import dataclass
from penstock.core.types import Type
from penstock.ir.contract import checked_kernel
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs
from penstock.ops.internal.transfer import STACK

_TYPE, _IS_CONSTANT = attrgetter("type"), attrgetter("is_constant")


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """The kernel of a node with these attributes, whose inputs and outputs have these types and
    constants; None if the backend has none, and ``error`` if it raised."""

    attrs: Attrs
    types: list[Type]
    constants: list[Value]
    kernel: Kernel | None
    error: Exception | None


class KernelTable:
    """The answers to ``Backend.kernel`` during one compilation, by backend and node.

    Fusion, placement and the plan ask for the kernels of the same nodes. The table passes each
    question on once, and again only if the types or constants of the node have changed since. It
    lives as long as the compilation: kernels that are not chosen go with it.
    """

    __slots__ = ("_answers",)

    def __init__(self) -> None:
        self._answers: dict[tuple[str, Node], _Answer] = {}

    def kernel(self, backend: Backend, node: Node) -> Kernel | None:
        """The kernel of ``node`` on ``backend``; None if it has none. Raises what the backend
        raises, such as ``ShapeError`` for types that the operation never takes."""
        answer = self._answer(backend, node)
        if answer.error is not None:
            raise answer.error
        return answer.kernel

    def accepts(self, backend: Backend, node: Node) -> bool:
        """Whether ``backend`` has a kernel for ``node``, or an error that says why no run of the
        node can succeed. Never raises."""
        answer = self._answer(backend, node)
        return answer.kernel is not None or answer.error is not None

    def without_state(self) -> KernelTable:
        """A copy without the kernels of impure operations, which may keep state from call to call
        (a generator of random numbers): for runs that must leave no trace, such as measurements."""
        copy = KernelTable()
        copy._answers = {key: answer for key, answer in self._answers.items() if key[1].op.pure}
        return copy

    def _answer(self, backend: Backend, node: Node) -> _Answer:
        key = (backend.name, node)
        answer = self._answers.get(key)
        attrs, inputs = node.attrs, node.inputs
        # A node is asked about several times: no code of Python runs for each of its values.
        types = [*map(_TYPE, filter(None, (*inputs, *node.outputs)))]
        constants = [*filter(_IS_CONSTANT, filter(None, inputs))]
        # Values are compared by identity.
        same = answer and types == answer.types and constants == answer.constants
        if answer is None or not same or attrs is not answer.attrs:
            if (run := THREAD.run) is not None:  # as in ``checkpoint``
                run.check()  # a library may take milliseconds to choose a kernel
            kernel, error = None, None
            of_inputs: list[Type | None] = [*types[: len(inputs)]]
            if None in inputs:
                of_inputs = [None if v is None else v.type for v in inputs]
            try:
                if node.op is STACK:
                    kernel = stack_kernel(node, backend)
                else:
                    kernel = backend.kernel(node, of_inputs)
                kernel = checked_kernel(node, kernel, backend)
            except Exception as raised:
                error = raised.with_traceback(None)  # that would hold this table
            answer = self._answers[key] = _Answer(attrs, types, constants, kernel, error)
        return answer
