"""Runs a schedule of streams with any timing, and tells what is certain whatever the timing is.

Written from what ``StreamSchedule`` says about itself, and independent of how ``streams.py`` comes
to its decisions. A node on several streams has a part on each; parts start and end on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from penstock.algorithms.dag import Dag
from penstock.algorithms.stream_assignment import StreamSchedule

# A node and one of its streams.
Part = tuple[int, int]
BEGIN, END = "begin", "end"


def programs(schedule: StreamSchedule) -> list[list[int]]:
    """Per stream its nodes."""
    return [
        [i for i in schedule.order if s in schedule.streams[i]] for s in range(schedule.n_streams)
    ]


def emitters(schedule: StreamSchedule) -> dict[int, Part]:
    """Per signal the part that emits it."""
    return {k: (i, schedule.stream_of[k]) for i in schedule.order for k in schedule.emits[i]}


def needs(dag: Dag, schedule: StreamSchedule) -> dict[Part, set[Part]]:
    """The parts that must have ended before a part starts, for the sake of one edge or another."""
    streams = schedule.streams
    needed: dict[Part, set[Part]] = {(i, s): set() for i in schedule.order for s in streams[i]}
    for a, b in dag.edges:
        within = set(streams[b]) <= set(streams[a])
        for s in streams[b]:
            needed[b, s] |= {(a, s)} if within else {(a, t) for t in streams[a]}
    return needed


class Replay:
    """One run. ``choose`` picks which of the things that can happen next does."""

    def __init__(self, dag: Dag, schedule: StreamSchedule, choose: Callable[[int], int]) -> None:
        self.schedule = schedule
        self.choose = choose
        self.programs = programs(schedule)
        self.needs = needs(dag, schedule)
        self.at = [0] * schedule.n_streams
        self.running: set[int] = set()
        self.emitted: set[int] = set()
        self.ended: set[Part] = set()
        self.begun = self.over = False

    def run(self) -> None:
        while not self.over:
            possible = list(self.possible())
            assert possible, f"deadlock after {sorted(self.ended)}"
            possible[self.choose(len(possible))]()
        assert len(self.ended) == len(self.needs), "the run is over, but something is not"

    def possible(self) -> Iterator[Callable[[], None]]:
        if not self.begun:
            yield self.begin
        for s in range(self.schedule.n_streams):
            if s in self.running:
                yield lambda s=s: self.end(s)
            elif self.can_start(s):
                yield lambda s=s: self.start(s)
        first_is_through = not self.programs or self.at[0] == len(self.programs[0])
        if self.begun and first_is_through and self.emitted >= set(self.schedule.end):
            yield self.finish

    def can_start(self, s: int) -> bool:
        if self.at[s] == len(self.programs[s]):
            return False
        held = not self.begun and (s == 0 or s in self.schedule.begin)
        return not held and self.emitted >= set(self.schedule.waits[self.programs[s][self.at[s]]])

    def begin(self) -> None:
        self.begun = True

    def finish(self) -> None:
        self.over = True

    def start(self, s: int) -> None:
        part = (self.programs[s][self.at[s]], s)
        assert self.begun, f"{part} starts before the run has begun"
        missing = self.needs[part] - self.ended
        assert not missing, f"{part} starts before {sorted(missing)} have ended"
        self.running.add(s)

    def end(self, s: int) -> None:
        i = self.programs[s][self.at[s]]
        self.running.discard(s)
        self.at[s] += 1
        self.ended.add((i, s))
        self.emitted |= {k for k in self.schedule.emits[i] if self.schedule.stream_of[k] == s}


def certain(schedule: StreamSchedule) -> set[tuple[Hashable, Hashable]]:
    """All pairs of parts of which the first has ended before the second starts, in every run.

    The begin of the run counts as a part, and so does its end.
    """
    after: dict[Hashable, set[Hashable]] = {BEGIN: set(), END: set()}
    after.update({(i, s): set() for i in schedule.order for s in schedule.streams[i]})
    from_part = emitters(schedule)
    for s, program in enumerate(programs(schedule)):
        for i, j in pairwise(program):
            after[i, s].add((j, s))
        if s == 0 or s in schedule.begin:
            after[BEGIN].add((program[0], s))
        if s == 0:
            after[program[-1], s].add(END)
    for i in schedule.order:
        for k in schedule.waits[i]:
            after[from_part[k]] |= {(i, s) for s in schedule.streams[i]} - {from_part[k]}
    for k in schedule.end:
        after[from_part[k]].add(END)
    pairs = set()
    for first in after:
        reached, found = set(), [first]
        while found:
            for following in after[found.pop()] - reached:
                reached.add(following)
                found.append(following)
        pairs |= {(first, following) for following in reached}
    return pairs


def with_less(schedule: StreamSchedule) -> Iterator[StreamSchedule]:
    """The same with one wait left out, for each there is: of nodes, in the end, at the beginning."""

    def shorter(entries: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for k in range(len(entries)):
            yield (*entries[:k], *entries[k + 1 :])

    for i, own in enumerate(schedule.waits):
        for fewer in shorter(own):
            yield replace(schedule, waits=(*schedule.waits[:i], fewer, *schedule.waits[i + 1 :]))
    for fewer in shorter(schedule.end):
        yield replace(schedule, end=fewer)
    for fewer in shorter(schedule.begin):
        yield replace(schedule, begin=fewer)
