"""Shapes that grow from run to run: one plan with open dims serves them all.

A plan for exactly the shapes of a run is the fastest, but takes as long to compile as many runs. A
decoder whose cache grows seldom meets the same shapes again. So dims that have grown by the same
step several times in a row, beside an input that stays as it is, are left open in a plan, until
some shapes are met often::

    ids [1, 1], past [1, 8, 5, 64]    a plan of its own
    ids [1, 1], past [1, 8, 6, 64]    a plan of its own
    ids [1, 1], past [1, 8, 7, 64]    a plan of its own
    ids [1, 1], past [1, 8, 8, 64]    a plan for ids [1, 1], past [1, 8, ?, 64]
    ids [1, 1], past [1, 8, 9, 64]    the same

Shapes that vary in any other way, such as the batches of a service, come again, and each has a plan
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from penstock.algorithms.records import dataclass
from penstock.ir.graph import Value
from penstock.types import Dim, TensorType, Type

Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""those of the inputs, None for those that are no tensors"""

GROWN = 3
"""steps by which dims have grown alike before they are left open"""
OFTEN = 8
"""runs with the same shapes among ``_RECENT`` shapes before these have a plan of their own"""
_RECENT, _MOST_OPEN = 16, 8


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
        self._met = met = [*self._met[-GROWN:], shapes]
        growths = [_growth(*pair) for pair in pairwise(met)]
        places = growths[-1] if len(growths) == GROWN else {}
        if not places or min(places.values()) <= 0 or any(g != places for g in growths):
            return None
        growing = {i for i, _ in places}
        if not any(shape and len(shape) > 1 for i, shape in enumerate(shapes) if i not in growing):
            return None  # nothing stays that a cache would grow by
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


def _growth(earlier: Shapes, later: Shapes) -> dict[tuple[int, int], int]:
    """By how much dims have grown, by input and axis; nothing if ranks differ."""
    growth: dict[tuple[int, int], int] = {}
    for i, (old, new) in enumerate(zip(earlier, later, strict=True)):
        if old != new:
            if old is None or new is None or len(old) != len(new):
                return {}
            growth |= {
                (i, axis): n - o for axis, (o, n) in enumerate(zip(old, new, strict=True)) if n != o
            }
    return growth
