"""Where the slots of a plan are in memory, for its checker (``plan.check``)."""

# tests: tests/plan/test_check.py tests/plan/test_check_places.py

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import STRING, TensorType
from penstock.ir.graph import Value
from penstock.ops.internal.transfer import HOST
from penstock.plan.plan import Plan, Slot, SlotKind, Step

if TYPE_CHECKING:
    from penstock.plan.arena_layout import ArenaPlan

# Names of the module are faster than attributes of a class.
_ARENA, _ALIAS, _CONSTANT = SlotKind.ARENA, SlotKind.ALIAS, SlotKind.CONSTANT
_ALIGNMENT = 64


class UnsoundPlanError(Exception):
    """A plan is unsound; the message says why."""


def require(holds: bool, problem: str, *places: Step | Slot | int) -> None:
    """Raise ``UnsoundPlanError`` unless a condition holds. The text is only formatted then."""
    if not holds:
        raise UnsoundPlanError(problem.format(*map(_name, places)))


def _name(place: Step | Slot | int) -> str:
    if isinstance(place, Step):
        return place.node.label
    return f"slot {place}" if isinstance(place, int) else f"{place.name!r} ({place.kind.value})"


class SlotPlaces:
    """The places of slots: ``begin`` and ``end`` of arena slots, with a separate range of numbers
    for each memory. ``rooted[i]`` is the arena slot that contains the value of slot i, -1 if it is
    known only during a run, and None for constants; the last element is None, for slot -1."""

    def __init__(self, plan: Plan, arena: ArenaPlan) -> None:
        self.slots = plan.slots
        self.begin: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.rooted: list[int | None] = []
        self.order: dict[int, list[int]] = {}  # memory order of dims, if it is not the default
        self.constants: dict[int, Value] = {}  # constants with the types of their slots
        self.strided: set[int] = set()  # slots outside of the arena with strides
        # The numbers of each memory follow those of the previous one.
        first, start = 0, {}
        for memory, size in ((HOST, arena.size), *arena.remote.items()):
            start[memory] = first
            first += size
        sizes, offsets, rooted = {**arena.remote, HOST: arena.size}, arena.offsets, self.rooted
        for i, slot in enumerate(with_checkpoints(plan.slots)):
            # Inlined where possible, like the steps in ``check``.
            kind, type_ = slot.kind, slot.type
            if kind is _ARENA:
                rooted.append(i)
                plain = type_.__class__ is TensorType and type_.static and type_.dtype is not STRING
                nbytes = type_.nbytes if plain else bytes_of(slot)  # type: ignore[union-attr]
                at, memory = offsets.get(i, -1), slot.memory
                if at < 0 or at % _ALIGNMENT or at + nbytes > sizes.get(memory, -1):
                    require(False, "{} lies outside the arena, or is not aligned to 64 bytes", slot)
                self.begin[i] = begin = at + start[memory]
                self.end[i] = begin + nbytes
                if slot.strides or slot.offset or slot.owned:
                    self._check_strides(i, slot)
            elif kind is _CONSTANT:
                rooted.append(None)
                constant = slot.constant
                if constant is None or slot.owned:
                    require(False, "{} is a constant without contents", slot)
                elif constant.type is type_:
                    self.constants[i] = constant
            elif kind is _ALIAS:
                rooted.append(slot.base)
                self._check_view(slot)
            else:
                rooted.append(-1)
                if slot.roots or slot.base != -1 or slot.strides:
                    self._check_roots(i, slot)
        rooted.append(None)

    def _check_strides(self, i: int, slot: Slot) -> None:
        order = order_of_dims(slot) if slot.strides else []
        if order is None or slot.offset or slot.owned:
            raise UnsoundPlanError(
                f"{_name(slot)} has strides that overlap or leave gaps, or an offset"
            )
        self.order |= {i: order} if slot.strides else {}

    def _check_view(self, slot: Slot) -> None:
        base = self.slots[slot.base] if 0 <= slot.base < len(self.slots) else None
        if base is None or base.kind is not _ARENA:
            raise UnsoundPlanError(f"{_name(slot)} is a view of a slot outside the arena")
        rank = len(slot.type.shape or ()) if isinstance(slot.type, TensorType) else -1
        if len(slot.strides) != rank or slot.owned:
            require(False, "{} needs one stride per dim", slot)
        low, high = _extent(slot)
        if slot.offset + low < 0 or slot.offset + high > bytes_of(base):
            require(False, "{} extends beyond the slot that it views", slot)

    def _check_roots(self, i: int, slot: Slot) -> None:
        count, slots = len(self.slots), self.slots
        for r in slot.roots:
            if not 0 <= r < count or slots[r].kind is not _ARENA:
                require(False, "{} refers to slots that do not exist or are not in the arena", slot)
        if slot.strides:
            self.strided.add(i)
        if slot.base != -1:
            base = slots[slot.base] if 0 <= slot.base < count and slot.base != i else None
            fits = base is not None and base.owned >= slot.owned
            require(fits, "{} refers to slots that do not exist or are not in the arena", slot)

    def overlaps(self, a: int, b: int) -> bool:
        return self.begin[a] < self.end[b] and self.begin[b] < self.end[a]

    def roots(self, i: int) -> Sequence[int]:
        """The arena slots that may contain the value of a slot."""
        root = self.rooted[i]
        return () if root is None else (root,) if root >= 0 else self.slots[i].roots


def bytes_of(slot: Slot) -> int:
    """The bytes of a slot. Raises ``UnsoundPlanError`` if its type leaves the size open."""
    type_ = slot.type
    if type_.__class__ is TensorType and type_.static and type_.dtype is not STRING:
        return type_.nbytes
    raise UnsoundPlanError(f"{slot.name!r} is in the arena, but its type {type_} has no fixed size")


def _extent(slot: Slot) -> tuple[int, int]:
    """The first and one past the last byte of a slot, relative to its offset."""
    nbytes = bytes_of(slot)
    type_ = slot.type
    assert isinstance(type_, TensorType)
    if not slot.strides or not nbytes:
        return 0, nbytes
    if len(slot.strides) != len(type_.dims):
        require(False, "{} needs one stride per dim", slot)
    low, high = 0, nbytes // type_.elements
    for n, stride in zip(type_.dims, slot.strides, strict=True):
        if stride < 0:
            low += (n - 1) * stride
        else:
            high += (n - 1) * stride
    return low, high


def order_of_dims(slot: Slot) -> list[int] | None:
    """The dims of a slot that are not 1, the outermost in memory first; None if elements overlap or
    have gaps between them."""
    type_, strides = slot.type, slot.strides
    if not isinstance(type_, TensorType) or len(strides) != len(type_.dims):
        return None
    dims = type_.dims
    order: list[int] = []
    stride = type_.nbytes // max(type_.elements, 1)
    for k in sorted(range(len(dims)), key=strides.__getitem__, reverse=True)[::-1]:
        if dims[k] != 1:
            if strides[k] != stride and type_.nbytes:
                return None
            stride *= dims[k]
            order.insert(0, k)
    return order
