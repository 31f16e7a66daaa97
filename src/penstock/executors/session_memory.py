"""The memory of one session (``memory=``), shared by the arenas of all its plans.

::

    memory    weights, plans | arena of a run | arena of a run | free arena |      left      |

A run begins when its arena fits. If necessary, free arenas of other plans are dropped; otherwise
the run waits for others to end, in the order of arrival. The memory that a plan needs is known
before it runs, so a plan that could never run is refused at compile time. If the sizes of results
depend on data, the run takes the whole memory of the session and counts its allocations.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from weakref import ref

from penstock.core.errors import LimitExceeded
from penstock.host.fork import renewed
from penstock.host.malloc import bound_kept_memory
from penstock.ir.describe import format_bytes

if TYPE_CHECKING:
    from penstock.plan.plan import StepTable

_ABOUT = 1024
"""upper bound of the bytes by which the size of a plan differs between processes"""


class Pool(Protocol):
    """The arenas of one plan: ``count`` in all, of which no run uses those in ``free``. An arena
    takes ``needs`` bytes of the session's memory, or all of it if a run must be ``alone``."""

    count: int
    needs: int
    alone: bool

    @property
    def free(self) -> Sized: ...

    def forget_free(self) -> None:
        """Drop a free arena."""
        ...


Waiting: TypeAlias = tuple[Any, Callable[[Any], None]]
"""a pool, and the callback of a waiting run, which receives one of the pool's arenas"""


class PlanTooLarge(LimitExceeded):
    """A run of the plan ``table`` needs ``needed`` bytes, or ``at_least`` these: more than the
    session's ``limit`` bytes leave beside the ``held`` bytes of weights and plans."""

    table: StepTable | None = None

    def __init__(self, limit: int, held: int, needed: int, *, at_least: bool = False) -> None:
        # Plan sizes are approximate, so the message states a limit that suffices in any process.
        least = (held + needed + 2 * _ABOUT) // _ABOUT * _ABOUT
        more = ", and more for what it allocates outside of its arena" if at_least else ""
        super().__init__(
            f"memory= allows {limit} bytes, but at least {least} are needed: {format_bytes(held)} "
            f"for weights and plans, {format_bytes(needed)} for a run{more}"
        )
        self.limit, self.held, self.needed = limit, held, needed

    @property
    def left(self) -> int:
        """Bytes available to a run."""
        return max(self.limit - self.held, 0)


class SessionMemory:
    """The memory of a session: ``limit`` bytes, of which weights and plans take ``held``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.forked()
        renewed(self)
        self.waiting: deque[Waiting] = deque()
        """the queue of runs, of any plan, that wait for an arena"""
        self._pools: list[ref[Pool]] = []  # the most recently used pool is last
        bound_kept_memory(self)

    def forked(self) -> None:
        """Forget, in a forked child, the parent's run in parts."""
        self.results = 0
        """bytes of the results that a run in parts has computed so far"""
        self.turn = threading.Lock()
        """held by a run in parts, on the thread ``owner``"""
        self.owner = 0
        self.next_part: Callable[[Any], None] | None = None
        """the callback that receives an arena for that run, if it waits for one"""

    @property
    def left(self) -> int:
        """Bytes available to runs."""
        return max(self.limit - self.held - self.results, 0)

    @property
    def unused(self) -> int:
        """Bytes available to runs that no arena takes."""
        return max(self.left - self.taken, 0)

    @property
    def taken(self) -> int:
        """Bytes of all arenas, including those that runs of dropped plans still use."""
        return sum([pool.count * pool.needs for pool in self._alive()])

    def check(self, needed: int, at_least: bool = False) -> None:
        """Raise ``PlanTooLarge`` if a run that needs ``needed`` bytes, or ``at_least`` these, could
        never begin. Within a run in parts, the results of that run count as taken."""
        held = self.held + (self.results if self.in_parts else 0)
        if needed > max(self.limit - held, 0):
            raise PlanTooLarge(self.limit, held, needed, at_least=at_least)

    @property
    def in_parts(self) -> bool:
        """Whether the calling thread is in a run in parts."""
        return self.owner == threading.get_ident()

    def makes_room(self, pool: Pool, part: bool = False) -> bool:
        """Make room for one more arena of ``pool``, and return whether it fits. Drops free arenas
        of other pools if necessary. ``part``: the arena is for a part of the run that holds
        results. The caller must hold the lock of all pools."""
        self._pools = [own for own in self._pools if own() not in (None, pool)]
        others = self._alive()
        self._pools.append(ref(pool))
        return self._makes_room(pool.needs, pool.alone, [pool], others, part or not self.results)

    def holds_results(self, nbytes: int) -> bool:
        """Reserve ``nbytes`` for results, if they fit, and return whether they do."""
        if not self._makes_room(nbytes, False, [], self._alive(), True):
            return False
        self.results = nbytes
        return True

    def _alive(self) -> list[Pool]:
        return [pool for own in self._pools if (pool := own()) is not None]

    def _makes_room(
        self, nbytes: int, alone: bool, own: list[Pool], others: list[Pool], may_be_first: bool
    ) -> bool:
        while True:
            held = [pool for pool in (*own, *others) if pool.count]
            # Without any arena in use, waiting would not help, even if plans compiled since then
            # have taken the memory. Results of another run, in contrast, are released at its end.
            if not held and may_be_first:
                return True
            taken = sum([pool.count * pool.needs for pool in held])
            shared = not alone and not any(pool.alone for pool in held)
            if shared and taken + nbytes <= self.left:
                return True
            idle = next((pool for pool in others if pool.free), None)
            if idle is None:
                return False
            idle.forget_free()
