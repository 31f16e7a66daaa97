"""The cost of nodes: read from the table of measured costs, measured now, or estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any

from penstock.backends.base import Backend
from penstock.backends.kernels import KernelTable
from penstock.backends.specializing import estimates
from penstock.core.checkpoints import report_progress
from penstock.core.errors import PenstockError
from penstock.core.records import NamedTuple, cached_property
from penstock.core.types import RunValues
from penstock.executors.base import Executor
from penstock.host.thread_share import ThreadShare
from penstock.ir.graph import Graph, Node, clone
from penstock.ops.internal.transfer import HOST, Place, is_transfer
from penstock.ops.work_estimate import Rates, Workload, estimate, host_seconds
from penstock.plan.plan import Step

if TYPE_CHECKING:
    from penstock.observers.profile import Entry, Profile
    from penstock.tuning.cost_table import CostTable

# Transfers that were never measured.
_TRANSFER = {"": Rates(10e-6, 5e9)}
# A number of streams so large that every kernel gets one thread.
_ALL = 1 << 20


def _wants_layout(kernels: KernelTable, backend: Backend, node: Node) -> bool:
    """Whether the kernel of a node reads only one order of dims in memory."""
    with suppress(Exception):  # the plan raises it, unless the node may never run
        kernel = kernels.kernel(backend, node)
        return kernel is not None and bool(kernel.layout.contiguous_inputs)
    return False


def threads_of(backend: Backend, among: Sequence[Backend], single_threaded: bool) -> int:
    """The threads of a kernel of ``backend`` in a run that is alone. NumPy has one thread beside a
    library whose threads belong to the calling thread."""
    beside = any(other.threads_of_caller for other in among) and not backend.threads_of_caller
    return 1 if single_threaded or (beside and backend.memory == HOST) else backend.threads


Measurable = Callable[[Graph, Mapping[Node, Backend], KernelTable, int], Executor]
"""Compiles a graph for a placement, with kernels of a table and a number of threads for each, into
an executor that tells observers of its steps."""


class CostSource(Enum):
    """Source of a node's cost, the most reliable first."""

    MEASURED = "measured"
    """of just this node's operation, types and threads, on this machine"""
    ESTIMATED = "estimated"
    """from measurements of other sizes"""
    GUESSED = "guessed"
    """from its work, without any measurement"""


class Cost(NamedTuple):
    """The seconds that a node is expected to take."""

    seconds: float
    source: CostSource = CostSource.MEASURED


