"""Capture of consecutive device steps into a graph, which a single launch replays.

Consecutive steps on one device, with static shapes and no host operands, become a separate
function, ``body_0``. The program calls the wrapper that the backend creates for it
(``Backend.captured``), which at first calls the function and later replays its graph::

    v1 = transfer_0(v0)                     a loop's body and a branch have graphs of their own:
    (v9,) = graph_0(v1)                     between them the host decides
    v10 = transfer_8(v9)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from penstock.codegen.names import runtime_slots
from penstock.codegen.steps import SourceText, StepWriter
from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import TensorType
from penstock.ops.internal.transfer import is_transfer
from penstock.ops.work_estimate import flops
from penstock.plan.plan import Plan, SlotKind, Step

_FEWEST = 2
"""least number of kernels for which a graph launch pays off"""


class CapturedSteps:
    """Steps that are captured together. ``inputs`` and ``outputs`` are slots known only at run
    time; ``fresh`` says for each output whether it needs new memory, as it may be read after the
    next launch. ``state`` and ``reason`` are the outcome of the capture, in any arena."""

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Sequence[int],
        outputs: Sequence[int],
        fresh: Sequence[bool],
    ) -> None:
        self.steps = tuple(steps)
        self.backend = steps[0].backend
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.fresh = tuple(fresh)
        self.state = "not captured yet"
        self.reason = ""

    @property
    def told(self) -> str:
        """Return the state as text, with the reason."""
        return f"{self.state}: {self.reason}" if self.reason else self.state

    def captured(self) -> None:
        """Record that a graph was captured."""
        self.state = "captured"

    def failed(self, reason: str) -> None:
        """Record that a graph cannot be captured."""
        self.state, self.reason = "not captured", reason


class CaptureWriter:
    """Writer of the calls of graphs, ``graph_0`` and so on, whose steps are in ``captures``; and of
    their ``bodies``, the captured functions."""

    def __init__(self, plan: Plan) -> None:
        self.captures: dict[str, CapturedSteps] = {}
        self.bodies: list[SourceText] = []
        self._plan = plan
        self._at_once = read_at_once(plan)

    def pieces(self, steps: Sequence[Step], counted: Collection[Step]) -> Iterator[list[Step]]:
        """Yield the ``capture_groups`` of the steps of a block."""
        return capture_groups(self._plan, steps, counted)

    def write(self, writer: StepWriter, steps: Sequence[Step]) -> None:
        """Write the call of a graph of ``steps``, and its body."""
        slots, after = self._plan.slots, writer.lifetimes.after
        results = [i for step in steps for i in step.outputs if i >= 0]
        made = [i for i in results if slots[i].kind is SlotKind.DYNAMIC]
        released = [i for step in steps for i in after.get(step, ())]
        read = dict.fromkeys(i for step in steps for i in runtime_slots(self._plan, step))
        inputs = [i for i in read if i not in made]
        outputs = [i for i in made if i not in released]
        # A replay overwrites the results of the previous one, unless they are read at once.
        fresh = [i not in self._at_once for i in outputs]
        number = len(self.captures)
        self.captures[f"graph_{number}"] = CapturedSteps(steps, inputs, outputs, fresh)
        writer.add_work(sum([flops(step.node) for step in steps]), steps[0])
        targets = f"({writer.names(outputs)},) = " if outputs else ""
        call = f"{targets}graph_{number}({writer.names(inputs)})"
        writer.write_gathered()
        writer.text.write(call, tuple(steps), f"{len(steps)} steps")
        writer.release([i for i in released if i not in made])
        # The body is a separate function, so its lines are collected separately.
        outer, work = writer.text, writer.work
        writer.text = body = SourceText()
        writer.line(f"def body_{number}({writer.names(inputs)}):")
        with writer.indented():
            for step in with_checkpoints(steps):
                writer.call(step)
                gone = [i for i in after.get(step, ()) if i in made]
                if gone:
                    writer.line(f"del {writer.names(gone)}")
            writer.line(f"return ({writer.names(outputs)}{',' if outputs else ''})")
        self.bodies.append(body)
        writer.text, writer.work = outer, work


def capture_groups(
    plan: Plan, steps: Sequence[Step], counted: Collection[Step]
) -> Iterator[list[Step]]:
    """Yield the steps of a block in groups that can be captured together; results of ``counted``
    steps count against the budget of a run."""
    group: list[Step] = []
    for step in with_checkpoints(steps):
        # A replay allocates no memory that a budget could count.
        joins = step not in counted and is_capturable(plan, step)
        if group and not (joins and step.backend == group[0].backend):
            yield from _worth(group)
            group = []
        if joins:
            group.append(step)
        else:
            yield [step]
    if group:
        yield from _worth(group)


def _worth(group: list[Step]) -> Iterator[list[Step]]:
    kernels = [step for step in group if step.kernel is not None and not step.kernel.view]
    if len(kernels) >= _FEWEST:
        yield group
    else:
        yield from ([step] for step in group)


def is_capturable(plan: Plan, step: Step) -> bool:
    """Whether a step launches the same kernels in each run, apart from tensor contents."""
    kernel, slots = step.kernel, plan.slots
    if kernel is None or step.backend not in plan.captures or is_transfer(step.node):
        return False
    if (
        kernel.device.host_outputs
        or kernel.begin is not None
        or step.copied
        or step.contract is not None
    ):
        return False
    # A replay would use the host values of the time of capture.
    if any(slots[step.inputs[i]].kind is not SlotKind.CONSTANT for i in _given(step)):
        return False
    types = [slots[i].type for i in (*step.inputs, *step.outputs) if i >= 0]
    return step.node.op.pure and all(isinstance(t, TensorType) and t.static for t in types)


def _given(step: Step) -> list[int]:
    """Return the inputs that a step's kernel reads on the host."""
    assert step.kernel is not None
    return [
        i for i in step.kernel.device.host_inputs if i < len(step.inputs) and step.inputs[i] >= 0
    ]


def read_at_once(plan: Plan) -> set[int]:
    """Return the slots that are read only by (blocking) transfers to the host."""
    moved: set[int] = set()
    others: set[int] = set(plan.outputs)
    for step in with_checkpoints(plan.walk()):
        brought = is_transfer(step.node) and step.node.attrs["target"] not in plan.captures
        (moved if brought else others).update(i for i in step.inputs if i >= 0)
        for block in step.blocks:
            others.update(block.outputs)
        others.update(carry.initial for carry in step.carries)
        others.update(slots_of(plan, step))
    return moved - others


def slots_of(plan: Plan, step: Step) -> Iterable[Any]:
    """Return the slots that the outputs of a step are views of."""
    return [plan.slots[i].base for i in step.outputs if i >= 0 and plan.slots[i].base >= 0]
