"""The exchange of values between the parts of a run: non-blocking queues, by key.

Whichever side comes first leaves the value, or a function to be called with the value. Values of
the same key are received in the order in which they were sent, by receivers in the order of their
requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from penstock.core.errors import Aborted
from penstock.core.types import RunValue

Receiver = Callable[[Any, bool, Aborted | None], None]
"""Takes a value, whether it is dead, and None; or None, False, and the error because of which no
value will be sent."""


class NoValue(Aborted):
    """The error of a receiver whose value will never be sent, although no part has failed."""


def edge_key(source: str, target: str, name: str) -> str:
    """Return the common part of the keys of an edge: its devices, and the value's name."""
    return f"{source};{target};{name}"


class Rendezvous:
    """The queues of one run. Both ends of an edge use the same key: the ``edge_key``, with the
    frame and the iteration in which the value is sent."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Lists, which stay short: a deque takes four times as long to create.
        self._sent: dict[Hashable, list[tuple[Any, bool]]] = {}
        self._waiting: dict[Hashable, list[Receiver]] = {}
        self._error: str | None = None

    def send(self, key: Hashable, value: RunValue, dead: bool = False) -> None:
        """Leave a value, or call its waiting receiver. Raises ``Aborted`` after ``abort``."""
        with self._lock:
            if self._error is not None:
                raise Aborted(self._error)
            receivers = self._waiting.get(key)
            if receivers is None:
                self._sent.setdefault(key, []).append((value, dead))
                return
            receiver = receivers.pop(0)
            # Keys contain the iteration number, so empty lists would accumulate over a loop.
            if not receivers:
                del self._waiting[key]
        # Called without the lock, since a receiver may send or receive values itself.
        receiver(value, dead, None)

    def recv(self, key: Hashable, receiver: Receiver) -> tuple[Any, bool] | None:
        """Return the next value of ``key``, and whether it is dead, if it has been sent. Otherwise
        return None; the thread that sends the value calls ``receiver`` with it. Raises ``Aborted``
        after ``abort``."""
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
        """Whether values of this key come from another process: a part that waits does not rest."""
        return False

    def abort(self, error: BaseException) -> None:
        """Abort all transfers because of ``error``. Waiting receivers are called with an
        ``Aborted`` that quotes it, which later calls raise."""
        with self._lock:
            if self._error is not None:
                return
            # Kept as text, since the traceback of the error would keep the run's frames alive.
            self._error = f"a transfer was aborted because of {error!r}"
            self._sent.clear()
        self._dismiss(lambda: Aborted(self._error))

    def end(self) -> None:
        """Call waiting receivers with ``NoValue``: no more values will come."""
        self._dismiss(NoValue)

    def _dismiss(self, error: Callable[[], Aborted]) -> None:
        """Call each waiting receiver with an error that ``error`` returns."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for receivers in waiting.values():
            for receiver in receivers:
                receiver(None, False, error())

    def close(self) -> None:
        """Drop waiting receivers and values at the end of the run, without a call."""
        with self._lock:
            self._waiting.clear()
            self._sent.clear()

    def __len__(self) -> int:
        """Return the number of waiting values and receivers."""
        with self._lock:
            return sum(map(len, self._sent.values())) + sum(map(len, self._waiting.values()))
