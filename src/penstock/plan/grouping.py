"""Groups the steps of a plan into tasks with enough work to pay for a hand-over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from penstock.algorithms.clustering import cluster
from penstock.algorithms.dag import Dag
from penstock.algorithms.ordering import critical_path
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import cached_property
from penstock.host.threads import OVERHEADS
from penstock.ir.op import Role
from penstock.plan.plan import Step, StepTable, step_dag, walk
from penstock.plan.tasks import Grouping, are_asynchronous, nests_deep

Seconds = Callable[[Step], float]

# A second worker pays only if the time on several is less than this part of the time on one.
_CHAIN = 0.95
# The trip count of a loop whose limit is not a constant.
DEFAULT_TRIP_COUNT = 10


def is_chain(plan: StepTable) -> bool:
    """Whether no two steps of a plan, nested ones included, could run at the same time."""
    steps = plan.steps
    if any(step.control for step in steps):
        return False
    dag = plan.dag
    return dag.pred.count(()) <= 1 and max(map(len, dag.succ), default=0) <= 1


class OrderedGrouping(Grouping):
    """The fewest tasks that can run the steps of a plan one by one. Blocks that nest too deep for
    one function have tasks of their own. If kernels are asynchronous, each step is a task, so that
    all others run meanwhile. ``queues`` as for ``ClusteredGrouping``."""

    def __init__(self, plan: StepTable, queues: Mapping[str, int] | None = None) -> None:
        self.asynchronous = are_asynchronous(plan.steps)
        self._queues = queues or {}

    def expands(self, step: Step) -> bool:
        return step.control and (are_asynchronous((step,)) or nests_deep(step))

    def groups(self, dag: Dag, steps: Sequence[Step]) -> list[list[int]]:
        if self.asynchronous:
            return super().groups(dag, steps)
        alone = [1 + i if self.expands(step) else 0 for i, step in enumerate(steps)]
        return cluster(dag, [0.0] * dag.n, inf, alone)

    def queue(self, step: Step) -> int:
        return self._queues.get(step.backend, 0)


class ClusteredGrouping(Grouping):
    """Tasks that are each worth a worker, if a simulated schedule is faster than one task.
    ``seconds(step)`` is the time of a step with a kernel on one thread, ``workers[q]`` the number
    of concurrent tasks of queue q. ``queues`` maps names of backends to queues; the default is
    queue 0, the host's."""

    hand_over_s = OVERHEADS.hand_over_s
    grains: Sequence[float] = (hand_over_s, 4 * hand_over_s, 16 * hand_over_s)

    def __init__(
        self,
        plan: StepTable,
        seconds: Seconds,
        workers: Sequence[int],
        queues: Mapping[str, int] | None = None,
    ) -> None:
        self.plan = plan
        self.workers = workers
        self._of_kernel = seconds
        self._queues = queues or {}
        self._seconds: dict[Step, float] = {}
        self._grouped: dict[tuple[Step, ...], tuple[list[list[int]], float]] = {}
        self._expanded: dict[Step, bool] = {}

    def queue(self, step: Step) -> int:
        return self._queues.get(step.backend, 0)

    def seconds(self, step: Step) -> float:
        """The time of a step, if the steps of its blocks run sequentially."""
        if step not in self._seconds:
            times = [sum(map(self.seconds, block.steps)) for block in step.blocks]
            own = not (step.control or times)
            cost = self._of_kernel(step) if own else control_flow_cost(self.plan, step, times)
            self._seconds[step] = cost
        return self._seconds[step]

    def expands(self, step: Step) -> bool:
        if step not in self._expanded:
            wins = any(self._wins(block.steps) for block in step.blocks)
            self._expanded[step] = wins or nests_deep(step)
        return self._expanded[step]

    def groups(self, dag: Dag, steps: Sequence[Step]) -> list[list[int]]:
        return self._best(steps, dag)[0]

    # Whether several workers pay.

    @cached_property
    def promising(self) -> bool:
        """Whether more than one worker may pay. Cheap for plans that are one chain."""
        steps = self.plan.steps
        if any(self.queue(step) for step in self.plan.walk()):
            return True
        if self.workers[0] == 1 or is_chain(self.plan) or self.serial < OVERHEADS.worth_s:
            return False
        graphs = any(step.control for step in steps)
        longest = critical_path(self.plan.dag, list(map(self.seconds, steps)))
        # No schedule is shorter than the critical path, which is cheaper to find than a schedule.
        if not graphs and longest > _CHAIN * self.serial:
            return False
        return self.makespan < _CHAIN * self.serial

    @cached_property
    def serial(self) -> float:
        """Seconds of a run on one worker."""
        return sum(map(self.seconds, self.plan.steps))

    @cached_property
    def makespan(self) -> float:
        """Seconds of a run with these groups, by a simulated schedule."""
        return self._best(self.plan.steps)[1]

    def _wins(self, steps: Sequence[Step]) -> bool:
        """Whether a block runs faster as separate tasks."""
        if any(self.queue(step) for step in walk(steps)):
            return True
        return self._best(steps)[1] < sum(map(self.seconds, steps))

    def _best(self, steps: Sequence[Step], dag: Dag | None = None) -> tuple[list[list[int]], float]:
        """The groups of the grain with the least simulated makespan, and that makespan."""
        key = tuple(steps)
        if key not in self._grouped:
            outermost = steps is self.plan.steps
            dag = dag or (self.plan.dag if outermost else step_dag(self.plan.slots, steps))
            self._grouped[key] = self._group(steps, dag)
        return self._grouped[key]

    def _group(self, steps: Sequence[Step], dag: Dag) -> tuple[list[list[int]], float]:
        from penstock.algorithms.heft import list_schedule

        # Only steps of one class may share a group: the class is the queue, or, for an expanded
        # step, the step itself.
        classes = [
            -1 - i if step.control and self.expands(step) else self.queue(step)
            for i, step in enumerate(steps)
        ]
        cost = [self.seconds(step) for step in steps]
        for i, step in enumerate(with_checkpoints(steps)):
            if classes[i] < 0:
                times = [self._best(block.steps)[1] for block in step.blocks]
                cost[i] = control_flow_cost(self.plan, step, times)
        # Python itself runs on one worker at a time.
        floor = sum(min(c, OVERHEADS.python_s) for c in cost)
        # The baseline: sequential, in as few tasks as possible.
        one_class = len(set(classes)) == 1
        best = [list(range(len(steps)))] if one_class else cluster(dag, cost, inf, classes)
        least = sum(cost)
        if len(best) == 1 and classes[0] >= 0:
            least = sum(map(self.seconds, steps))
        for grain in self.grains:
            groups = cluster(dag, cost, grain, classes)
            if len(groups) == 1:
                continue
            group_of = {i: g for g, group in enumerate(groups) for i in group}
            pairs = [(group_of[a], group_of[b]) for a, b in dag.edges]
            group_dag = Dag(len(groups), [(a, b) for a, b in pairs if a != b])
            total = [sum(cost[i] for i in group) + OVERHEADS.dispatch_s for group in groups]
            on = [max(0, classes[group[0]]) for group in groups]
            schedule = list_schedule(group_dag, total, self.workers, on)
            makespan = max(schedule.makespan, floor) + OVERHEADS.hand_over_s
            if makespan < least:
                best, least = groups, makespan
        return best, least


