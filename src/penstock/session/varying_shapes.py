"""Shapes that vary from run to run: one plan with open dims serves them all.

A plan for exactly the shapes of a run is the fastest, but takes as long to compile as many runs. A
decoder whose cache grows, or a service of requests of any length, seldom meets the same shapes
again. So shapes that differ from several earlier ones in the same dims share a plan in which these
dims are open, until they are met often::

    ids [1, 1], past [1, 8, 5, 64]    a plan of its own
    ids [1, 1], past [1, 8, 6, 64]    a plan of its own
    ids [1, 1], past [1, 8, 7, 64]    a plan of its own
    ids [1, 1], past [1, 8, 8, 64]    a plan for ids [1, 1], past [1, 8, ?, 64]
    ids [1, 1], past [1, 8, 9, 64]    the same
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from penstock.algorithms.records import dataclass
from penstock.ir.graph import Value
from penstock.types import Dim, TensorType, Type

Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""those of the inputs, None for those that are no tensors"""

ALIKE = 3
"""earlier shapes that differ in the same dims, before these dims are left open"""
OFTEN = 8
"""runs with the same shapes among ``_RECENT`` shapes before these have a plan of their own"""
_RECENT, _MOST_MET, _MOST_OPEN = 16, 32, 8


@dataclass(frozen=True)
class OpenShapes:
    """The shapes that a plan is for, with None for each dim that is open."""

    shapes: tuple[tuple[int | None, ...] | None, ...]

    def fit(self, shapes: Shapes) -> bool:
        """Whether ``shapes`` differ in open dims only."""
        return all(
            own == shape
            or (
                own is not None
                and shape is not None
                and len(own) == len(shape)
                and all(a is None or a == b for a, b in zip(own, shape, strict=True))
            )
            for own, shape in zip(self.shapes, shapes, strict=True)
        )

    def types(self, inputs: Sequence[Value], values: Sequence[Any]) -> list[Type]:
        """The types of ``inputs`` for these values, with open dims as the inputs declare them."""
        types = []
        for value, shape, array in zip(inputs, self.shapes, values, strict=True):
            type_, own = value.type, shape
            if isinstance(type_, TensorType) and own is not None:
                declared: Sequence[Dim] = type_.shape or (None,) * len(own)
                dims = [a if b is None else b for a, b in zip(declared, own, strict=True)]
                type_ = TensorType(array.dtype, tuple(dims))
            types.append(type_)
        return types


class VaryingShapes:
    """The shapes that a subgraph was run with. There is no lock: what several threads change at the
    same time are lists and dicts, by one call each, and an entry that is lost matters little."""

    def __init__(self) -> None:
        self.fixed = False
        """whether all plans must be for exact shapes"""
        self._met: list[Shapes] = []
        self._open: list[OpenShapes] = []
        self._uses: dict[Shapes, int] = {}

    def open(self, shapes: Shapes) -> OpenShapes | None:
        """What to compile for shapes that have no plan of their own; None for such a plan."""
        if self.fixed:
            return None
        for known in list(self._open):
            if known.fit(shapes):
                return None if self._is_often(shapes) else known
        if shapes in self._met:
            return None  # another thread compiles that plan, or it was dropped
        alike: dict[frozenset[tuple[int, int]], list[Shapes]] = {}
        for earlier in list(self._met):
            alike.setdefault(_difference(shapes, earlier), [shapes]).append(earlier)
        self._met = [*self._met[1 - _MOST_MET :], shapes]
        varying = [places for places, group in alike.items() if _vary(places, group)]
        if not varying:
            return None
        places = min(varying, key=len)
        new = OpenShapes(tuple([
            shape and tuple([None if (i, j) in places else dim for j, dim in enumerate(shape)])
            for i, shape in enumerate(shapes)
        ]))  # fmt: skip
        self._open = [new, *self._open[: _MOST_OPEN - 1]]
        return new

    def _is_often(self, shapes: Shapes) -> bool:
        uses = self._uses.pop(shapes, 0) + 1
        if uses > OFTEN:
            return True
        self._uses[shapes] = uses
        for oldest in list(self._uses)[:-_RECENT]:
            self._uses.pop(oldest, None)
        return False


def _difference(a: Shapes, b: Shapes) -> frozenset[tuple[int, int]]:
    """The inputs and axes in which shapes differ; none if ranks do."""
    places = []
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        if left != right:
            if left is None or right is None or len(left) != len(right):
                return frozenset()
            places += [(i, axis) for axis in range(len(left)) if left[axis] != right[axis]]
    return frozenset(places)


def _vary(places: frozenset[tuple[int, int]], group: Sequence[Shapes]) -> bool:
    """Whether shapes that differ in these places from the first have many dims in each."""
    dims = [{(shape[i] or ())[axis] for shape in group} for i, axis in places]
    return bool(dims) and len(group) > ALIKE and all(len(each) >= ALIKE for each in dims)
