"""User streams: queues of runs, concurrent with one another.

Work on a stream runs in order: runs on the pool of their session, callbacks on the pool of the
preceding work. Enqueuing returns at once. A signal marks a point of a stream; other streams and
threads can wait for it. The terms are those of CUDA (stream, event) and of NNC (stream context,
signal).

A run that has enqueued its work on a device hands over to the next one (``executors/turn.py``). No
thread waits for a stream: a command that reaches the front of the queue and cannot proceed
leaves its thread, and the event that lets it proceed resumes the queue.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.compiler.options import RunOptions, make
from penstock.core.errors import PenstockError, RunError
from penstock.core.option_records import takes
from penstock.core.records import NamedTuple
from penstock.core.types import RunValue
from penstock.executors.turn import Turn
from penstock.host.fork import renewed
from penstock.host.on_demand import imported
from penstock.host.threads import Workers, fulfil, on_worker, pool
from penstock.session.future import RunFuture
from penstock.session.session import Session

if TYPE_CHECKING:
    from penstock.session.device_stream import DeviceLine

T = TypeVar("T")

_device_line: Callable[[Any], DeviceLine] = imported("penstock.session.device_stream.DeviceLine")

# Replaces a pool: the thread that enqueues commands of a stream on a device also runs them.
_HERE: Any = object()


class _Mark:
    """A point of a stream, passed once: a future without a result, at a third of the cost."""

    event: Any = None
    """the event of a device at this point, once it is recorded"""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[Any], object]] = []
        self._passed = False

    def done(self) -> bool:
        return self._passed

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        with self._lock:
            if not self._passed:
                self._callbacks.append(function)
                return
        function(self)

    def reach(self) -> None:
        with self._lock:
            self._passed = True
            # Called without the lock: callbacks run commands of streams, and return when the next
            # command must wait.
            callbacks, self._callbacks = self._callbacks, []
        for function in callbacks:
            function(self)


class _Command(NamedTuple):
    """An entry of the queue. ``begin`` does its work on a thread of ``workers``, or of any pool for
    None. It takes the turn of the preceding run, or None if that has ended, and returns the mark
    or turn that later commands wait for, if any. ``refuse`` ends it with an error if the pool is
    closed. ``is_run``: it may begin as soon as the preceding run hands over."""

    begin: Callable[[Turn | None], _Mark | Turn | None]
    refuse: Callable[[Exception], object]
    workers: Workers | None = None
    is_run: bool = False


class Signal:
    """A point in the work of a stream, which streams and threads can wait for.

    ``stream.signal()`` creates one and emits it. A signal may be emitted again, also by another
    stream; later waits are for the new point. Waiting for a signal that was never emitted returns
    at once.
    """

    def __init__(self) -> None:
        self._mark: _Mark | None = None

    def query(self) -> bool:
        """Whether all work before the signal on its stream has ended."""
        # Read once, since another thread may emit the signal again.
        mark = self._mark
        return mark is None or mark.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until ``query()`` holds; return whether it does.

        Raises ``PenstockError`` on a thread of the pool that runs streams, which could wait for
        itself.

        Args:
            timeout: The most seconds to wait; by default there is no limit.
        """
        mark = self._mark
        if mark is None or mark.done():
            return True
        if on_worker():
            raise PenstockError(
                "a run on a stream cannot block until a signal is emitted: order it behind the "
                "signal with stream.wait_for(signal)"
            )
        reached = threading.Event()
        mark.add_done_callback(lambda _: reached.set())
        return reached.wait(timeout)

    def __repr__(self) -> str:
        state = "never emitted" if self._mark is None else "passed" if self.query() else "pending"
        return f"<Signal, {state}>"


