"""The stages of graphs that run on the workers of a cluster.

::

    Feeds -> specialize -> structure_for_workers -> build_on_cluster

    Feeds           a graph, copied, and the values of its inputs
    Feeds           the graph with types, and the workers that nodes and ``place=`` name
    Executor        a worker for each node; a part for each worker, registered there

The graph is partitioned by worker. Each worker partitions its part again, by its devices
(``devices=``). A graph whose nodes name workers keeps its loops and conditions, as for
``devices=``: those that span workers run by tokens. In other graphs all control flow is
structured, and a loop is one node. A worker compiles its part in the same way as this process
would compile it (``compiler.frames``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

from penstock.analysis.frames import Frames
from penstock.analysis.sizes import check_sizes
from penstock.backends.base import Backend
from penstock.compiler.lowering import pass_context
from penstock.compiler.options import CompileOptions
from penstock.compiler.stages import CompileContext, Feeds, NamedWorkers
from penstock.core.errors import InvalidInput, InvalidModel, OptionError, Unsupported, check_count
from penstock.core.records import replace
from penstock.executors.base import Executor
from penstock.ir.device_name import LOCAL, DeviceName, local
from penstock.ir.graph import Graph, GraphPart, Model, Node, is_framed
from penstock.ir.op import Role
from penstock.ops.work_estimate import host_seconds
from penstock.passes.context import FramePolicy
from penstock.passes.lowering.assign_devices import AssignDevices
from penstock.passes.lowering.partition import Partition
from penstock.passes.optimize.fold_constants import InferTypes
from penstock.passes.pipeline import ASSIGN, DEVICES, run_passes
from penstock.passes.structure.lower_control_flow import spans_devices
from penstock.tuning.measure import CostSource
from penstock.tuning.placement import check_keys, wanted
from penstock.tuning.worker_placement import ClusterForecast, LinkCost, WorkerPlacement, WorkerPool


def names_task(device: str) -> bool:
    """Whether the name of a device includes a job or task, and so selects a worker."""
    if "job:" not in device and "task:" not in device:
        return False
    try:
        name = DeviceName.parse(device)
    except InvalidModel:
        return False
    # Names of the local job mean this process, not a worker.
    here = DeviceName.parse(LOCAL)
    return (name.job or name.task) is not None and not name.allows(here)


class WorkerPolicy(FramePolicy):
    """The policy for the workers of a cluster: each has one part, with all of its devices.

    ``own``: the devices of each worker, by their full names. A part is named as the cluster names
    its worker, which may differ from the names of the worker's devices.
    """

    separates = True

    def __init__(self, workers: WorkerPool, own: Sequence[Mapping[str, object]]) -> None:
        super().__init__()
        self._workers = workers
        self._own = [[*names] for names in own] or [[name] for name in workers.devices]
        self._worker = {name: i for i, names in enumerate(self._own) for name in names}
        self.devices = [*self._worker]

    def runs_apart(self, node: Node) -> bool:
        return spans_devices(node)

    def home(self, device: str) -> str:
        return self._workers.devices[self._worker[device]]

    def worker(self, device: str) -> int:
        """Return the index of the worker that has a device."""
        return self._worker[device]

    def first(self, worker: int) -> str:
        """Return the device of a worker for nodes that name no device."""
        return self._own[worker][0]

    def moved(self, device: str, worker: int) -> str:
        """Return the device of a worker that corresponds to one of another, or its first one."""
        name = DeviceName.parse(device)
        wanted = DeviceName(kind=name.kind, index=name.index)
        same = (own for own in self._own[worker] if DeviceName.parse(own).allows(wanted))
        return next(same, self.first(worker))


def devices_of_workers(
    devices: int | Sequence[str] | Mapping[str, str | Backend], workers: Sequence[str]
) -> list[dict[str, str | Backend | None]]:
    """Return the devices of each worker by their full names, with the backend that a mapping gives
    each. ``workers``: names of the workers. A name without a worker is a device of every worker,
    and a worker without devices has one CPU. Raises ``OptionError``."""
    if isinstance(devices, int):
        check_count("devices", devices, 10_000)
        devices = [f"cpu:{i}" for i in range(devices)]
    names = [*devices]
    if not names:
        raise OptionError(f'devices={devices!r}: give a number, or names such as ["cpu:0"]')
    backends: Mapping[str, str | Backend] = devices if isinstance(devices, Mapping) else {}
    own: list[dict[str, str | Backend | None]] = []
    used: set[str] = set()
    for worker in workers:
        # Names without a number are refused below instead of being completed to CPU:0.
        here = replace(DeviceName.parse(worker), index=None)
        fitting = [name for name in names if _parsed(name).allows(here)]
        used |= {*fitting}
        full = local(fitting, here) if fitting else [worker]
        keys: Sequence[str | None] = fitting or [None]
        own.append({f: backends.get(k) if k else None for f, k in zip(full, keys, strict=True)})
    for name in names:
        if name not in used:
            raise OptionError(f"devices= has {name!r}, but the cluster has no such worker")
    return own


def _parsed(name: str) -> DeviceName:
    try:
        return DeviceName.parse(name)
    except InvalidModel as error:
        raise OptionError(f"devices= has {name!r}, which is not a device: {error}") from error


def worker_places(options: CompileOptions, model: Model) -> tuple[CompileOptions, NamedWorkers]:
    """Split ``place=`` into the entries that name workers and the others. Return the options with
    the others, and the workers. Raises ``InvalidInput`` for an unknown worker or key."""
    place, cluster = options.place or {}, options.cluster
    assert cluster is not None
    pins = {k: name for k, name in place.items() if isinstance(name, str) and "task:" in name}
    given = options.devices
    own = [] if given is None else devices_of_workers(given, cluster.devices)
    names = [name for each in own for name in each] or cluster.devices
    available = [DeviceName.parse(device) for device in names]
    for key, name in pins.items():
        if not any(DeviceName.parse(name).allows(device) for device in available):
            raise InvalidInput(
                f"place={{{key!r}: {name!r}}}: the cluster has no such worker, it has "
                f"{', '.join(names[:2])} and so on: {len(names)} in all"
            )
    # Keys that name backends are checked later, with the backends.
    check_keys(pins, model.graph)
    rest = {key: name for key, name in place.items() if key not in pins}
    named = bool(pins) or any(names_task(node.device) for node in model.graph.walk())
    return replace(options, place=rest or None), NamedWorkers(pins, named, own)


def structure_for_workers(feeds: Feeds, context: CompileContext) -> Feeds:
    """Assign to nodes the workers of ``place=``, and to values their types. If nodes in nested
    graphs name workers, every node gets one, and control flow becomes primitives."""
    graph = feeds.graph
    for node in graph.walk():
        node.device = next(iter(wanted(node, context.named_workers.by_key)), node.device)
    # A structured node runs as a whole on one worker, unless nodes inside it name several.
    inner = [inner_node for node in graph.nodes for inner_node in node.inner]
    has_devices = bool(context.named_workers.devices)
    spread = any(node.device and (has_devices or names_task(node.device)) for node in inner)
    passes = pass_context(context, frames=_policy(context))
    run_passes(DEVICES if spread else (InferTypes(),), graph, passes)
    check_sizes(graph, context.limits)
    # Called for its errors: a graph with invalid frames is refused before any worker gets a part.
    Frames(graph)
    return feeds


def build_on_cluster(feeds: Feeds, context: CompileContext) -> Executor:
    """Return the executor of a graph on a cluster."""
    graph, cluster, policy = feeds.graph, context.options.cluster, _policy(context)
    assert cluster is not None
    passes = pass_context(context, frames=policy)
    if is_framed(graph):
        run_passes(ASSIGN, graph, passes)
    else:
        placement = _placement(graph, cluster, context)
        # Without frames each node runs once per run, so its cost is what a run takes.
        workers = placement.best(cluster.objective)
        for node, worker in zip(graph.nodes, workers, strict=True):
            for part_node in (node, *node.inner):
                part_node.device = policy.moved(part_node.device, worker)
    run_passes((Partition(),), graph, passes)
    return cluster.executor([_named(part, policy) for part in policy.parts], graph, context)


def forecast_on_cluster(feeds: Feeds, context: CompileContext) -> ClusterForecast:
    """Return the expected times of runs of a graph on a cluster. Raises ``Unsupported`` for a graph
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


