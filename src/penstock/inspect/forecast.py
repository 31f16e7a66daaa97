"""The simulated time of a plan on a number of workers."""

from __future__ import annotations

from collections.abc import Callable

from penstock.algorithms.heft import bound, place
from penstock.algorithms.ordering import critical_path
from penstock.core.errors import Unsupported
from penstock.core.records import dataclass
from penstock.ir.op import Role
from penstock.plan.grouping import ClusteredGrouping, Seconds
from penstock.plan.plan import Step, StepTable

_CALLING = (Role.IF, Role.LOOP, Role.SCAN, Role.SEQUENCE_MAP, Role.FRAME)
"""what has its graphs as blocks, unless tokens run them"""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds of a plan: ``serial`` on one worker, ``makespan`` on ``workers``.

    ``critical_path`` is the time of the longest chain of steps. No schedule is shorter than
    ``bound``, max(critical path, serial / workers). Hand-overs between threads and shared memory
    bandwidth are not simulated. The costs of ``measured`` of all ``kernels`` were measured on this
    machine, the others are estimated.
    """

    workers: int
    serial: float
    makespan: float
    critical_path: float
    bound: float
    kernels: int
    measured: int


def check_static(plan: StepTable) -> None:
    """Raise ``Unsupported`` for a plan that no schedule can be simulated of before a run. That is
    one with loops of TensorFlow's frames, with parts on several devices, or with graphs that nodes
    call."""
    called = "how long the graph takes that it calls is known only during a run"
    reasons: dict[Role | None, str] = {
        Role.NEXT_ITERATION: "how often its loop runs is known only during a run",
        Role.RECV: "the parts of the graph on its devices wait for one another during a run",
        **dict.fromkeys((Role.CALL, *_CALLING), called),
    }
    advice = "no schedule can be simulated; measure runs with profile() or a trace instead"
    nodes = [
        step.node
        for step in plan.walk()
        if step.node.op.role in reasons and not (step.node.op.role in _CALLING and step.blocks)
    ]
    if nodes:
        raise Unsupported.of(
            (node.op.full_name, f"{reasons[node.op.role]}: {advice}", node.label) for node in nodes
        )


def forecast(
    plan: StepTable, seconds: Seconds, workers: int, is_measured: Callable[[Step], bool]
) -> Forecast:
    """Simulate the outermost steps of ``plan`` on ``workers``; an If or a loop counts as one step.
    ``seconds(step)`` is the cost of a step with a kernel, and ``is_measured(step)`` whether it was
    measured. Raises ``ValueError`` if there are no workers, and ``Unsupported`` as ``check_static``
    does."""
    check_static(plan)
    if workers < 1:
        raise ValueError(f"a machine with {workers} workers cannot run anything")
    whole = ClusteredGrouping(plan, seconds, [1])
    dag = plan.dag
    single = [whole.seconds(step) for step in plan.steps]
    makespan = place(dag, [[seconds] for seconds in single], workers=[workers]).makespan
    longest, least = critical_path(dag, single), bound(dag, single, workers)
    kernels = [is_measured(step) for step in plan.walk() if step.kernel is not None]
    return Forecast(workers, sum(single), makespan, longest, least, len(kernels), sum(kernels))
