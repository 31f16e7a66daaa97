"""The cost of nodes: read from the table of measured costs, measured now, or estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.base import Backend
from penstock.backends.dynamic_shapes import expected_seconds
from penstock.backends.kernels import KernelTable, other_places, placed_kernels
from penstock.core.checkpoints import report_progress
from penstock.core.errors import PenstockError
from penstock.executors.base import Executor
from penstock.executors.control import compile_run
from penstock.executors.linear import LinearExecutor
from penstock.host.thread_share import ThreadShare
from penstock.ir.graph import Graph, Node, clone
from penstock.observers.base import ObservedRun
from penstock.ops.internal.transfer import HOST, Place, is_transfer
from penstock.ops.work_estimate import seconds as estimated
from penstock.plan.plan import Step
from penstock.tuning.node_signature import node_signature, tensor_bytes

if TYPE_CHECKING:
    from penstock.observers.profile import Entry, Profile
    from penstock.tuning.cost_table import CostTable

# Runs to measure a graph by: one, and up to this number while they take less than _MOST_SECONDS.
_MOST_RUNS = 5
_MOST_SECONDS = 0.2
# Turns of observed and unobserved runs: few, since each begins with its memory cold.
_TURNS = 3
_DISTURBED = 3
# A number of streams so large that every kernel gets one thread.
_ALL = 1 << 20


def _wants_layout(kernels: KernelTable, backend: Backend, node: Node) -> bool:
    """Whether the kernel of a node reads only one order of dims in memory."""
    with suppress(Exception):  # the plan raises it, unless the node may never run
        kernel = kernels.kernel(backend, node)
        return kernel is not None and bool(kernel.layout.contiguous_inputs)
    return False


def profile_runs(
    executor: Executor, values: Sequence[Any], runs: int, most_seconds: float = inf
) -> Profile:
    """A profile of ``runs`` runs of an observed executor, after one to warm up; of fewer once they
    have taken ``most_seconds``. Nothing is kept in the table of costs."""
    from penstock.observers.profile import Profile

    profile = Profile()
    begin = perf_counter()
    for i in range(1 + runs):
        _observe(executor, values, profile if i else None)
        if i and perf_counter() - begin > most_seconds:
            break
    return profile


def profile_in_turn(
    observed: Executor, executor: Executor, values: Sequence[Any], runs: int
) -> Profile:
    """A profile of ``runs`` runs of ``observed``, and in turn with them of as many of ``executor``,
    the same without observers, so that what slows the machine down slows down both, but for single
    runs and steps that were interrupted (``undisturbed``). What observing adds is in it until it
    is settled (``Profile.settle``)."""
    from penstock.observers.profile import Profile

    watched: list[Profile] = []
    alone: list[float] = []
    turns = min(_TURNS, runs // 3) or 1
    for turn in range(turns):
        report_progress("measure the plan", turn, turns)
        count = (runs + turn) // turns
        # Each turn after one run to warm up: the other executor has an arena of its own.
        alone += _seconds(executor, values, 1 + count, runs)[1:]
        for i in range(1 + count):
            profile = Profile()
            _observe(observed, values, profile if i else None)
            watched += [profile] if i else []
    report_progress("measured the plan", turns, turns)
    whole = _without_disturbances(watched)
    whole.alone = undisturbed(alone)
    return whole


def _seconds(executor: Executor, values: Sequence[Any], runs: int, trials: int) -> list[float]:
    """The seconds of each of ``runs`` runs, without up to ``trials`` others by which the executor
    chooses the number of its threads."""
    taken: list[float] = []
    while len(taken) < runs:
        trial = trials > 0 and isinstance(executor, LinearExecutor) and executor.undecided
        with compile_run() as control:
            begin = perf_counter()
            executor.run(values, control)
            seconds = perf_counter() - begin
        trials -= trial
        taken += [] if trial else [seconds]
    return taken


def _without_disturbances(profiles: Sequence[Profile]) -> Profile:
    """The profile of all runs of which each has one of ``profiles``. What other processes do to a
    run, they do to few of its steps: the seconds of each step are those of ``undisturbed`` runs,
    and the runs are as much shorter."""
    from penstock.observers.profile import Profile

    whole = Profile()
    for profile in profiles:
        whole.add(profile)
    for key, entry in whole.entries.items():
        own = [p.entries[key].total for p in profiles if key in p.entries]
        seconds = sum(undisturbed(own))
        whole.observed -= entry.total - seconds
        entry.total = seconds
    return whole


def undisturbed(seconds: Sequence[float]) -> list[float]:
    """The times of runs that do the same; one of more than ``_DISTURBED`` times the median, which
    other processes must have interrupted, counts as the median.

    >>> undisturbed([1.0, 1.5, 80.0, 1.0])
    [1.0, 1.5, 1.25, 1.0]
    """
    middle = float(np.median(seconds))
    return [x if x <= _DISTURBED * middle else middle for x in seconds]


def _observe(executor: Executor, values: Sequence[Any], profile: Profile | None) -> None:
    """One run of an observed executor."""
    with compile_run() as control:
        control.run = ObservedRun(executor.table, executor.name, executor.threads)
        if profile is not None:
            control.observer = profile
        control.observer.run_begin(control.run)
        executor.run(values, control)
        control.observer.run_end(control.run, None)


def _contiguous(values: Sequence[Any]) -> list[Any]:
    """Copies of values that stand for a shape: reading strides of zero would be too fast."""
    return [np.ascontiguousarray(x) if isinstance(x, np.ndarray) and x.ndim else x for x in values]


def threads_of(backend: Backend, among: Sequence[Backend], single_threaded: bool) -> int:
    """The threads of a kernel of ``backend`` in a run that is alone. NumPy has one thread beside a
    library whose threads belong to the calling thread."""
    beside = any(other.threads_of_caller for other in among) and not backend.threads_of_caller
    return 1 if single_threaded or (beside and backend.memory == HOST) else backend.threads


Measurable = Callable[[Graph, Mapping[Node, Backend], KernelTable, int], Executor]
"""Compiles a graph for a placement, with kernels of a table and a number of threads for each, into
an executor that tells observers of its steps."""


class CostModel:
    """The seconds of nodes on ``backends``: from the table of costs, or else estimated. Nodes of
    dynamic shapes are not in the table: their seconds are kept here, by label."""

    def __init__(self, backends: Sequence[Backend] = ()) -> None:
        self.backends = backends
        self._own: dict[tuple[str, str, bool], float] = {}

    @cached_property
    def _table(self) -> CostTable:
        # Its file is read only if costs decide something.
        from penstock.tuning.cost_table import cost_table

        return cost_table()

    def known(self, node: Node, backend: Backend, single_threaded: bool) -> float | None:
        """The measured seconds of ``node`` on ``backend``; None if it was never measured."""
        signature = node_signature(node)
        if signature is not None:
            threads = threads_of(backend, self.backends, single_threaded)
            return self._table.lookup(backend.name, signature, threads)
        return self._own.get((node.label, backend.name, single_threaded))

    def seconds(self, node: Node, backend: Backend, *, single_threaded: bool) -> float:
        """The seconds of ``node`` on ``backend``: measured, interpolated, or else estimated."""
        known = self.known(node, backend, single_threaded)
        if known is None and (signature := node_signature(node)) is not None:
            threads = threads_of(backend, self.backends, single_threaded)
            known = self._table.estimate(backend.name, signature, threads)
        return estimated(node) if known is None else known

    def guess(self, by_name: Mapping[str, Backend], step: Step) -> float:
        """The seconds of a step with a kernel, without measuring it now: measured before, or else
        estimated from its work, or by its backend (of ``by_name``) if that expects more."""
        node, backend = step.node, by_name.get(step.backend)
        if backend is None or is_transfer(node):
            return self.estimate(node)
        if self._own or self._table.knows(node.op.full_name):
            known = self.known(node, backend, True)
            if known is not None:
                return known
        expected = backend.seconds(node)
        return max(self.estimate(node), 0.0 if expected == inf else expected)

    def estimate(self, node: Node) -> float:
        """The seconds of ``node`` estimated from its work, without any measurement."""
        return estimated(node)

    def measured(self, node: Node, among: Sequence[Backend]) -> dict[str, float] | None:
        """The measured seconds of ``node`` by the name of each backend, infinite where that has no
        kernel; None unless it was measured on all the others."""
        if not self._table.knows(node.op.full_name):
            return None
        seconds: dict[str, float] = {}
        for backend in among:
            known = self.known(node, backend, False)
            if known is None and backend.seconds(node) == inf:
                known = inf
            if known is None:
                return None
            seconds[backend.name] = known
        return seconds

    def expected(self, node: Node, among: Sequence[Backend]) -> list[float]:
        """The seconds of ``node`` on each of ``among``, to compare with one another: measured if it
        was measured on all of them, else the backends' own estimates."""
        measured = self.measured(node, among)
        if measured is None:
            return expected_seconds(among, node)
        return [measured[backend.name] for backend in among]

    def transfer(self, source: str, target: str, nbytes: int) -> float:
        """The seconds to copy ``nbytes`` between two backends, given by their names."""
        measured = self._table.transfer(source, target, nbytes)
        return _TRANSFER_S + nbytes / _TRANSFER_BYTES_PER_S if measured is None else measured

    def of_step(self, step: Step, by_name: Mapping[str, Backend], single_threaded: bool) -> float:
        """The seconds of a step with a kernel, or of a transfer; ``by_name`` has its backend."""
        node = step.node
        if not step.backend:
            return 0.0  # it passes its inputs on
        if not is_transfer(node):
            return self.seconds(node, by_name[step.backend], single_threaded=single_threaded)
        size = sum(tensor_bytes(value) or 0 for value in node.outputs)
        return self.transfer(node.attrs["source"], node.attrs["target"], size)

    def record_new(self, profile: Profile, single_threaded: bool) -> None:
        """Record only entries that have no measurement yet."""
        by_name = {backend.name: backend for backend in self.backends}
        new = [
            entry
            for entry in profile
            if entry.step.backend in by_name
            and not is_transfer(entry.step.node)
            and self.known(entry.step.node, by_name[entry.step.backend], single_threaded) is None
        ]
        self.record(new, single_threaded)

    def record(self, profile: Iterable[Entry], single_threaded: bool) -> None:
        """Keep what nodes and transfers took in runs, with one thread or with all; ``save`` writes
        it to the table's file."""
        threads = {b.name: threads_of(b, self.backends, single_threaded) for b in self.backends}
        for entry in profile:
            node, name = entry.step.node, entry.step.backend
            self._own[node.label, name, single_threaded] = entry.best
            signature = node_signature(node)
            if is_transfer(node):
                source, target = node.attrs["source"], node.attrs["target"]
                for size in filter(None, map(tensor_bytes, node.outputs)):
                    self._table.record_transfer(source, target, size, entry.best)
            elif signature is not None:
                self._table.record(name, signature, threads[name], entry.best)

    def save(self) -> None:
        self._table.save()

    # A model without a graph has nothing to measure.

    def complete_already(self) -> bool:
        """Whether every node has been measured, with one thread and with all."""
        return True

    def complete(self, *, single_threaded: bool) -> None:
        """Measure every node on every backend that supports it, as far as that is needed."""

    def faster(self, one: Executor, other: Executor, margin: float) -> Executor:
        """``one`` if it takes at most ``margin`` of the time of ``other``, else ``other``."""
        return one


