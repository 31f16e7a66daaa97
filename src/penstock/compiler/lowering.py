"""The stages of the compile line that run passes. Saved plans need none of them, and do not import
this module."""

from __future__ import annotations

from functools import partial

from penstock.analysis.sizes import check_sizes
from penstock.backends.kernels import KernelTable
from penstock.compiler.stages import (
    CompileContext,
    Feeds,
    Lowered,
    set_threads,
)
from penstock.host.on_demand import imported
from penstock.ir.graph import Graph, Node, clone
from penstock.ops.internal.transfer import Place, Ports
from penstock.passes.pipeline import LOWER, optimize, run_passes
from penstock.tuning.measure import GraphProfiler
from penstock.tuning.placement import Placement

_observed_executor = imported("penstock.compiler.scheduling.observed_executor")


def optimize_for_shapes(feeds: Feeds, context: CompileContext) -> Feeds:
    """Simplify the graph as far as its shapes allow; refuse tensors that do not fit into memory."""
    if feeds.refined:  # else it is as simple already as its shapes allow
        optimize(feeds.graph, context.passes())
    check_sizes(feeds.graph, context.limits)
    return feeds


def lower_graph(feeds: Feeds, context: CompileContext, *, layouts: bool = True) -> Lowered:
    """Quantize, fuse, place each node on a backend; insert transfers between memories, and with
    ``layouts`` copies between layouts. Values that kernels allocate need none of these."""
    graph, kernels = feeds.graph, KernelTable()
    set_threads(graph, context)
    costs, profiler = context.costs, None
    if context.options.expert.cost_model is None:
        observed = partial(_observed_executor, context)
        profiler = GraphProfiler(graph, costs, feeds.values, kernels, observed)
    placement = Placement(context.backends, context.options.place or {}, kernels, costs)
    if context.one_memory and context.options.autotune and profiler is not None:
        _measure_fused(graph, placement, profiler, context)
    places = partial(_places, placement, profiler, context, feeds.ports)
    passes = context.passes(placement, places, kernels, layouts, feeds.ports)
    run_passes(LOWER, graph, passes)
    placed = {node: context.by_name[place.backend] for node, place in passes.placement.items()}
    return Lowered(graph, placed, kernels, costs, profiler)


def _measure_fused(
    graph: Graph, placement: Placement, profiler: GraphProfiler, context: CompileContext
) -> None:
    """Measure the nodes of ``graph``, with chains fused, on all backends."""
    copy = with_chains_fused(graph, placement, context)
    profiler.graph, profiler.allowed = copy, placement.candidates(copy)
    profiler.complete(single_threaded=False)
    profiler.graph = graph


def with_chains_fused(graph: Graph, placement: Placement, context: CompileContext) -> Graph:
    """A copy of ``graph`` with every chain fused that a backend has a kernel for, unless that was
    measured to be slower: once it is measured, costs decide which chains are."""
    copy = clone(graph)
    placement.measured_only = True
    run_passes(LOWER, copy, context.passes(placement))
    return copy


def _places(
    placement: Placement,
    profiler: GraphProfiler | None,
    context: CompileContext,
    ports: Ports | None,
    graph: Graph,
) -> dict[Node, Place]:
    """Where each node of ``graph`` runs, whose inputs and outputs are where ``ports`` say."""
    costs = placement.costs
    parallel = context.executor in ("parallel", "streams", "auto")
    if context.one_memory:
        # Values need no transfers, so each node runs where it is fastest.
        placed = placement.for_workers(graph, context.workers if parallel else 1)
        if profiler is not None:
            profiler.allowed = {node: [backend] for node, backend in placed.items()}
    else:
        allowed = placement.candidates(graph)
        if profiler is not None:
            profiler.allowed = allowed
            profiler.copy_graph()  # later measurements must not see the transfers of this one
            profiler.complete(single_threaded=parallel)
        from penstock.tuning.transfer_placement import choose

        threads = 1 if parallel else None
        placed = choose(
            graph,
            allowed,
            context.backends,
            lambda node, backend: costs.cost(node, backend, threads).seconds,
            costs.transfer,
            parallel=parallel,
            ports=ports,
        )
    return {node: Place(backend.name, backend.memory) for node, backend in placed.items()}
