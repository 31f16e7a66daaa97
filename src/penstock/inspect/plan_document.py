"""Plans as plain data, for machines and for reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from penstock.core.types import JsonObject
from penstock.inspect.explain import block_names
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.plan import SlotKind, Step, StepTable
from penstock.plan.step_facts import step_facts


def plan_document(
    plan: StepTable, arena_plan: ArenaPlan | None, reason: Callable[[Step], Any]
) -> JsonObject:
    """A plan as JSON has it: its name, inputs and outputs, bytes, and its steps in their order,
    those of nested blocks behind the step that carries them, with the number of that step
    (``parent``) and the name of the ``block``. ``memory`` of a value is "arena", "alias",
    "constant" or "dynamic", with its ``offset`` in the arena if it has one. ``reason`` says why a
    step runs on its backend."""
    order = range(len(plan.steps)) if arena_plan is None else arena_plan.order
    offsets = {} if arena_plan is None else arena_plan.offsets
    slots = [_slot(plan, i, offsets) for i in range(len(plan.slots))]
    steps: list[dict[str, Any]] = []
    for step, parent, block in nested_steps([plan.steps[i] for i in order]):
        facts = asdict(step_facts(step))
        why = reason(step)
        facts |= {
            "number": len(steps) + 1,
            "parent": parent,
            "block": block,
            "inputs": [slots[i] for i in step.inputs if i >= 0],
            "outputs": [slots[i] for i in step.outputs if i >= 0],
            "reason": why.text,
            "candidates": [asdict(candidate) for candidate in why.candidates],
        }
        steps.append(facts)
    return {
        "name": plan.name,
        "inputs": [slots[i] for i in plan.inputs],
        "outputs": [slots[i] for i in plan.outputs],
        "arena_bytes": 0 if arena_plan is None else arena_plan.size,
        "arena_lower_bound": 0 if arena_plan is None else arena_plan.lower_bound,
        "memory_planner": None if arena_plan is None else arena_plan.planner,
        "constant_bytes": plan.constant_bytes,
        "steps": steps,
    }


def nested_steps(steps: Sequence[Step]) -> Iterator[tuple[Step, int | None, str | None]]:
    """Each step, with the number of the step that carries it and the name of its block there."""
    number = 0
    stack: list[Iterator[tuple[Step, int | None, str | None]]] = [
        iter([(step, None, None) for step in steps])
    ]
    while stack:
        for step, parent, block in stack[-1]:
            number += 1
            yield step, parent, block
            if step.blocks:
                named = list(zip(block_names(step), step.blocks, strict=False))
                stack.append(
                    iter([(inner, number, name) for name, b in named for inner in b.steps])
                )
                break
        else:
            stack.pop()


def _slot(plan: StepTable, index: int, offsets: Any) -> JsonObject:
    slot = plan.slots[index]
    entry: dict[str, Any] = {"name": slot.name, "type": str(slot.type), "memory": slot.kind.value}
    if slot.kind is SlotKind.ARENA and index in offsets:
        entry["offset"] = offsets[index]
    elif slot.kind is SlotKind.ALIAS and slot.base in offsets:
        entry["offset"] = offsets[slot.base] + slot.offset
    return entry