class GraphProfiler(CostModel):
    """The cost model of one graph, which runs it on ``values`` to measure what is missing, with the
    executors that ``observed`` compiles. ``allowed`` has the backends of each node that is to be
    measured."""

    def __init__(
        self,
        graph: Graph,
        backends: Sequence[Backend],
        values: Sequence[Any],
        kernels: KernelTable,
        observed: Measurable,
    ) -> None:
        super().__init__(backends)
        self.kernels = kernels
        self.graph = graph
        self.allowed: Mapping[Node, Sequence[Backend]] = {}
        self.values = values
        self.observed = observed

    def copy_graph(self) -> None:
        """Measure on a copy of the graph from now on."""
        copy = clone(self.graph)
        pairs = zip(self.graph.walk(), copy.walk(), strict=True)
        self.allowed = {new: self.allowed[old] for old, new in pairs if old in self.allowed}
        self.graph = copy

    def complete_already(self) -> bool:
        return not any(self._missing(b, one) for b in self.backends for one in (True, False))

    def _missing(self, backend: Backend, single_threaded: bool) -> list[Node]:
        """The nodes that were never measured on ``backend``, though it supports them."""
        return [
            node
            for node, allowed in self.allowed.items()
            if backend in allowed and self.known(node, backend, single_threaded) is None
        ]

    def complete(self, *, single_threaded: bool) -> None:
        """Measure the nodes that were never measured on some backend that supports them. If the
        graph cannot run on these values, the missing costs are estimated: the user's own run will
        raise the error."""
        for i, backend in enumerate(self.backends):
            if self._missing(backend, single_threaded):
                report_progress(f"measure nodes on {backend.name}", i, len(self.backends))
                with suppress(PenstockError):
                    self._measure(backend, single_threaded, None)
        self._table.save()

    def measure_all(self, runs: int) -> None:
        """Measure every node on every backend that supports it, even if measured before."""
        both = (True, False) if any(b.threads > 1 for b in self.backends) else (False,)
        ways = [(backend, single) for backend in self.backends for single in both]
        for i, (backend, single) in enumerate(ways):
            threads = "with one thread" if single else "with all threads"
            report_progress(f"measure nodes on {backend.name} {threads}", i, len(ways))
            self._measure(backend, single, runs)
        report_progress("measured nodes", len(ways), len(ways))
        self._table.save()

    def faster(self, one: Executor, other: Executor, margin: float) -> Executor:
        # Both are run: a simulation knows neither shared memory bandwidth nor Python's lock.
        fed = _contiguous(self.values)
        best = [inf, inf]
        try:
            # Twice: threads that one executor left spinning slow down the first run of the other.
            for _ in range(2):
                for i, executor in enumerate((one, other)):
                    begin = perf_counter()
                    for _ in range(_MOST_RUNS):
                        start = perf_counter()
                        with compile_run() as control:
                            executor.run(fed, control)
                        best[i] = min(best[i], perf_counter() - start)
                        if perf_counter() - begin > _MOST_SECONDS / 2:
                            break
        except PenstockError:
            return other
        return one if best[0] <= margin * best[1] else other

    def _measure(self, backend: Backend, single_threaded: bool, runs: int | None) -> None:
        """Run the graph once to warm up, then ``runs`` times, by default up to five, and keep what
        its nodes and transfers take. Raises the errors of the run. Nodes run on ``backend`` where
        it supports them."""
        kernels, backends = self.kernels.without_state(), self.backends
        graph, placed = self._placed_on(backend, kernels)
        hosts = [b for b in backends if b.memory == HOST]
        threads = {b.name: threads_of(b, backends, single_threaded) for b in backends}
        most = max([threads[b.name] for b in {*placed.values()} if b.memory == HOST], default=1)
        executor = self.observed(graph, placed, kernels, most)
        # The executor enters as one stream; for one thread, pretend that many others run as well.
        with ThreadShare(hosts, _ALL) if single_threaded else nullcontext():
            fed, limit = _contiguous(self.values), inf if runs else _MOST_SECONDS
            profile = profile_runs(executor, fed, runs or _MOST_RUNS, limit)
        self.record(profile, single_threaded)

    def _placed_on(
        self, backend: Backend, kernels: KernelTable
    ) -> tuple[Graph, Mapping[Node, Backend]]:
        """The graph with its nodes on ``backend`` as far as that supports them, and its placement;
        a copy with transfers and layouts if the placement needs these."""
        from penstock.passes.context import PassContext
        from penstock.passes.lowering.assign_layouts import AssignLayouts
        from penstock.passes.lowering.insert_transfers import InsertTransfers
        from penstock.passes.pipeline import run_passes

        placed = {node: backend if backend in b else b[0] for node, b in self.allowed.items()}
        remote = any(b.memory != HOST for b in placed.values())
        if not remote and not any(_wants_layout(kernels, b, node) for node, b in placed.items()):
            return self.graph, placed
        copy = clone(self.graph)
        placement = {
            new: Place(placed[old].name, placed[old].memory)
            for old, new in zip(self.graph.walk(), copy.walk(), strict=True)
            if old in placed
        }
        compiled = placed_kernels(kernels, self.backends, placement)
        others = other_places(kernels, self.backends, placement)
        context = PassContext(placement=placement, compiled=compiled, other_places=others)
        run_passes((InsertTransfers(), AssignLayouts()), copy, context)
        by_name = {b.name: b for b in self.backends}
        return copy, {node: by_name[place.backend] for node, place in placement.items()}


# Transfers that were never measured.
_TRANSFER_S = 10e-6
_TRANSFER_BYTES_PER_S = 5e9
