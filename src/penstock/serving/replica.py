"""One replica of a model: runs a request or a batch, on its own threads or on a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from penstock.compiler.options import RunOptions
from penstock.host.threads import Workers
from penstock.ir.graph import Model
from penstock.session.session import RunDone, Session, compile

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from penstock.stepping.shared_loops import SharedLoops
    from penstock.tuning.worker_placement import WorkerPool

MOST_ON_WORKERS = 2
"""the number of batches sent to a worker at a time: a second one is available when the first ends,
so that the worker does not wait for a round trip"""


class ReplicaCluster(Protocol):
    """A cluster whose workers can be replicas (``penstock.Cluster``)."""

    workers: int

    def each_worker(self) -> Sequence[WorkerPool]:
        """Return each worker as a separate cluster."""
        ...


class SessionReplica:
    """A replica that runs a session. In this process, replicas share the session, which keeps no
    state between runs, and run on threads of ``workers``; on a cluster, all graphs of the session
    are on one worker. ``most``: the maximum number of batches in progress."""

    runs_here = True
    """whether the thread that submits a request may run it"""

    def __init__(self, session: Session, most: int = 1, workers: Workers | None = None) -> None:
        self.session = session
        self.most = most
        self._workers = workers

    def begin(
        self, options: RunOptions, done: RunDone, check: Callable[[], object] | None = None
    ) -> None:
        """Begin a run; ``done`` is called at its end, on any thread. ``check`` is called before the
        run, which ends if ``check`` raises an error."""
        self.session._begin(done, options, self._workers, check)


class LoopsReplica(SessionReplica):
    """Runs a model with shared loops on threads of ``workers``."""

    runs_here = False

    def __init__(self, loops: SharedLoops, workers: Workers) -> None:
        super().__init__(loops.session, 1, workers)
        self._loops, self._threads = loops, workers

    def begin(
        self, options: RunOptions, done: RunDone, check: Callable[[], object] | None = None
    ) -> None:
        """Begin a run as ``SessionReplica.begin`` does; ``check`` is only for batches."""
        feeds = cast("Mapping[str, ArrayLike]", options.feeds)

        # A thread for each run, which waits in its loop for steps that another one may compute.
        def run() -> None:
            try:
                outputs = self._loops.run(feeds, options.fetches, cancel=options.cancel)
            except BaseException as error:
                # Whatever ends a run is the request's: this thread goes on to the next one.
                done(None, error)
            else:
                done(outputs, None)

        self._threads.submit(run, options.priority or 0)


def worker_sessions(
    model: Any, n: int, cluster: ReplicaCluster, options: Mapping[str, Any]
) -> list[Session]:
    """Return a session for each worker of a cluster."""
    from penstock.frontends.load import load

    if n != cluster.workers:
        raise ValueError(f"n={n} must be the number of workers, {cluster.workers}, or omitted")
    if not isinstance(model, Model):
        names = ("limits", "map_weights", "signature", "timeout", "cancel")
        loading = {name: options[name] for name in names if name in options}
        model = load(model, **loading)
    return [compile(model, **{**options, "cluster": one}) for one in cluster.each_worker()]


def shared_loops(model: object, max_batch: int) -> SharedLoops | None:
    """Return the model if its runs share the iterations of its loops, else None. Raises
    ``ValueError`` if requests are to be joined to batches as well."""
    # By attribute: the module of SharedLoops is only imported by its users.
    if not isinstance(getattr(model, "session", None), Session):
        return None
    if max_batch > 1:
        raise ValueError("max_batch= is not supported for SharedLoops, whose runs share iterations")
    return cast("SharedLoops", model)


def replicas_of(
    sessions: Sequence[Session],
    loops: SharedLoops | None,
    n: int,
    most: int,
    workers: Workers | None,
) -> list[SessionReplica]:
    """Return ``n`` replicas, which divide the sessions or share the loops."""
    if loops is not None and workers is not None:
        return [LoopsReplica(loops, workers)] * n
    return [SessionReplica(own, most, workers) for own in [*sessions] * (n // len(sessions))]