class CostModel:
    """The cost of nodes on ``backends``: from the table of costs, or else guessed. Nodes of dynamic
    shapes are not in the table: their seconds are kept here, by label."""

    def __init__(self, backends: Sequence[Backend] = ()) -> None:
        self.backends = backends
        self._own: dict[tuple[str, str, int], float] = {}

    @cached_property
    def _table(self) -> CostTable:
        # Its file is read only if costs decide something.
        from penstock.tuning.cost_table import cost_table

        return cost_table()

    def cost(self, node: Node, backend: Backend, threads: int | None = None) -> Cost:
        """The cost of ``node`` on ``backend``, with ``threads`` threads for its kernel, by default
        as many as it has in a run that is alone."""
        if self.knowing(node, [backend]):
            from penstock.tuning.node_signature import node_signature

            threads = threads or threads_of(backend, self.backends, False)
            signature = node_signature(node)
            if signature is None:  # a node of dynamic shapes, which no other process can look up
                known = self._own.get((node.label, backend.name, threads))
            else:
                known = self._table.lookup(backend.name, signature, threads)
            if known is not None:
                return Cost(known)
            if signature is not None:
                known = self._table.estimate(backend.name, signature, threads)
            if known is not None:
                return Cost(known, CostSource.ESTIMATED)
        expected = backend.seconds(node)
        guess = max(host_seconds(node), 0.0 if expected == inf else expected)
        return Cost(guess, CostSource.GUESSED)

    def knowing(self, node: Node, among: Sequence[Backend]) -> Sequence[Backend]:
        """Return the backends of ``among`` with a measurement of the operation, of any size."""
        if self._own:
            return among
        measured, operation = self._table.measured, node.op.full_name
        if not measured:  # no costs were ever measured here
            return ()
        return [backend for backend in among if (backend.name, operation) in measured]

    def transfer(self, source: str, target: str, nbytes: int) -> float:
        """The seconds to copy ``nbytes`` between two backends, given by their names."""
        measured = self._table.transfer(source, target, nbytes)
        return estimate(_TRANSFER, Workload(nbytes=nbytes)) if measured is None else measured

    def record_new(self, profile: Profile, single_threaded: bool) -> None:
        """Record only entries that have no measurement yet."""
        by_name = {backend.name: backend for backend in self.backends}
        threads = 1 if single_threaded else None
        new = [
            entry
            for entry in profile
            if entry.step.backend in by_name
            and not is_transfer(entry.step.node)
            and not self.is_measured(entry.step.node, by_name[entry.step.backend], threads)
        ]
        self.record(new, single_threaded)

    def record(self, profile: Iterable[Entry], single_threaded: bool) -> None:
        """Keep what nodes and transfers took in runs, with one thread or with all; ``save`` writes
        it to the table's file."""
        from penstock.tuning.node_signature import node_signature, tensor_bytes

        threads = {b.name: threads_of(b, self.backends, single_threaded) for b in self.backends}
        for entry in profile:
            node, name = entry.step.node, entry.step.backend
            self._own[node.label, name, threads[name]] = entry.best
            signature = node_signature(node)
            if is_transfer(node):
                source, target = node.attrs["source"], node.attrs["target"]
                for size in filter(None, map(tensor_bytes, node.outputs)):
                    self._table.record_transfer(source, target, size, entry.best)
            elif signature is not None:
                self._table.record(name, signature, threads[name], entry.best)

    def save(self) -> None:
        self._table.save()

    def is_measured(self, node: Node, backend: Backend, threads: int | None = None) -> bool:
        """Whether ``cost`` has a measurement of ``node``."""
        known = bool(self.knowing(node, [backend]))
        return known and self.cost(node, backend, threads).source is CostSource.MEASURED


class CustomCosts(CostModel):
    """The costs of ``compile(cost_model=...)``, which decide wherever they are measured ones."""

    def __init__(self, model: Any, backends: Sequence[Backend]) -> None:
        super().__init__(backends)
        self._model = model
        if (transfer := getattr(model, "transfer", None)) is not None:
            self.transfer = transfer  # type: ignore[method-assign]

    def cost(self, node: Node, backend: Backend, threads: int | None = None) -> Cost:
        cost: Cost = self._model.cost(node, backend, threads)
        return cost

    def knowing(self, node: Node, among: Sequence[Backend]) -> Sequence[Backend]:
        return among


def costs_of(model: Any, backends: Sequence[Backend]) -> CostModel:
    """The costs by which a session decides: those of ``cost_model=``, if it is given."""
    if model is None:
        return CostModel(backends)
    return model if type(model) is CostModel else CustomCosts(model, backends)


def compared(
    costs: CostModel, node: Node, among: Sequence[Backend]
) -> tuple[Sequence[float], bool]:
    """The seconds of ``node`` on each of ``among``, to compare with one another, and whether they
    were measured. Else they are the backends' own estimates."""
    measured = measured_seconds(costs, node, among)
    return (estimates(among, node), False) if measured is None else (measured, True)


def measured_seconds(
    costs: CostModel, node: Node, among: Sequence[Backend]
) -> Sequence[float] | None:
    """The seconds of ``node`` on each of ``among`` if they were measured: on all but those without
    a kernel, where they are infinite."""
    known = costs.knowing(node, among)
    if not known or any(backend.seconds(node) < inf for backend in among if backend not in known):
        return None
    seconds: list[float] = []
    for backend in among:
        cost = costs.cost(node, backend)
        if cost.source is CostSource.MEASURED:
            seconds.append(cost.seconds)
        elif backend.seconds(node) < inf:
            return None
        else:
            seconds.append(inf)
    return seconds


