"""The variables of sessions on a cluster. Each variable is on one worker once a graph that names it
is registered; before that, it is in this process, with its initial value."""

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
    """A cluster whose workers have variables (``penstock.Cluster``)."""

    def home(self, store: Store, name: str) -> tuple[int, int] | None:
        """Return the worker that has a variable, and the number of its store, or None."""

    def variable(self, worker: int, store: int, name: str) -> np.ndarray | None:
        """Return the value of a variable."""

    def set_variable(self, worker: int, store: int, name: str, value: np.ndarray | None) -> None:
        """Replace the value of a variable."""


class _RemoteVariable:
    """A variable as the driver sees it. Reading and setting it calls its worker, if it has one."""

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
        else:  # sent to its worker later
            self._local.value = value

    def assign(self, value: np.ndarray) -> None:
        """Replace the value by a copy."""
        self.value = np.array(value)


class ClusterVariables(Variables):
    """The variables of a session on a cluster. ``save`` writes a checkpoint, from which
    ``restore`` restores them after the loss of a worker. All methods raise ``WorkerLost`` if a
    worker does not answer."""

    def __init__(
        self, cluster: HasVariables, model: Model, own: dict[Store, Store], limits: Limits
    ) -> None:
        self._cluster = cluster
        super().__init__(model, own, limits)

    def _variable(self, name: str) -> Any:
        local = super()._variable(name)
        store, own_name = self._places[name]
        return _RemoteVariable(self._cluster, store, own_name, local)
