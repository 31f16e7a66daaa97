"""Feeds that are already on devices, and results that stay there.

A plan has its inputs and outputs in the host's memory, with a transfer after each input and before
each output of a device. Feeds in a backend's own memory, and results that the caller wants there,
need no transfers: such runs have plans of their own (``Subgraph.variants``)::

    run({"x": array})                        x -> Transfer -> Conv -> Transfer -> y
    run({"x": tensor}, returns="torch")      x -> Conv -> y
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any
from weakref import ref

import numpy as np

from penstock.backends.base import Backend, TakesTensors
from penstock.compiler.subgraph import LatestPlan, Subgraph
from penstock.compiler.subgraphs import Request
from penstock.core import capability
from penstock.core.errors import InvalidInput, PenstockError
from penstock.core.records import NamedTuple
from penstock.core.types import NamedValues, RunValue, RunValues, TensorType, dtype_name
from penstock.executors.base import Executor
from penstock.executors.linear import LinearExecutor
from penstock.ops.internal.transfer import HOST, Place, Ports


class DeviceOrder:
    """The order of a run relative to other work on devices, for its feeds and results there.

    A linear run is on the stream of the thread that runs it: on the caller's, in order with the
    caller's own work; on another thread after ``events`` that the caller's stream has recorded, and
    the host waits for its results. Other executors have streams or threads of their own, so the
    host waits before and after them. If a run is ``ordered``, its caller does all this.
    """

    def __init__(
        self, devices: Sequence[Any], events: Sequence[Any] | None = None, ordered: bool = False
    ) -> None:
        self._devices = devices
        self._events = events
        self._ordered = ordered

    def begin(self, executor: Executor) -> None:
        """Called before the run, on its thread."""
        if self._ordered and (executor.hands_over or isinstance(executor, LinearExecutor)):
            return
        # Work on the caller's stream must end before kernels read its results.
        for i, device in enumerate(self._devices):
            if not isinstance(executor, LinearExecutor):
                (device.settle if not self._events else self._events[i].synchronize)()
            elif self._events:
                device.current().wait(self._events[i])

    def end(self, executor: Executor) -> None:
        """Called after the run, on the thread on which it ends."""
        linear = isinstance(executor, LinearExecutor)
        # The caller's own stream needs no wait: later work there is queued after it.
        if executor.hands_over or (linear and (self._ordered or self._events is None)):
            return
        for device in self._devices:
            (device.settle if linear else device.settle_all)()


class Fed(NamedTuple):
    """A value in the memory of a backend, and its type."""

    value: RunValue
    type: TensorType
    backend: Backend


def adopting(backends: Sequence[Backend]) -> list[Backend]:
    """Return the backends that accept callers' values in their own memory without a copy."""
    return [b for b in backends if b.memory != HOST and capability(b, TakesTensors) is not None]


class DevicePorts:
    """Finds feeds on the devices of ``backends``, and the subgraphs for them. ``planned``: whether
    the executor plans where values are; otherwise all are in the host's memory during a
    run."""

    def __init__(self, backends: Sequence[Backend], planned: bool) -> None:
        self._backends: Sequence[Any] = backends
        self._planned = planned

    @property
    def _devices(self) -> list[Any]:
        return [b.device for b in self._backends if b.device is not None]

    def order_of_caller(self) -> DeviceOrder:
        """Return the order of a run on the calling thread."""
        return DeviceOrder(self._devices)

    def order_of(self, ordered: bool) -> DeviceOrder:
        """Return the order of a run on another thread; call it now, on the caller's thread.
        ``ordered``: the caller orders the run itself."""
        devices = self._devices
        events = () if ordered else [device.current().record() for device in devices]
        return DeviceOrder(devices, events, ordered)

    def fed(self, feeds: NamedValues) -> dict[str, Fed]:
        """Return the feeds that are on devices."""
        fed = {}
        for name, value in feeds.items():
            # The common case: the host's arrays have __dlpack__ as well.
            if value.__class__ is np.ndarray or not hasattr(value, "__dlpack__"):
                continue
            for backend in self._backends:
                adopted = backend.adopt(value)
                if adopted is not None:
                    on_device, type_ = adopted
                    fed[name] = Fed(on_device, type_, backend)
                    break
        return fed

    def variant(
        self, subgraph: Subgraph, feeds: NamedValues, fed: Mapping[str, Fed], stay: bool
    ) -> tuple[Subgraph, Mapping[str, Any]]:
        """Return the subgraph for feeds of which some are on devices and results that ``stay``, and
        the feeds in the form that it takes."""
        tensors = {
            name: on
            for (name, type_, _) in subgraph.port_types
            if (on := fed.get(name)) is not None and isinstance(type_, TensorType) and type_.dtype
        }
        # These executors have all values in the host's memory.
        if not self._planned or subgraph.framed:
            tensors, stay = {}, False
        hosted = {n: on.backend.to_host(on.value) for n, on in fed.items() if n not in tensors}
        feeds = {**feeds, **hosted, **tensors}
        if not tensors and not stay:
            return subgraph, feeds
        key = (tuple([(name, on.backend.name) for name, on in tensors.items()]), stay)
        known = subgraph.variants.get(key)
        if known is None:
            numbers = {name: i for i, name in enumerate(subgraph.names)}
            places = {
                numbers[name]: Place(on.backend.name, on.backend.memory)
                for name, on in tensors.items()
            }
            new = DeviceSubgraph(subgraph, key, Ports(places, stay))
            # Another thread may have added it meanwhile; the subgraph itself holds its plans.
            known = subgraph.variants.setdefault(key, new)
        return known, feeds


