"""Plans as text: steps in their order, and the memory of each value.

A line has the number of a step, its outputs with their memory and types, its operation, its inputs
with their memory, its backend and its origin; ``@`` is an offset in the arena::

    1 a @0 float32[8] = Conv+Relu(x <input>, w <constant>) on native  # Conv_0 in model.onnx
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.algorithms.arena import MEMORY_PLANNERS
from penstock.ir.describe import format_bytes
from penstock.ops.internal.fused import operation_name
from penstock.ops.internal.transfer import is_transfer
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.plan import Plan, SlotKind, Step, StepTable
from penstock.plan.tasks import Tasks


def format_plan(
    plan: StepTable,
    arena_plan: ArenaPlan | None,
    tasks: Tasks | None = None,
    sequences: Mapping[str, Sequence[Step]] | None = None,
    about: str = "",
    reason: Callable[[Step], object] | None = None,
) -> str:
    """A plan with a line for each step; offsets are in bytes from the start of the arena. With
    ``tasks``, steps are listed under their tasks, the most urgent first. Without an ``arena_plan``,
    neither an order nor memory is planned; with one, the arenas of all planners are compared. Steps
    of ``sequences`` that one call runs have their name behind their origin. ``about`` is a line on
    what it runs with; ``reason`` why a step runs on its backend."""
    memory = "no order and no arena planned"
    if arena_plan is not None:
        views = plan.views if isinstance(plan, Plan) else 0
        planner = f"planner {arena_plan.planner}, " if arena_plan.planner else ""
        memory = (
            f"{views} free views, arena {format_bytes(arena_plan.size)} "
            f"({planner}lower bound {format_bytes(arena_plan.lower_bound)}{_others(arena_plan)})"
        )
        for name, size in arena_plan.remote.items():
            memory += f", arena {format_bytes(size)} in memory {name!r}"
    lines = [
        f"plan {plan.name!r}: {sum(1 for _ in plan.walk())} steps, {memory}, "
        f"constants {format_bytes(plan.constant_bytes)}"
    ]
    lines += [about] if about else []
    for title, slots in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        text = ", ".join(f"{plan.slots[i].name}: {plan.slots[i].type}" for i in slots)
        lines.append(f"{title} ({text})")
    formatter = _Formatter(plan, arena_plan, sequences or {}, reason)
    if tasks is None:
        order = range(len(plan.steps)) if arena_plan is None else arena_plan.order
        lines.extend(formatter.steps([plan.steps[i] for i in order], 0))
    else:
        lines.extend(formatter.tasks(tasks, 0, 0))
    return "\n".join(lines) + "\n"


def _others(arena_plan: ArenaPlan) -> str:
    """The arenas that other planners make of the same plan."""
    if arena_plan.by is None:
        return ""
    others = [name for name in MEMORY_PLANNERS if name != arena_plan.planner]
    sizes = [f"{name} {format_bytes(arena_plan.by(name).size)}" for name in others]
    return f"; {', '.join(sizes)}"


class _Formatter:
    def __init__(
        self,
        plan: StepTable,
        arena_plan: ArenaPlan | None,
        sequences: Mapping[str, Sequence[Step]],
        reason: Callable[[Step], object] | None,
    ) -> None:
        self.plan = plan
        self.reason = reason
        self.sequence_of = {step: name for name, steps in sequences.items() for step in steps}
        self.offsets = {} if arena_plan is None else arena_plan.offsets
        self.number = 0

    def steps(self, steps: Sequence[Step], depth: int) -> Iterator[str]:
        for step in steps:
            yield self.step(step, depth)
            for name, block in zip(block_names(step), step.blocks, strict=False):
                yield f"{'  ' * depth}     {name}:"
                yield from self.steps(block.steps, depth + 1)

    def tasks(self, tasks: Tasks, block: int, depth: int) -> Iterator[str]:
        before: dict[int, list[int]] = {}
        for number in tasks.blocks[block]:
            for after in tasks.consumers[number]:
                before.setdefault(after, []).append(number)
        for number in tasks.blocks[block]:
            task = tasks.tasks[number]
            queue = f", queue {task.queue}" if task.queue else ""
            names = ", ".join(f"t{t}" for t in before.get(number, ()))
            waits = f" after {names}" if names else ""
            yield f"{'  ' * depth}task t{number}{waits} (about {task.seconds * 1e6:.1f} us{queue})"
            for step in task.steps:
                yield from self.signals("waits for", tasks.signals.waits, step, depth)
                if step not in tasks.expanded:
                    yield from self.steps((step,), depth)
                else:
                    yield self.step(step, depth)
                    for name, inner in zip(block_names(step), tasks.expanded[step], strict=True):
                        yield f"{'  ' * depth}     {name}:"
                        yield from self.tasks(tasks, inner, depth + 1)
                yield from self.signals("emits", tasks.signals.emits, step, depth)

    def signals(
        self, verb: str, of: Mapping[Step, Sequence[int]], step: Step, depth: int
    ) -> Iterator[str]:
        if numbers := of.get(step):
            yield f"{'  ' * depth}     {verb} signal {', '.join(map(str, numbers))}"

    def step(self, step: Step, depth: int) -> str:
        self.number += 1
        outputs = ", ".join(self.slot(i, typed=True) for i in step.outputs)
        inputs = ", ".join(self.slot(i, typed=False) for i in step.inputs)
        call = f"{operation_name(step.node)}({inputs})"
        if step.workspace >= 0:
            workspace = self.plan.slots[step.workspace].type
            call += f" workspace {self.where(step.workspace)} {workspace}"
        origin = step.node.origin or step.node.name
        if step in self.sequence_of:
            origin += f" ({self.sequence_of[step]})"
        on = f" on {_place(step)}" if step.backend else ""
        text = f"{'  ' * depth}{self.number:>4} {outputs} = {call}{on}  # {origin}"
        if self.reason is None:
            return text
        return f"{text}\n{'  ' * depth}     # {self.reason(step)}"

    def slot(self, index: int, *, typed: bool) -> str:
        if index < 0:
            return "_"
        slot = self.plan.slots[index]
        return f"{slot.name} {self.where(index)}{f' {slot.type}' if typed else ''}"

    def where(self, index: int) -> str:
        """The memory of a slot: ``@offset`` in the arena, constant, or dynamic."""
        slot = self.plan.slots[index]
        if slot.kind is SlotKind.ARENA:
            return f"@{self.offsets[index]}"
        if slot.kind is SlotKind.ALIAS:
            return f"@{self.offsets[slot.base] + slot.offset}"
        return f"<{slot.kind.value}>"


def _place(step: Step) -> str:
    """The backend of a step; for a transfer, those that it copies between."""
    attrs = step.node.attrs
    return f"{attrs['source']} to {attrs['target']}" if is_transfer(step.node) else step.backend


def block_names(step: Step) -> Sequence[str]:
    """The names of a step's blocks, in the order of the step (which need not be the file's)."""
    return ("body",) if len(step.blocks) == 1 else ("then_branch", "else_branch")
