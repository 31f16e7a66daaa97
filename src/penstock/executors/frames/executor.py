"""The frames executor: TensorFlow's, with tagged tokens, dead values and frames of iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.codegen.helpers import unshared
from penstock.executors.frames.barrier import Barrier, MultiPartExecutor
from penstock.executors.frames.frame_graph import FrameGraph
from penstock.executors.frames.run import FramesRun
from penstock.executors.frames.scheduler import missing_output
from penstock.host.threads import Workers
from penstock.limits import Limits

# Bytes of a node of a frame graph, with its step, about.
_NODE_BYTES = 2000


class FramesExecutor(MultiPartExecutor):
    """Runs a graph with TensorFlow's control flow, or without."""

    def __init__(
        self, graph: FrameGraph, workers: Workers | None, limits: Limits, observed: bool = False
    ) -> None:
        self.graph = graph
        self.table = graph.table()
        self._limits = limits
        self._workers = workers
        self._observed = observed

    @property
    def source(self) -> str:
        """The nodes, each with the frame that it is in."""
        lines = [f"{n.frame.name or '-'}: {n.node!r}" for n in self.graph.nodes if n.node]
        return "\n".join(lines) + "\n"

    @property
    def plan_bytes(self) -> int:
        return _NODE_BYTES * len(self.graph.nodes)

    def observed(self) -> FramesExecutor:
        return FramesExecutor(self.graph, self._workers, self._limits, True)

    def part(self, barrier: Barrier, inputs: Sequence[Any]) -> FramesRun:
        """A run that ends at a barrier, perhaps with others."""
        observe, limits = self._observed, self._limits
        return FramesRun(self.graph, inputs, self._workers, observe, limits, barrier)

    @property
    def asynchronous(self) -> bool:
        """Whether its runs may wait for something outside of them."""
        return self.graph.asynchronous

    def results(self, run: FramesRun) -> tuple[Any, ...]:
        """The outputs of a run that has ended; raises ``DeadTensor``."""
        dead = missing_output(run.root, run.chosen)
        if dead is not None:
            raise dead
        return tuple([unshared(result) for result in run.root.results])

    def _begin(self, barrier: Barrier, inputs: Sequence[Any]) -> None:
        barrier.begin([self.part(barrier, inputs)], listens=self.asynchronous)

    def _outputs(self, parts: Sequence[FramesRun]) -> tuple[Any, ...]:
        return self.results(parts[0])
