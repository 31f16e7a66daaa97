"""The meeting point of values and the parts of a run that need them: queues by key; nothing blocks.

The side that comes first leaves a value, or a function to call with it. The values of one key are
taken in the order in which they were sent, by their receivers in the order in which these asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from penstock.core.errors import Aborted
from penstock.core.types import RunValue

Receiver = Callable[[Any, bool, Aborted | None], None]
"""Takes a value, and whether it is dead; or None, False and the error that prevents it from being
sent."""


class NoValue(Aborted):
    """The error of a receiver whose value will never be sent."""


def edge_key(source: str, target: str, name: str) -> str:
    """The common part of the keys of an edge: the devices at its ends, and the value's name."""
    return f"{source};{target};{name}"


class Rendezvous:
    """The queues of one run. A key is whatever both ends agree on: an ``edge_key``, with the frame
    and the iteration in which a value is sent."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Lists, which are short: a deque takes four times as long to create.
        self._sent: dict[Hashable, list[tuple[Any, bool]]] = {}
        self._waiting: dict[Hashable, list[Receiver]] = {}
        self._error: str | None = None

    def send(self, key: Hashable, value: RunValue, dead: bool = False) -> None:
        """Leave a value, or call the receiver that waits for it. Raises ``Aborted``."""
        with self._lock:
            if self._error is not None:
                raise Aborted(self._error)
            receivers = self._waiting.get(key)
            if receivers is None:
                self._sent.setdefault(key, []).append((value, dead))
                return
            receiver = receivers.pop(0)
            # Keys have the number of the iteration: lists that stay would add up over a loop.
            if not receivers:
                del self._waiting[key]
        # Outside of the lock: a receiver may send or ask for values itself.
        receiver(value, dead, None)

    def recv(self, key: Hashable, receiver: Receiver) -> tuple[Any, bool] | None:
        """The next value, and whether it is dead, if it has been sent; else None, and ``receiver``
        is called with it on the thread that sends it. Raises ``Aborted``."""
        with self._lock:
            if self._error is not None:
                raise Aborted(self._error)
            values = self._sent.get(key)
            if values is None:
                self._waiting.setdefault(key, []).append(receiver)
                return None
            value = values.pop(0)
            if not values:
                del self._sent[key]
            return value

    def is_remote(self, key: Hashable) -> bool:
        """Whether values with this key are sent from outside of the process, so that a part that
        waits for one is not at rest."""
        return False

    def abort(self, error: BaseException) -> None:
        """Give up all transfers because of ``error``: waiting receivers are called with an
        ``Aborted`` that quotes it, and later calls raise one."""
        with self._lock:
            if self._error is not None:
                return
            # As text: the error itself would keep the frames of the run alive in its traceback.
            self._error = f"a transfer was given up, because of {error!r}"
            self._sent.clear()
        self._dismiss(lambda: Aborted(self._error))

    def end(self) -> None:
        """Let waiting receivers know that no values will come, without an error."""
        self._dismiss(NoValue)

    def _dismiss(self, error: Callable[[], Aborted]) -> None:
        """Call all waiting receivers with an error each."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for receivers in waiting.values():
            for receiver in receivers:
                receiver(None, False, error())

    def close(self) -> None:
        """Drop waiting receivers and values at the end of the run; no receiver is called."""
        with self._lock:
            self._waiting.clear()
            self._sent.clear()

    def __len__(self) -> int:
        """The number of values and receivers that wait."""
        with self._lock:
            return sum(map(len, self._sent.values())) + sum(map(len, self._waiting.values()))
