"""A plan on streams: a static schedule for each of its blocks, as tasks.

``algorithms.stream_assignment`` assigns the nodes of one graph to streams; this module applies it
to a plan and all nested blocks. If several streams do not pay off in a block, because of their
signals, the block has one stream and runs within its step.

A step on several devices is a node of the schedule on each device, on a stream there; a stream
waits only for signals of other streams. Streams that share a step form one task, a *lane*, which
enqueues their steps in the order of the schedule. Here step ``all`` is on devices 1 and 2::

    stream 0 (device 1)   a !0   ?1 all   c         one task:   a  b  all  c
    stream 1 (device 2)   b !1   ?0 all !2
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain, pairwise, product, takewhile
from math import inf, log2

from penstock.algorithms.dag import Dag
from penstock.algorithms.stream_assignment import StreamSchedule, assign_streams, simulate_streams
from penstock.backends.base import Device
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass
from penstock.host.threads import OVERHEADS
from penstock.ops.internal.transfer import is_transfer
from penstock.plan.arrangement import Arranger, Draft, arrange
from penstock.plan.grouping import Seconds, control_flow_cost
from penstock.plan.plan import (
    Carry,
    Plan,
    Slot,
    Step,
    StepTable,
    has_effect,
    memory_of,
    reads,
    step_dag,
    walk,
)
from penstock.plan.tasks import Grouping, Overlap, Signals, Tasks, nests_deep

# Several streams must take less than this part of the time of one.
_MARGIN = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class BlockSchedule:
    """The static schedule of one block. ``nodes[k]``: the step of node k of ``dag`` and
    ``schedule``; nodes of one step are consecutive. ``start`` and ``finish``: the simulated times
    of each node, in seconds. ``segments[s]``: the nodes of stream s, cut before steps that wait and
    after steps that emit, in the order of the plan within a segment. A step on several streams is a
    segment of its first stream, and cuts all of them."""

    nodes: tuple[int, ...]
    dag: Dag
    schedule: StreamSchedule
    start: tuple[float, ...]
    finish: tuple[float, ...]
    segments: tuple[list[list[int]], ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last step has ended."""
        return max(self.finish, default=0.0)

    def together(self, segment: Sequence[int]) -> list[int]:
        """The nodes of the steps of a segment, on all their streams."""
        if len(segment) > 1:  # none is on several streams
            return [*segment]
        (k,) = segment
        return [k, *takewhile(lambda n: self.nodes[n] == self.nodes[k], range(k + 1, self.dag.n))]

    @property
    def lanes(self) -> list[list[int]]:
        """The streams, grouped if they share a step."""
        lane = list(range(self.schedule.n_streams))
        for a, b in pairwise(range(len(self.nodes))):
            if self.nodes[a] == self.nodes[b]:
                new, old = (lane[self.schedule.stream[k]] for k in (a, b))
                lane = [new if number == old else number for number in lane]
        return [[s for s, of in enumerate(lane) if of == number] for number in dict.fromkeys(lane)]


