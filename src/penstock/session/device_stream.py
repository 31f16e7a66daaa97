"""User streams on a device: a call enqueues runs there, in order with the user's own work.

A run on ``Stream(device=...)`` begins on the calling thread, which enqueues its kernels on the
device's stream and returns, as calls of kernels do. The run thus follows the work on the stream,
and work that the caller enqueues later follows the run::

    stream.torch   user's kernels | run 1: kernels, outputs to the host | user's kernels | run 2 ...
    host           ... puts all this there, and futures of runs end with events on the stream

A run with steps on the host that wait for the device blocks its caller until all of it is on the
stream. While a queue waits on the host, for a ``call`` or for a signal of the host, later runs are
enqueued on the device only once the queue continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from penstock.compiler.options import RunOptions
from penstock.core.errors import PenstockError
from penstock.core.records import replace
from penstock.core.types import RunValue, RunValues
from penstock.executors.turn import Turn
from penstock.host.event_watch import EVENTS
from penstock.host.threads import Workers, pool
from penstock.session.session import Session


class DeviceLine:
    """The stream of a device that a user stream uses. ``device``: a stream or the name of a device,
    as ``penstock.backends.torch.device.stream_on`` takes them."""

    def __init__(self, device: Any) -> None:
        try:
            from penstock.backends.torch.device import stream_on
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                "Stream(device=) needs torch: pip install 'penstock-runtime[torch]'; Stream() is a "
                "queue of runs on the host"
            ) from error
        self.stream = stream_on(device)

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread enqueues its work on the stream."""
        return self.stream.current()

    def query(self) -> bool:
        """Whether all work on the stream has ended."""
        return self.stream.query()

    def then(self, function: Callable[[], object]) -> None:
        """Call ``function``, which must not block its thread, when the work on the stream has
        ended."""
        EVENTS.add(self.stream.record().query, function)

    def backend_of(self, session: Session) -> Any:
        """Return the session's backend on this device. Raises ``PenstockError`` if it has none."""
        wanted = self.stream.device
        for backend in session.inspect.backends:
            own: Any = backend.device
            if own is not None and getattr(own, "torch_device", None) == wanted.torch_device:
                return backend
        raise PenstockError(
            f"the session has no backend on {wanted.torch_device}, the device of this stream; "
            f"compile the model with backends=[TorchBackend({str(wanted.torch_device)!r})]"
        )

    def run(
        self, session: Session, options: RunOptions, future: Future[dict[str, RunValue]]
    ) -> tuple[Callable[[], None], Callable[[Exception], object]]:
        """Return a callback that puts a run on the stream, and one that ends it with an error if
        that never happens."""
        backend = self.backend_of(session)
        launched: Future[dict[str, RunValue]] = Future()
        # Results are copied to the host on the stream, so that no thread waits for them here.
        on_device = replace(options, returns="torch", out=None)
        if options.out is not None:
            raise PenstockError("out= is for runs on the host; a stream of a device has returns=")
        job = session._job(on_device, launched, ordered=True)
        bring = backend.leaving if options.returns == "numpy" else _as_it_is
        wait_and_bring = backend.to_host if options.returns == "numpy" else _as_it_is

        def begin() -> None:
            if not future.set_running_or_notify_cancel():
                launched.cancel()
            job.turn = turn = _LineTurn(self, session.options.expert.pool or pool())
            with self.current():
                job()
                # Later work of the caller must follow all of the run's kernels.
                if not launched.done() and not turn.handed_over:
                    launched.exception()  # wait
                if launched.done():
                    if not launched.cancelled():  # with ``future``, which then has ended
                        _finish(launched, future, bring, self.then)
                    return
            launched.add_done_callback(lambda _: _finish(launched, future, wait_and_bring))

        def refuse(error: Exception) -> None:
            job.refuse(error)
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        return begin, refuse


class _LineTurn(Turn):
    """A run after the work on the stream of a device. Later work may follow as soon as all of the
    run has been put on devices."""

    def __init__(self, line: DeviceLine, workers: Workers) -> None:
        super().__init__(None, workers)
        self._line = line
        self._before = (line.stream.record(),)
        self.handed_over = False

    @property
    def behind(self) -> RunValues:
        return self._before

    def hand_over(self, events: Sequence[Any]) -> None:
        if not self.handed_over:
            for event in events:
                self._line.stream.wait(event)
            self.handed_over = True


def _finish(
    launched: Future[Any],
    future: Future[Any],
    bring: Callable[[Any], Any],
    then: Callable[[Callable[[], None]], object] = lambda end: end(),
) -> None:
    """End ``future`` with the results of ``launched``, once ``then`` calls its argument."""
    error = launched.exception()
    try:
        if error is None:
            results = {name: bring(value) for name, value in launched.result().items()}
            then(partial(future.set_result, results))
            return
    except Exception as raised:
        error = raised
    future.set_exception(error)


def _as_it_is(value: RunValue) -> RunValue:
    return value
