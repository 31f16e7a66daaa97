"""Values of a run that are read while it goes on (``Session.stream``).

::

    run     iteration 0 ── iteration 1 ── iteration 2 ...      waits where too many are unread
                 │              │
    caller      ("token", 17)  ("token", 4) ...                as an iterator, also of asyncio
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.checkpoints import LOOK_S, WAKE_S, checkpoint
from penstock.core.types import RunValue
from penstock.executors.control import CancelToken

if TYPE_CHECKING:
    from concurrent.futures import Future


class Channel:
    """What a run puts values into, and its reader takes out; at most ``ahead`` of them wait. The
    run does not hold the reader, whose end ends the run."""

    def __init__(self, ahead: int) -> None:
        self.queue: Queue[tuple[str, RunValue] | None] = Queue(ahead)
        self.reads = True

    def put(self, name: str, value: RunValue) -> None:
        """Take a value, on the thread of the run, when there is room for it."""
        # Its memory is that of the run, which goes on.
        item, waits = (name, _copied(value)), True
        while waits and self.reads:
            try:
                self.queue.put(item, timeout=LOOK_S)
                waits = False
            except Full:
                checkpoint()  # the run may have been cancelled

    def wake(self, future: Future[dict[str, RunValue]]) -> None:
        """Let a thread that waits for a value look whether the run has ended."""
        with suppress(Full):  # then it does not wait
            self.queue.put_nowait(None)


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

    def close(self) -> None:
        """Cancel the run, if it has not ended, and read no more."""
        self._channel.reads = False
        self._token.cancel()

    def __iter__(self) -> Iterator[tuple[str, RunValue]]:
        return self

    def __next__(self) -> tuple[str, RunValue]:
        channel = self._channel
        while channel.reads:
            # A run that has ended puts nothing more: what is there is read before the end is told.
            ended = self._future.done()
            try:
                found = channel.queue.get(timeout=WAKE_S) if not ended else channel.queue.get(False)
            except Empty:
                if ended:
                    channel.reads = False
                    self._future.result()
                continue
            if found is not None:
                return found
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[tuple[str, RunValue]]:
        return self

    async def __anext__(self) -> tuple[str, RunValue]:
        import asyncio

        try:
            found = await asyncio.to_thread(next, self, None)
        except asyncio.CancelledError:
            self.close()
            raise
        if found is None:
            raise StopAsyncIteration
        return found

    def __enter__(self) -> ValueStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # nobody can read what the run would wait to be read


def _copied(value: RunValue) -> RunValue:
    """A value in memory of its own."""
    if isinstance(value, list | tuple):
        return [_copied(element) for element in value]
    if isinstance(value, dict):
        return {key: _copied(element) for key, element in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value
