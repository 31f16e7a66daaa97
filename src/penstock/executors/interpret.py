"""The ``interpret`` executor, for debugging: the reference interpreter with a check of every value.

The nodes of the original model run one by one, in the order of the graph, each on its NumPy kernel;
nothing is optimized, fused or planned. If another executor computes a different result, the fault
is in that executor or in a pass. A kernel whose result violates its node's declared type is
reported at that node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock.analysis.interpreter import Interpreter, evaluate
from penstock.backends.base import Backend
from penstock.codegen.helpers import awaited, begun, too_many, unshared
from penstock.core.errors import InternalError
from penstock.core.limits import Limits
from penstock.core.types import RunValue, RunValues, accepts, type_of
from penstock.executors.base import InlineExecutor, budget_of, quiet, share_of
from penstock.executors.control import Control
from penstock.executors.errors import explained_at, run_error, throw
from penstock.host.current_run import working_for
from penstock.ir.contract import guarded
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.kernel import Kernel
from penstock.ops.result_bytes import counted
from penstock.plan.plan import Plan, Step

# Estimated bytes of a step, with its node and its values.
_STEP_BYTES = 2000

_END = 8
"""number of elements at each end of a sequence whose types are checked"""


class InterpretExecutor(InlineExecutor):
    """Runs ``graph`` with the interpreter. Observers see the steps of ``plan``, its plan."""

    name = "interpret"
    tasks = None
    arena_plan = None
    arena_bytes = run_bytes = 0

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        hosts: Sequence[Backend],
        limits: Limits,
        threads: int | None = None,
        observed: bool = False,
    ) -> None:
        self.graph = graph
        self.table = plan
        self._arguments = graph, plan, hosts, limits, threads
        self._limits = limits
        self._observed = observed
        self._share = share_of(plan, hosts, threads=threads)
        self._step_of = {step.node: step for step in plan.walk()}
        self.plan_bytes = _STEP_BYTES * (1 + len(self._step_of))

    @property
    def source(self) -> str:
        """The nodes in their order of execution."""
        return "\n".join(map(repr, self.graph.nodes)) + "\n"

    @property
    def threads(self) -> int:
        return self._share.threads

    def observed(self) -> InterpretExecutor:
        return InterpretExecutor(*self._arguments, observed=True)

    def trim(self) -> None:
        pass

    def run(self, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        control = control.own()
        if control.budget is None and self._limits.count_runs:
            control.budget = budget_of(self._limits)
        interpreter = _CheckedInterpreter(self._step_of, control, self._limits, self._observed)
        with self._share as threads:
            control.outside = partial(self._share.waiting, threads)
            outputs = quiet(working_for, control, interpreter.run, self.graph, inputs, {})
        try:
            return tuple(working_for(control, unshared, list(outputs)))
        except MemoryError as lack:
            raise run_error("the outputs", lack) from lack


def _awaited(control: Control, begin: Callable[..., RunValue], *inputs: RunValue) -> RunValue:
    return awaited(control, begun(control, begin, *inputs))


def _ends(value: RunValue) -> RunValue:
    """Return ``value``, or only the first and last elements of a long sequence. Most elements were
    checked before the last insertion: to check all after each would take quadratic time."""
    is_long = isinstance(value, list) and len(value) > 2 * _END
    return [*value[:_END], *value[-_END:]] if is_long else value


class _CheckedInterpreter(Interpreter):
    """The interpreter of one run. It checks ``control`` before each node, and the outputs after."""

    def __init__(
        self, step_of: Mapping[Node, Step], control: Control, limits: Limits, observed: bool
    ) -> None:
        self._step_of = step_of
        self._control = control
        self._most_iterations = limits.max_iterations
        self._observed = observed

    def node(self, node: Node, inputs: RunValues, values: Mapping[Value, RunValue]) -> RunValues:
        control, step = self._control, self._step_of[node]
        try:
            if control.stopped:
                control.stop()
            if self._observed:
                control.observer.step_begin(control.run, step, inputs)
            kernel = step.kernel
            if kernel is None:
                outputs = self.control(node, inputs, values)
            else:
                if step.contract is not None:
                    kernel = guarded(step.contract, kernel)
                if kernel.begin is not None:
                    kernel = Kernel(partial(_awaited, control, kernel.begin))
                outputs = evaluate(
                    node,
                    inputs,
                    Kernel(counted(node, kernel.function, kernel.memory.checks_budget)),
                )
        except Exception as error:
            if getattr(error, "__notes__", None):
                raise  # explained already, at a node of one of this node's sub-graphs
            throw(explained_at(node, inputs, error))
        lists = any(isinstance(x, list) for x in inputs)
        for value, output in zip(node.outputs, outputs, strict=False):
            sample = _ends(output) if lists else output
            if value is not None and not accepts(value.type, type_of(sample)):
                raise InternalError(
                    f"{node.op.name} ({node.label}) computed a {type_of(output)} as "
                    f"{value.name!r}, which is declared as {value.type}. This is a bug in "
                    "Penstock: please report it"
                )
        if self._observed:
            control.observer.step_end(control.run, step, outputs)
        return outputs

    def enter(self, node: Node, number: int) -> None:
        control, most = self._control, self._most_iterations
        if control.stopped:
            control.stop()
        if most is not None and number >= most and node.op.name != "If":
            too_many(most, node.label)
