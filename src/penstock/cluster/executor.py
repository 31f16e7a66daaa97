"""The executor of a graph on a cluster: sends feeds with the graph's handle to workers, and
receives outputs. Values that parts exchange do not pass through this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from penstock.cluster.parts import RemotePart
from penstock.cluster.runs import ClusterRun, Runs, listen
from penstock.core.checkpoints import await_release
from penstock.core.errors import Cancelled, Unsupported, WorkerLost
from penstock.core.records import dataclass
from penstock.core.types import RunValue, RunValues
from penstock.executors.base import Done, Executor
from penstock.executors.control import NEVER, Control
from penstock.host.threads import pool
from penstock.observers.profile import Profile, StepRow
from penstock.plan.plan import StepTable
from penstock.tuning.trial import run_seconds

# Estimated bytes of a part in this process.
_PART_BYTES = 1000


@dataclass(frozen=True, eq=False)
class RemoteGraph:
    """A graph whose ``parts`` are registered with workers under its ``handle``. ``table`` has its
    inputs and outputs, but no steps, which workers plan. ``source``: its nodes, as text;
    ``backends``: the names of the backends that steps run on."""

    handle: int
    parts: Sequence[RemotePart]
    table: StepTable
    source: str
    backends: Collection[str]


class ClusterExecutor:
    """Runs a graph on workers. ``retries``: how often a run is repeated. ``loss``: returns a loss
    of variables to raise, for a graph with variables. ``threads``: the threads of a worker.
    ``observe``: a context within which workers measure their steps."""

    name = "cluster"
    hands_over = False
    arena_plan = None
    tasks = None
    arena_bytes = 0
    run_bytes = 0

    def __init__(
        self,
        runs: Runs,
        graph: RemoteGraph,
        retries: int,
        loss: Callable[[int], WorkerLost | None] | None,
        threads: int,
        observe: Callable[[], AbstractContextManager[Sequence[StepRow]]],
    ) -> None:
        self.threads = threads
        self._observe = observe
        self.parts = graph.parts
        self.table = graph.table
        self.source = graph.source
        self.backends = graph.backends
        self._retries = retries
        self._loss = loss
        self._runs = runs
        self._handle = graph.handle

    @property
    def plan_bytes(self) -> int:
        return _PART_BYTES * len(self.parts)

    def observed(self) -> Executor:
        reason = (
            "steps run on the workers of a cluster, which report no events: neither observers nor "
            "PENSTOCK_TRACE see them; use session.profile(), for which workers measure their "
            "steps, or observe runs of a session that is compiled without cluster="
        )
        raise Unsupported.of([("observers", reason, "run")])

    def profile(self, inputs: RunValues, runs: int) -> Profile:
        """Return a profile of ``runs`` runs: the times of the steps of all workers."""
        from penstock.cluster.profile import ClusterProfile

        run_seconds(self, inputs, 1)  # warm up
        alone = run_seconds(self, inputs, runs)
        with self._observe():
            run_seconds(self, inputs, 1)
        with self._observe() as rows:
            observed = run_seconds(self, inputs, runs)
        return ClusterProfile(rows, runs, sum(observed), alone)

    def trim(self) -> None:
        """Do nothing: this process has no arenas of the graph."""

    def run(self, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        ended = threading.Lock()
        ended.acquire()
        results: list[tuple[Any, BaseException | None]] = []

        def done(outputs: tuple[RunValue, ...] | None, error: BaseException | None) -> None:
            results.append((outputs, error))
            ended.release()

        run = self._begin(inputs, control, done)
        try:
            await_release(ended)
        except BaseException:
            self._runs.stop(run, Cancelled("the run was interrupted"))
            raise
        outputs, error = results.pop()
        if error is not None:
            try:
                raise error
            finally:
                del error, run  # the traceback refers to this frame
        assert outputs is not None
        return outputs

    def run_async(self, inputs: RunValues, control: Control, done: Done) -> None:
        # Callbacks of a finished run may be slow or wait for another run, so they are not called on
        # the thread that receives a worker's messages.
        self._begin(inputs, control, lambda *result: pool().submit(partial(done, *result)))

    def _begin(self, inputs: RunValues, control: Control, done: Done) -> ClusterRun:
        run = ClusterRun(self._handle, self.parts, inputs, control, done, self._retries)
        if control is not NEVER:
            listen(self._runs, run)
        loss = None if self._loss is None else self._loss(self._handle)
        if loss is not None:
            run.end(None, loss)
        else:
            self._runs.begin(run)
        return run
