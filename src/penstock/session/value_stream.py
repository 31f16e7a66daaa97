"""Values of a run that are read while it goes on (``Session.stream``).

::

    run     iteration 0 ── iteration 1 ── iteration 2 ...      waits where too many are unread
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

from penstock.core.checkpoints import LOOK_S, THREAD, WAKE_S, checkpoint
from penstock.core.types import RunValue
from penstock.executors.control import CancelToken, Control
from penstock.host.threads import waiting_for_program

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future


class Channel:
    """What a run puts values into, and its reader takes out; at most ``ahead`` of them wait. The
    run does not hold the reader, whose end ends the run."""

    def __init__(self, ahead: int) -> None:
        self.queue: Queue[tuple[str, RunValue] | None] = Queue(ahead)
        self.reads = True
        self.tell: Callable[[], object] | None = None
        """called when there is something new, for a reader that waits for no thread"""

    def put(self, name: str, value: RunValue) -> None:
        """Take a value, on the thread of the run, when there is room for it."""
        # Its memory is that of the run, which goes on.
        item = name, _copied(value)
        if self._puts(item, 0):
            return
        run = THREAD.run
        outside = run.outside if isinstance(run, Control) else nullcontext
        # Nobody may ever read it: other runs have the worker and the threads meanwhile.
        with waiting_for_program(), outside():
            while not self._puts(item, LOOK_S):
                checkpoint()  # the run may have been cancelled

    def _puts(self, item: tuple[str, RunValue], timeout: float) -> bool:
        """Whether an item is put within ``timeout`` seconds, or need not be."""
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
        """Let a thread that waits for a value look whether the run has ended."""
        with suppress(Full):  # then it does not wait
            self.queue.put_nowait(None)
        self._tell()


class ValueStream:
    """The values of a run by name, in the order in which they are computed: an iterator and an
    asynchronous iterator of pairs of a name and a value. Once the run has ended, the iterator ends,
    or raises the error of the run. As a context manager it cancels a run that has not ended."""

    def __init__(
        self, channel: Channel, token: CancelToken, future: Future[dict[str, RunValue]]
    ) -> None:
        self._channel = channel
        self._token = token
        self._future = future
        future.add_done_callback(channel.wake)

    def result(self, timeout: float | None = None) -> dict[str, RunValue]:
        """The outputs of the run, by name, once it has ended; values that were not read are lost.
        Raises the error of the run, ``TimeoutError`` if it has not ended in time."""
        self._channel.reads = False
        return self._future.result(timeout)

    def then(self, done: Callable[[BaseException | None], object]) -> None:
        """Call ``done`` with the error of the run, if any, when it has ended."""
        self._future.add_done_callback(lambda future: done(future.exception()))

    def close(self) -> None:
        """Cancel the run, if it has not ended, and read no more."""
        self._channel.reads = False
        self._token.cancel()

    def __iter__(self) -> Iterator[tuple[str, RunValue]]:
        return self

    def __next__(self) -> tuple[str, RunValue]:
        while self._channel.reads:
            found, _ = self._look(WAKE_S)
            if found is not None:
                return found
        raise StopIteration

    def _look(self, timeout: float = 0) -> tuple[tuple[str, RunValue] | None, bool]:
        """What is read next, if it comes in so many seconds, or else whether the run has ended.
        Raises the error of the run."""
        # A run that has ended puts nothing more: what is there is read before the end is told.
        channel, ended = self._channel, self._future.done()
        waits = timeout > 0 and not ended
        with suppress(Empty):
            # What wakes a thread that waits comes first, if the run has just ended.
            while (found := channel.queue.get(waits, timeout)) is None and not waits:
                pass
            return found, False
        if ended:
            channel.reads = False
            self._future.result()
        return None, ended

    def __aiter__(self) -> AsyncIterator[tuple[str, RunValue]]:
        return self

    async def __anext__(self) -> tuple[str, RunValue]:
        import asyncio

        # No thread waits: those of asyncio are few, and streams may be many.
        channel, loop = self._channel, asyncio.get_running_loop()
        try:
            await asyncio.sleep(0)  # other tasks go on, however fast values come
            while channel.reads:
                news = asyncio.Event()
                # Before it is looked at: what comes in between is told.
                channel.tell = partial(_tell, loop, news)
                found, ended = self._look()
                if found is not None:
                    return found
                if not ended:
                    await news.wait()
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            channel.tell = None
        raise StopAsyncIteration

    def __enter__(self) -> ValueStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # nobody can read what the run would wait to be read


def _tell(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(news.set)


def _copied(value: RunValue) -> RunValue:
    """A value in memory of its own."""
    if isinstance(value, list | tuple):
        return [_copied(element) for element in value]
    if isinstance(value, dict):
        return {key: _copied(element) for key, element in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value
