"""Facts about a session: its inputs and outputs, the memory it holds, counters, and the options in
effect for its plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.backends.base import Backend, RoundsOperands
from penstock.compiler.options import CompileOptions
from penstock.compiler.stages import CompileContext
from penstock.core import capability
from penstock.core.errors import warn
from penstock.core.records import changed_fields, dataclass
from penstock.core.types import TensorType, Type
from penstock.executors.base import Executor, OnWorkers
from penstock.ir.describe import format_bytes

_HELD = ("weights", "arenas", "plans", "caches")
"""fields of ``Memory`` that are bytes"""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a session: its name and its type."""

    name: str
    type: Type

    @property
    def shape(self) -> tuple[int | str | None, ...] | None:
        """The dims of a tensor, names or None where they are open; None if the rank is open or the
        value is not a tensor."""
        return self.type.shape if isinstance(self.type, TensorType) else None

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype of a tensor; None if it is open or the value is not a tensor."""
        return self.type.dtype if isinstance(self.type, TensorType) else None

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"

    def __repr__(self) -> str:
        return f"Port({self})"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a session holds: ``weights``, which its plans share; ``arenas``, including
    workspaces of streams on devices; ``plans`` with their programs, approximately; and the
    number of plans, ``count``. ``caches``: the memory of all caches that its runs returned and
    callers still hold, including the room for their growth."""

    weights: int
    arenas: int
    plans: int
    count: int
    caches: int = 0

    def __repr__(self) -> str:
        held = [f"{name} {format_bytes(getattr(self, name))}" for name in _HELD]
        return f"Memory({self.count} plan{'s' * (self.count != 1)}: {', '.join(held)})"


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of a session: plans that it compiled, and plans taken from a file or a cache; runs
    that found a plan; plans dropped to stay within ``Limits.max_plans_bytes``; plans that it
    keeps; runs requested by ``run``, ``submit`` and all other methods; and submitted runs that have
    not ended."""

    plans_made: int
    plans_opened: int
    plans_found: int
    plans_dropped: int
    plans_kept: int
    runs: int
    pending: int

    def __repr__(self) -> str:
        return changed_fields(self, Stats(0, 0, 0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class EffectiveOptions:
    """The options in effect for a plan, which may differ from those requested: the name of its
    executor, the precision of its products, the virtual devices of its nodes, the most ``threads``
    of one kernel, and the backends that its steps run on."""

    executor: str
    precision: str
    devices: tuple[str, ...]
    threads: int
    backends: tuple[str, ...]

    def line(self, options: CompileOptions) -> str:
        """Return them in one line, with what ``options`` requested where that differs."""
        texts = [
            f"executor {self.executor}{_asked(options.executor, self.executor)}",
            f"precision {self.precision}{_asked(options.precision, self.precision)}",
            f"up to {self.threads} thread{'s' if self.threads > 1 else ''} for a kernel",
            f"backends {' '.join(self.backends) or 'none'}",
        ]
        if self.devices:
            texts.append(f"devices {' '.join(self.devices)}")
        return ", ".join(texts)


def _asked(asked: str, effective: str) -> str:
    return "" if asked == effective else f" (asked for: {asked})"


def effective_options(context: CompileContext, executor: Executor) -> EffectiveOptions:
    """Return the options in effect for the plan of ``executor``."""
    used = {step.backend for step in executor.table.walk() if step.backend}
    on_workers = capability(executor, OnWorkers)
    used.update(() if on_workers is None else on_workers.backends)
    names = [backend.name for backend in context.backends if backend.name in used]
    names += sorted(used.difference(names))  # backends that devices= gives
    precision = effective_precision(context.options.precision, context.backends)
    devices = context.devices if executor.name == "frames" else ()
    # On a cluster, the devices are those of all workers.
    devices = devices or tuple([n for own in context.named_workers.devices for n in own])
    return EffectiveOptions(executor.name, precision, devices, executor.threads, tuple(names))


def effective_precision(asked: str, backends: Sequence[Backend]) -> str:
    """Return the precision that ``backends`` can provide."""
    rounding = [capability(backend, RoundsOperands) for backend in backends]
    # A backend that cannot round computes in float32, which is more precise.
    narrows = any(own.narrow for own in rounding if own is not None)
    return "float32" if asked == "bf16" and not narrows else asked


def warn_of_precision(asked: str, backends: Sequence[Backend]) -> None:
    """Warn if no backend supports the requested precision."""
    if effective_precision(asked, backends) == asked:
        return
    names = ", ".join([backend.name for backend in backends])
    warn(f'precision="bf16" computes in float32 here: no backend of {names} rounds to bfloat16')
