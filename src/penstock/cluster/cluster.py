"""``penstock.Cluster``: workers on one machine or many that run the parts of graphs together."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any

from penstock.algorithms.records import dataclass
from penstock.analysis.frames import GraphPart
from penstock.cluster.simulated import MOST_WORKERS, check_rates, worker_devices
from penstock.errors import InvalidModel, PenstockError, WorkerLost, check_count
from penstock.ir.graph import Graph
from penstock.ir.op import Role
from penstock.plan.plan import Slot, SlotKind, StepTable
from penstock.session.stages import CompileContext
from penstock.tuning.profile_costs import ProfileCosts
from penstock.types import TensorType

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from penstock.cluster.executor import ClusterExecutor
    from penstock.cluster.members import Members
    from penstock.cluster.one_worker import OneWorker
    from penstock.cluster.parts import PartOptions, RemotePart
    from penstock.cluster.variables import ClusterVariables
    from penstock.ir.graph import Model
    from penstock.limits import Limits
    from penstock.ops.tensorflow.state import Store
    from penstock.tuning.worker_placement import LinkCost

# Bytes of the messages by which links are measured, and how often each is sent.
_PROBES = (8, 1 << 20)
_PROBE_ROUNDS = 8
# Times that workers are replaced in a row while others die.
_MOST_REPLACEMENTS = 5
# Seconds that reading or setting a variable waits for its worker to be replaced.
_MOST_WAIT_S = 60.0


@dataclass(frozen=True, eq=False)
class _Registered:
    """A graph: the contents of its part for each worker, as a reference of Ray, their digests and
    bytes, and what workers need to compile it. ``variables``: the names of those that each worker
    has."""

    contents: Mapping[int, Any]
    digests: Mapping[int, bytes]
    nbytes: Mapping[int, int]
    options: PartOptions
    parts: Mapping[int, RemotePart]
    stores: Mapping[int, list[int]]
    variables: Mapping[int, list[str]]


class Cluster:
    """Workers that run the graphs of sessions together: ``penstock.compile(model, cluster=...)``.

    Workers are processes, actors of Ray (``pip install penstock[ray]``), which start when the first
    graph is compiled. Any number of sessions may share a cluster, which ``close`` ends, or the end
    of the process. Nodes run on the worker that they name (``/job:worker/task:1``), or that
    ``place=`` names; of others costs decide.

    A run whose worker dies ends with ``WorkerLost``; a new worker takes the place of the old one,
    with the variables as the model has them.

    Args:
        workers: Their number.
        threads: Threads of each worker.
        retries: How often a run is tried again whose worker died, if its graph has no variables.
        worker_timeout: Seconds after which a worker that gives no answer counts as dead.
        objective: What placements are for: "throughput", that many runs at the same time take the
            least time each, as a pipeline; or "latency", that one run does.
        bandwidth: Bytes per second between workers; measured when the cluster starts unless given.
        latency: Seconds from worker to worker; measured as well.
        cores: The cores that all workers share, on one machine: placements then use no more
            workers at a time. By default each worker has its own, as kernels have that wait for
            devices.
        profile: A file with what nodes take (``Profile.save``); by default the table of costs.
        address: That of a Ray; by default the one that this process uses, or else one that is
            started on this machine.
    """

    def __init__(
        self,
        workers: int = 2,
        threads: int = 1,
        *,
        retries: int = 0,
        worker_timeout: float = 30.0,
        objective: str = "throughput",
        bandwidth: float | None = None,
        latency: float | None = None,
        cores: int | None = None,
        profile: str | Path | None = None,
        address: str | None = None,
    ) -> None:
        check_count("workers", workers, MOST_WORKERS)
        check_count("threads", threads)
        if cores is not None:
            check_count("cores", cores)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries={retries!r}: a whole number of at least 0 is needed")
        check_rates(objective, worker_timeout=worker_timeout, bandwidth=bandwidth, latency=latency)
        self.workers = workers
        self.threads = threads
        self.cores = cores
        self.retries = retries
        self.worker_timeout = worker_timeout
        self.objective = objective
        self.devices = worker_devices(workers)
        self.costs = None if profile is None else ProfileCosts.read(profile)
        self.sent_graph_bytes = 0
        """bytes of graphs that workers have been sent"""
        self._address = address
        self._rates = bandwidth, latency
        self._link_cost: LinkCost | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._whole = threading.Event()
        self._whole.set()
        self._members: Members | None = None
        self._handles = count()
        self._graphs: dict[int, _Registered] = {}
        self._contents: dict[bytes, Any] = {}  # references of Ray, by digest
        self._store_numbers: weakref.WeakKeyDictionary[Store, int] = weakref.WeakKeyDictionary()
        self._homes: dict[tuple[int, str], int] = {}
        self._losses: dict[int, WorkerLost] = {}
        self._echo: dict[int, threading.Event] = {}
        self._runs: Any = None

    # Starting and ending.

    def start(self) -> None:
        """Start the workers, unless they have been started. Raises ``PenstockError`` if Ray is not
        installed, or has no room for them."""
        with self._lock:
            if self._closed:
                raise PenstockError("the cluster is closed")
            if self._members is not None:
                return
            try:
                from penstock.cluster.members import Members, start_ray
                from penstock.cluster.runs import Runs
            except ImportError as error:
                raise PenstockError(
                    f"a cluster needs Ray ({error}): pip install penstock[ray]"
                ) from error
            start_ray(self._address, self.workers * self.threads)
            runs = Runs()
            self._members = runs.members = Members(
                self.devices,
                self.threads,
                self.worker_timeout,
                self._take,
                self._lost,
                runs.end_doubtful,
            )
            self._runs = runs
            atexit.register(self.close)

    def close(self) -> None:
        """End the workers; runs in flight end with ``WorkerLost``. Ray goes on."""
        with self._lock:
            closed, self._closed = self._closed, True
            members, runs = self._members, self._runs
        if not closed and members is not None:
            atexit.unregister(self.close)
            members.close()
            runs.end_all(WorkerLost("the cluster was closed"))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a cluster cannot be pickled: it has workers of this process")

    @property
    def processes(self) -> list[int]:
        """The numbers of the workers' processes."""
        return [] if self._members is None else [m.process for m in self._members.members]

    def each_worker(self) -> list[OneWorker]:
        """Each worker as a cluster of its own, for replicas."""
        from penstock.cluster.one_worker import OneWorker

        return [OneWorker(self, i) for i in range(self.workers)]

    # Graphs.

    def executor(
        self, parts: Sequence[GraphPart], graph: Graph, context: CompileContext
    ) -> ClusterExecutor:
        """Register the parts of a graph with the workers whose devices they name."""
        from penstock.cluster.executor import ClusterExecutor

        self.start()
        assert self._members is not None
        handle = next(self._handles)
        workers = [self.devices.index(part.device) for part in parts]
        self._members.connect(self._pairs(parts))
        fresh: list[tuple[Store, str]] = []
        by_worker = dict(zip(workers, parts, strict=True))
        registered = self._encoded(handle, by_worker, context, fresh)
        with self._lock:
            self._graphs[handle] = registered
        for worker in workers:
            self._register(handle, registered, worker)
        for store, name in fresh:
            self._send_variable(store, name)
        remote = list(registered.parts.values())
        # A run that has changed variables must not do so again.
        stateful = any(registered.stores.values())
        retries, loss = (0, self.undeclared_loss) if stateful else (self.retries, None)
        table, source = _table(graph), _source(parts)
        executor = ClusterExecutor(
            self._runs, handle, remote, table, source, retries, loss, self.threads
        )
        weakref.finalize(executor, self._forget, handle)
        return executor

    def _encoded(
        self,
        handle: int,
        parts: Mapping[int, GraphPart],
        context: CompileContext,
        fresh: list[tuple[Store, str]],
    ) -> _Registered:
        """The parts of a graph for their workers. ``fresh`` gets the variables that no worker had
        before."""
        import numpy as np
        import ray

        from penstock.cluster.parts import PartOptions, encode_part, remote_parts, variables_of

        contents: dict[int, Any] = {}
        digests: dict[int, bytes] = {}
        nbytes: dict[int, int] = {}
        numbers: dict[int, list[int]] = {}
        variables: dict[int, list[str]] = {}
        for worker, part in parts.items():
            content, stores = encode_part(part, context.functions)
            with self._lock:
                known = self._store_numbers
                numbers[worker] = [known.setdefault(s, len(known)) for s in stores]
                names = variables_of(part.graph, context.functions)
                variables[worker] = [name for _, name in names]
                for store, name in names:
                    if self._settle((known[store], name), worker):
                        fresh.append((store, name))
            digests[worker] = blake2b(content, digest_size=16).digest()
            with self._lock:  # replicas on several workers have the same content
                stored = self._contents.get(digests[worker])
                if stored is None:
                    stored = ray.put(np.frombuffer(content, np.uint8))
                    self._contents[digests[worker]] = stored
            contents[worker] = stored
            nbytes[worker] = len(content)
        options = PartOptions.of(context)
        remote = {part.worker: part for part in remote_parts(parts)}
        return _Registered(contents, digests, nbytes, options, remote, numbers, variables)

    def _settle(self, variable: tuple[int, str], worker: int) -> bool:
        """Note the worker that has a variable; whether none had it before."""
        is_new = variable not in self._homes
        home = self._homes.setdefault(variable, worker)
        if home != worker:
            raise InvalidModel(
                f"variable {variable[1]!r} is used on {self.devices[home]} and on "
                f"{self.devices[worker]}, which have no memory in common; give all nodes that name "
                "it one device"
            )
        return is_new

    def _register(self, handle: int, registered: _Registered, worker: int) -> None:
        assert self._members is not None
        actor = self._members.members[worker].actor
        content, stores = registered.contents[worker], registered.stores[worker]
        part = registered.parts[worker]
        call = actor.register.remote(handle, part, content, registered.options, stores)
        self._members.result(call)
        self.sent_graph_bytes += registered.nbytes[worker]

    def _pairs(self, parts: Sequence[GraphPart]) -> dict[tuple[int, int], int]:
        """The pairs of workers that exchange values, with the bytes of the largest one."""
        pairs: dict[tuple[int, int], int] = {}
        for part in parts:
            for node in part.graph.nodes:
                if node.op.role is Role.RECV:
                    ends = node.attrs["send_device"], node.attrs["recv_device"]
                    source, target = map(self.devices.index, ends)
                    type_ = node.attrs.get("type")
                    nbytes = 0
                    if isinstance(type_, TensorType) and type_.static:
                        nbytes = type_.nbytes
                    pairs[source, target] = max(nbytes, pairs.get((source, target), 0))
        return pairs

    def _forget(self, handle: int) -> None:
        """Give up a graph that no session needs any more."""
        with self._lock:
            registered = self._graphs.pop(handle, None)
            members = self._members
            kept = {d for other in self._graphs.values() for d in other.digests.values()}
            for digest in () if registered is None else registered.digests.values():
                if digest not in kept:
                    self._contents.pop(digest, None)
        if registered is None or members is None or self._closed:
            return
        for worker in registered.contents:
            members.members[worker].actor.forget.remote([handle])

    # Variables.

    def variables(self, model: Model, own: dict[Store, Store], limits: Limits) -> ClusterVariables:
        """The variables of a session, whose stores are its ``own``, by those of the model."""
        from penstock.cluster.variables import ClusterVariables

        return ClusterVariables(self, model, own, limits)

    def _send_variable(self, store: Store, name: str) -> None:
        """Give a worker the value that a variable was set to before the worker had it."""
        value = store.variable(name, TensorType()).value
        home = self.home(store, name)
        if home is not None and value is not store.model.initial.get(name):
            self.set_variable(*home, name, value)

    def home(self, store: Store, name: str) -> tuple[int, int] | None:
        """The worker that has a variable, and the number of its store there; None if no graph that
        names it is registered."""
        with self._lock:
            number = self._store_numbers.get(store)
            worker = None if number is None else self._homes.get((number, name))
            return None if number is None or worker is None else (worker, number)

    def variable(self, worker: int, store: int, name: str) -> np.ndarray | None:
        """A copy of the value of a variable."""
        value: np.ndarray | None = self._ask(worker, "variable", store, name)
        return value

    def set_variable(self, worker: int, store: int, name: str, value: np.ndarray | None) -> None:
        """Replace the value of a variable."""
        self._ask(worker, "set_variable", store, name, value)

    def _ask(self, worker: int, method: str, *arguments: Any) -> Any:
        """What a worker answers, once it has its parts: those that it had, after it was lost."""
        assert self._members is not None
        if not self._whole.wait(_MOST_WAIT_S):
            raise WorkerLost(f"worker {worker} is lost, and not replaced yet")
        call = getattr(self._members.members[worker].actor, method)
        return self._members.result(call.remote(*arguments))

    # Messages, and lost workers.

    def _take(self, worker: int, message: tuple[Any, ...]) -> None:
        if message[0] == "echo":
            self._echo[message[1]].set()
        else:
            self._runs.take(worker, message)

    def _lost(self, lost: dict[int, str]) -> None:
        """Replace workers that have died, and others that die meanwhile; on the thread that
        watches."""
        assert self._members is not None
        self._whole.clear()
        gone: str | None = None
        for _ in range(_MOST_REPLACEMENTS):
            for worker, reason in lost.items():
                self._note_loss(worker, reason)
                self._runs.hold(worker, partial(self._told, worker, reason))
            try:
                self._replace(lost)
                gone = None
                break
            except Exception as error:
                if self._closed:
                    return
                gone = f"workers {sorted(lost)} are lost and cannot be replaced: {error}"
                lost = {**dict.fromkeys(lost, gone), **self._members.dead()}
        self._whole.set()
        self._runs.resume(gone)

    def _told(self, worker: int, reason: str, part: RemotePart) -> str:
        return f"worker {worker} ({self.devices[worker]}) is lost: {reason}. It ran {part.nodes}"

    def _replace(self, lost: Collection[int]) -> None:
        """Start workers anew, and register their parts with them."""
        assert self._members is not None
        self._members.replace(lost)
        with self._lock:
            graphs = list(self._graphs.items())
        for handle, registered in graphs:
            for worker in registered.contents.keys() & {*lost}:
                self._register(handle, registered, worker)

    def _note_loss(self, worker: int, reason: str) -> None:
        """Note which variables a lost worker had: the next run that needs them is told."""
        with self._lock:
            for registered in self._graphs.values():
                names = registered.variables.get(worker)
                if names:
                    listed = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
                    loss = WorkerLost(
                        f"worker {worker} ({self.devices[worker]}) was lost: {reason}. Its "
                        f"variables {listed} have the values again that they began with, if any; "
                        "restore a checkpoint (session.variables.restore) or run what assigns "
                        "them, then repeat this run"
                    )
                    self._losses.update(dict.fromkeys(registered.stores[worker], loss))

    def undeclared_loss(self, handle: int) -> WorkerLost | None:
        """The loss of variables of a graph that no run has been told of."""
        if not self._losses:
            return None
        with self._lock:
            stores = self._graphs[handle].stores.values()
            losses = [self._losses.pop(n, None) for numbers in stores for n in numbers]
        return next((loss for loss in losses if loss is not None), None)

    # Costs of transfers.

    @property
    def link_cost(self) -> LinkCost:
        """The time that a message between two workers takes, as given, or as measured now."""
        from penstock.tuning.worker_placement import LinkCost

        with self._lock:
            if self._link_cost is None:
                bandwidth, latency = self._rates
                if bandwidth is None or latency is None:
                    measured = self._measure()
                    bandwidth = measured.bandwidth if bandwidth is None else bandwidth
                    latency = measured.latency if latency is None else latency
                self._link_cost = LinkCost(bandwidth, latency)
            return self._link_cost

    def _measure(self) -> LinkCost:
        """Time messages to a worker and back, which are two links."""
        import numpy as np

        from penstock.tuning.worker_placement import LinkCost

        self.start()
        assert self._members is not None
        link = self._members.members[0].link
        seconds = []
        for nbytes in _PROBES:
            times = []
            payload = np.zeros(nbytes, np.uint8)
            for i in range(_PROBE_ROUNDS):
                event = self._echo[i] = threading.Event()
                start = monotonic()
                link.send(("echo", i, payload))
                if not event.wait(self.worker_timeout):
                    raise PenstockError("a worker gives no answer")
                times.append((monotonic() - start) / 2)
            seconds.append(min(times))
        small, large = seconds
        per_byte = max(large - small, 1e-9) / (_PROBES[1] - _PROBES[0])
        return LinkCost(1 / per_byte, small)


def _table(graph: Graph) -> StepTable:
    """The ports of a graph; its steps are those of workers, which plan them."""
    values = [*dict.fromkeys([*graph.inputs, *graph.outputs])]
    slots = [Slot(value.name, value.type, SlotKind.DYNAMIC) for value in values]
    place = {value: i for i, value in enumerate(values)}
    inputs = tuple([place[value] for value in graph.inputs])
    outputs = tuple([place[value] for value in graph.outputs])
    return StepTable(graph.name, (), tuple(slots), inputs, outputs)


def _source(parts: Sequence[GraphPart]) -> str:
    """The nodes of each part."""
    lines = []
    for part in parts:
        lines += [f"# {part.device}", *map(repr, part.graph.nodes)]
    return "\n".join(lines) + "\n"
