"""The stages of graphs that run on the workers of a cluster.

::

    Feeds -> specialize -> structure_for_workers -> build_on_cluster

    Feeds           a graph, copied, and the values of its inputs
    Feeds           the graph with types, and with the workers that nodes and ``place=`` name
    Executor        a worker for each node; a part for each worker, registered there

A graph whose nodes name workers keeps its loops and conditions, as for ``devices=``: those that
span workers run by tokens. Of other graphs all control flow is structured, and a loop is one node.
What a worker makes of its part is what this process would make of it (``compiler.frames``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

from penstock.analysis.frames import Frames
from penstock.analysis.sizes import check_sizes
from penstock.compiler.lowering import pass_context
from penstock.compiler.options import CompileOptions
from penstock.compiler.stages import CompileContext, Feeds, NamedWorkers
from penstock.core.errors import InvalidInput, InvalidModel, Unsupported
from penstock.core.records import replace
from penstock.executors.base import Executor
from penstock.ir.device_name import LOCAL, DeviceName
from penstock.ir.graph import Graph, GraphPart, Model, Node, is_framed
from penstock.ir.op import Role
from penstock.ops.work_estimate import host_seconds
from penstock.passes.context import FramePolicy, PassContext
from penstock.passes.lowering.assign_devices import AssignDevices
from penstock.passes.lowering.partition import Partition
from penstock.passes.optimize.fold_constants import InferTypes
from penstock.passes.pipeline import ASSIGN, DEVICES, run_passes
from penstock.passes.structure.lower_control_flow import spans_devices
from penstock.tuning.measure import CostSource
from penstock.tuning.placement import check_keys, wanted
from penstock.tuning.worker_placement import (
    ClusterForecast,
    LinkCost,
    WorkerPlacement,
    WorkerPool,
)


def names_task(device: str) -> bool:
    """Whether the name of a device says on which worker it is."""
    if "job:" not in device and "task:" not in device:
        return False
    try:
        name = DeviceName.parse(device)
    except InvalidModel:
        return False
    # Names of the local job mean this process, and no worker.
    here = DeviceName.parse(LOCAL)
    return (name.job or name.task) is not None and not name.allows(here)


class WorkerPolicy(FramePolicy):
    """Each worker of a cluster is a device with a part of its own."""

    separates = True

    def __init__(self, workers: WorkerPool) -> None:
        super().__init__()
        self.devices = workers.devices

    def runs_apart(self, node: Node) -> bool:
        return spans_devices(node)


def worker_places(options: CompileOptions, model: Model) -> tuple[CompileOptions, NamedWorkers]:
    """Take out of ``place=`` what names workers: the other options, and the workers. Raises
    ``InvalidInput`` for a worker that the cluster lacks, and a key that the model lacks."""
    place, cluster = options.place or {}, options.cluster
    assert cluster is not None
    pins = {k: name for k, name in place.items() if isinstance(name, str) and "task:" in name}
    available = [DeviceName.parse(device) for device in cluster.devices]
    for key, name in pins.items():
        if not any(DeviceName.parse(name).allows(device) for device in available):
            raise InvalidInput(
                f"place={{{key!r}: {name!r}}}: the cluster has no such worker, it has "
                f"{', '.join(cluster.devices[:2])} and so on: {cluster.workers} in all"
            )
    # Keys that name backends are checked with the backends later.
    check_keys(pins, model.graph)
    rest = {key: name for key, name in place.items() if key not in pins}
    named = bool(pins) or any(names_task(node.device) for node in model.graph.walk())
    return replace(options, place=rest or None), NamedWorkers(pins, named)


def structure_for_workers(feeds: Feeds, context: CompileContext) -> Feeds:
    """Give nodes the workers that ``place=`` has for them, and values their types. If the nodes in
    the graphs of others name workers, all nodes get one, and control flow becomes primitives."""
    graph = feeds.graph
    for node in graph.walk():
        node.device = next(iter(wanted(node, context.named_workers.by_key)), node.device)
    # A structured node runs as a whole on one worker, unless what is in it names several.
    inner = [n for node in graph.nodes for _, g in node.graphs for n in g.walk()]
    spread = any(names_task(node.device) for node in inner)
    run_passes(DEVICES if spread else (InferTypes(),), graph, _passes(context))
    check_sizes(graph, context.limits)
    Frames(graph)
    return feeds


def build_on_cluster(feeds: Feeds, context: CompileContext) -> Executor:
    """The executor of a graph on a cluster."""
    graph, cluster, passes = feeds.graph, context.options.cluster, _passes(context)
    assert cluster is not None
    if is_framed(graph):
        run_passes(ASSIGN, graph, passes)
    else:
        placement = _placement(graph, cluster, context)
        # Without frames each node runs once in a run, so that its cost says what a run takes.
        workers = placement.best(cluster.objective)
        for node, worker in zip(graph.nodes, workers, strict=True):
            node.device = cluster.devices[worker]
    run_passes((Partition(),), graph, passes)
    return cluster.executor([_named(part, cluster) for part in passes.frames.parts], graph, context)


def forecast_on_cluster(feeds: Feeds, context: CompileContext) -> ClusterForecast:
    """What runs of a graph on a cluster are expected to take. Raises ``Unsupported`` for a graph
    with loops of TensorFlow's frames."""
    graph, cluster = feeds.graph, context.options.cluster
    assert cluster is not None
    if is_framed(graph):
        reason = "how often its loop runs is known only during a run: measure runs instead"
        framed = [node for node in graph.nodes if node.op.role is Role.NEXT_ITERATION]
        raise Unsupported.of(
            (node.op.full_name, reason, node.label) for node in framed or graph.nodes
        )
    placement = _placement(graph, cluster, context)
    return placement.simulated(placement.best(cluster.objective))