class StreamSchedules(Grouping):
    """The schedules of a plan's blocks, computed on demand.

    ``seconds(step)`` is the time of a step with a kernel on one thread. A block has at most
    ``most`` streams, or as many per device number if that is a mapping. It has one stream if
    several would not be faster, unless ``forced``. Steps on one of the ``devices``, given by
    backend or named by the kernel, have separate streams there, and so have steps on the backends
    in ``queues``, which gives the number of their queue; all others are in queue 0, the host's.
    """

    def __init__(
        self,
        plan: StepTable,
        seconds: Seconds,
        most: int | Mapping[int, int],
        *,
        forced: bool = False,
        devices: Mapping[str, Device] | None = None,
        queues: Mapping[str, int] | None = None,
    ) -> None:
        self.plan = plan
        self.most = most
        self.queues = dict(queues or {})
        self.forced = forced
        self.devices = dict(devices or {})
        """by name: the backend's name, with a number if its kernels name the device"""
        self._of_backend = tuple(self.devices)
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

    @property
    def names(self) -> list[str]:
        """The names of the devices of schedules, by number; "" is the host."""
        return ["", *self.queues, *self.devices]

    def places(self, step: Step) -> tuple[str, ...]:
        """The names of a step's devices. A transfer runs on its target, so that one to the host
        runs there."""
        if step.kernel is None:
            return ("",)
        if step.kernel.device.devices:
            return tuple(
                [self._name(step.backend, device) for device in step.kernel.device.devices]
            )
        name = step.node.attrs["target"] if is_transfer(step.node) else step.backend
        return (name if name in self.queues or name in self._of_backend else "",)

    def _name(self, backend: str, device: Device) -> str:
        for name, other in self.devices.items():
            if other is device:
                return name
        name = f"{backend}:{len(self.devices)}"
        self.devices[name] = device
        return name

    def groups(self, dag: Dag, steps: Sequence[Step]) -> list[list[int]]:
        block = self.of(steps)
        return [[block.nodes[k] for k in segment] for segment in chain(*block.segments)]

    def orders(self, steps: Sequence[Step]) -> Iterable[tuple[int, int]]:
        block = self.of(steps)
        for program in block.schedule.programs:
            yield from pairwise([block.nodes[k] for k in program])

    def seconds(self, step: Step) -> float:
        if not (step.control or step.blocks):
            return self._of_kernel(step)
        times = [self.of(block.steps).makespan for block in step.blocks]
        return control_flow_cost(self.plan, step, times)

    # Schedules.

    def _schedule(self, steps: Sequence[Step]) -> BlockSchedule:
        dag = step_dag(self.plan.slots, steps)
        seconds = [self.seconds(step) for step in with_checkpoints(steps)]
        places = [self.places(step) for step in with_checkpoints(steps)]
        number = {name: d for d, name in enumerate(self.names)}
        devices = [number[name] for names in places for name in names]
        nodes = tuple([i for i, names in enumerate(places) for _ in names])
        if len(nodes) > dag.n:
            dag = _of_nodes(dag, nodes)
        cost = [seconds[i] for i in nodes]
        rough = list(map(_rough, with_checkpoints(cost)))
        commands = [None if steps[i].blocks else steps[i].node.op.full_name for i in nodes]
        used = len(set(devices))

        def scheduled(most: int | Mapping[int, int]) -> BlockSchedule:
            schedule = assign_streams(
                dag,
                devices=devices,
                commands=commands,
                cost=rough,
                time=cost,
                # Each device in use needs its own stream.
                max_streams=max(most, used) if isinstance(most, int) else most,
            )
            times = simulate_streams(dag, schedule, cost, OVERHEADS.hand_over_s)
            return BlockSchedule(
                nodes, dag, schedule, *times, self._segments(schedule, nodes, steps)
            )

        several = scheduled(self.most)
        if self.forced or several.schedule.n_streams <= used:
            return several
        # Python itself runs on one stream at a time.
        in_python = sum(min(c, OVERHEADS.python_s) for c in seconds)
        least = max(several.makespan + OVERHEADS.hand_over_s, in_python)
        return several if least < _MARGIN * sum(seconds) else scheduled(1)

    def _segments(
        self, schedule: StreamSchedule, nodes: Sequence[int], steps: Sequence[Step]
    ) -> tuple[list[list[int]], ...]:
        parts = Counter(nodes)
        segments = []
        for program in schedule.programs:
            pieces: list[list[int]] = []
            cut = True
            for k in program:
                step, several = steps[nodes[k]], parts[nodes[k]] > 1
                alone = several or (step.control and self.expands(step))
                if cut or alone or schedule.waits[k]:
                    pieces.append([])
                if not (several and k and nodes[k - 1] == nodes[k]):
                    pieces[-1].append(k)
                cut = alone or bool(schedule.emits[k])
            segments.append(list(map(sorted, filter(None, pieces))))
        return tuple(segments)


def _of_nodes(dag: Dag, nodes: Sequence[int]) -> Dag:
    """Replace the steps of ``dag`` by ``nodes``: all nodes of a step come after all nodes of its
    predecessors. Nodes of one step have the same neighbours, so they stay consecutive in every
    schedule."""
    of: dict[int, list[int]] = {}
    for k, i in enumerate(nodes):
        of.setdefault(i, []).append(k)
    return Dag(len(nodes), [pair for a, b in dag.edges for pair in product(of[a], of[b])])


def _rough(seconds: float) -> float:
    """Round a cost to a power of the square root of 2: measurements of equal work differ, and there
    would be no ties for the commands of streams to break."""
    return 2.0 ** (round(2 * log2(seconds)) / 2) if 0 < seconds < inf else seconds


