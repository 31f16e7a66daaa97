"""The variables of sessions on a cluster: each is on one worker, as soon as a graph that names it
is registered; before that it is in this process, with the value that it begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.core.types import Type
from penstock.executors.variables import Variables

if TYPE_CHECKING:
    from penstock.core.limits import Limits
    from penstock.ir.graph import Model
    from penstock.ops.tensorflow.state import Store


class HasVariables(Protocol):
    """The cluster that has variables (``penstock.Cluster``)."""

    def home(self, store: Store, name: str) -> tuple[int, int] | None:
        """The worker that has a variable, and the number of its store there."""

    def variable(self, worker: int, store: int, name: str) -> np.ndarray | None:
        """The value of a variable."""

    def set_variable(self, worker: int, store: int, name: str, value: np.ndarray | None) -> None:
        """Replace the value of a variable."""


class _RemoteVariable:
    """A variable as the driver sees it: reading and setting it asks its worker, if it has one."""

    def __init__(self, cluster: HasVariables, store: Store, name: str, local: Any) -> None:
        self.name = name
        self.type: Type = local.type
        self._cluster = cluster
        self._store = store
        self._local = local

    @property
    def value(self) -> np.ndarray | None:
        home = self._cluster.home(self._store, self.name)
        if home is None:
            value: np.ndarray | None = self._local.value
            return value
        return self._cluster.variable(*home, self.name)

    @value.setter
    def value(self, value: np.ndarray | None) -> None:
        home = self._cluster.home(self._store, self.name)
        if home is not None:
            self._cluster.set_variable(*home, self.name, value)
        else:  # its worker will get it
            self._local.value = value

    def assign(self, value: np.ndarray) -> None:
        """Replace the value by a copy."""
        self.value = np.array(value)


class ClusterVariables(Variables):
    """As ``Variables``, for a session on a cluster. To save them is to write a checkpoint, from
    which they are restored when a worker was lost. Raises ``PenstockError`` if a worker gives no
    answer."""

    def __init__(
        self, cluster: HasVariables, model: Model, own: dict[Store, Store], limits: Limits
    ) -> None:
        self._cluster = cluster
        super().__init__(model, own, limits)

    def _variable(self, name: str) -> Any:
        local = super()._variable(name)
        store, own_name = self._places[name]
        return _RemoteVariable(self._cluster, store, own_name, local)
