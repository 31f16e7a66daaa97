"""Checks that the order of a plan's tasks is safe, for ``plan.check``."""

# tests: tests/plan/test_check.py tests/plan/test_check_tasks.py

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.plan.check_places import SlotPlaces, require
from penstock.plan.plan import Plan, SlotKind, Step

if TYPE_CHECKING:
    from penstock.plan.tasks import Tasks

_ALIAS, _DYNAMIC = SlotKind.ALIAS, SlotKind.DYNAMIC
_Touched: TypeAlias = "dict[int, list[tuple[Step, bool]]]"
"""the steps that access each slot, and whether they write it"""
_Writers: TypeAlias = "dict[int, Step]"
"""the first step that writes each slot"""


def check_tasks(plan: Plan, places: SlotPlaces, tasks: Tasks, order: TaskOrder) -> None:
    """Check that accesses to shared values have an order that is certain before the run, and that
    values are released after their last reader."""
    touched: _Touched = {}
    writers: _Writers = {}
    for task in with_checkpoints(tasks.tasks):
        for step in task.steps:
            for i, writes in _accesses(step, inside=step not in tasks.expanded):
                if i < 0:
                    continue
                if writes:
                    writers.setdefault(i, step)
                slot = plan.slots[i]
                roots = (slot.base,) if slot.kind is _ALIAS else (i, *slot.roots)
                for root in roots:
                    touched.setdefault(root, []).append((step, writes))
    if plan.remote or tasks.signals.devices:
        return  # device streams order their own work
    _check_releases(plan, tasks, order)
    for i, accesses in with_checkpoints(touched.items()):
        writer = writers.get(i)
        for step, _ in accesses if writer is not None else ():
            sure = step is writer or order.precedes(writer, step)  # type: ignore[arg-type]
            require(sure, "{} may run before {} is written", step, plan.slots[i])
    _check_memory(plan, places, order, touched, writers)


def _check_memory(
    plan: Plan, places: SlotPlaces, order: TaskOrder, touched: _Touched, writers: _Writers
) -> None:
    """Check that of two slots that share memory, one is used no more when the other is written."""
    among = [i for i in places.end if i in touched and i in writers]
    text, slots = "{} and {} share arena memory, but their tasks are not ordered", plan.slots
    # Arenas are reused hundreds of times in deep plans: most pairs are of slots that only steps of
    # the outermost block access, and are checked by many at once.
    outer = [i for i in among if all(len(order.path[step]) == 1 for step, _ in touched[i])]
    for a, b in order.unordered(outer, places, touched, writers):
        require(False, text, slots[a], slots[b])
    writes = Counter(writers[i] for i in outer)
    rest = among if len(outer) < len(among) else [i for i in outer if writes[writers[i]] > 1]
    among, known = sorted(rest, key=places.begin.__getitem__), {*outer}
    for number, a in enumerate(with_checkpoints(among)):
        # They are sorted by their begin: no later slot overlaps this one.
        for b in among[number + 1 :]:
            if places.begin[b] >= places.end[a]:
                break
            if a in known and b in known and writers[a] is not writers[b]:
                continue
            if places.overlaps(a, b):
                apart = order.all_before(touched[a], writers[b]) or order.all_before(
                    touched[b], writers[a]
                )
                require(apart, text, slots[a], slots[b])


