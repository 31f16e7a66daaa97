"""Random changes of schedules: of the steps and slots of a plan, their places in the arena, and the
tasks and signals that order them. All is drawn from the generator that is passed in.

Here the checker of plans (``penstock.plan.check``) stands alone, while what a file says is read by
code that refuses most changes before a plan is made of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.compiler.stages import Scheduled
from penstock.core.records import replace
from penstock.core.types import TensorType, dtypes
from penstock.plan.plan import Block, Carry, Slot, SlotKind, Step, walk
from penstock.plan.tasks import Signals, Tasks

_OFFSETS = [-128, -64, 64, 128, 4]


@dataclass
class Draft:
    """A schedule in pieces that are to be changed: ``steps`` has the steps that take the place of
    others, at any depth."""

    schedule: Scheduled
    draw: random.Random
    slots: list[Slot] = field(default_factory=list)
    steps: dict[Step, Step] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    arena: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = list(self.schedule.plan.slots)

    def place(self) -> int:
        """A slot."""
        return self.draw.randrange(len(self.slots))

    def others(self, places: tuple[int, ...]) -> tuple[int, ...]:
        """Slots of which one is another, absent, left out or repeated."""
        changed, draw = list(places), self.draw
        if not changed or draw.random() < 0.1:
            changed.insert(draw.randrange(len(changed) + 1), self.place())
        elif draw.random() < 0.1:
            changed.pop(draw.randrange(len(changed)))
        else:
            near = draw.choice(changed)
            changed[draw.randrange(len(changed))] = draw.choice(
                [self.place(), near, self.alike(near)]
            )
        return tuple(changed)

    def alike(self, place: int) -> int:
        """Another slot of the type of this one, if there is one; -1 or one that there is not."""
        type_ = self.slots[place % len(self.slots)].type
        same = [i for i, slot in enumerate(self.slots) if slot.type == type_]
        return self.draw.choice([*same * 8, -1, len(self.slots)])

    def result(self) -> Scheduled:
        schedule = self.schedule
        memo: dict[Step, Step] = {}

        def moved(step: Step) -> Step:
            if step not in memo:
                now = self.steps.get(step, step)
                blocks = tuple(
                    [replace(b, steps=tuple([moved(s) for s in b.steps])) for b in now.blocks]
                )
                memo[step] = replace(now, blocks=blocks) if now is not step or blocks else step
            return memo[step]

        steps = tuple([moved(step) for step in schedule.plan.steps])
        plan = replace(schedule.plan, steps=steps, slots=tuple(self.slots), **self.plan)
        tasks = schedule.tasks
        if tasks is not None:
            tasks = replace(tasks, **self.tasks)
            tasks = _with_steps(tasks, lambda step: memo.get(step, step))
        return replace(
            schedule, plan=plan, tasks=tasks, arena_plan=replace(schedule.arena_plan, **self.arena)
        )


def _with_steps(tasks: Tasks, moved: Callable[[Step], Step]) -> Tasks:
    def keys(of: Mapping[Step, Any]) -> dict[Step, Any]:
        return {moved(step): x for step, x in of.items()}

    signals = replace(
        tasks.signals, waits=keys(tasks.signals.waits), emits=keys(tasks.signals.emits)
    )
    return replace(
        tasks,
        tasks=tuple([replace(t, steps=tuple(map(moved, t.steps))) for t in tasks.tasks]),
        expanded=keys(tasks.expanded),
        signals=signals,
    )


def changed_schedule(schedule: Scheduled, draw: random.Random) -> tuple[Scheduled, bool]:
    """A schedule with one or two changes of order and places, or of steps and slots; and whether
    its answers must stay if it passes the check: which part of a value a view shows is known to
    kernels alone."""
    draft = Draft(schedule, draw)
    of_order = draw.random() < 0.5
    changes = [_change_offset] * 3 + [_change_order]
    changes += [_change_tasks] * 4 if schedule.tasks is not None else []
    others = [_change_slot, _change_step, _change_step, _change_control, _change_ports]
    for _ in range(draw.choice([1, 1, 2])):
        draw.choice(changes if of_order else others)(draft, draw)
    before, now = schedule.plan.slots, draft.slots
    views = [i for i, slot in enumerate(now) if slot.kind is SlotKind.ALIAS]
    same = all(now[i] is before[i] for i in views)
    same &= all(now[before[i].base].strides == before[before[i].base].strides for i in views)
    return draft.result(), same


def _change_offset(draft: Draft, draw: random.Random) -> None:
    arena = draft.schedule.arena_plan
    if not arena.offsets:
        return
    offsets = draft.arena.setdefault("offsets", dict(arena.offsets))
    i, j = draw.choice(sorted(offsets)), draw.choice(sorted(offsets))
    chance = draw.random()
    if chance < 0.05:
        draft.arena["size"] = arena.size + draw.choice(_OFFSETS)
    elif chance < 0.1:
        offsets[draft.place()] = offsets.pop(i)
    else:
        near = offsets[i] + draw.choice(_OFFSETS)
        offsets[i] = draw.choice([offsets[j], offsets[j], near, near, arena.size, 0])


def _change_order(draft: Draft, draw: random.Random) -> None:
    order = list(draft.schedule.arena_plan.order)
    if order:
        step = order.pop(draw.randrange(len(order)))
        order.insert(draw.randrange(len(order) + 1), draw.choice([step] * 9 + [0]))
        draft.arena["order"] = tuple(order)


def _change_slot(draft: Draft, draw: random.Random) -> None:
    place = draft.place()
    slot, other = draft.slots[place], draft.slots[draft.place()]
    type_ = slot.type
    changes: list[dict[str, Any]] = [
        {"type": other.type},
        {"kind": draw.choice(list(SlotKind))},
        {"base": draft.place(), "offset": draw.choice([slot.offset, 0, 4])},
        {"offset": slot.offset + draw.choice([4, -4, 64])},
        {"strides": draw.choice([other.strides, slot.strides[::-1], ()])},
        {"roots": draw.choice([(), slot.roots[1:], (draft.place(),)])},
        {"owned": not slot.owned},
        {"constant": other.constant},
        {"memory": draw.choice(["", "cuda", other.memory])},
    ]
    if isinstance(type_, TensorType) and type_.shape:
        dims = list(type_.shape)
        at = draw.randrange(len(dims))
        dims[at] = draw.choice([1, 0, None, 99, dims[-1]])
        dtype = dtypes()[draw.choice(["float64", "float32", "int8", "int64", "string"])]
        changes += [{"type": TensorType(type_.dtype, tuple(dims))}] * 3
        changes += [{"type": TensorType(dtype, type_.shape)}]
    draft.slots[place] = replace(slot, **draw.choice(changes))


def _change_step(draft: Draft, draw: random.Random) -> None:
    steps = list(draft.schedule.plan.walk())
    if not steps:
        return
    step, other = draw.choice(steps), draw.choice(steps)
    now = draft.steps.get(step, step)
    changes: list[dict[str, Any]] = [
        *[{"inputs": draft.others(now.inputs)}] * 4,
        *[{"outputs": draft.others(now.outputs)}] * 3,
        {"into": not now.into},
        {"workspace": draw.choice([-1, draft.place(), draft.place()])},
        {"copied": draw.choice([(), tuple(range(len(now.inputs))), (99,)])},
        {"node": other.node, "kernel": other.kernel, "into": other.into},
        *[{"blocks": other.blocks, "carries": other.carries}] * (step not in walk((other,))),
        {"inputs": other.inputs, "outputs": other.outputs},
    ]
    draft.steps[step] = replace(now, **draw.choice(changes))


def _change_control(draft: Draft, draw: random.Random) -> None:
    """A block or a carried value of an If or a loop."""
    steps = [step for step in draft.schedule.plan.walk() if step.blocks]
    if not steps:
        return _change_step(draft, draw)
    step = draw.choice(steps)
    now = draft.steps.get(step, step)
    if now.carries and draw.random() < 0.6:
        carries = list(now.carries)
        carries[draw.randrange(len(carries))] = _changed_carry(draft, draw.choice(carries), draw)
        draft.steps[step] = replace(now, carries=tuple(carries))
    elif now.blocks:
        blocks = list(now.blocks)
        at = draw.randrange(len(blocks))
        blocks[at] = _changed_block(draft, blocks[at], draw)
        draft.steps[step] = replace(now, blocks=tuple(blocks))
    return None


def _changed_carry(draft: Draft, carry: Carry, draw: random.Random) -> Carry:
    name = draw.choice(["initial", "inside", "updated", "result"])
    changes: list[dict[str, Any]] = [
        {name: draw.choice([draft.place(), draft.alike(max(getattr(carry, name), 0))])},
        {name: draw.choice([draft.place(), -1])},
        {"direct": not carry.direct},
        {"buffers": None if carry.buffers else (draft.place(), draft.place())},
    ]
    if carry.buffers is not None:
        changes.append(
            {"buffers": draw.choice([carry.buffers[:1] * 2, draft.others(carry.buffers)])}
        )
    return replace(carry, **draw.choice(changes))


def _changed_block(draft: Draft, block: Block, draw: random.Random) -> Block:
    steps = list(block.steps)
    if steps:
        step = steps.pop(draw.randrange(len(steps)))
        steps.insert(draw.randrange(len(steps) + 1), step)
    changes: list[dict[str, Any]] = [
        {"inputs": draft.others(block.inputs)},
        {"outputs": draft.others(block.outputs)},
        {"steps": tuple(steps)},
        {"steps": block.steps[1:]},
    ]
    return replace(block, **draw.choice(changes))


def _change_ports(draft: Draft, draw: random.Random) -> None:
    name = draw.choice(["inputs", "outputs"])
    places = list(getattr(draft.schedule.plan, name))
    if places:
        at = draw.randrange(len(places))
        places[at] = draw.choice([draft.place(), draft.alike(max(places[at], 0))])
        draft.plan[name] = tuple(places)


def _change_tasks(draft: Draft, draw: random.Random) -> None:
    tasks = draft.schedule.tasks
    assert tasks is not None
    if not tasks.tasks:
        return
    t, other = draw.randrange(len(tasks.tasks)), draw.randrange(len(tasks.tasks))
    numbers = tasks.consumers[t]
    changes: list[dict[str, Any]] = [
        {"waits": _with(tasks.waits, t, tasks.waits[t] + draw.choice([-1, 1]))},
        {"consumers": _with(tasks.consumers, t, numbers[1:])},
        {"consumers": _with(tasks.consumers, t, (*numbers, other))},
        {
            "consumers": _with(tasks.consumers, t, numbers[1:]),
            "waits": tuple([n - (k in numbers[:1]) for k, n in enumerate(tasks.waits)]),
        },
        {"releases": _with(tasks.releases, t, tasks.releases[t][1:])},
        {"releases": _with(tasks.releases, t, (*tasks.releases[t], draft.place()))},
        {"counted": _with(tasks.counted, t, tasks.counted[other])},
        {"shared": tasks.shared ^ {draft.place()}},
        {"signals": _changed_signals(tasks.signals, draw)},
    ]
    if tasks.readers:
        slot = draw.choice(sorted(tasks.readers))
        changes.append(
            {"readers": {**tasks.readers, slot: tasks.readers[slot] + draw.choice([-1, 1])}}
        )
    steps = tasks.tasks[t].steps
    shuffled = tuple(draw.sample(steps, len(steps)))
    changes.append({"tasks": _with(tasks.tasks, t, replace(tasks.tasks[t], steps=shuffled))})
    changes.append({"tasks": _with(tasks.tasks, t, tasks.tasks[other])})
    block = draw.randrange(len(tasks.blocks))
    changes.append({"blocks": _with(tasks.blocks, block, tasks.blocks[block][1:])})
    changes.append({"parent": _with(tasks.parent, block, draw.choice([-1, t]))})
    if tasks.expanded:
        step = draw.choice(list(tasks.expanded))
        changes.append({"expanded": {s: b for s, b in tasks.expanded.items() if s is not step}})
        changes.append({"expanded": {**tasks.expanded, step: tasks.expanded[step][::-1]}})
    draft.tasks.update(draw.choice(changes))


def _changed_signals(signals: Signals, draw: random.Random) -> Signals:
    name = draw.choice(["waits", "emits"])
    entries: dict[Step, tuple[int, ...]] = dict(getattr(signals, name))
    if not entries:
        return replace(signals, of_block=tuple([(a, b + 1) for a, b in signals.of_block]))
    step, other = draw.choice(list(entries)), draw.choice(list(entries))
    numbers = draw.choice([(), entries[step][1:], entries[other], (99,)])
    return replace(signals, **{name: {**entries, step: numbers}})


def _with(entries: tuple[Any, ...], at: int, entry: Any) -> tuple[Any, ...]:
    return (*entries[:at], entry, *entries[at + 1 :])
