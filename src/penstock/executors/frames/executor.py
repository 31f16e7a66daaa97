"""The frames executor: TensorFlow's, with tagged tokens, dead values and frames of iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.codegen.helpers import unshared
from penstock.executors.frames.barrier import Barrier, MultiPartExecutor
from penstock.executors.frames.run import FramesRun
from penstock.executors.frames.scheduler import missing
from penstock.executors.frames.tokens import Tokens
from penstock.host.threads import Workers
from penstock.limits import Limits
from penstock.plan.arena_layout import ArenaPlan

# What an item takes, with its node, about.
_ITEM_BYTES = 2000


class FramesExecutor(MultiPartExecutor):
    """Runs a graph with TensorFlow's primitives of control flow, or without."""

    name = "frames"
    tasks = None
    arena_bytes = 0

    def __init__(
        self, tokens: Tokens, workers: Workers | None, limits: Limits, observed: bool = False
    ) -> None:
        self.tokens = tokens
        self._limits = limits
        self.plan = tokens.plan()
        self.arena_plan = ArenaPlan(tuple(range(len(self.plan.steps))), {}, {}, 0, 0)
        self._workers = workers
        self._observed = observed

    @property
    def source(self) -> str:
        """The nodes, each with the frame that it is in."""
        lines = [f"{i.frame.name or '-'}: {i.node!r}" for i in self.tokens.items if i.node]
        return "\n".join(lines) + "\n"

    @property
    def plan_bytes(self) -> int:
        return _ITEM_BYTES * len(self.tokens.items)

    def observed(self) -> FramesExecutor:
        return FramesExecutor(self.tokens, self._workers, self._limits, True)

    def trim(self) -> None:
        pass

    def part(self, barrier: Barrier, inputs: Sequence[Any]) -> FramesRun:
        """A run that ends at a barrier, with others perhaps."""
        observe, limits = self._observed, self._limits
        return FramesRun(self.tokens, inputs, self._workers, observe, limits, barrier)

    @property
    def asynchronous(self) -> bool:
        """Whether its runs may wait for somebody outside."""
        return self.tokens.asynchronous

    def results(self, run: FramesRun) -> tuple[Any, ...]:
        """The outputs of a run that has ended; raises ``DeadTensor``."""
        dead = missing(run.root, run.chosen)
        if dead is not None:
            raise dead
        return tuple([unshared(result) for result in run.root.results])

    def _begin(self, barrier: Barrier, inputs: Sequence[Any]) -> None:
        barrier.begin([self.part(barrier, inputs)], listens=self.asynchronous)

    def _outputs(self, parts: Sequence[FramesRun]) -> tuple[Any, ...]:
        return self.results(parts[0])
