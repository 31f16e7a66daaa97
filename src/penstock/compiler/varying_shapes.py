"""Shapes that grow from run to run, or keep changing: one plan with open dims serves them all.

A plan for exactly the shapes of a run is the fastest, but takes as long to compile as many runs. A
decoder whose cache grows seldom meets the same shapes again. So dims that have grown by the same
step several times, beside an input that stays as it is, are left open in a plan, until some
shapes are met often::

    ids [1, 1], past [1, 8, 5, 64]    a plan of its own
    ids [1, 1], past [1, 8, 6, 64]    a plan of its own
    ids [1, 1], past [1, 8, 7, 64]    a plan of its own
    ids [1, 1], past [1, 8, 8, 64]    a plan for ids [1, 1], past [1, 8, ?, 64]
    ids [1, 1], past [1, 8, 9, 64]    the same

Several sequences may grow in turns. Dims that differ when the same ones grow again, such as the
length of what an encoder has read, are open in the next plan as well.

Shapes that vary in any other way, such as the batches of a service, mostly come again, and each has
a plan of its own. Lines of text that are cut out of images do not: where many plans have been
compiled and fewer runs have found one, the dims in which the last shapes differ are left open::

    image [1, 3, 48, 320]             a plan of its own
    image [1, 3, 48, 176]             a plan of its own
    ...
    image [1, 3, 48, 504]             a plan for image [1, 3, 48, ?]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TypeAlias

from penstock.core.records import dataclass
from penstock.core.types import Dim, RunValues, TensorType, Type
from penstock.ir.graph import Value

Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""those of the inputs, None for those that are no tensors"""

Place: TypeAlias = tuple[int, int]
"""an input and an axis"""

GROWN = 3
"""how often dims have grown alike before they are left open"""
OFTEN = 8
"""runs with the same shapes among ``_RECENT`` shapes before these have a plan of their own"""
# Sooner, batches of random sizes would have the slower plan for ever: of some small layers they
# took 270 us instead of 116 (decision 55).
CHANGED = 12
"""shapes without a plan, and fewer with one, before the dims in which they differ are left open"""
_RECENT, _MOST_OPEN = 64, 8
_SEQUENCES = 8  # that grow in turns
_SAMPLE_RUNS = 1, 5  # which dims are tried for


@dataclass(frozen=True, eq=False)
class OpenTypes:
    """The types of the inputs of a plan with open dims, and examples of those in ``later`` runs:
    dims of values that are the same with all of these are expected
    (``passes.optimize.expect_dims``). Nothing is expected without examples."""

    types: Sequence[Type]
    later: Sequence[Sequence[Type]] = ()


@dataclass(frozen=True, eq=False)
class OpenShapes:
    """The shapes that a plan is for, with None for each dim that is open, and by how much dims grow
    from run to run, by input and axis. ``alike`` are places of dims of one name, some of which are
    open. ``expects``: whether dims that only inference leaves open are taken for known."""

    shapes: tuple[tuple[int | None, ...] | None, ...]
    growth: Mapping[Place, int]
    alike: Sequence[Sequence[Place]]
    expects: bool

    def agree(self, shapes: Shapes) -> bool:
        """Whether dims of one name are equal in shapes that fit."""
        for (i, axis), *others in self.alike:
            dim = shapes[i][axis]  # type: ignore[index]
            for j, other in others:
                if shapes[j][other] != dim:  # type: ignore[index]
                    return False
        return True

    def fit(self, shapes: Shapes) -> bool:
        """Whether ``shapes`` differ in open dims only."""
        for own, shape in zip(self.shapes, shapes, strict=True):
            if own != shape:  # most inputs are the same, and to compare tuples takes no loop
                if own is None or shape is None or len(own) != len(shape):
                    return False
                for a, b in zip(own, shape, strict=True):
                    if a != b and a is not None:
                        return False
        return True

    def types(self, inputs: Sequence[Value], values: RunValues) -> OpenTypes:
        """The types of ``inputs`` for these values, with open dims as the inputs declare them."""
        types: list[Type] = []
        for value, shape, array in zip(inputs, self.shapes, values, strict=True):
            type_, own = value.type, shape
            if isinstance(type_, TensorType) and own is not None:
                declared: Sequence[Dim] = type_.shape or (None,) * len(own)
                dims = [a if b is None else b for a, b in zip(declared, own, strict=True)]
                type_ = TensorType(array.dtype, tuple(dims))
            types.append(type_)
        return OpenTypes(types, self._later(inputs, values) if self.expects else ())

    def _later(self, inputs: Sequence[Value], values: RunValues) -> list[list[Type]]:
        """The types of ``inputs`` after some more runs; open dims that do not grow are others."""
        sampled = []
        for runs in _SAMPLE_RUNS:
            types: list[Type] = []
            for i, (value, x) in enumerate(zip(inputs, values, strict=True)):
                own = self.shapes[i] or ()
                steps = [self.growth.get((i, j), int(dim is None)) for j, dim in enumerate(own)]
                dims = [dim + runs * step for dim, step in zip(x.shape, steps, strict=True)]
                is_tensor = isinstance(value.type, TensorType)
                types.append(TensorType(x.dtype, tuple(dims)) if is_tensor else value.type)
            sampled.append(types)
        return sampled