def step_seconds(
    costs: CostModel, step: Step, by_name: Mapping[str, Backend], threads: int | None
) -> float:
    """The seconds of a step with a kernel, or of a transfer; ``by_name`` has its backend."""
    node = step.node
    if not step.backend:
        return 0.0  # it passes its inputs on
    if not is_transfer(node):
        return costs.cost(node, by_name[step.backend], threads).seconds
    from penstock.tuning.node_signature import tensor_bytes

    size = sum(tensor_bytes(value) or 0 for value in node.outputs)
    return costs.transfer(node.attrs["source"], node.attrs["target"], size)


class GraphProfiler:
    """Adds to ``costs`` what is missing of one graph: runs it on ``values``, with the executors
    that ``observed`` compiles. ``allowed`` has the backends of each node that is to be
    measured."""

    def __init__(
        self,
        graph: Graph,
        costs: CostModel,
        values: RunValues,
        kernels: KernelTable,
        observed: Measurable,
    ) -> None:
        self.costs = costs
        self.backends = costs.backends
        self.kernels = kernels
        self.graph = graph
        self.allowed: Mapping[Node, Sequence[Backend]] = {}
        self.values = values
        self.observed = observed
        # Seconds that brief measuring may still take, by the name of the backend.
        self._left: dict[str, float] = {}

    def copy_graph(self) -> None:
        """Measure on a copy of the graph from now on."""
        copy = clone(self.graph)
        pairs = zip(self.graph.walk(), copy.walk(), strict=True)
        self.allowed = {new: self.allowed[old] for old, new in pairs if old in self.allowed}
        self.graph = copy

    def complete_already(self) -> bool:
        return not any(self._lacks(b, one) for b in self.backends for one in (True, False))

    def _lacks(self, backend: Backend, single_threaded: bool) -> bool:
        """Whether some node was never measured on ``backend``, though it supports it."""
        threads = 1 if single_threaded else None
        return any(
            backend in allowed and not self.costs.is_measured(node, backend, threads)
            for node, allowed in self.allowed.items()
        )

    def complete(self, *, single_threaded: bool, brief_runs: int | None = None) -> None:
        """Measure the nodes that were never measured on some backend that supports them: with
        ``brief_runs``, in as many runs at most, and within ``BUDGET`` times a run on each backend.
        If the graph cannot run on these values, or the time is too little, the missing costs are
        estimated: the user's own run will raise the error."""
        for i, backend in enumerate(self.backends):
            # Compiling a plan to measure takes time as well, so it is not for a single moment left.
            if self._left.get(backend.name, inf) > 0 and self._lacks(backend, single_threaded):
                report_progress(f"measure nodes on {backend.name}", i, len(self.backends))
                with suppress(PenstockError):
                    self._measure(backend, single_threaded, None, brief_runs)
        self.costs.save()

    def measure_briefly(self) -> float | None:
        """Measure every node with one thread on its backend, in one memory, within ``BUDGET`` times
        the seconds of a run with all threads, which it returns; None if that is too little."""
        from penstock.tuning import trial

        kernels = self.kernels.without_state()  # what is measured is no run of the user's
        graph, placed = self._placed_on(self.backends[0], kernels)
        executor = self.observed(graph, placed, kernels, self._most_threads(placed))
        with suppress(PenstockError):
            fed = trial.without_broadcasts(self.values)
            serial = trial.observed_run(executor, fed, None)
            with ThreadShare([b for b in self.backends if b.memory == HOST], _ALL):
                profile, _ = trial.profile_briefly(executor, fed, 1, trial.left_after(serial))
            self.costs.record(profile, True)
            self.costs.save()
            return serial
        return None

    def _most_threads(self, placed: Mapping[Node, Backend]) -> int:
        """The threads of the kernels of a graph in a run that is alone."""
        hosts = [b for b in {*placed.values()} if b.memory == HOST]
        return max([threads_of(b, self.backends, False) for b in hosts], default=1)

    def measure_all(self, runs: int) -> None:
        """Measure every node on every backend that supports it, even if measured before."""
        both = (True, False) if any(b.threads > 1 for b in self.backends) else (False,)
        ways = [(backend, single) for backend in self.backends for single in both]
        for i, (backend, single) in enumerate(ways):
            threads = "with one thread" if single else "with all threads"
            report_progress(f"measure nodes on {backend.name} {threads}", i, len(ways))
            self._measure(backend, single, runs)
        report_progress("measured nodes", len(ways), len(ways))
        self.costs.save()

    def _measure(
        self,
        backend: Backend,
        single_threaded: bool,
        runs: int | None,
        brief_runs: int | None = None,
    ) -> None:
        """Run the graph once to warm up, then ``runs`` times, by default up to five, and keep what
        its nodes and transfers take; with ``brief_runs``, as ``complete`` says. Raises the errors
        of the run. Nodes run on ``backend`` where it supports them."""
        from penstock.tuning.trial import (
            MOST_RUNS,
            MOST_SECONDS,
            profile_briefly,
            profile_runs,
            without_broadcasts,
        )

        kernels, backends = self.kernels.without_state(), self.backends
        graph, placed = self._placed_on(backend, kernels)
        hosts = [b for b in backends if b.memory == HOST]
        threads = {b.name: threads_of(b, backends, single_threaded) for b in backends}
        most = max([threads[b.name] for b in {*placed.values()} if b.memory == HOST], default=1)
        executor = self.observed(graph, placed, kernels, most)
        # The executor enters as one stream; for one thread, pretend that many others run as well.
        with ThreadShare(hosts, _ALL) if single_threaded else nullcontext():
            fed, limit = without_broadcasts(self.values), inf if runs else MOST_SECONDS
            if brief_runs is None:
                profile = profile_runs(executor, fed, runs or MOST_RUNS, limit)
            else:
                left = self._left.get(backend.name)
                self._left[backend.name] = 0.0  # unless it ends in time
                profile, self._left[backend.name] = profile_briefly(executor, fed, brief_runs, left)
        self.costs.record(profile, single_threaded)

    def _placed_on(
        self, backend: Backend, kernels: KernelTable
    ) -> tuple[Graph, Mapping[Node, Backend]]:
        """The graph with its nodes on ``backend`` as far as that supports them, and its placement;
        a copy with transfers and layouts if the placement needs these, and with variables of its
        own if it has any: what is measured is no run of the user's."""
        from penstock.passes.context import PassContext
        from penstock.passes.lowering.assign_layouts import AssignLayouts
        from penstock.passes.pipeline import insert_transfers, run_passes
        from penstock.tuning.kernel_placing import KernelPlacing

        placed = {node: backend if backend in b else b[0] for node, b in self.allowed.items()}
        graph = self.graph
        if any("store" in node.attrs for node in graph.walk()):
            from penstock.ops.tensorflow.state import apart

            graph = apart(graph)
            pairs = zip(self.graph.walk(), graph.walk(), strict=True)
            placed = {new: placed[old] for old, new in pairs if old in placed}
        remote = any(b.memory != HOST for b in placed.values())
        if not remote and not any(_wants_layout(kernels, b, node) for node, b in placed.items()):
            return graph, placed
        copy = clone(graph)
        placement = {
            new: Place(placed[old].name, placed[old].memory)
            for old, new in zip(graph.walk(), copy.walk(), strict=True)
            if old in placed
        }
        context = PassContext(placing=KernelPlacing(self.backends, kernels, placement))
        run_passes((insert_transfers, AssignLayouts()), copy, context)
        by_name = {b.name: b for b in self.backends}
        return copy, {node: by_name[place.backend] for node, place in placement.items()}


def profile_plan(
    executor: Executor,
    observed: Executor,
    values: RunValues,
    runs: int,
    backends: Sequence[Backend],
) -> Profile:
    """Where the time of a plan goes: of ``runs`` runs of ``observed``, and as many of ``executor``,
    which is the same without observers, for what a run takes alone. What was not measured before is
    kept in the table of costs."""
    from penstock.tuning.trial import profile_in_turn

    profile = profile_in_turn(observed, executor, values, runs)
    costs = CostModel(backends)
    for single in (False, True) if executor.threads == 1 else (False,):
        costs.record_new(profile, single)
    costs.save()
    profile.settle()
    return profile
