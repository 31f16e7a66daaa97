"""Runs a schedule of streams with any timing, and tells what is certain whatever the timing is.

Written from what ``StreamSchedule`` says about itself, and independent of how it comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from penstock.algorithms.dag import Dag
from penstock.algorithms.stream_assignment import StreamSchedule

BEGIN, END = "begin", "end"


class Replay:
    """One run. ``choose`` picks which of the things that can happen next does."""

    def __init__(self, dag: Dag, schedule: StreamSchedule, choose: Callable[[int], int]) -> None:
        self.schedule = schedule
        self.choose = choose
        self.dag = dag
        self.programs = schedule.programs
        self.at = [0] * schedule.n_streams
        self.running: set[int] = set()
        self.emitted: set[int] = set()
        self.ended: set[int] = set()
        self.begun = self.over = False

    def run(self) -> None:
        while not self.over:
            possible = list(self.possible())
            assert possible, f"deadlock after {sorted(self.ended)}"
            possible[self.choose(len(possible))]()
        assert len(self.ended) == self.dag.n, "the run is over, but something is not"

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
        i = self.programs[s][self.at[s]]
        assert self.begun, f"{i} starts before the run has begun"
        missing = set(self.dag.pred[i]) - self.ended
        assert not missing, f"{i} starts before {sorted(missing)} have ended"
        self.running.add(s)

    def end(self, s: int) -> None:
        i = self.programs[s][self.at[s]]
        self.running.discard(s)
        self.at[s] += 1
        self.ended.add(i)
        self.emitted |= set(self.schedule.emits[i])


def certain(schedule: StreamSchedule) -> set[tuple[Hashable, Hashable]]:
    """All pairs of nodes of which the first has ended before the second starts, in every run.

    The begin of the run counts as a node, and so does its end.
    """
    after: dict[Hashable, set[Hashable]] = {BEGIN: set(), END: set()}
    after.update({i: set() for i in schedule.order})
    emitter = {k: i for i in schedule.order for k in schedule.emits[i]}
    for s, program in enumerate(schedule.programs):
        for i, j in pairwise(program):
            after[i].add(j)
        if s == 0 or s in schedule.begin:
            after[BEGIN].add(program[0])
        if s == 0:
            after[program[-1]].add(END)
    for i in schedule.order:
        for k in schedule.waits[i]:
            after[emitter[k]].add(i)
    for k in schedule.end:
        after[emitter[k]].add(END)
    pairs = set()
    for first in after:
        reached, unvisited = set(), [first]
        while unvisited:
            for following in after[unvisited.pop()] - reached:
                reached.add(following)
                unvisited.append(following)
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