def _passes(context: CompileContext) -> PassContext:
    """The context of passes over a graph for a cluster."""
    cluster = context.options.cluster
    assert cluster is not None
    return pass_context(context, frames=WorkerPolicy(cluster))


def _named(part: GraphPart, cluster: WorkerPool) -> GraphPart:
    """A part with the worker of its nodes: of a part without nodes, the first one."""
    if part.device:  # else it has no nodes: the model fetches what it is fed
        return part
    nodes = part.graph.nodes
    return replace(part, device=nodes[0].device if nodes else cluster.devices[0])


def _placement(graph: Graph, cluster: WorkerPool, context: CompileContext) -> WorkerPlacement:
    """What chooses the workers of nodes by costs: but for those that name one, and for those with a
    state, which are on the first one."""
    # ``assign_devices`` overwrites the names that the model has, which tell pins from other nodes.
    copy = {node: node.device for node in graph.nodes}
    for node in graph.nodes:
        if not names_task(node.device):
            node.device = cluster.devices[0]
    run_passes((AssignDevices(),), graph, _passes(context))
    pins = {
        node: cluster.devices.index(node.device)
        for node in graph.nodes
        if names_task(copy[node]) or _has_state(node, context)
    }
    seconds: Callable[[Node], float] = partial(_seconds, context)
    if cluster.costs is not None:
        seconds = cluster.costs.seconds(graph, seconds)
    # Nothing can be sent where there is one worker.
    link = cluster.link_cost if cluster.workers > 1 else LinkCost(inf, 0.0)
    return WorkerPlacement(graph, cluster.workers, seconds, link, pins, cluster.cores)


def _has_state(node: Node, context: CompileContext) -> bool:
    """Whether a node has to do with variables, or other objects that stay on one worker."""
    # State is one only where it is on one worker.
    if not node.op.pure or "store" in node.attrs:
        return True
    if node.op.role is Role.CALL:
        inner = context.functions[node.attrs["function"]].walk()
        return any(_has_state(each, context) for each in inner)
    return any(_has_state(each, context) for _, graph in node.graphs for each in graph.walk())


def _seconds(context: CompileContext, node: Node) -> float:
    """The cost of a node with one thread: measured, or else estimated."""
    costs = context.costs
    if node.graphs or node.op.role is not None:
        return host_seconds(node)
    known = [costs.cost(node, backend, 1) for backend in context.hosts]
    measured = [cost.seconds for cost in known if cost.source is CostSource.MEASURED]
    return min(measured, default=host_seconds(node))
