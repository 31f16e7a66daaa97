"""A plan on streams: a static schedule for each of its blocks, as tasks.

``algorithms.stream_assignment`` assigns the nodes of one graph to streams; this applies it to a
plan and to all blocks inside. A block whose streams do not pay for their signals has one stream,
and runs in place of its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import inf, log2

from penstock.algorithms.checkpoints import paced
from penstock.algorithms.dag import Dag
from penstock.algorithms.stream_assignment import StreamSchedule, assign_streams, simulate_streams
from penstock.ops.internal.transfer import is_transfer
from penstock.plan.grouping import HAND_OVER_S, PYTHON_S, Seconds, control_flow_cost
from penstock.plan.plan import Plan, Step, StepTable
from penstock.plan.tasks import (
    Arranger,
    Draft,
    Grouping,
    Signals,
    Tasks,
    arrange,
    nests_deep,
    step_dag,
)

# Several streams must take less than this part of the time of one.
_MARGIN = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class BlockSchedule:
    """The static schedule of one block. ``start`` and ``finish``: the simulated times of each step,
    in seconds. ``segments[s]``: the steps of stream s, cut before those that wait and behind those
    that emit; within a segment, in the order of the plan."""

    dag: Dag
    schedule: StreamSchedule
    start: tuple[float, ...]
    finish: tuple[float, ...]
    segments: tuple[list[list[int]], ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last step has ended."""
        return max(self.finish, default=0.0)


class StreamSchedules(Grouping):
    """The schedules of a plan's blocks, computed on demand.

    ``seconds(step)`` is the time of a step with a kernel on one thread. A block has at most
    ``most`` streams; one if several would take no less time, unless ``forced``. Steps on one of
    ``devices``, names of backends, have streams of their own there.
    """

    def __init__(
        self,
        plan: StepTable,
        seconds: Seconds,
        most: int,
        *,
        forced: bool = False,
        devices: Iterable[str] = (),
    ) -> None:
        self.plan = plan
        self.most = most
        self.forced = forced
        self.devices = ("", *devices)
        self._number = {name: d for d, name in enumerate(self.devices)}
        self._of_kernel = seconds
        self._scheduled: dict[tuple[Step, ...], BlockSchedule] = {}

    def of(self, steps: Sequence[Step]) -> BlockSchedule:
        """The schedule of a block."""
        key = tuple(steps)
        if key not in self._scheduled:
            self._scheduled[key] = self._schedule(steps)
        return self._scheduled[key]

    @property
    def one(self) -> bool:
        """Whether the whole plan is on one stream of the host."""
        return self._is_inline(self.plan.steps)

    def expands(self, step: Step) -> bool:
        """Whether the blocks of a step have streams of their own."""
        if not step.blocks:
            return False
        return nests_deep(step) or not all(self._is_inline(block.steps) for block in step.blocks)

    def _is_inline(self, steps: Sequence[Step]) -> bool:
        """Whether a block runs in place of its step, on one stream of the host."""
        devices = self.of(steps).schedule.device_of
        return devices in ((), (0,)) and not any(map(self.expands, steps))

    def device(self, step: Step) -> int:
        """The index of a step's device in ``devices``, 0 for the host. A transfer runs on its
        target, so that one to the host runs there."""
        if step.control:
            return 0
        name = step.node.attrs["target"] if is_transfer(step.node) else step.backend
        return self._number.get(name, 0)

    def groups(self, dag: Dag, steps: Sequence[Step]) -> list[list[int]]:
        return list(chain(*self.of(steps).segments))

    def orders(self, steps: Sequence[Step]) -> Iterable[tuple[int, int]]:
        for segments in self.of(steps).segments:
            for before, after in pairwise(segments):
                yield before[-1], after[0]

    def seconds(self, step: Step) -> float:
        if not step.control:
            return self._of_kernel(step)
        times = [self.of(block.steps).makespan for block in step.blocks]
        return control_flow_cost(self.plan, step, times)

    # Schedules.

    def _schedule(self, steps: Sequence[Step]) -> BlockSchedule:
        dag = step_dag(self.plan.slots, steps)
        cost = [self.seconds(step) for step in paced(steps)]
        rough = list(map(_rough, paced(cost)))
        devices = [self.device(step) for step in paced(steps)]
        commands = [None if step.blocks else step.node.op.full_name for step in steps]
        used = len(set(devices))

        def scheduled(most: int) -> BlockSchedule:
            bound = max(most, used)
            schedule = assign_streams(
                dag,
                devices=devices,
                commands=commands,
                cost=rough,
                time=cost,
                max_streams=bound,
            )
            start, finish = simulate_streams(dag, schedule, cost, HAND_OVER_S)
            return BlockSchedule(dag, schedule, start, finish, self._segments(schedule, steps))

        several = scheduled(self.most)
        if self.forced or several.schedule.n_streams <= used:
            return several
        # Python itself runs on one stream at a time.
        least = max(several.makespan + HAND_OVER_S, sum(min(c, PYTHON_S) for c in cost))
        return several if least < _MARGIN * sum(cost) else scheduled(1)

    def _segments(
        self, schedule: StreamSchedule, steps: Sequence[Step]
    ) -> tuple[list[list[int]], ...]:
        segments = []
        for program in schedule.programs:
            pieces: list[list[int]] = []
            cut = True
            for i in program:
                alone = steps[i].control and self.expands(steps[i])
                if cut or alone or schedule.waits[i]:
                    pieces.append([])
                pieces[-1].append(i)
                cut = alone or bool(schedule.emits[i])
            segments.append(list(map(sorted, pieces)))
        return tuple(segments)