def control_flow_cost(plan: StepTable, step: Step, block_seconds: Sequence[float]) -> float:
    """Seconds of a step without a kernel, or of a segment, from the times of its blocks: the
    maximum for an If, the time of the body times the number of iterations for a loop."""
    role = step.node.op.role
    if role is Role.IF:
        # Only a run knows which branch it takes.
        return max(block_seconds)
    if role in (Role.LOOP, Role.SCAN, Role.SEQUENCE_MAP, Role.FRAME):
        return trip_count(plan, step) * block_seconds[0]
    return sum(block_seconds)  # of a token that only goes on, 0


def trip_count(plan: StepTable, step: Step) -> int:
    """The number of iterations of a loop if its limit is a constant, else a guess."""
    limit = step.inputs[0] if step.node.op.name == "Loop" else -1
    const = plan.slots[limit].const if limit >= 0 else None
    if const is None or const.size != 1:
        return DEFAULT_TRIP_COUNT
    return max(0, int(const.reshape(-1)[0]))


def least_makespan(plan: StepTable, seconds: Seconds, workers: int) -> float:
    """The seconds that the steps of a plan take at least on this many workers, in any schedule."""
    from penstock.algorithms.heft import bound

    times = [seconds(step) for step in plan.steps]
    return bound(step_dag(plan.slots, plan.steps), times, workers)
