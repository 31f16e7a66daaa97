"""Which steps of a plan make a task: one each, or as many as make it worth another worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import inf

from penstock.cluster import cluster
from penstock.dag import Dag
from penstock.heft import simulate
from penstock.ops.cost import seconds as estimated
from penstock.order import critical_path
from penstock.plan import Plan, Step, walk
from penstock.tasks import dependencies

Seconds = Callable[[Step], float]

DISPATCH_S = 2.5e-6
"""what the loop takes for a task"""
HAND_OVER_S = 30e-6
"""what it takes until another worker has a task, and its result is seen"""
PYTHON_S = 2e-6
"""of a step, what no other thread of Python runs beside"""
_GRAINS = (HAND_OVER_S, 4 * HAND_OVER_S, 16 * HAND_OVER_S)
# Less than this altogether is not worth a second worker; nor is what could end no earlier than in
# this part of the time on one.
_WORTH_S = 4 * HAND_OVER_S
_CHAIN = 0.95
# How often a loop turns that does not say so itself.
_TURNS = 10


class OneByOne:
    """Each step is a task, and every If and loop is expanded: for the dataflow executor."""

    def expands(self, step: Step) -> bool:
        return step.control

    def groups(self, dag: Dag, steps: Sequence[Step]) -> list[list[int]]:
        return [[i] for i in range(dag.n)]

    def queue(self, step: Step) -> int:
        return 0

    def seconds(self, step: Step) -> float:
        return sum(estimated(each.node) for each in walk((step,)) if not each.control)


class Clustered:
    """Steps in tasks that are worth a worker, if a simulated schedule says that this wins.

    ``seconds(step)`` is what a step with a kernel takes on one thread, ``workers`` how many run at
    once on the host; ``queues`` maps backends to queues, those not named to 0. Where all steps in
    one task are about as fast, they are one.
    """

    def __init__(
        self,
        plan: Plan,
        seconds: Seconds,
        workers: int,
        queues: dict[str, int] | None = None,
        grains: Sequence[float] = _GRAINS,
    ) -> None:
        self.plan = plan
        self.workers = workers
        self._of_kernel = seconds
        self._queues = queues or {}
        self._grains = grains
        self._seconds: dict[int, float] = {}
        self._grouped: dict[tuple[int, ...], tuple[list[list[int]], float]] = {}
        self._expanded: dict[int, bool] = {}

    # What ``arrange`` asks.

    def queue(self, step: Step) -> int:
        return self._queues.get(step.backend, 0)

    def seconds(self, step: Step) -> float:
        """What a step takes where its blocks run one step after the other."""
        found = self._seconds.get(id(step))
        if found is None:
            found = self._of_kernel(step) if not step.control else self._of_blocks(step)
            self._seconds[id(step)] = found
        return found

    def expands(self, step: Step) -> bool:
        found = self._expanded.get(id(step))
        if found is None:
            found = self._expanded[id(step)] = any(map(self._wins, self._blocks(step)))
        return found

    def groups(self, dag: Dag, steps: Sequence[Step]) -> list[list[int]]:
        return self._best(steps, dag)[0]

    # What the session asks.

    @cached_property
    def promising(self) -> bool:
        """Whether more than one worker may do any good; cheap to ask of what is one chain."""
        if any(self.queue(step) for step in self.plan.walk()):
            return True
        if self.workers == 1 or self.serial < _WORTH_S:
            return False
        steps = self.plan.steps
        cost = list(map(self.seconds, steps))
        whole = critical_path(dependencies(self.plan.slots, steps), cost)
        if whole > _CHAIN * self.serial and not any(step.control for step in steps):
            return False
        return self.makespan < _CHAIN * self.serial

    @cached_property
    def serial(self) -> float:
        """Seconds that the plan takes on one worker."""
        return sum(map(self.seconds, self.plan.steps))

    @cached_property
    def makespan(self) -> float:
        """Seconds that the plan takes as it is grouped, by a simulated schedule."""
        return self._best(self.plan.steps)[1]

    def _blocks(self, step: Step) -> Iterator[Sequence[Step]]:
        return (block.steps for block in step.blocks)

    def _of_blocks(self, step: Step) -> float:
        times = [sum(map(self.seconds, steps)) for steps in self._blocks(step)]
        if step.node.op.name == "If":
            return max(times)
        return self.turns(step) * times[0]

    def turns(self, step: Step) -> int:
        """How often a loop turns, as far as that is known."""
        limit = step.inputs[0] if step.node.op.name == "Loop" else -1
        const = self.plan.slots[limit].const if limit >= 0 else None
        return int(const.reshape(-1)[0]) if const is not None and const.size == 1 else _TURNS

    def _wins(self, steps: Sequence[Step]) -> bool:
        """Whether a block is better run as tasks of its own."""
        if any(self.queue(each) for each in walk(steps)):
            return True
        groups, makespan = self._best(steps)
        return len(groups) > 1 and makespan < sum(map(self.seconds, steps))

    def _best(self, steps: Sequence[Step], dag: Dag | None = None) -> tuple[list[list[int]], float]:
        """The groups of the grain with the least simulated makespan, and that."""
        key = tuple(map(id, steps))
        found = self._grouped.get(key)
        if found is None:
            if dag is None:
                dag = dependencies(self.plan.slots, steps)
            found = self._grouped[key] = self._group(steps, dag)
        return found

    def _group(self, steps: Sequence[Step], dag: Dag) -> tuple[list[list[int]], float]:
        cost = list(map(self.seconds, steps))
        serial = sum(cost)
        kinds = [
            -1 - i if step.control and self.expands(step) else self.queue(step)
            for i, step in enumerate(steps)
        ]
        alike = len(set(kinds)) <= 1 and not (kinds and kinds[0] < 0)
        # One after the other, in the order of the plan: what every other way must beat.
        best: list[list[int]] = [list(range(len(steps)))] if steps else []
        least = serial if alike else inf
        # Python itself runs on one worker at a time.
        floor = sum(min(each, PYTHON_S) for each in cost)
        for grain in self._grains:
            groups = cluster(dag, cost, grain, kinds)
            if len(groups) == 1:
                continue
            of = {i: g for g, group in enumerate(groups) for i in group}
            over = Dag(len(groups), [(of[a], of[b]) for a, b in dag.edges if of[a] != of[b]])
            total = [[sum(cost[i] for i in group) + DISPATCH_S] for group in groups]
            makespan = max(simulate(over, total, self.workers), floor)
            if self.workers > 1 and not all(k > 0 for k in kinds):
                makespan += HAND_OVER_S
            if makespan < least:
                best, least = groups, makespan
        return best, least