class Stream:
    """A queue of runs, callbacks, signals and waits.

    Its methods may be called from any thread, and all but ``wait`` return at once. An error goes to
    the future of the run that failed; the rest of the queue continues.

    ``device``: a stream of torch (``torch.cuda.current_stream()``) or the name of a device. The
    call itself then enqueues runs there (``session/device_stream.py``): after the user's own work
    on ``stream.torch``, and before work that the user enqueues there later.
    """

    def __init__(self, device: Any = None) -> None:
        self._line: DeviceLine | None = None if device is None else _device_line(device)
        self.forked()
        renewed(self)

    def forked(self) -> None:
        """Empty the stream in a forked child, since its parent runs the work on it."""
        self._lock = threading.RLock()
        self._commands: deque[_Command] = deque()
        self._busy = False
        self._last: _Mark | None = None
        self._turn: Turn | None = None  # of the latest run

    @takes(RunOptions, after=(Session,))
    def run(self, session: Session, *arguments: Any, **options: Any) -> Future[dict[str, RunValue]]:
        """Put a run of ``session`` on the stream, as ``session.submit`` puts it on its pool. The
        arrays that are fed are read when the run's turn comes. If that pool is closed by then, the
        future raises ``RunError``.

        Args:
            session: The session to run; a stream may have runs of several.
        """
        future: Future[dict[str, RunValue]] = RunFuture()
        if self._line is not None:
            record = make(RunOptions, "run", *arguments, **options)
            put, refuse = self._line.run(session, record, future)
            self._put(_Command(lambda _: put(), refuse))
            return future
        # Options and the session are checked by this call, not when the turn comes.
        job = session._job(make(RunOptions, "run", *arguments, **options), future)

        workers = session.options.expert.pool or pool()

        def begin(previous: Turn | None) -> Turn:
            job.turn = turn = Turn(previous, workers)
            future.add_done_callback(lambda _: turn.end())
            job()
            return turn

        self._put(_Command(begin, job.refuse, workers, is_run=True))
        return future

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function after all work now on the stream; later work waits for it.

        Args:
            function: Takes no arguments; its result or error becomes the future's.
        """
        future: Future[T] = RunFuture()
        begin = partial(fulfil, future, function)
        self._put(_Command(lambda _: self._behind(begin), partial(_fail, future)))
        return future

    def signal(self, signal: Signal | None = None) -> Signal:
        """Emit a signal after all work now on the stream, and return it.

        Args:
            signal: The signal to emit, by default a new one.
        """
        signal = signal or Signal()
        mark = signal._mark = _Mark()
        line = self._line

        def reach(_: Turn | None = None) -> None:
            if line is None:
                mark.reach()
            else:
                mark.event = line.stream.record()
                line.then(mark.reach)

        self._put(_Command(reach, lambda _: mark.reach()), mark)
        return signal

    @property
    def torch(self) -> Any:
        """The torch stream of this stream. Raises ``PenstockError`` without ``device=``."""
        if self._line is None:
            raise PenstockError("this stream is a queue of the host; Stream(device=...) has one")
        return self._line.stream.torch

    def _behind(self, function: Callable[[], object]) -> _Mark | None:
        """Call ``function`` when the work on the stream has ended. Return the mark to wait for."""
        if self._line is None:
            function()
            return None
        mark, workers = _Mark(), pool()

        def call() -> None:
            try:
                function()
            finally:
                mark.reach()

        self._line.then(partial(workers.submit, call))
        return mark

    def wait_for(self, signal: Signal) -> None:
        """Let later work on the stream wait for a signal.

        Args:
            signal: The signal, at its last emission. If it was never emitted, do not wait.
        """
        mark = signal._mark
        if mark is None or mark.done():
            return

        def wait(_: Turn | None) -> _Mark | None:
            if self._line is None or mark.event is None:
                return mark
            self._line.stream.wait(mark.event)
            return None

        self._put(_Command(wait, lambda _: None))

    def wait(self, timeout: float | None = None) -> bool:
        """Block until all work now on the stream has ended; return whether it has. Raises as
        ``Signal.wait`` does.

        Args:
            timeout: The most seconds to wait; by default there is no limit.
        """
        return self.query() or self.signal().wait(timeout)

    def query(self) -> bool:
        """Whether all work put on the stream has ended."""
        last, turn = self._last, self._turn
        if self._busy:
            return last is not None and last.done()
        if self._line is not None:
            return self._line.query()
        return turn is None or turn.ended

    def _put(self, command: _Command, mark: _Mark | None = None) -> None:
        """Queue a command; ``mark`` is the point that it passes, if that is all it does."""
        with self._lock:
            self._commands.append(command)
            self._last = mark
            if self._busy:
                return
            self._busy = True
        self._advance(_HERE if self._line is not None else None)

    def _advance(self, workers: Workers | None = None) -> None:
        """Run commands until one cannot proceed: here if this is a thread of ``workers`` and the
        command has no other pool, else on the right pool. End commands whose pool is closed."""
        while True:
            with self._lock:
                if not self._commands:
                    self._busy = False
                    return
                # The command stays in the queue meanwhile: only the thread that made the stream
                # busy takes commands.
                command = self._commands[0]
            turn = self._turn
            # A run may begin once the preceding one has enqueued its work on devices; other
            # commands wait for its end.
            if turn is not None:
                proceed = turn.is_handed_over if command.is_run else turn.is_over
                if not proceed(self._advance):
                    return
            # Each run uses the pool of its session.
            target = command.workers or workers or pool()
            if target is workers or workers is _HERE:
                self._commands.popleft()
                blocker = command.begin(None if turn is None or turn.ended else turn)
                if isinstance(blocker, Turn):
                    self._turn = blocker
                elif blocker is not None and not blocker.done():
                    blocker.add_done_callback(lambda _: self._advance())
                    return
                continue
            try:
                target.submit(partial(self._advance, target))
                return
            except RuntimeError as error:  # the pool is closed, or the process exits
                self._commands.popleft()
                command.refuse(RunError(f"a run on a stream cannot begin: {error}"))


def _fail(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