def _rough(seconds: float) -> float:
    """A cost as a power of the root of two: measured ones of equal work differ, and would leave no
    ties for the commands of streams to decide."""
    return 2.0 ** (round(2 * log2(seconds)) / 2) if 0 < seconds < inf else seconds


class _StreamArranger(Arranger):
    """Arranges each stream of a block as one task."""

    overlapping = True

    def __init__(self, plan: Plan, schedules: StreamSchedules) -> None:
        super().__init__(plan, schedules)
        self.schedules = schedules
        self.waits: dict[Step, tuple[int, ...]] = {}
        self.emits: dict[Step, tuple[int, ...]] = {}
        self.of_block: list[tuple[int, int]] = []
        self.events: set[int] = set()
        # The device of each task, by its draft; none for the host.
        self.devices: dict[Draft, str] = {}

    def pieces(self, steps: Sequence[Step], number: int) -> list[Draft]:
        block_schedule = self.schedules.of(steps)
        schedule = block_schedule.schedule
        waited = set(chain(*schedule.waits))
        # Blocks come in the order of their numbers, each with the signals after those before.
        first = self.of_block[-1][1] if self.of_block else 0
        self.of_block.append((first, first + schedule.n_signals))
        drafts = []
        for segments in block_schedule.segments:
            run = tuple([steps[i] for i in chain(*segments)])
            device = self.schedules.device(run[0])
            for piece in segments:
                # A segment waits before its first step, and emits after its last.
                waits = [first + k for i in piece for k in schedule.waits[i]]
                emits = [first + k for i in piece for k in schedule.emits[i] if k in waited]
                if waits:
                    self.waits[steps[piece[0]]] = tuple(waits)
                if emits:
                    self.emits[steps[piece[-1]]] = tuple(emits)
                    self.events.update(emits if device else ())
            draft = Draft(run, number, 0, sum(map(self.schedules.seconds, run)))
            if device:
                self.devices[draft] = self.schedules.devices[device]
            drafts.append(draft)
        return drafts

    def signals(self) -> Signals:
        devices = {draft.number: name for draft, name in self.devices.items()}
        of_block, events = tuple(self.of_block), frozenset(self.events)
        return Signals(self.waits, self.emits, of_block, devices, events)


def stream_programs(plan: Plan, schedules: StreamSchedules) -> Tasks:
    """The tasks of a plan on streams, one for each stream of each block. A block has ended when all
    of its tasks have, so that signals that only mark its end are left out."""
    return _StreamArranger(plan, schedules).arrange()


def stream_segments(plan: Plan, schedules: StreamSchedules) -> Tasks:
    """The same streams cut into segments, a task each. Their order is that of the streams, so that
    memory can be planned for it."""
    return arrange(plan, schedules)
