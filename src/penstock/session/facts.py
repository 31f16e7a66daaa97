"""What sessions tell about themselves: inputs and outputs, the memory that they hold, counts."""

from __future__ import annotations

import numpy as np

from penstock.core.records import dataclass
from penstock.core.types import TensorType, Type


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a session: its name and its type."""

    name: str
    type: Type

    @property
    def shape(self) -> tuple[int | str | None, ...] | None:
        """The dims of a tensor, names or None where they are open; None if its rank is open, or it
        is no tensor."""
        return self.type.shape if isinstance(self.type, TensorType) else None

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype of a tensor; None if it is open, or it is no tensor."""
        return self.type.dtype if isinstance(self.type, TensorType) else None

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a session holds: constants, which its plans share; arenas, with workspaces of
    streams on devices; plans, about, with their programs; and how many plans there are. ``caches``:
    the memory of caches that its runs returned, with the room that they have to grow: of all that
    callers still hold."""

    weights: int
    arenas: int
    plans: int
    count: int
    caches: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """What a session has done: plans that it compiled, and those that it took from a file or a
    cache; runs that found their plan among those that it keeps; plans
    dropped for want of room (``Limits.max_plans_bytes``); plans that it keeps; runs that were asked
    for, by ``run``, ``submit`` and all others; and submitted runs that have not ended."""

    plans_made: int
    plans_opened: int
    plans_found: int
    plans_dropped: int
    plans_kept: int
    runs: int
    pending: int