class _StreamArranger(Arranger):
    """Arranges each lane of a block as one task."""

    overlapping = True

    def __init__(self, plan: Plan, schedules: StreamSchedules) -> None:
        super().__init__(plan, schedules)
        self.schedules = schedules
        self.waits: dict[Step, tuple[int, ...]] = {}
        self.emits: dict[Step, tuple[int, ...]] = {}
        self.of_block: list[tuple[int, int]] = []
        # Of streams of devices, which have numbers of their own.
        self.devices: list[str] = []
        self.on: dict[Step, tuple[int, ...]] = {}
        self.of_draft: dict[Draft, tuple[int, ...]] = {}
        self.events: dict[int, int] = {}
        self.behind: dict[Step, tuple[tuple[int, int], ...]] = {}

    def pieces(self, steps: Sequence[Step], number: int) -> list[Draft]:
        block = self.schedules.of(steps)
        # Blocks come in the order of their numbers, each with the signals after those before.
        first = self.of_block[-1][1] if self.of_block else 0
        self.of_block.append((first, first + block.schedule.n_signals))
        stream = self._device_streams(block.schedule, first)
        for k, s in stream.items():
            step = steps[block.nodes[k]]
            self.on[step] = (*self.on.get(step, ()), s)
        place = {k: p for p, k in enumerate(block.schedule.order)}
        waited = set(chain(*block.schedule.waits))
        drafts = []
        for lane in block.lanes:
            segments = list(chain(*[block.segments[s] for s in lane]))
            segments.sort(key=lambda segment: min([place[k] for k in segment]))
            for segment in segments:
                self._signals(steps, block, segment, first, waited, stream)
            run = tuple([steps[block.nodes[k]] for k in chain(*segments)])
            (first_place, *_) = self.schedules.places(run[0])
            queue = self.schedules.queues.get(first_place, 0)
            draft = Draft(run, number, queue, sum(map(self.schedules.seconds, run)))
            if run[0] in self.on:
                self.of_draft[draft] = tuple(sorted({n for step in run for n in self.on[step]}))
            drafts.append(draft)
        return drafts

    def _signals(
        self,
        steps: Sequence[Step],
        block: BlockSchedule,
        segment: Sequence[int],
        first: int,
        waited: Container[int],
        stream: Mapping[int, int],
    ) -> None:
        """A segment waits before its first step, and emits after its last."""
        nodes, schedule = block.together(segment), block.schedule
        waits = [(first + n, k) for k in nodes for n in schedule.waits[k]]
        emits = [first + n for k in nodes for n in schedule.emits[k] if n in waited]
        begin, end = (steps[block.nodes[segment[i]]] for i in (0, -1))
        if waits:
            self.waits[begin] = tuple(sorted({n for n, _ in waits}))
        if emits:
            self.emits[end] = tuple(emits)
        behind = [(stream[k], n) for n, k in waits if k in stream and n in self.events]
        if behind:
            self.behind[begin] = tuple(behind)

    def _device_streams(self, schedule: StreamSchedule, first: int) -> dict[int, int]:
        """Number the streams of a block on devices; the number for each node that is on one."""
        names, stream = self.schedules.names, {}
        number = {
            s: len(self.devices) + n
            for n, s in enumerate(
                [s for s, d in enumerate(schedule.device_of) if names[d] in self.schedules.devices]
            )
        }
        self.devices += [names[schedule.device_of[s]] for s in number]
        for k, s in enumerate(schedule.stream):
            if s in number:
                stream[k] = number[s]
                self.events.update({first + n: number[s] for n in schedule.emits[k]})
        return stream

    def signals(self) -> Signals:
        of_task = {draft.number: streams for draft, streams in self.of_draft.items()}
        overlaps = Overlaps(self.plan.slots, self.on, self.of_block[-1][1])
        for loop, blocks in self.expanded.items():
            if loop.node.op.name != "If":
                overlaps.add(loop, self.blocks[blocks[0]])
        return Signals(
            self.waits,
            self.emits,
            tuple(self.of_block),
            devices=tuple(self.devices),
            on=self.on,
            of_task=of_task,
            events=self.events,
            behind=self.behind,
            overlap=overlaps.overlap(),
        )


def stream_programs(plan: Plan, schedules: StreamSchedules) -> Tasks:
    """The tasks of a plan on streams, one for each stream of each block. A block ends when all of
    its tasks have ended, so signals that only mark its end are omitted."""
    return _StreamArranger(plan, schedules).arrange()


def stream_segments(plan: Plan, schedules: StreamSchedules) -> Tasks:
    """The same streams cut into segments, each a task. Their order is the order of the streams, so
    that memory can be planned for it."""
    return arrange(plan, schedules)


