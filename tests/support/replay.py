"""Replays a plan on an arena of tags, to see that no value is overwritten before its last reader.

Written from what ``plan.py`` says steps, slots and carried values mean, and independent of how
``plan.arena_layout`` computes lifetimes; this records only which step wrote each byte last.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from penstock.core.types import TensorType
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.plan import Block, Plan, SlotKind, Step


@dataclass(frozen=True)
class Ref:
    """Bytes ``low`` to ``high`` of the arena, as they were written under ``tag``."""

    low: int
    high: int
    tag: int

    def overlaps(self, other: Ref) -> bool:
        return max(self.low, other.low) < min(self.high, other.high)


class OverwrittenError(AssertionError):
    """A step reads memory that another value has taken."""


class Replay:
    """One run of a plan, with branches and numbers of iterations drawn at random.

    ``values`` has where each slot's value is now; ``None`` for memory outside of the arena.
    """

    def __init__(self, plan: Plan, arena_plan: ArenaPlan, seed: int) -> None:
        self.plan = plan
        self.arena_plan = arena_plan
        self.random = random.Random(seed)
        self.tags = np.zeros(arena_plan.size, np.int64)
        self.values: dict[int, Ref | None] = {}
        self.tag = 0
        # The buffer that a step may write directly, by the slot that it produces.
        self.free: dict[int, int] = {}

    def run(self) -> None:
        for i in self.plan.inputs:
            self.values[i] = None
        for i in self.arena_plan.order:
            self.step(self.plan.steps[i])
        for i in self.plan.outputs:
            self.read(i)

    # Memory.

    def place(self, index: int) -> tuple[int, int]:
        """The bytes that a planned slot may touch."""
        slot = self.plan.slots[index]
        assert isinstance(slot.type, TensorType)
        if slot.kind is SlotKind.ARENA:
            start = self.arena_plan.offsets[index]
            assert start % 64 == 0
            return start, start + slot.type.nbytes
        start = self.arena_plan.offsets[slot.base] + slot.offset
        if not slot.type.nbytes:
            return start, start
        reach = [(d - 1) * s for d, s in zip(slot.type.dims, slot.strides, strict=True)]
        low = start + sum(min(0, r) for r in reach)
        high = start + sum(max(0, r) for r in reach) + slot.type.dtype.itemsize
        base, end = self.place(slot.base)
        assert base <= low <= high <= end, (slot, base, end)
        return low, high

    def read(self, index: int) -> Ref | None:
        slot = self.plan.slots[index]
        if slot.kind is SlotKind.CONSTANT:
            return None
        if slot.kind is SlotKind.ALIAS:
            base = self.values[slot.base]
            assert base is not None
            ref: Ref | None = Ref(*self.place(index), base.tag)
        else:
            ref = self.values[index]
        self.check(slot.name, ref)
        return ref

    def check(self, name: str, ref: Ref | None) -> None:
        if ref is not None and not (self.tags[ref.low : ref.high] == ref.tag).all():
            raise OverwrittenError(f"{name} is read after its memory was taken by another value")

    def write(self, index: int) -> Ref:
        self.tag += 1
        ref = Ref(*self.place(index), self.tag)
        assert ref.high <= len(self.tags)
        self.tags[ref.low : ref.high] = self.tag
        return ref

    # Steps.

    def step(self, step: Step) -> None:
        if step.node.op.name == "If":
            self.branches(step)
        elif step.control:
            self.loop(step)
        else:
            self.kernel(step)

    def kernel(self, step: Step) -> None:
        kernel = step.kernel
        assert kernel is not None
        inputs = [None if i < 0 else self.read(i) for i in step.inputs]
        if not step.into:
            for i in step.outputs:
                if i >= 0:
                    assert self.plan.slots[i].kind is SlotKind.DYNAMIC
                    self.values[i] = inputs[0] if kernel.view else None
            return
        written: list[Ref] = []
        if step.workspace >= 0:
            written.append(self.exclusive(step.workspace, step, inputs, written, -1))
        for position, i in enumerate(step.outputs):
            if i >= 0 and self.plan.slots[i].owned:
                self.values[i] = None
            elif i >= 0:
                ref = self.exclusive(self.free.get(i, i), step, inputs, written, position)
                self.values[i] = ref
                written.append(ref)

    def exclusive(
        self, index: int, step: Step, inputs: list[Ref | None], written: list[Ref], position: int
    ) -> Ref:
        """Write a slot that shares memory with no input but one it may take over."""
        ref = self.write(index)
        assert not any(ref.overlaps(other) for other in written)
        shared = [i for i, r in enumerate(inputs) if r is not None and ref.overlaps(r)]
        assert step.kernel is not None
        if shared:
            slots = {step.inputs[i] for i in shared}
            assert position == 0 and len(slots) == 1, "two inputs in the memory of the output"
            assert set(shared) & set(step.kernel.inplace)
            (taken,) = slots
            before, after = self.plan.slots[taken].type, self.plan.slots[index].type
            assert before.without_data() == after.without_data()
            read = inputs[shared[0]]
            assert read is not None and (read.low, read.high) == (ref.low, ref.high)
        return ref

    def block(self, block: Block) -> None:
        for step in block.steps:
            self.step(step)

    def branches(self, step: Step) -> None:
        self.read(step.inputs[0])
        block = self.random.choice(step.blocks)
        self.block(block)
        for result, value in zip(step.outputs, block.outputs, strict=True):
            if result >= 0:
                ref = self.read(value)
                self.values[result] = None if self.plan.slots[result].owned else ref

    def loop(self, step: Step) -> None:
        (block,) = step.blocks
        for i in step.inputs:
            if i >= 0:
                self.read(i)
        buffers = {c: list(c.buffers) for c in step.carries if c.buffers is not None}
        inside = {c: None if c.initial < 0 else self.read(c.initial) for c in step.carries}
        before = {c.inside for c in step.carries}
        for i in block.inputs:
            # What is scanned is a view of an input; all of it is read each time.
            if i not in before:
                self.values[i] = None
        looped = step.node.op.name == "Loop"
        trips = self.random.randrange(4)
        for _ in range(trips):
            for carry, ref in inside.items():
                self.values[carry.inside] = ref
            for carry, pair in buffers.items():
                if carry.direct:
                    self.free[carry.updated] = pair[0]
            if not looped:
                entered = zip(step.inputs, block.inputs, strict=True)
                for source, entering in list(entered)[len(step.carries) :]:
                    self.values[entering] = self.read(source)
            self.block(block)
            for i in block.outputs[looped + len(step.carries) :]:
                self.read(i)
            for carry in step.carries:
                if carry.updated == carry.inside:
                    continue
                updated = self.read(carry.updated)
                if carry in buffers:
                    pair = buffers[carry]
                    inside[carry] = updated if carry.direct else self.write(pair[0])
                    pair.reverse()
                else:
                    inside[carry] = None  # in memory of its own, by now
            if looped:
                self.read(block.outputs[0])
        for carry, ref in inside.items():
            self.check(self.plan.slots[carry.inside].name, ref)
            if carry.result >= 0:
                copied = not trips and carry in buffers
                self.values[carry.result] = self.write(buffers[carry][0]) if copied else ref
        for i in step.outputs[len(step.carries) :]:
            if i >= 0:
                self.values[i] = None


def replay(plan: Plan, arena_plan: ArenaPlan, seeds: int = 4) -> None:
    """Raise ``OverwrittenError`` or ``AssertionError`` where the arena_plan lets values get in each other's
    way, in one of several runs."""
    for seed in range(seeds):
        Replay(plan, arena_plan, seed).run()
