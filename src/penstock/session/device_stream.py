"""User streams on a device: runs are put there by the call, in order with the user's work.

A run on ``Stream(device=...)`` begins on the calling thread, which puts its kernels on the stream
of the device and returns, as calls of kernels do. So it comes behind what is on the stream, and
what the caller puts there next comes behind the run::

    stream.torch   user's kernels | run 1: kernels, outputs to the host | user's kernels | run 2 ...
    host           ... puts all this there, and futures of runs end with events on the stream

A run whose steps on the host wait for the device keeps its caller until it is on the stream as a
whole. While a queue waits on the host, for a ``call`` or for a signal of the host, runs are put on
the device once it goes on.
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
    """The stream of a device under a user stream. ``device``: a stream or the name of a device, as
    ``penstock.backends.torch.device.stream_on`` takes them."""

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
        """The calling thread puts its work on the stream."""
        return self.stream.current()

    def query(self) -> bool:
        """Whether all work on the stream has ended."""
        return self.stream.query()

    def then(self, function: Callable[[], object]) -> None:
        """Call ``function``, on a thread that must not wait, when what is on the stream has
        ended."""
        EVENTS.add(self.stream.record().query, function)

    def backend_of(self, session: Session) -> Any:
        """The backend of a session on this device. Raises ``PenstockError`` if it has none."""
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
        """A callback that puts a run on the stream, and one that ends it with an error if that
        never happens."""
        backend = self.backend_of(session)
        launched: Future[dict[str, RunValue]] = Future()
        # Results are brought to the host on the stream, so that no thread waits for them here.
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
                # Later work of the caller's must come behind all of the run's kernels.
                if not launched.done() and not turn.handed_over:
                    launched.exception()  # wait
                if launched.done():
                    self._end(launched, future, bring)
                    return
            launched.add_done_callback(lambda _: _finish(launched, future, wait_and_bring))

        def refuse(error: Exception) -> None:
            job.refuse(error)
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        return begin, refuse

    def _end(self, launched: Future[Any], future: Future[Any], bring: Callable[[Any], Any]) -> None:
        """End ``future`` when the results, which are on the stream, are there."""
        # Together with ``future``, which so has ended.
        if launched.cancelled():
            return
        error = launched.exception()
        try:
            if error is None:
                results = {name: bring(value) for name, value in launched.result().items()}
                self.then(partial(future.set_result, results))
                return
        except Exception as raised:
            error = raised
        future.set_exception(error)


class _LineTurn(Turn):
    """A run behind what is on the stream of a device, which lets later work there come behind it
    as soon as all of it has been put on devices."""

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


def _finish(launched: Future[Any], future: Future[Any], bring: Callable[[Any], Any]) -> None:
    error = launched.exception()
    try:
        if error is None:
            future.set_result({name: bring(x) for name, x in launched.result().items()})
            return
    except Exception as raised:
        error = raised
    future.set_exception(error)


def _as_it_is(value: RunValue) -> RunValue:
    return value
