"""The cache of a session's executors, by subgraph and input shapes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count
from threading import get_ident
from typing import TYPE_CHECKING, cast

from penstock.compiler.subgraph import NO_PLAN, Subgraph
from penstock.core.checkpoints import hold_lock
from penstock.core.errors import LimitExceeded, OptionError, PenstockError
from penstock.core.records import dataclass
from penstock.executors.base import CompiledExecutor, Executor
from penstock.host.fork import refuse_reentry, shared_lock
from penstock.host.log import INFO, is_logged, log
from penstock.host.malloc import give_back_memory

if TYPE_CHECKING:
    from penstock.executors.pager import Pager
    from penstock.executors.session_memory import SessionMemory

_LOCK = shared_lock()  # one for all sessions, taken to keep and drop plans

# Bytes of dropped plans after which freed memory is returned to the system.
_MANY_BYTES = 16 << 20

# The default limit for models with few constants.
_LEAST_BYTES = 64 << 20

# Changes of shapes after which the bytes of plans are measured again.
_LOOK_EVERY = 8

Compile = Callable[[], Executor]
_Place = tuple[Subgraph, Hashable, bool]


@dataclass(slots=True, eq=False)
class _Kept:
    """A cached executor, its subgraph and key, the number of its last use, and the bytes of its
    constants."""

    place: _Place
    executor: Executor
    last_use: int
    constants: dict[int, int]


class PlanCache:
    """Executors in the order of their last use, bounded by the bytes that they hold.

    Each is stored by its subgraph, the key of its feeds (``Subgraph.key``) and whether it reports
    steps to observers. The least recently used first lose arenas that no run holds, which takes a
    few milliseconds to undo, and then are dropped. The one used last is always kept, whatever its
    size. ``max_bytes`` is ``Limits.max_plans_bytes``; ``memory`` the bound on all that the session
    holds (``memory=``): a plan that could never run within it is refused with ``LimitExceeded``.
    """

    def __init__(self, max_bytes: int | None, memory: SessionMemory | None = None) -> None:
        self._max_bytes = max_bytes
        self.memory = memory
        self.pager: Pager | None = None
        """releases pages of weights in a mapped file, for a session that may hold less"""
        self.closed = False
        self.unbounded = False
        """whether plans are never dropped for others, as while two models are compared"""
        self._dropped = 0
        self.made = self.evicted = 0
        """plans compiled, and plans dropped for lack of room"""
        # Counters whose next() is atomic.
        self.runs = count()
        """runs of the session"""
        self._looked, self._hits = count(), count()
        self.look_up, self.hit = self._looked.__next__, self._hits.__next__
        """counts runs that did not begin at once with the plan used last, and those that then
        found their plan"""
        # Threads that compile a plan, or wait for one.
        self._compiling: set[int] = set()
        # Read without the lock; an OrderedDict would need it for changes of the order.
        self._kept: dict[_Place, _Kept] = {}
        self._use, self._change = count().__next__, count(1).__next__

    def get(self, subgraph: Subgraph, key: Hashable, observed: bool, compile: Compile) -> Executor:
        """Return the executor of a plan, compiled if it is new. If several threads need the same
        new plan, one compiles it; threads with other plans continue."""
        place = (subgraph, key, observed)
        executor = self._lookup(place)
        if executor is None:
            self.refuse_reentry()
            self._compiling.add(get_ident())
            try:
                with hold_lock(subgraph.lock):
                    # Another thread may have compiled it while this one waited.
                    executor = self._lookup(place)
                    if executor is None:
                        executor = compile()
                        self._keep(place, executor)
            finally:
                self._compiling.discard(get_ident())
        elif executor.run_bytes > executor.arena_bytes or self._change() % _LOOK_EVERY == 0:
            # It lost its arenas to others, or kernels may have been created in runs.
            with _LOCK:
                self._make_room(executor)
        if self.closed and not observed:
            subgraph.last = NO_PLAN
        elif not observed:
            subgraph.use(key, executor)
        return executor

    @property
    def hits(self) -> int:
        """The number of runs that found a plan compiled before."""
        # Most runs use the plan used last, and should not pay for a second counter.
        looked, hits = counter_value(self._looked), counter_value(self._hits)
        return max(0, counter_value(self.runs) - looked + hits)

    def has(self, subgraph: Subgraph, key: Hashable) -> bool:
        """Whether there is a plan of a subgraph under this key."""
        return (subgraph, key, False) in self._kept

    def find(self, subgraph: Subgraph, key: Hashable) -> Executor | None:
        """Return the plan of a subgraph under this key, or None."""
        return self._lookup((subgraph, key, False))

    def refuse_reentry(self) -> None:
        """Raise ``PenstockError`` on a thread that compiles a plan or holds a lock that others
        need: its caller, such as a signal handler, would wait for itself."""
        refuse_reentry()
        if get_ident() in self._compiling:
            raise PenstockError(
                "the session is called while this thread compiles a plan for it, as a signal "
                "handler, a finalizer or a callback may do; call it again when that has returned"
            )

    def of(self, subgraph: Subgraph) -> dict[Hashable, Executor]:
        """Return the executors of a subgraph without observers, by key."""
        with _LOCK:
            own = [kept for kept in self._by_use() if kept.place[::2] == (subgraph, False)]
        return {kept.place[1]: kept.executor for kept in own}

    def executors(self) -> list[Executor]:
        """Return all cached executors, least recently used first."""
        with _LOCK:
            return [kept.executor for kept in self._by_use()]

    def replace(self, old: Executor, new: Executor) -> None:
        """Replace an executor by a faster one of the same plan."""
        with _LOCK:
            for (subgraph, key, _), kept in self._kept.items():
                if kept.executor is old:
                    kept.executor = new
                    if subgraph.last.executor is old:
                        subgraph.use(key, new)

    def subgraph_of(self, executor: Executor) -> Subgraph | None:
        """Return the subgraph of a cached executor, or None."""
        with _LOCK:
            return next((k.place[0] for k in self._by_use() if k.executor is executor), None)

    def forget(self, subgraph: Subgraph, key: Hashable) -> None:
        """Drop one plan, if it is there."""
        self._kept.pop((subgraph, key, False), None)
        if subgraph.last.key == key:
            subgraph.last = NO_PLAN

    def drop(self, subgraph: Subgraph) -> None:
        """Forget the plans of a subgraph and of its variants."""
        # Variants are the same graph for feeds on devices.
        variants = {subgraph, *subgraph.variants.values()}
        with _LOCK:
            for place in [place for place in list(self._kept) if place[0] in variants]:
                self._kept.pop(place, None)
        for variant in variants:
            variant.last = NO_PLAN

    def close(self) -> None:
        """Forget all plans, and store none from now on."""
        with _LOCK:
            self.closed = True
            for subgraph, _, _ in list(self._kept):
                subgraph.last = NO_PLAN
                if subgraph.base is not None:
                    subgraph.base.last = NO_PLAN
            self._kept.clear()

    def _by_use(self) -> list[_Kept]:
        return sorted(self._kept.values(), key=lambda kept: kept.last_use)

    def _lookup(self, place: _Place) -> Executor | None:
        # No lock: each call is atomic, and a signal handler may run between them.
        kept = self._kept.get(place)
        if kept is not None:
            kept.last_use = self._use()
        return None if kept is None else kept.executor

    def _keep(self, place: _Place, executor: Executor) -> None:
        """Add a plan and drop the least recently used ones, down to the limit on bytes."""
        with _LOCK:
            self.made += 1
            if self.closed or place[0].retired:
                return
            if self.memory is not None:  # before plans make room for it, since it may be refused
                self._share(executor, self.memory)
            # Counting the constants of all plans for each new one would take longer and longer.
            constants = {} if self.memory is None else executor.table.constant_memory()
            self._kept[place] = _Kept(place, executor, self._use(), constants)
            self._make_room(executor)
            if self._dropped > _MANY_BYTES or self.memory is not None:
                self._dropped = 0
                give_back_memory(-1 if self.memory is None else self.memory.unused)

    def _share(self, executor: Executor, memory: SessionMemory) -> None:
        """Let the runs of a cached plan use the memory that the session may hold."""
        if not isinstance(executor, CompiledExecutor):
            if executor.name == "parts":  # each part has a plan of its own
                return
            raise OptionError(f"memory= is for plans, and {executor.table.name!r} runs by frames")
        pager = self.pager
        try:
            self._share_anew(executor, memory)
        except LimitExceeded:
            if pager is None or pager.active:
                raise
            pager.begin()
            self._share_anew(executor, memory)
        if pager is not None and pager.active:
            for cached in (executor, *[kept.executor for kept in self._by_use()]):
                if isinstance(cached, CompiledExecutor):
                    cached.sampler = pager

    def _share_anew(self, executor: CompiledExecutor, memory: SessionMemory) -> None:
        from penstock.executors.session_memory import PlanTooLarge

        memory.held = self._weights(cast(Executor, executor)) + executor.plan_bytes
        try:
            executor.share_memory(memory)
        except PlanTooLarge as error:
            error.table = executor.table
            raise

    def expect(self, executor: CompiledExecutor, nbytes: int) -> None:
        """Drop other plans to make room for ``nbytes`` of a plan's runs, learned during a run."""
        with _LOCK:
            executor.expect(nbytes)
            self._make_room(cast(Executor, executor))
            if self._dropped:
                self._dropped = 0
                give_back_memory()

    def check(self, executor: Executor, needed: int) -> None:
        """Raise ``LimitExceeded`` if a run of a plan that needs ``needed`` bytes does not fit into
        the session's memory, even with all other plans dropped."""
        from penstock.executors.session_memory import PlanTooLarge

        assert self.memory is not None
        with _LOCK:
            held, self.memory.held = self.memory.held, self._weights(executor) + executor.plan_bytes
            try:
                self.memory.check(needed)
            except PlanTooLarge as error:
                error.table = executor.table
                raise
            finally:
                self.memory.held = held

    def _weights(self, last: Executor) -> int:
        """Return the bytes of the constants of all plans, each counted once. If each run reads them
        from a file, count only what one step and the next need of them."""
        held = last.table.constant_memory()
        for kept in self._by_use():
            held |= kept.constants
        if self.pager is None or not self.pager.active:
            return sum(held.values())
        plans = [last, *[kept.executor for kept in self._by_use()]]
        self.pager.window = 2 * max([plan.table.step_constant_bytes for plan in plans])
        return sum(held.values()) - self.pager.bytes_of(held) + self.pager.window

    def _make_room(self, last: Executor) -> None:
        """Release arenas and then plans, least recently used first, down to the limit."""
        if self.unbounded:
            return
        most, memory, weights = self._max_bytes, self.memory, 0
        by_use = self._by_use()
        plans = sum([kept.executor.plan_bytes for kept in by_use])
        if memory is None:
            # The coming run allocates its arenas again.
            held = plans + sum([kept.executor.arena_bytes for kept in by_use])
            held += 0 if last.arena_bytes else last.run_bytes
        else:
            # Runs of dropped plans hold their arenas until they end.
            held = plans + memory.taken
            held += 0 if last.arena_bytes else getattr(last, "needs_bytes", last.run_bytes)
            weights = self._weights(last)
            left = memory.limit - weights - memory.results
            most = left if most is None else min(most, left)
        if most is None:  # computed late, since counting constants takes longer than a small run
            most = _LEAST_BYTES
            most = most if held <= most else max(most, last.table.constant_bytes)
        for executor in [kept.executor for kept in by_use]:
            if held > most and executor is not last:
                before = executor.arena_bytes if memory is None else memory.taken
                # Arenas first: a plan takes longer to compile than an arena to allocate.
                executor.trim()
                freed = before - (executor.arena_bytes if memory is None else memory.taken)
                self._dropped += freed
                held -= freed
        for kept in by_use[:-1]:
            if held <= most:
                break
            self._kept.pop(kept.place, None)
            subgraph, freed = kept.place[0], kept.executor.plan_bytes
            freed += kept.executor.arena_bytes if memory is None else 0
            held -= freed
            self._dropped += freed
            self.evicted += 1
            if is_logged(INFO):
                log(INFO, "dropped a plan of %d bytes: plans may have %d", freed, most)
            if subgraph.last.executor is kept.executor:
                subgraph.last = NO_PLAN
        if memory is not None:
            memory.held = weights + sum([own.executor.plan_bytes for own in self._by_use()])


def counter_value(counter: count[int]) -> int:
    """Return how often ``next`` was called for a counter that began with 0."""
    # A count shows its value only in its repr.
    return int(repr(counter)[len("count(") : -1])