class VaryingShapes:
    """The shapes that a subgraph was run with. There is no lock: what several threads change at the
    same time are lists and dicts, by one call each, and an entry that is lost matters little."""

    def __init__(self, types: Sequence[Type], first: Shapes | None = None) -> None:
        self._types = types
        self.fixed = False
        """whether all plans must be for exact shapes"""
        self.expects = True
        """whether plans with open dims may take dims for known"""
        self._met: list[_Met] = [] if first is None else [_Met(first, {}, 0)]
        # Misses, and hits before them, since the last open plan.
        self._misses, self._hits = len(self._met), 0
        self._open: list[OpenShapes] = []
        self._uses: dict[Shapes, int] = {}

    def open(self, shapes: Shapes, hits: int) -> OpenShapes | None:
        """What to compile for shapes that have no plan of their own; None for such a plan. ``hits``
        is how many runs of the session have found a plan, the one used last included: a batch that
        is fed a thousand times before the next one speaks for plans of their own."""
        if self.fixed:
            return None
        for known in self._open:
            if known.fit(shapes):
                return None if self._is_often(shapes) else known
        if any(met.shapes == shapes for met in self._met):
            return None  # another thread compiles that plan, or it was dropped
        self._misses += 1
        # Growth is looked for after this: where most runs miss, any plan that serves is better.
        if self._misses >= CHANGED and hits - self._hits < self._misses:
            return self._opened(shapes, self._changing(shapes), {}, hits)
        growth, times = self._meet(shapes)
        # The same growth beside other dims: another sequence, of which no three steps are awaited.
        like = [o for o in self._open if growth and o.growth == growth and _of_ranks(o, shapes)]
        growing = {i for i, _ in growth}
        stays = any(s and len(s) > 1 for i, s in enumerate(shapes) if i not in growing)
        if not stays or (times < GROWN and not like):
            return None  # a cache grows by what stays, and batches alike by chance
        places = set(growth).union(*[_differences(known, shapes) for known in like])
        return self._opened(shapes, places, growth, hits)

    def _opened(
        self, shapes: Shapes, places: Set[Place], growth: Mapping[Place, int], hits: int
    ) -> OpenShapes:
        """A new plan for ``shapes`` with ``places`` open. Shapes that do not grow may be the same
        after some runs by chance, and so no dims are expected to be."""
        expects = self.expects and bool(growth)
        new = OpenShapes(_without(shapes, places), growth, self._alike(places), expects)
        self._open = [new, *self._open[: _MOST_OPEN - 1]]
        self._misses, self._hits = 0, hits
        return new

    def _changing(self, shapes: Shapes) -> set[Place]:
        """Where the shapes that were met last, of the same ranks, differ from ``shapes``."""
        return set().union(*[_differences(m, shapes) for m in self._met if _of_ranks(m, shapes)])

    def _meet(self, shapes: Shapes) -> tuple[Mapping[Place, int], int]:
        """By how much shapes have grown since some that were met, and how often alike before."""
        new = _Met(shapes, {}, 0)
        for met in self._met:
            growth = _growth(met.shapes, shapes)
            if growth and min(growth.values()) > 0:  # shorter: another sequence begins
                times = met.times + 1 if met.growth == growth else 1
                new = _Met(shapes, growth, times) if times >= new.times else new
        self._met = [*self._met[1 - _SEQUENCES :], new]
        return new.growth, new.times

    def _alike(self, places: Set[Place]) -> list[list[Place]]:
        """The places of dims of one name, of names that some of these ``places`` have."""
        named: dict[str, list[Place]] = {}
        for i, type_ in enumerate(self._types):
            for axis, dim in enumerate((isinstance(type_, TensorType) and type_.shape) or ()):
                if isinstance(dim, str):
                    named.setdefault(dim, []).append((i, axis))
        return [own for own in named.values() if not places.isdisjoint(own)]

    def forget(self) -> None:
        """Take no dims for known from now on that inference leaves open."""
        self.expects = False  # for good: what was wrong once would cost a second run each time
        self._open = []

    def _is_often(self, shapes: Shapes) -> bool:
        uses = self._uses.pop(shapes, 0) + 1  # put back at the end: the oldest go first
        if uses > OFTEN:
            return True
        self._uses[shapes] = uses
        if len(self._uses) > _RECENT:
            for oldest in list(self._uses)[:-_RECENT]:
                self._uses.pop(oldest, None)
        return False


@dataclass(frozen=True)
class _Met:
    """Shapes that were met, by how much they had grown since others, and how often before that."""

    shapes: Shapes
    growth: Mapping[Place, int]
    times: int


def _of_ranks(known: OpenShapes | _Met, shapes: Shapes) -> bool:
    """Whether inputs have as many dims as those of ``known``."""
    pairs = zip(known.shapes, shapes, strict=True)
    return all((a and len(a)) == (b and len(b)) for a, b in pairs)


def _differences(known: OpenShapes | _Met, shapes: Shapes) -> set[Place]:
    """The places of dims that are not those of ``known``, of the same ranks."""
    return {
        (i, axis)
        for i, (own, shape) in enumerate(zip(known.shapes, shapes, strict=True))
        for axis, (a, b) in enumerate(zip(own or (), shape or (), strict=True))
        if a != b
    }


def _without(shapes: Shapes, places: Set[Place]) -> tuple[tuple[int | None, ...] | None, ...]:
    """``shapes`` with None at ``places``."""
    return tuple([
        shape and tuple([None if (i, j) in places else dim for j, dim in enumerate(shape)])
        for i, shape in enumerate(shapes)
    ])  # fmt: skip


def _growth(earlier: Shapes, later: Shapes) -> dict[Place, int]:
    """By how much dims have grown, by input and axis; nothing if ranks differ."""
    growth: dict[Place, int] = {}
    for i, (old, new) in enumerate(zip(earlier, later, strict=True)):
        if old != new:
            if old is None or new is None or len(old) != len(new):
                return {}
            growth |= {
                (i, axis): n - o for axis, (o, n) in enumerate(zip(old, new, strict=True)) if n != o
            }
    return growth
