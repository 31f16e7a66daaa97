"""Loops whose iterations overlap on the streams of devices.

The streams of a body run on from one iteration to the next: what the host must see ended, it brings
back itself. A carried value is handed on with the event of the step that computed it, which a
reader on another stream waits for, and the host puts an iteration on the devices as soon as the
last but one has ended there::

    stream 0   a0 a1 a2 ...        a and b carry a value each, and c reads that of b, which it gets
    stream 1   b0  b1   b2 ...     with its event: c1 waits for b0, and not for c0 or a0
    stream 2   c0   c1    c2 ...

"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from itertools import chain

from penstock.core.checkpoints import with_checkpoints
from penstock.plan.arrangement import Draft
from penstock.plan.plan import Carry, Slot, Step, has_effect, memory_of, reads, walk
from penstock.plan.tasks import Overlap

HOST_STREAM = -1


class Overlaps:
    """Finds the loops whose iterations overlap. ``on`` has the streams of devices of steps, the
    host's is -1; signals are numbered from ``first`` on."""

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
        """A loop whose body has these tasks."""
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
        """Whether a task puts all of its steps on devices, and none reads memory of the arena that
        iterations write, and the next one may write before it is read."""
        inputs = [i for step in with_checkpoints(steps) for i in step.inputs if i >= 0]
        read = chain(*[memory_of(self.slots, i) for i in inputs])
        return all(step in self.on for step in steps) and not any(i in written for i in read)

    def _carry(self, loop: Step, sources: Sequence[Step | None], body: Sequence[Draft]) -> None:
        """Hand the events of carried values on with them, to where these are read."""
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
        """For each carried value, the streams on which an iteration before may have computed it:
        several, if carried values change places."""
        index = {carry.inside: j for j, carry in enumerate(carries)}
        streams = [set() if source is None else {self.on[source][0]} for source in sources]
        # A stream passes through a chain of carried values in as many rounds at most.
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