class DeviceSubgraph(Subgraph):
    """``base``, for feeds on devices and results that stay there, as ``ports`` say."""

    def __init__(self, base: Subgraph, name: Hashable, ports: Ports) -> None:
        super().__init__(base.graph, base.outputs, base.unraised)
        # Weak: the base holds its variants, and subgraphs are freed with their last reference.
        self._base = ref(base)
        self.name = name
        self.ports = ports

    @property
    def base(self) -> Subgraph | None:
        return self._base()

    def values(self, feeds: NamedValues) -> list[Any]:
        """Return the values in order. Those on devices are checked like arrays, not converted."""
        fed = {name: value for name, value in feeds.items() if value.__class__ is Fed}
        for name, type_, _ in self._ports:
            if name in fed and isinstance(type_, TensorType):
                _check_dtype(name, type_, fed[name])
        # Shapes are checked as for arrays, without a copy to the host.
        stand_ins = {name: _placeholder(on.type) for name, on in fed.items()}
        values = super().values({**feeds, **stand_ins})
        return [
            fed[name].value if name in fed else value
            for name, value in zip(self.names, values, strict=True)
        ]

    def key(self, values: RunValues) -> tuple[Hashable, ...]:
        return super().key(self.placeholders(values))

    def placeholders(self, values: RunValues) -> RunValues:
        """Return arrays without contents as placeholders for values on devices."""
        assert self.ports is not None
        stand_ins = list(values)
        for i in self.ports.fed:
            type_ = self.types[i]
            assert isinstance(type_, TensorType)
            if stand_ins[i].__class__ is not np.ndarray:
                stand_ins[i] = _placeholder(TensorType(type_.dtype, tuple(values[i].shape)))
        return stand_ins

    def use(self, key: Hashable, executor: Executor) -> None:
        super().use(key, executor)
        # The session shows the plan that was used last. No key of the base equals this one.
        if (base := self.base) is not None:
            base.last = LatestPlan((self.name, key), executor, None)


class Returned:
    """The results of a ``request`` as tensors in the memory of ``backend``. Results in other memory
    are copied."""

    def __init__(
        self, request: Request, backend: TakesTensors, order: DeviceOrder | None, executor: Executor
    ) -> None:
        self._request = request
        self._backend = backend
        self._order = order
        self._executor = executor

    def named(self, outputs: RunValues) -> dict[str, RunValue]:
        give = self._backend.give
        if self._order is not None:
            self._order.end(self._executor)
        return {name: give(value) for name, value in self._request.named(outputs).items()}


def returned_by(backends: Collection[Backend], wanted: str) -> TakesTensors:
    """Return the backend whose tensors ``returns=`` asks for. Raises ``PenstockError`` if the
    session has none."""
    for backend in backends:
        tensors = capability(backend, TakesTensors)
        if tensors is not None and tensors.gives == wanted:
            return tensors
    raise PenstockError(
        f"returns={wanted!r} needs a backend with such values; compile the model with "
        f"backends=[{wanted!r}]"
    )


def _check_dtype(name: str, type_: TensorType, on: Fed) -> None:
    if on.type.dtype != type_.dtype and type_.dtype is not None:
        wanted, actual = dtype_name(type_.dtype), dtype_name(on.type.dtype)
        raise InvalidInput(
            f"input {name!r} must be {wanted}, not {actual}; convert it with .to(torch.{wanted})"
        )


def _placeholder(type_: TensorType) -> np.ndarray:
    # Its dims do not matter: it takes the memory of one element.
    return np.broadcast_to(np.zeros((), type_.dtype), type_.dims)