def _policy(context: CompileContext) -> WorkerPolicy:
    """Return the policy that says where nodes may run on the workers of a cluster."""
    cluster = context.options.cluster
    assert cluster is not None
    return WorkerPolicy(cluster, context.named_workers.devices)


def _named(part: GraphPart, policy: WorkerPolicy) -> GraphPart:
    """Return a part named after the worker of its nodes, or the first worker if it has none."""
    if part.device:  # empty for a part without nodes: the model fetches what it is fed
        return part
    nodes = part.graph.nodes
    return replace(part, device=policy.home(nodes[0].device if nodes else policy.first(0)))


def _placement(graph: Graph, cluster: WorkerPool, context: CompileContext) -> WorkerPlacement:
    """Return the placement that chooses the workers of nodes by costs. Nodes that name a worker
    keep it; stateful nodes are on the first worker."""
    # ``assign_devices`` overwrites the model's own names, which distinguish pinned nodes.
    copy, policy = {node: node.device for node in graph.nodes}, _policy(context)
    for node in graph.nodes:
        # Without devices= a name such as cpu:1 has no meaning here.
        if not names_task(node.device) and not (node.device and context.named_workers.devices):
            node.device = policy.first(0)
    run_passes((AssignDevices(),), graph, pass_context(context, frames=policy))
    pins = {
        node: policy.worker(node.device)
        for node in graph.nodes
        if names_task(copy[node]) or _has_state(node, context)
    }
    seconds: Callable[[Node], float] = partial(_seconds, context)
    if cluster.costs is not None:
        seconds = cluster.costs.seconds(graph, seconds)
    # With one worker there are no transfers to save.
    link = cluster.link_cost if cluster.workers > 1 else LinkCost(inf, 0.0)
    return WorkerPlacement(graph, cluster.workers, seconds, link, pins, cluster.cores)


def _has_state(node: Node, context: CompileContext) -> bool:
    """Whether a node uses variables, or other objects that stay on one worker."""
    # Variables keep one consistent value only on a single worker.
    if not node.op.pure or "store" in node.attrs:
        return True
    called = context.functions[node.attrs["function"]] if node.op.role is Role.CALL else None
    inner = node.inner if called is None else called.walk()
    return any(_has_state(inner_node, context) for inner_node in inner)


def _seconds(context: CompileContext, node: Node) -> float:
    """Return the cost of a node in seconds with one thread, measured if possible."""
    costs = context.costs
    if node.graphs or node.op.role is not None:
        return host_seconds(node)
    known = [costs.cost(node, backend, 1) for backend in context.hosts]
    measured = [cost.seconds for cost in known if cost.source is CostSource.MEASURED]
    return min(measured, default=host_seconds(node))