def _check_releases(plan: Plan, tasks: Tasks, order: TaskOrder) -> None:
    """Check that shared values are in ``V``, and are released after all tasks have used them."""
    touching: dict[int, dict[Step, int]] = {}
    for t, task in enumerate(with_checkpoints(tasks.tasks)):
        for step in task.steps:
            for i, _ in _accesses(step, inside=step not in tasks.expanded):
                if i >= 0 and plan.slots[i].kind is _DYNAMIC:
                    touching.setdefault(i, {})[step] = t
    shared = {i for i, steps in touching.items() if len({*steps.values()}) > 1}
    ends = {i for i in (*plan.inputs, *plan.outputs) if plan.slots[i].kind is _DYNAMIC}
    require(tasks.shared == shared | ends, "tasks use other shared slots than declared")
    kept = {0: plan.outputs}  # by block
    for step, numbers in tasks.expanded.items():
        kept |= {b: block.outputs for b, block in zip(numbers, step.blocks, strict=True)}
    until: dict[int, list[int]] = {}
    for t in range(len(tasks.tasks)):
        for i in (*tasks.releases[t], *tasks.counted[t]):
            until.setdefault(i, []).append(t)
    for i, last in with_checkpoints(until.items()):
        fits = len(last) == tasks.readers.get(i, 1) and i in shared
        fits = fits and not any(i in kept[tasks.tasks[t].block] for t in last)
        require(
            fits and (i in tasks.readers) is (len(last) > 1), "{} is not released exactly once", i
        )
        ends_of = [tasks.tasks[t].steps[-1] for t in last]
        for step in touching.get(i, ()):
            in_time = any(order.precedes(step, end) for end in ends_of)
            require(in_time, "{} is released before its reader {} has run", i, step)


def _accesses(step: Step, *, inside: bool) -> Iterator[tuple[int, bool]]:
    """The slots that a step accesses, and whether it writes them."""
    yield from ((i, False) for i in step.inputs)
    yield from ((i, True) for i in (*step.outputs, step.workspace))
    for carry in step.carries:
        yield from ((i, True) for i in (*(carry.buffers or ()), carry.inside))
        yield from ((i, False) for i in (carry.initial, carry.updated))
    for block in step.blocks:
        yield from ((i, True) for i in block.inputs)
        yield from ((i, False) for i in block.outputs)
        for inner in block.steps if inside else ():
            yield from _accesses(inner, inside=True)


def _check_numbers(tasks: Tasks) -> None:
    """Check the indices by which tasks refer to each other."""
    listed = [t for members in tasks.blocks for t in members]
    require(sorted(listed) == [*range(len(tasks.tasks))], "a task is not in exactly one block")
    for number, members in enumerate(tasks.blocks):
        own = all(tasks.tasks[t].block == number for t in members)
        require(own, "block {} lists tasks of other blocks", number)
    waits, parent = [0] * len(tasks.tasks), [-1] * len(tasks.blocks)
    for task, consumers in with_checkpoints(zip(tasks.tasks, tasks.consumers, strict=True)):
        for c in consumers:
            waits[c] += 1
            require(tasks.tasks[c].block == task.block, "a task waits for a task of another block")
    for t, task in enumerate(with_checkpoints(tasks.tasks)):
        inner = [b for step in task.steps for b in tasks.expanded.get(step, ())]
        require(inner == [*task.blocks], "task {} lists blocks that do not belong to its steps", t)
        for b in inner:
            parent[b] = t
    require(waits == [*tasks.waits], "the wait counts of tasks differ from their producers")
    require(parent == [*tasks.parent], "a block names a parent task that does not run it")
    emitted = [s for emits in tasks.signals.emits.values() for s in emits]
    require(len({*emitted}) == len(emitted), "a signal is emitted by two steps")
    for step, waited in tasks.signals.waits.items():
        require({*waited} <= {*emitted}, "{} waits for a signal that no step emits", step)
    require(all(0 <= s < tasks.signals.count for s in emitted), "a signal has no valid number")


