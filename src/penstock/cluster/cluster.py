"""``penstock.Cluster``: workers on one machine or many that run the parts of graphs together."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cluster.driver_state import MOST_REPLACEMENTS, LinkTimer, VariableHomes, Wholeness
from penstock.cluster.simulated import check_rates, check_workers, worker_devices
from penstock.cluster.waits import START_S
from penstock.compiler.stages import CompileContext
from penstock.core import Closeable
from penstock.core.errors import (
    Cancelled,
    DeadlineExceeded,
    PenstockError,
    WorkerLost,
    check_count,
    extra_needed,
    wrong_type,
)
from penstock.core.records import dataclass, field, replace
from penstock.core.types import RunValue, TensorType
from penstock.host.fork import renewed
from penstock.host.threads import report_thread_exception
from penstock.ir.graph import Graph, GraphPart
from penstock.ir.op import Role
from penstock.observers.profile import StepRow
from penstock.plan.plan import Slot, SlotKind, StepTable
from penstock.tuning.profile_costs import ProfileCosts

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from penstock.cluster.executor import ClusterExecutor
    from penstock.cluster.links import Link, Message
    from penstock.cluster.members import Members
    from penstock.cluster.one_worker import OneWorker
    from penstock.cluster.parts import RemotePart
    from penstock.cluster.variables import ClusterVariables
    from penstock.core.limits import Limits
    from penstock.ir.graph import Model
    from penstock.ops.tensorflow.state import Store
    from penstock.tuning.worker_placement import LinkCost

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Registered:
    """A registered graph. By worker: the ``contents`` of its part, as an object reference of Ray,
    with digest and size in bytes; the part, the numbers of its variables' ``stores``, and the names
    of its ``variables``. ``options``: encoded ``PartOptions``. ``backends``: those in use."""

    contents: Mapping[int, Any]
    digests: Mapping[int, bytes]
    nbytes: Mapping[int, int]
    options: bytes
    parts: Mapping[int, RemotePart]
    stores: Mapping[int, list[int]]
    variables: Mapping[int, list[str]]
    backends: set[str] = field(default_factory=set)


# Ray starts processes, finds machines and reports dead processes; values between parts only go
# through its channels. Its object references and compiled graphs were measured and rejected: a hop
# of 600 KB takes 4.4 ms and 0.6 ms instead of 0.23 ms, and a compiled graph supports neither loops
# nor dead values. Decision 58 has all figures.
#
# A graph is registered once, under a handle, and runs send only the handle and their feeds. So the
# driver must know the parts of each worker: it registers the parts of a dead worker again with the
# replacement, and lets workers forget parts that no session needs.
#
# There are two locks. ``_lock`` guards the tables, and is held briefly, except while workers start
# or links are measured. ``Wholeness.changed`` is the condition that no worker is lost: calls of
# workers wait for it while the watching thread (``Members``) replaces lost workers, which takes
# seconds. With a single lock, nothing could be compiled or forgotten during that time.


class Cluster(Closeable):
    """Workers that run the graphs of sessions together: ``penstock.compile(model, cluster=...)``.

    Workers are processes, Ray actors (``pip install penstock-runtime[ray]``), which start when
    the first graph is compiled. Any number of sessions may share a cluster. ``close``, or the end
    of the process, ends the workers. A node runs on the worker that it names
    (``/job:worker/task:1``), or that ``place=`` names for it; the cost model places other nodes.

    A run whose worker dies raises ``WorkerLost``. A new worker replaces it, with the variables at
    their initial values.

    Args:
        workers: The number of workers.
        threads: The number of threads of each worker.
        retries: How often a run is repeated after a worker has died, if its graph has no variables.
        worker_timeout: Seconds without an answer after which a worker counts as dead.
        objective: What placements minimize: "throughput", the time per run when many run at the
            same time as a pipeline; or "latency", the time of a single run.
        bandwidth: Bytes per second between workers; measured by default.
        latency: Seconds that a message takes between workers; measured by default.
        cores: The number of cores that all workers share, on one machine: placements then use at
            most that many workers at the same time. By default each worker has its own cores, which
            is also right for kernels that wait for devices.
        profile: A file with the seconds of nodes (``Profile.save``); by default the cost table.
        address: The address of a Ray cluster, as ``host:port``, or "auto" for one on this machine.
            By default the cluster that this process uses, the one in ``RAY_ADDRESS``, or else a new
            one on this machine.
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
        if address is not None and not isinstance(address, str):
            raise wrong_type("address", address, "a str, such as '10.0.0.1:6379', or None")
        check_workers(workers, cores)
        check_count("threads", threads)
        check_count("retries", retries, least=0)
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
        """bytes of graphs that were sent to workers"""
        self._address = address
        self._link_timer = LinkTimer(bandwidth, latency)
        self._lock = threading.RLock()
        self._wholeness = Wholeness()
        self._members: Members | None = None
        self._handles = count()
        self._graphs: dict[int, _Registered] = {}
        # Finalizers append to it, on any thread and under any lock: ``append`` needs no lock.
        self._forgotten: deque[int] = deque()
        self._contents: dict[bytes, Any] = {}  # object references of Ray, by digest
        self._variables = VariableHomes()
        self._runs: Any = None
        renewed(self)

    # Start and end.

    def start(self) -> None:
        """Start the workers, unless they are running. Raises ``PenstockError`` if Ray is not
        installed, or has too few CPUs for them."""
        # The lock is held to the end, so that a second session that is compiled meanwhile waits for
        # the workers.
        with self._lock:
            if self._wholeness.ended is not None:
                raise PenstockError(self._wholeness.ended)
            if self._members is not None:
                return
            # Ray is an extra, imported when a cluster starts (decision 58).
            with extra_needed("a cluster needs Ray", "ray"):
                from penstock.cluster.members import MemberEvents, Members, start_ray
                from penstock.cluster.runs import Runs
            start_ray(self._address, self.workers * self.threads)
            # Runs and members refer to each other: answers may arrive as soon as there are members.
            runs = Runs()
            events = MemberEvents(self._take, self._lost, self._look, self._end)
            self._members = runs.members = Members(
                self.devices, self.threads, self.worker_timeout, events
            )
            self._runs = runs
            # Workers that exit normally remove Ray's files in /dev/shm (decision 58).
            atexit.register(self.close)

    def close(self) -> None:
        """End the workers. Runs in flight raise ``WorkerLost``. Ray keeps running."""
        self._end("the cluster is closed")

    def _end(self, reason: str) -> None:
        whole = self._wholeness
        with self._lock:
            is_first = whole.ended is None
            if is_first:
                whole.ended = reason
            members, runs = self._members, self._runs
        # Without the lock: members wait for their workers, and runs call user code.
        if is_first and members is not None:
            with whole.changed:  # lets calls that wait for a lost worker fail
                whole.changed.notify_all()
            atexit.unregister(self.close)
            members.close()
            runs.end_all(WorkerLost(reason))

    def forked(self) -> None:
        """Refuse all calls in a forked child, which has no connection to the workers."""
        # New locks: a thread of the parent, which the child lacks, may have held the old ones.
        self._lock = threading.RLock()
        ended, self._wholeness = self._wholeness.ended, Wholeness()
        if self._members is not None:
            ended = "the workers of this cluster belong to the process that forked this one"
            atexit.unregister(self.close)
            self._runs.forked(ended)
        self._wholeness.ended = ended

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a cluster cannot be pickled: it has workers of this process")

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers."""
        return [] if self._members is None else [m.process for m in self._members.members]

    def each_worker(self) -> list[OneWorker]:
        """Return each worker as a separate cluster, for replicas."""
        from penstock.cluster.one_worker import OneWorker

        return [OneWorker(self, i) for i in range(self.workers)]

    # Graphs.

    def executor(
        self, parts: Sequence[GraphPart], graph: Graph, context: CompileContext
    ) -> ClusterExecutor:
        """Register the parts of a graph with the workers whose devices they name, and return the
        executor of the graph. Raises ``WorkerLost``, and errors of compilation."""
        from penstock.cluster.executor import ClusterExecutor, RemoteGraph

        self.start()
        assert self._members is not None
        self._forget()
        handle = next(self._handles)
        workers = [self.devices.index(part.device) for part in parts]
        # Links outlive graphs: a pair of workers that already has one keeps it.
        self._wholeness.steady(partial(self._members.connect, self._pairs(parts)))
        fresh: list[tuple[Store, str]] = []
        by_worker = dict(zip(workers, parts, strict=True))
        try:
            registered = self._encoded(by_worker, context, fresh)
            # Recorded before it is sent, so that the replacement of a worker that dies gets it.
            with self._lock:
                self._graphs[handle] = registered
            for worker in workers:
                self._wholeness.steady(partial(self._register, handle, registered, worker, None))
            for store, name in fresh:
                self._send_variable(store, name)
        except BaseException:
            # Otherwise, a later graph with another placement could not have these variables.
            with self._lock:
                self._variables.unsettle(fresh)
            self._forgotten.append(handle)
            raise
        remote = list(registered.parts.values())
        # A run that has changed variables must not be repeated.
        stateful = any(registered.stores.values())
        retries, loss = (0, self.undeclared_loss) if stateful else (self.retries, None)
        whole = RemoteGraph(handle, remote, _table(graph), _source(parts), registered.backends)
        observe = partial(self._observe, handle, workers)
        executor = ClusterExecutor(self._runs, whole, retries, loss, self.threads, observe)
        # Finalizers only append, since they may run in a thread that holds a lock or waits for Ray.
        weakref.finalize(executor, self._forgotten.append, handle)
        return executor

    def _encoded(
        self,
        parts: Mapping[int, GraphPart],
        context: CompileContext,
        fresh: list[tuple[Store, str]],
    ) -> _Registered:
        """Return the encoded parts of a graph. Adds variables that no worker had to ``fresh``."""
        import numpy as np
        import ray

        from penstock.cluster.parts import PartOptions, encode_part, remote_parts, variables_of

        contents: dict[int, Any] = {}
        digests: dict[int, bytes] = {}
        nbytes: dict[int, int] = {}
        numbers: dict[int, list[int]] = {}
        variables: dict[int, list[str]] = {}
        for worker, part in parts.items():
            # Without the lock, since it copies all weights of the part.
            content, stores = encode_part(part, context.functions)
            with self._lock:
                numbers[worker] = [self._variables.number(store) for store in stores]
                names = variables_of(part.graph, context.functions)
                variables[worker] = [name for _, name in names]
                for store, name in names:
                    variable = self._variables.number(store), name
                    if self._variables.settle(variable, worker, self.devices):
                        fresh.append((store, name))
            digests[worker] = blake2b(content, digest_size=16).digest()
            with self._lock:  # replicas on several workers have equal contents
                stored = self._contents.get(digests[worker])
                # Workers map Ray's object store, so workers on the same machine share the weights.
                if stored is None:
                    stored = ray.put(np.frombuffer(content, np.uint8))
                    self._contents[digests[worker]] = stored
            contents[worker] = stored
            nbytes[worker] = len(content)
        graphs = [*[part.graph for part in parts.values()], *context.functions.values()]
        options = PartOptions.of(context, graphs).encode()
        remote = {part.worker: part for part in remote_parts(parts)}
        return _Registered(contents, digests, nbytes, options, remote, numbers, variables)

    def _register(
        self, handle: int, registered: _Registered, worker: int, timeout: float | None
    ) -> None:
        """Let a worker compile its part of a graph. ``timeout`` is in seconds; None if another
        thread detects workers that hang."""
        assert self._members is not None
        actor = self._members.members[worker].actor
        content, stores = registered.contents[worker], registered.stores[worker]
        part = registered.parts[worker]
        call = actor.register.remote(handle, part, content, registered.options, stores)
        try:
            registered.backends.update(self._members.result(call, timeout))
        except (Cancelled, DeadlineExceeded, KeyboardInterrupt):
            # The worker must forget the part once it has compiled it, since Ray cannot cancel a
            # call that has begun.
            call.future().add_done_callback(lambda _: self._forgotten.append(handle))
            raise
        self.sent_graph_bytes += registered.nbytes[worker]

    def _pairs(self, parts: Sequence[GraphPart]) -> dict[tuple[int, int], int]:
        """Return the pairs of workers that exchange values, with the bytes of the largest value."""
        # The buffer of a link is allocated for that value: for a larger one, Ray must allocate
        # another buffer.
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

    def _forget(self) -> None:
        """Drop the graphs and the variables that no session needs any more."""
        # The current number of entries: finalizers may append meanwhile.
        handles = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        gone = self._variables.forgotten
        stores = [gone.popleft() for _ in range(len(gone))]
        if not handles and not stores:
            return
        with self._lock:
            self._variables.forget(stores)
            for handle in handles:
                self._graphs.pop(handle, None)
            # Replicas on several workers have equal contents, so another graph may still need the
            # contents of a dropped graph.
            kept = {d for other in self._graphs.values() for d in other.digests.values()}
            for digest in self._contents.keys() - kept:
                del self._contents[digest]
        # Not awaited: a dead worker has forgotten everything anyway.
        if self._members is not None and self._wholeness.ended is None:
            for member in self._members.members:
                member.actor.forget.remote(handles, stores)

    def _look(self) -> None:
        """End runs in doubt, and forget graphs. The watching thread calls this regularly."""
        self._runs.end_doubtful()
        self._forget()

    # Variables.

    def variables(self, model: Model, own: dict[Store, Store], limits: Limits) -> ClusterVariables:
        """Return the variables of a session. ``own`` maps the model's stores to the session's."""
        from penstock.cluster.variables import ClusterVariables

        return ClusterVariables(self, model, own, limits)

    def _send_variable(self, store: Store, name: str) -> None:
        """Send the value of a variable to its new worker, unless it is the initial value."""
        value = store.variable(name, TensorType()).value
        home = self.home(store, name)
        if home is not None and value is not store.model.initial.get(name):
            self.set_variable(*home, name, value)

    @contextmanager
    def _observe(self, handle: int, workers: Sequence[int]) -> Iterator[list[StepRow]]:
        """Let workers measure the steps of a graph in the context, and add them to the list."""
        rows: list[StepRow] = []
        for worker in workers:
            self._ask(worker, "observe", handle)
        try:
            yield rows
        finally:
            for worker in workers:
                own: Any = self._ask(worker, "observed", handle)
                rows += [replace(row, worker=self.devices[worker]) for row in own]

    def home(self, store: Store, name: str) -> tuple[int, int] | None:
        """Return the worker of a variable, and the number of its store; None if it has none."""
        with self._lock:
            return self._variables.find(store, name)

    def variable(self, worker: int, store: int, name: str) -> np.ndarray | None:
        """Return a copy of a variable's value, None if it has none. Raises ``WorkerLost``."""
        value: np.ndarray | None = self._ask(worker, "variable", store, name)
        return value

    def set_variable(self, worker: int, store: int, name: str, value: np.ndarray | None) -> None:
        """Replace the value of a variable; None for no value. Raises ``WorkerLost``."""
        self._ask(worker, "set_variable", store, name, value)

    def _ask(self, worker: int, method: str, *arguments: RunValue) -> RunValue:
        """Call a method of a worker, or of its replacement if it is lost; return the result."""

        def call() -> Any:
            assert self._members is not None
            asked = getattr(self._members.members[worker].actor, method)
            return self._members.result(asked.remote(*arguments), None)

        return self._wholeness.steady(call)

    # Messages, and lost workers.

    def _take(self, worker: int, message: Message) -> None:
        if message[0] == "echo":
            self._link_timer.take_echo(message[1])
        else:
            self._runs.take(worker, message)

    def _lost(self, lost: dict[int, str]) -> None:
        """Replace dead workers, and others that die meanwhile. Called on the watching thread."""
        assert self._members is not None
        self._forget()  # unused graphs are not registered again
        with self._wholeness.changed:
            self._wholeness.is_whole = False
        gone: str | None = None
        for _ in range(MOST_REPLACEMENTS):
            # Runs that begin from now on wait for the replacements.
            for worker, reason in lost.items():
                self._note_loss(worker, reason)
                self._runs.hold(worker, partial(self._told, worker, reason))
            try:
                self._replace(lost)
                gone = None
                break
            except Exception as error:
                if self._wholeness.ended is not None:
                    return
                gone = f"workers {sorted(lost)} are lost and cannot be replaced: {error}"
                lost = {**dict.fromkeys(lost, gone), **self._members.dead()}
        # Set in any case: without a replacement, calls must fail now instead of after a minute.
        # New runs then raise ``gone``.
        self._wholeness.replaced()
        self._runs.resume(gone)

    def _told(self, worker: int, reason: str, part: RemotePart) -> str:
        return f"worker {worker} ({self.devices[worker]}) is lost: {reason}. It ran {part.nodes}"

    def _replace(self, lost: Collection[int]) -> None:
        """Start replacements of lost workers, and register the parts with them."""
        assert self._members is not None
        self._members.replace(lost)
        with self._lock:
            graphs = list(self._graphs.items())
        for handle, registered in graphs:
            for worker in registered.contents.keys() & {*lost}:
                try:
                    self._register(handle, registered, worker, START_S)
                except WorkerLost:
                    raise
                except Exception:  # no worker can compile it, and its session raises the error
                    report_thread_exception()

    def _note_loss(self, worker: int, reason: str) -> None:
        """Record the loss of a worker's variables, which the next run that needs them raises."""
        # Variables are not restored from a checkpoint here: those of other workers are newer, and
        # only the caller knows which runs must be repeated (decision 58).
        with self._lock:
            for registered in self._graphs.values():
                names = registered.variables.get(worker)
                if names:
                    listed = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
                    loss = WorkerLost(
                        f"worker {worker} ({self.devices[worker]}) was lost: {reason}. Its "
                        f"variables {listed} are reset to their initial values, if any; restore a "
                        "checkpoint (session.variables.restore), or run the nodes that assign "
                        "them, then repeat this run"
                    )
                    self._variables.losses.update(dict.fromkeys(registered.stores[worker], loss))

    def undeclared_loss(self, handle: int) -> WorkerLost | None:
        """Return a loss of variables of a graph that no run has raised yet, or None."""
        known = self._variables.losses
        if not known:
            return None
        with self._lock:
            stores = self._graphs[handle].stores.values()
            losses = [known.pop(n, None) for numbers in stores for n in numbers]
        return next((loss for loss in losses if loss is not None), None)

    # Costs of transfers.

    @property
    def link_cost(self) -> LinkCost:
        """The latency and the bandwidth between two workers, as given or as measured."""
        # Measured when a placement first needs it: graphs that name all workers never do.
        with self._lock:
            return self._link_timer.cost(self._first_link, self.worker_timeout)

    def _first_link(self) -> Link:
        self.start()
        assert self._members is not None
        return self._members.members[0].link


def _table(graph: Graph) -> StepTable:
    """Return a table with the inputs and outputs of a graph, without steps, which workers plan."""
    values = [*dict.fromkeys([*graph.inputs, *graph.outputs])]
    slots = [Slot(value.name, value.type, SlotKind.DYNAMIC) for value in values]
    place = {value: i for i, value in enumerate(values)}
    inputs = tuple([place[value] for value in graph.inputs])
    outputs = tuple([place[value] for value in graph.outputs])
    return StepTable(graph.name, (), tuple(slots), inputs, outputs)


def _source(parts: Sequence[GraphPart]) -> str:
    """Return the nodes of each part, as text."""
    lines = []
    for part in parts:
        lines += [f"# {part.device}", *map(repr, part.graph.nodes)]
    return "\n".join(lines) + "\n"
