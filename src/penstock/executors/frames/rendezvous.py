"""Where values wait for who takes them: a queue for each key, in which nobody ever blocks.

Whoever comes first leaves a value, or a function to call with it. Values for one key are taken in
the order in which they were sent, by those who have asked in the order in which they did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from penstock.errors import Aborted

Take = Callable[[Any, bool, Aborted | None], None]
"""Takes a value, and whether it is dead; or None, and the error that nothing will come for."""


def edge(source: str, target: str, name: str) -> str:
    """What keys have of an edge: the devices at its ends, and the name of what is sent."""
    return f"{source};{target};{name}"


class Rendezvous:
    """The queues of one run.

    A key is whatever both ends agree on: an ``edge``, with the frame and the iteration that a value
    is sent in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Lists, which are short: a deque takes four times as long to make.
        self._sent: dict[Hashable, list[tuple[Any, bool]]] = {}
        self._asked: dict[Hashable, list[Take]] = {}
        self._error: str | None = None

    def send(self, key: Hashable, value: Any, dead: bool = False) -> None:
        """Leave a value, or call who waits for it, here and now. Raises ``Aborted``."""
        with self._lock:
            if self._error is not None:
                raise Aborted(self._error)
            takers = self._asked.get(key)
            if takers is None:
                self._sent.setdefault(key, []).append((value, dead))
                return
            take = takers.pop(0)
            if not takers:
                del self._asked[key]
        take(value, dead, None)

    def recv(self, key: Hashable, take: Take) -> tuple[Any, bool] | None:
        """The next value, and whether it is dead, if it is there; else None, and ``take`` is called
        with it, on the thread that sends it. Raises ``Aborted``."""
        with self._lock:
            if self._error is not None:
                raise Aborted(self._error)
            waiting = self._sent.get(key)
            if waiting is None:
                self._asked.setdefault(key, []).append(take)
                return None
            found = waiting.pop(0)
            if not waiting:
                del self._sent[key]
            return found

    def abort(self, error: BaseException) -> None:
        """End it: all who wait are told an ``Aborted`` that speaks of ``error``, and whoever comes
        has one raised."""
        with self._lock:
            if self._error is not None:
                return
            self._error = f"a transfer was given up, because of {error!r}"
            asked, self._asked = self._asked, {}
            self._sent.clear()
        for takers in asked.values():
            for take in takers:
                take(None, False, Aborted(self._error))

    def close(self) -> None:
        """The run is over: forget who waits, and what was sent, without a word."""
        with self._lock:
            self._asked.clear()
            self._sent.clear()

    def __len__(self) -> int:
        """How many values, and how many who take them, are waiting."""
        with self._lock:
            return sum(map(len, self._sent.values())) + sum(map(len, self._asked.values()))