class TaskOrder:
    """The certain order of steps: by their tasks, by the waits between tasks, and by signals.
    Raises ``UnsoundPlanError`` if steps wait for each other in a cycle."""

    def __init__(self, tasks: Tasks) -> None:
        self.expanded = tasks.expanded
        self.sorted: list[list[Step]] = []
        """the steps of each block in topological order"""
        self.path: dict[Step, tuple[Step, ...]] = {}
        self.block: dict[Step, int] = {}
        self.after: dict[Step, int] = {}
        self.number: dict[Step, int] = {}
        _check_numbers(tasks)
        around: dict[int, Step] = {b: step for step, of in tasks.expanded.items() for b in of}
        for number, members in enumerate(tasks.blocks):
            outer = around.get(number)
            above = () if outer is None else self.path[outer]
            for t in members:
                for step in tasks.tasks[t].steps:
                    self.path[step], self.block[step] = (*above, step), number
            self._reach([tasks.tasks[t].steps for t in members], members, tasks)

    def _reach(self, lanes: Sequence[Sequence[Step]], members: Sequence[int], tasks: Tasks) -> None:
        """Find the successors of each step of a block, as bits of an integer."""
        steps = [step for lane in lanes for step in lane]
        self.number.update((step, i) for i, step in enumerate(steps))
        following: dict[Step, list[Step]] = {step: [] for step in steps}
        for t, lane in zip(members, lanes, strict=True):
            for a, b in pairwise(lane):
                following[a].append(b)
            for c in tasks.consumers[t]:
                following[lane[-1]].append(tasks.tasks[c].steps[0])
        emitted = {s: step for step in steps for s in tasks.signals.emits.get(step, ())}
        for step in steps:
            for s in tasks.signals.waits.get(step, ()):
                require(s in emitted, "{} waits for a signal that no step emits", step)
                following[emitted[s]].append(step)
        waits = dict.fromkeys(steps, 0)
        for afters in following.values():
            for step in afters:
                waits[step] += 1
        ready: list[Step] = [step for step in steps if not waits[step]]
        ran: list[Step] = []
        while ready:
            ran.append(ready.pop())
            for step in following[ran[-1]]:
                waits[step] -= 1
                ready += [] if waits[step] else [step]
        require(len(ran) == len(steps), "the waits between steps form a cycle")
        self.sorted.append(ran)
        # In reverse, so that the successors of a step are complete when it is reached.
        for step in reversed(ran):
            bits = 0
            for after in following[step]:
                bits |= self.after[after] | 1 << self.number[after]
            self.after[step] = bits

    def precedes(self, a: Step, b: Step) -> bool:
        """Whether ``a`` certainly ends before ``b`` begins, or at most one of them runs."""
        for x, y in zip(self.path[a], self.path[b], strict=False):
            if x is not y:
                if self.block[x] != self.block[y]:
                    return True
                return bool(self.after[x] >> self.number[y] & 1)
        return True  # one is nested in the other, which orders its own blocks

    def all_before(self, accesses: Iterable[tuple[Step, bool]], writer: Step) -> bool:
        return all(step is writer or self.precedes(step, writer) for step, _ in accesses)

    def unordered(
        self, slots: Sequence[int], places: SlotPlaces, touched: _Touched, writers: _Writers
    ) -> Iterator[tuple[int, int]]:
        """Pairs of ``slots`` with writers of their own that share memory without an order. All of
        their accesses are by steps of the outermost block."""
        steps = self.sorted[0]
        position = {step: i for i, step in enumerate(steps)}
        written = np.array([position[writers[i]] for i in slots])
        number = np.array([self.number[writers[i]] for i in slots])
        # Indices of addresses, which in a damaged file may be of more than 64 bits.
        marks = sorted({places.begin[i] for i in slots} | {places.end[i] for i in slots})
        index = {mark: i for i, mark in enumerate(marks)}
        begin = np.array([index[places.begin[i]] for i in slots])
        end = np.array([index[places.end[i]] for i in slots])
        for k, i in enumerate(with_checkpoints(slots)):
            # A slot that is written later cannot be used before one that is written earlier.
            later = (begin < end[k]) & (end > begin[k]) & (written > written[k])
            if not later.any():
                continue
            after = -1
            for step, _ in touched[i]:
                after &= self.after[step] | 1 << self.number[step]
            bits = np.frombuffer(after.to_bytes(len(steps) // 8 + 1, "little"), np.uint8)
            ordered = np.unpackbits(bits, bitorder="little")[number] == 1
            yield from [(i, slots[b]) for b in np.flatnonzero(later & ~ordered).tolist()]
