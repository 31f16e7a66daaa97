"""The stages of the compile line that run passes, and the pass context that they share. Saved
plans need none of this and do not import this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penstock.analysis.sizes import check_sizes
from penstock.backends.base import copier, stacks
from penstock.backends.kernels import KernelTable
from penstock.compiler.stages import CompileContext, Feeds, Lowered, set_threads
from penstock.executors.base import Executor
from penstock.ir.graph import Graph, Node, clone
from penstock.ops.internal.transfer import Place, Ports
from penstock.passes.context import FramePolicy, FusionPolicy, Numerics, PassContext, Placing
from penstock.passes.pipeline import LOWER, optimize, packing, run_passes
from penstock.tuning.kernel_placing import KernelPlacing
from penstock.tuning.measure import GraphProfiler
from penstock.tuning.placement import Placement


def optimize_for_shapes(feeds: Feeds, context: CompileContext) -> Feeds:
    """Simplify the graph as far as its shapes allow. Raises for tensors too large for memory."""
    if feeds.refined:  # otherwise the graph is already as simple as its shapes allow
        optimize(feeds.graph, pass_context(context))
    check_sizes(feeds.graph, context.limits)
    return feeds


def lower_graph(feeds: Feeds, context: CompileContext, *, layouts: bool = True) -> Lowered:
    """Quantize and fuse nodes, place each on a backend, insert transfers between memories and, with
    ``layouts``, copies between layouts. Values that kernels allocate need no layout copies."""
    # Kernels are compiled once: placement, layouts and the plan all use this table.
    graph, kernels = feeds.graph, KernelTable()
    set_threads(graph, context)
    costs, profiler = context.costs, None
    if context.measures:
        observed = partial(_observed_executor, context)
        profiler = GraphProfiler(graph, costs, feeds.values, kernels, observed)
    place, of_places = context.options.place or {}, context.placing_costs
    placement = Placement(context.backends, place, kernels, of_places)
    # With several memories, candidates are measured where placement needs them (``_places``).
    if context.one_memory and context.options.autotune and profiler is not None:
        _measure_fused(graph, placement, profiler, context)
    places = partial(_places, placement, profiler, context, feeds.ports)
    placing = BackendPlacing(context, places, kernels, layouts, feeds.ports)
    passes = packing(feeds.packs) if feeds.packs else LOWER
    run_passes(passes, graph, pass_context(context, placement, placing))
    # Passes know places by name; from here on each step has a backend object.
    placed = {node: context.by_name[place.backend] for node, place in placing.placement.items()}
    if context.options.reproducible:
        from penstock.ops.exactness import check_exact

        check_exact([node for node, backend in placed.items() if backend.name != "native"])
    return Lowered(graph, placed, kernels, costs, profiler, memory=placing.memory)


def _observed_executor(context: CompileContext, *parts: Any) -> Executor:
    """``scheduling.observed_executor``, imported only when something is measured."""
    from penstock.compiler.scheduling import observed_executor

    return observed_executor(context, *parts)


def _measure_fused(
    graph: Graph, placement: Placement, profiler: GraphProfiler, context: CompileContext
) -> None:
    """Measure the nodes of ``graph`` on all backends, with chains fused."""
    copy = with_chains_fused(graph, placement, context)
    # The graph itself stays unfused until costs show which chains pay off.
    profiler.graph, profiler.allowed = copy, placement.candidates(copy)
    profiler.complete(single_threaded=False)
    profiler.graph = graph


def with_chains_fused(graph: Graph, placement: Placement, context: CompileContext) -> Graph:
    """Return a copy of ``graph`` with every chain fused for which a backend has a kernel, except
    chains that were measured to be slower. Costs choose among chains after measuring."""
    copy = clone(graph)
    # An estimate would exclude chains that are about to be measured.
    placement.measured_only = True
    run_passes(LOWER, copy, pass_context(context, placement, BackendPlacing(context)))
    return copy


def _places(
    placement: Placement,
    profiler: GraphProfiler | None,
    context: CompileContext,
    ports: Ports | None,
    graph: Graph,
) -> dict[Node, Place]:
    """Place each node of ``graph``, whose inputs and outputs are in the memories of ``ports``."""
    costs = placement.costs
    parallel = context.executor in ("parallel", "streams", "auto")
    if context.one_memory:
        # Values need no transfers, so each node runs where it is fastest.
        placed = placement.for_workers(graph, context.workers if parallel else 1)
        if profiler is not None:  # measure only the costs that decide between orders from here on
            profiler.allowed = {node: [backend] for node, backend in placed.items()}
    else:
        from penstock.tuning.trial import BUDGET

        allowed = placement.candidates(graph)
        if profiler is not None:
            profiler.allowed = allowed
            profiler.copy_graph()  # later measurements must not see the transfers inserted here
            # Tasks also need costs with all threads, for which one of three runs remains.
            runs = None if context.options.autotune else BUDGET - (2 if parallel else 1)
            profiler.complete(single_threaded=parallel, brief_runs=runs)
        from penstock.tuning.transfer_placement import TransferPlacement

        threads = 1 if parallel else None  # tasks that run at the same time have one core each
        choice = TransferPlacement(
            allowed,
            context.backends,
            lambda node, backend: costs.cost(node, backend, threads).seconds,
            costs.transfer,
            parallel=parallel,
            ports=ports,
        )
        placed = choice.choose(graph)
        if profiler is not None:  # measure only the costs that decide between orders from here on
            pairs = zip(graph.walk(), profiler.graph.walk(), strict=True)
            profiler.allowed = {new: [placed[old]] for old, new in pairs if old in placed}
    return {node: Place(backend.name, backend.memory) for node, backend in placed.items()}


class BackendPlacing(KernelPlacing):
    """Places nodes on the backends of a session, by the function ``choose`` of a graph. With
    ``layouts``, the ``kernels`` of the compilation also determine the layouts of values."""

    def __init__(
        self,
        context: CompileContext,
        choose: Callable[[Graph], Mapping[Node, Place]] | None = None,
        kernels: KernelTable | None = None,
        layouts: bool = False,
        ports: Ports | None = None,
    ) -> None:
        super().__init__(context.backends, kernels or KernelTable(), ports=ports)
        self._by_name = context.by_name
        self._choose = choose
        self.plans_layouts = layouts

    def chosen(self, graph: Graph) -> Mapping[Node, Place]:
        return self.placement if self._choose is None else self._choose(graph)

    def direct(self, source: str, target: str) -> bool:
        return copier(self._by_name[source], self._by_name[target]) is not None

    def stacks(self, backend: str) -> bool:
        return stacks(self._by_name[backend])


def pass_context(
    context: CompileContext,
    fusion: FusionPolicy | None = None,
    placing: Placing | None = None,
    frames: FramePolicy | None = None,
) -> PassContext:
    """Return the context of passes. By default nodes have no places, and all frames are raised."""
    return PassContext(
        limits=context.limits,
        fusion=fusion if context.fuses else None,
        fold_quantized_weights=not context.fuses,
        numerics=Numerics(context.options.precision == "strict", context.options.reproducible),
        weights=context.weights,
        placing=placing or Placing(),
        frames=frames or FramePolicy(),
        after_pass=context.options.expert.after_pass,
    )