# Loops whose iterations overlap on the streams of devices.
#
# The streams of a body do not synchronize between iterations: the host waits only for values that
# it copies back. A carried value is passed on with the event of the step that computed it; a reader
# on another stream waits for this event. The host enqueues an iteration as soon as the last but one
# has ended on the devices::
#
#     stream 0   a0 a1 a2 ...        a and b each carry a value, and c reads the value of b with
#     stream 1   b0  b1   b2 ...     its event: c1 waits for b0, and not for c0 or a0
#     stream 2   c0   c1    c2 ...


HOST_STREAM = -1


class Overlaps:
    """Finds the loops whose iterations overlap. ``on`` has the device streams of steps; -1 is the
    host. Signals are numbered from ``first``."""

    def __init__(
        self, slots: Sequence[Slot], on: Mapping[Step, tuple[int, ...]], first: int
    ) -> None:
        self.slots = slots
        self.on = on
        self.first = self.next = first
        self.ends: dict[int, int] = {}
        self.moved: dict[Step, list[tuple[int, int]]] = {}
        self.last: dict[Step, list[int]] = {}
        self.marks: dict[Step, list[tuple[int, int]]] = defaultdict(list)
        self.awaited: dict[Step, list[tuple[int, int]]] = defaultdict(list)

    def add(self, loop: Step, body: Sequence[Draft]) -> None:
        """Add a loop whose body has these tasks."""
        written = {i for step in walk(loop.blocks[0].steps) for i in step.outputs}
        written.update(*[carry.buffers or () for carry in loop.carries])
        tasks = [draft.steps for draft in body if self._runs_on(draft.steps, written)]
        steps = list(chain(*tasks))
        streams = dict.fromkeys(s for step in steps for s in self.on[step])
        computed = {i: step for step in steps for i in step.outputs}
        sources = [computed.get(carry.updated) for carry in loop.carries]
        if any(map(has_effect, steps)):  # it keeps its order
            return
        self.moved[loop], self.last[loop] = [], []
        for stream in streams:
            self.ends[stream], last = self._signal(), self._signal()
            self.last[loop].append(last)
            self.moved[loop].append((last, self.ends[stream]))
        self._carry(loop, sources, body)

    def _runs_on(self, steps: Sequence[Step], written: Container[int]) -> bool:
        """Whether a task enqueues all of its steps on devices, and none reads arena memory that the
        loop writes: the next iteration might overwrite it before the read."""
        inputs = [i for step in with_checkpoints(steps) for i in step.inputs if i >= 0]
        read = chain(*[memory_of(self.slots, i) for i in inputs])
        return all(step in self.on for step in steps) and not any(i in written for i in read)

    def _carry(self, loop: Step, sources: Sequence[Step | None], body: Sequence[Draft]) -> None:
        """Pass on the events of carried values to the readers on other streams."""
        streams = self._streams(loop.carries, sources)
        event = {j: self._signal() for j, of in enumerate(streams) if of}
        index = {carry.inside: j for j, carry in enumerate(loop.carries)}
        for j in event:
            source = sources[j]
            if source is None:
                origin = event[index[loop.carries[j].updated]]
            else:
                origin = self._signal()
                self.marks[source].append((origin, self.on[source][0]))
            self.moved[loop].append((event[j], origin))
        for draft in body:
            behind: set[tuple[int, int]] = set()
            for step in with_checkpoints(draft.steps):
                for j in sorted({index[i] for i in reads(step) if i in index}):
                    for stream in self.on.get(step, (HOST_STREAM,)):
                        if j in event and streams[j] != {stream} and (stream, j) not in behind:
                            behind.add((stream, j))
                            self.awaited[step].append((stream, event[j]))

    def _streams(self, carries: Sequence[Carry], sources: Sequence[Step | None]) -> list[set[int]]:
        """For each carried value, the streams on which an earlier iteration may have computed it:
        several, if carried values are permuted."""
        index = {carry.inside: j for j, carry in enumerate(carries)}
        streams = [set() if source is None else {self.on[source][0]} for source in sources]
        # A chain of n carried values needs at most n rounds.
        for _ in carries:
            for j, carry in enumerate(carries):
                if carry.updated in index:
                    streams[j] |= streams[index[carry.updated]]
        return streams

    def _signal(self) -> int:
        self.next += 1
        return self.next - 1

    def overlap(self) -> Overlap:
        moved = {loop: tuple(pairs) for loop, pairs in self.moved.items()}
        last = {loop: tuple(signals) for loop, signals in self.last.items()}
        return Overlap(
            self.next - self.first, self.ends, moved, last, dict(self.marks), dict(self.awaited)
        )
