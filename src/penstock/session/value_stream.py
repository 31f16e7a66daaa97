"""Values of a run that are read while it runs (``Session.stream``).

::

    run     iteration 0 ── iteration 1 ── iteration 2 ...      waits if too many are unread
                 │              │
    caller      ("token", 17)  ("token", 4) ...                as an iterator, also of asyncio
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING

import numpy as np

from penstock.core import Closeable
from penstock.core.checkpoints import LOOK_S, THREAD, WAKE_S, checkpoint
from penstock.core.types import RunValue
from penstock.executors.control import CancelToken, Control
from penstock.host.threads import waiting_for_program

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future


class Channel:
    """A bounded queue from a run to its reader, of at most ``ahead`` values. It does not refer to
    the reader, so that the run ends when the reader is collected."""

    def __init__(self, ahead: int) -> None:
        self.queue: Queue[tuple[str, RunValue] | None] = Queue(ahead)
        self.reads = True
        self.tell: Callable[[], object] | None = None
        """called for each new value and at the end of the run, for a reader that must not block"""

    def put(self, name: str, value: RunValue) -> None:
        """Put a value into the queue as soon as there is room. Called on the run's thread."""
        # A copy, since the run reuses the memory.
        item = name, _copied(value)
        if self._puts(item, 0):
            return
        run = THREAD.run
        outside = run.outside if isinstance(run, Control) else nullcontext
        # The reader may never come: other runs use the worker and the threads meanwhile.
        with waiting_for_program(), outside():
            while not self._puts(item, LOOK_S):
                checkpoint()  # the run may have been cancelled

    def _puts(self, item: tuple[str, RunValue], timeout: float) -> bool:
        """Put an item within ``timeout`` seconds. Return False if the queue was full."""
        with suppress(Full):
            if self.reads:
                self.queue.put(item, timeout > 0, timeout)
            self._tell()
            return True
        return False

    def _tell(self) -> None:
        tell = self.tell
        if tell is not None:
            tell()

    def wake(self, future: Future[dict[str, RunValue]]) -> None:
        """Wake a thread that waits for a value, since the run has ended."""
        with suppress(Full):  # then no thread waits
            self.queue.put_nowait(None)
        self._tell()


class ValueStream(Closeable):
    """The values of a run by name, in the order in which they are computed: an iterator and an
    asynchronous iterator of pairs of a name and a value. Once the run has ended, the iterator ends
    or raises the error of the run. As a context manager it cancels a run that has not ended."""

    def __init__(
        self, channel: Channel, token: CancelToken, future: Future[dict[str, RunValue]]
    ) -> None:
        self._channel = channel
        self._token = token
        self._future = future
        future.add_done_callback(channel.wake)

    def result(self, timeout: float | None = None) -> dict[str, RunValue]:
        """Return the outputs of the run, by name, once it has ended; unread values are lost. Raises
        the error of the run, and ``TimeoutError`` if it has not ended in time."""
        self._channel.reads = False
        return self._future.result(timeout)

    def then(self, done: Callable[[BaseException | None], object]) -> None:
        """Call ``done`` with the error of the run, or None, when it has ended."""
        self._future.add_done_callback(lambda future: done(future.exception()))

    def close(self) -> None:
        """Cancel the run if it has not ended, and stop reading."""
        self._channel.reads = False
        self._token.cancel()

    def __iter__(self) -> Iterator[tuple[str, RunValue]]:
        return self

    def __next__(self) -> tuple[str, RunValue]:
        while self._channel.reads:
            item, _ = self._look(WAKE_S)
            if item is not None:
                return item
        raise StopIteration

    def _look(self, timeout: float = 0) -> tuple[tuple[str, RunValue] | None, bool]:
        """Return the next value, or None if there is none within ``timeout`` seconds, and whether
        the run has ended. Raises the error of the run."""
        # In this order: a run that has ended adds no values, but the queue may still have some.
        channel, ended = self._channel, self._future.done()
        waits = timeout > 0 and not ended
        with suppress(Empty):
            # If the run has just ended, the item that wakes a waiting thread may come first.
            while (item := channel.queue.get(waits, timeout)) is None and not waits:
                pass
            return item, False
        if ended:
            channel.reads = False
            self._future.result()
        return None, ended

    def __aiter__(self) -> AsyncIterator[tuple[str, RunValue]]:
        return self

    async def __anext__(self) -> tuple[str, RunValue]:
        import asyncio

        # No thread waits: asyncio has few of them, and there may be many streams.
        channel, loop = self._channel, asyncio.get_running_loop()
        try:
            await asyncio.sleep(0)  # let other tasks run, however fast values come
            while channel.reads:
                news = asyncio.Event()
                # Set before the queue is checked: values that come in between set the event.
                channel.tell = partial(_tell, loop, news)
                item, ended = self._look()
                if item is not None:
                    return item
                if not ended:
                    await news.wait()
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            channel.tell = None
        raise StopAsyncIteration

    def __del__(self) -> None:
        self.close()  # without a reader, the run would wait forever


def _tell(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(news.set)


def _copied(value: RunValue) -> RunValue:
    """Return a value in memory of its own."""
    if isinstance(value, list | tuple):
        return [_copied(element) for element in value]
    if isinstance(value, dict):
        return {key: _copied(element) for key, element in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value
