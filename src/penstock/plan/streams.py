"""A plan on streams: the static schedule of each of its blocks, as tasks.

What ``streams.py`` says of a graph, this says of a plan and of all blocks inside: which steps make
a stream, what these wait for and emit, and what memory may be shared. Where streams do not pay for
their signals, a block has one, and its steps stand where the step is that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.algorithms.dag import Dag
from penstock.algorithms.stream_assignment import StreamSchedule, assign_streams, simulate
from penstock.ops.internal.transfer import is_transfer
from penstock.plan.grouping import HAND_OVER_S, PYTHON_S, Seconds, control_flow_cost
from penstock.plan.plan import Plan, Step, StepTable
from penstock.plan.tasks import Arranger, Draft, Signals, Tasks, arrange, dependencies

# What several streams must win, as a part of what one takes.
_MARGIN = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class BlockSchedule:
    """The static schedule of one block.

    ``start`` and ``finish``: of each step, in seconds, simulated. ``segments[s]``: what stream s
    runs, cut where it waits or has emitted; the steps of a piece are in the order of the plan.
    """

    dag: Dag
    schedule: StreamSchedule
    start: tuple[float, ...]
    finish: tuple[float, ...]
    segments: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds until all has ended."""
        return max(self.finish, default=0.0)


class StreamSchedules:
    """The schedules of a plan's blocks, made when they are first asked for.

    ``seconds(step)`` is what a step with a kernel takes on one thread. At most ``most`` streams of
    a block run at once; where they would take no less time than one, and ``forced`` is not set,
    there is one. What runs on one of ``devices``, backends by name, has streams of its own there.
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
        found = self._scheduled.get(key)
        if found is None:
            found = self._scheduled[key] = self._schedule(steps)
        return found

    @property
    def one(self) -> bool:
        """Whether all there is, is one stream of the host."""
        return self._stands(self.plan.steps)

    # What ``arrange`` asks.

    def expands(self, step: Step) -> bool:
        """Whether the blocks of a step have streams of their own."""
        return not all(self._stands(block.steps) for block in step.blocks)

    def _stands(self, steps: Sequence[Step]) -> bool:
        """Whether a block can stand where its step does, on one stream of the host."""
        devices = self.of(steps).schedule.device_of
        return devices in ((), (0,)) and not any(map(self.expands, steps))

    def device(self, step: Step) -> int:
        """Where a step runs: 0 for the host, or one more than the place in ``devices``. What brings
        a value to the host runs there."""
        if step.control:
            return 0
        name = step.node.attrs["target"] if is_transfer(step.node) else step.backend
        return self._number.get(name, 0)

    def groups(self, dag: Dag, steps: Sequence[Step]) -> list[list[int]]:
        return [list(each) for segments in self.of(steps).segments for each in segments]

    def orders(self, steps: Sequence[Step]) -> Iterable[tuple[int, int]]:
        for segments in self.of(steps).segments:
            for before, after in pairwise(segments):
                yield before[-1], after[0]

    def queue(self, step: Step) -> int:
        return 0

    def seconds(self, step: Step) -> float:
        if not step.control:
            return self._of_kernel(step)
        times = [self.of(block.steps).makespan for block in step.blocks]
        return control_flow_cost(self.plan, step, times)

    # Schedules.

    def _schedule(self, steps: Sequence[Step]) -> BlockSchedule:
        dag = dependencies(self.plan.slots, steps)
        cost = [self.seconds(step) for step in steps]
        commands = [step.node.op.full_name for step in steps]
        devices = [(self.device(step),) for step in steps]
        used = len(set(devices))

        def scheduled(most: int) -> BlockSchedule:
            schedule = assign_streams(
                dag, devices=devices, cost=cost, commands=commands, max_streams=max(most, used)
            )
            start, finish = simulate(dag, schedule, cost, HAND_OVER_S)
            return BlockSchedule(dag, schedule, start, finish, self._segments(schedule, steps))

        found = scheduled(self.most)
        if self.forced or found.schedule.n_streams <= used:
            return found
        # Python itself runs on one stream at a time.
        least = max(found.makespan + HAND_OVER_S, sum(min(each, PYTHON_S) for each in cost))
        return found if least < _MARGIN * sum(cost) else scheduled(1)

    def _segments(
        self, schedule: StreamSchedule, steps: Sequence[Step]
    ) -> tuple[tuple[tuple[int, ...], ...], ...]:
        found = []
        for program in schedule.programs:
            pieces: list[list[int]] = []
            cut = True
            for i in program:
                alone = steps[i].control and self.expands(steps[i])
                if cut or alone or schedule.waits[i]:
                    pieces.append([])
                pieces[-1].append(i)
                cut = alone or bool(schedule.emits[i])
            found.append(tuple([tuple(sorted(piece)) for piece in pieces]))
        return tuple(found)


class _Programs(Arranger):
    """Tasks that each have all of a stream."""

    overlapping = True

    def __init__(self, plan: Plan, streaming: StreamSchedules) -> None:
        super().__init__(plan, streaming)
        self.streaming = streaming
        self.waits: dict[Step, tuple[int, ...]] = {}
        self.emits: dict[Step, tuple[int, ...]] = {}
        self.ranges: dict[int, tuple[int, int]] = {}
        self.events: set[int] = set()
        # By draft, the device that it runs on.
        self.devices: dict[Draft, str] = {}
        self.count = 0

    def pieces(self, steps: Sequence[Step], number: int) -> list[Draft]:
        scheduled = self.streaming.of(steps)
        schedule = scheduled.schedule
        waited = {signal for waits in schedule.waits for signal in waits}
        self.ranges[number] = self.count, self.count + schedule.n_signals
        drafts = []
        for segments in scheduled.segments:
            for piece in segments:
                # All that a piece waits for comes before, and what it emits after it.
                waits = [self.count + k for i in piece for k in schedule.waits[i]]
                emits = [self.count + k for i in piece for k in schedule.emits[i] if k in waited]
                if waits:
                    self.waits[steps[piece[0]]] = tuple(waits)
                if emits:
                    self.emits[steps[piece[-1]]] = tuple(emits)
            run = tuple([steps[i] for piece in segments for i in piece])
            seconds = sum(map(self.streaming.seconds, run))
            drafts.append(Draft(run, number, 0, seconds))
            device = self.streaming.device(run[0])
            if device:
                self.devices[drafts[-1]] = self.streaming.devices[device]
        self.events.update(
            self.count + k for k, s in enumerate(schedule.stream_of) if schedule.device_of[s]
        )
        self.count += schedule.n_signals
        return drafts

    def signals(self) -> Signals:
        return Signals(
            self.waits,
            self.emits,
            tuple([self.ranges[k] for k in sorted(self.ranges)]),
            {draft.number: name for draft, name in self.devices.items()},
            frozenset(self.events),
        )


def stream_programs(plan: Plan, streaming: StreamSchedules) -> Tasks:
    """A task for each stream of each block. A block has ended when all of its streams have: so
    nothing waits for what is emitted only to say so."""
    return _Programs(plan, streaming).arrange()


def stream_segments(plan: Plan, streaming: StreamSchedules) -> Tasks:
    """The same in pieces, as tasks that run in just the order that the streams keep: what memory is
    planned by."""
    return arrange(plan, streaming)
