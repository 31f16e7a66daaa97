"""The frames executor on several devices: an executor for each part of a graph, joined in a run.

The parts are executors of their own, passed in: this one hands them what they are fed, lets their
runs meet at a barrier, and puts together what they give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.executors.frames.barrier import Barrier, MultiPartExecutor
from penstock.executors.frames.barrier import Part as PartRun
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.plan import Plan


class PartExecutor(Protocol):
    """The executor of a part."""

    @property
    def source(self) -> str: ...

    @property
    def plan_bytes(self) -> int: ...

    @property
    def asynchronous(self) -> bool:
        """Whether its runs may wait for somebody outside of all parts."""
        ...

    def observed(self) -> PartExecutor: ...

    def part(self, barrier: Barrier, inputs: Sequence[Any]) -> PartRun:
        """A run of it that ends at a barrier."""
        ...

    def results(self, run: Any) -> tuple[Any, ...]:
        """The outputs of such a run, when it has ended."""
        ...


@dataclass(frozen=True, eq=False)
class DevicePart:
    """An executor, the device that it stands for, and which inputs and outputs are its own."""

    device: str
    executor: PartExecutor
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class PartitionedExecutor(MultiPartExecutor):
    """Runs the parts of a graph beside each other; ``plan`` is that of all of them."""

    name = "frames"
    tasks = None
    arena_bytes = 0

    def __init__(self, parts: Sequence[DevicePart], plan: Plan) -> None:
        self.parts = tuple(parts)
        self.plan = plan
        self.arena_plan = ArenaPlan(tuple(range(len(plan.steps))), {}, {}, 0, 0)

    @property
    def source(self) -> str:
        """The nodes of each device, each with the frame that it is in."""
        return "".join(f"# {part.device}\n{part.executor.source}" for part in self.parts)

    @property
    def plan_bytes(self) -> int:
        return sum(part.executor.plan_bytes for part in self.parts)

    def observed(self) -> PartitionedExecutor:
        watched = [replace(part, executor=part.executor.observed()) for part in self.parts]
        return PartitionedExecutor(watched, self.plan)

    def trim(self) -> None:
        pass

    def _begin(self, barrier: Barrier, inputs: Sequence[Any]) -> None:
        runs = [
            part.executor.part(barrier, [inputs[i] for i in part.inputs]) for part in self.parts
        ]
        listens = any(part.executor.asynchronous for part in self.parts)
        barrier.begin(runs, listens=listens)

    def _outputs(self, parts: Sequence[PartRun]) -> tuple[Any, ...]:
        found: dict[int, Any] = {}
        for part, run in zip(self.parts, parts, strict=True):
            found.update(zip(part.outputs, part.executor.results(run), strict=True))
        return tuple([found[i] for i in range(len(found))])
