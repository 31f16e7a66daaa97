"""Which worker of a cluster has which variable."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Sequence
from itertools import count
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidModel, WorkerLost

if TYPE_CHECKING:
    from penstock.ops.tensorflow.state import Store


class VariableHomes:
    """The workers of variables, by the numbers of their stores and their names, and the ``losses``
    of stores that no run has been told of. All methods are called under the cluster's lock."""

    def __init__(self) -> None:
        # Weak, so that variables go with their session, here and then on the workers.
        self._numbers: weakref.WeakKeyDictionary[Store, int] = weakref.WeakKeyDictionary()
        self._next = count()
        self.homes: dict[tuple[int, str], int] = {}
        self.losses: dict[int, WorkerLost] = {}
        # Finalizers add to it, on any thread and under any lock: appending takes none.
        self.forgotten: deque[int] = deque()

    def number(self, store: Store) -> int:
        """The number of a session's store, which no other store has had."""
        # Counted, since ``id`` may be that of a store that is gone, whose values workers still
        # have.
        number = self._numbers.get(store)
        if number is None:
            number = self._numbers[store] = next(self._next)
            weakref.finalize(store, self.forgotten.append, number)
        return number

    def settle(self, variable: tuple[int, str], worker: int, devices: Sequence[str]) -> bool:
        """Note the worker that has a variable; whether none had it before."""
        # Workers have no memory in common, and to keep two copies equal would take a message for
        # each assignment.
        is_new = variable not in self.homes
        home = self.homes.setdefault(variable, worker)
        if home != worker:
            raise InvalidModel(
                f"variable {variable[1]!r} is used on {devices[home]} and on {devices[worker]}, "
                "which have no memory in common; give all nodes that name it one device"
            )
        return is_new

    def unsettle(self, fresh: Sequence[tuple[Store, str]]) -> None:
        """Forget the workers of the variables of a graph that none has."""
        for store, name in fresh:
            self.homes.pop((self._numbers[store], name), None)

    def forget(self, stores: Collection[int]) -> None:
        """Forget the variables of stores, by their numbers."""
        for variable in [v for v in self.homes if v[0] in stores]:
            del self.homes[variable]
        for number in stores:
            self.losses.pop(number, None)

    def find(self, store: Store, name: str) -> tuple[int, int] | None:
        """The worker that has a variable, and the number of its store there; None if none has."""
        number = self._numbers.get(store)
        worker = None if number is None else self.homes.get((number, name))
        return None if number is None or worker is None else (worker, number)
