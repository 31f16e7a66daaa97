"""The frames executor on several devices: one executor for each part of a graph, joined in a run.

Each part has an executor of its own, passed in: this one feeds them, lets their runs meet at a
barrier, and puts their outputs together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.executors.frames.barrier import Barrier, MultiPartExecutor, PartRun
from penstock.plan.plan import StepTable


class PartExecutor(Protocol):
    """The executor of a part."""

    @property
    def source(self) -> str: ...

    @property
    def plan_bytes(self) -> int: ...

    @property
    def asynchronous(self) -> bool:
        """Whether its runs may wait for something outside of all parts."""
        ...

    def observed(self) -> PartExecutor: ...

    def part(self, barrier: Barrier, inputs: Sequence[Any]) -> PartRun:
        """A run of it that ends at a barrier."""
        ...

    def results(self, run: Any) -> tuple[Any, ...]:
        """The outputs of such a run that has ended."""
        ...


@dataclass(frozen=True, eq=False)
class DevicePart:
    """An executor, the device that it stands for, and which inputs and outputs of the whole graph
    are its own."""

    device: str
    executor: PartExecutor
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class PartitionedExecutor(MultiPartExecutor):
    """Runs the parts of a graph side by side; ``table`` has the steps of all of them."""

    def __init__(self, parts: Sequence[DevicePart], table: StepTable) -> None:
        self.parts = tuple(parts)
        self.table = table

    @property
    def source(self) -> str:
        """The nodes of each device, each with the frame that it is in."""
        return "".join(f"# {part.device}\n{part.executor.source}" for part in self.parts)

    @property
    def plan_bytes(self) -> int:
        return sum(part.executor.plan_bytes for part in self.parts)

    def observed(self) -> PartitionedExecutor:
        parts = [replace(part, executor=part.executor.observed()) for part in self.parts]
        return PartitionedExecutor(parts, self.table)

    def _begin(self, barrier: Barrier, inputs: Sequence[Any]) -> None:
        runs = [
            part.executor.part(barrier, [inputs[i] for i in part.inputs]) for part in self.parts
        ]
        listens = any(part.executor.asynchronous for part in self.parts)
        barrier.begin(runs, listens=listens)

    def _outputs(self, parts: Sequence[PartRun]) -> tuple[Any, ...]:
        outputs: dict[int, Any] = {}
        for part, run in zip(self.parts, parts, strict=True):
            outputs.update(zip(part.outputs, part.executor.results(run), strict=True))
        return tuple([outputs[i] for i in range(len(outputs))])
