"""Shapes that grow from run to run, or keep changing: one plan with open dims serves them all.

A plan for exactly the shapes of a run is the fastest, but compiling it takes as long as many runs.
A decoder whose cache grows seldom sees the same shapes again. So dims that have grown by the same
step several times, beside an input whose shape stays the same, are left open in a plan until some
shapes recur often::

    ids [1, 1], past [1, 8, 5, 64]    a plan of its own
    ids [1, 1], past [1, 8, 6, 64]    a plan of its own
    ids [1, 1], past [1, 8, 7, 64]    a plan of its own
    ids [1, 1], past [1, 8, 8, 64]    a plan for ids [1, 1], past [1, 8, ?, 64]
    ids [1, 1], past [1, 8, 9, 64]    the same

Several sequences may grow alternately. Dims that differ when the same dims grow again, such as the
length of an encoder's input, are open in the next plan as well.

Shapes that vary in other ways, such as the batch sizes of a service, usually recur, and each has a
plan of its own. Those of text lines that are cropped from images do not recur: if many plans were
compiled and fewer runs used one again, the dims in which the last shapes differ are left open::

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
"""the shapes of the inputs, None for those that are not tensors"""

Place: TypeAlias = tuple[int, int]
"""an input and an axis"""

GROWN = 3
"""how often dims must have grown alike before they are left open"""
OFTEN = 8
"""runs with the same shapes among ``_RECENT`` shapes before these get a plan of their own"""
# With fewer, sizes that recur would pay for a plan with open dims before each has its own again;
# with more, images of ever new sizes pay for plans that no other image uses (decision 55).
CHANGED = 6
"""shapes without a plan, with fewer runs that had one, before their differing dims are left open;
twice as many where dims have grown alike before"""
_RECENT, _MOST_OPEN = 64, 8
_SEQUENCES = 8  # sequences that may grow alternately
_SAMPLE_RUNS = 1, 5  # which later runs serve as examples


@dataclass(frozen=True, eq=False)
class OpenTypes:
    """The types of the inputs of a plan with open dims, and examples of types in ``later`` runs.
    Dims of values that are equal in all of these are expected to stay so
    (``passes.optimize.expect_dims``). Without examples, no dim is expected to stay."""

    types: Sequence[Type]
    later: Sequence[Sequence[Type]] = ()


@dataclass(frozen=True, eq=False)
class OpenShapes:
    """The shapes that a plan accepts, with None for each open dim, and by how much dims grow from
    run to run, by input and axis. ``alike``: groups of places whose dims share a name, with open
    dims among them. ``expects``: whether dims that only inference leaves open are predicted."""

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
        """Whether ``shapes`` differ only in open dims."""
        for own, shape in zip(self.shapes, shapes, strict=True):
            if own != shape:  # most inputs are equal, and comparing tuples takes no loop
                if own is None or shape is None or len(own) != len(shape):
                    return False
                for a, b in zip(own, shape, strict=True):
                    if a != b and a is not None:
                        return False
        return True

    def types(self, inputs: Sequence[Value], values: RunValues) -> OpenTypes:
        """Return the types of ``inputs`` for these values, with dims open as the inputs declare."""
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
        """Return the types of ``inputs`` after more runs; other open dims get new sizes, too."""
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
    """The shapes of the runs of a subgraph. There is no lock: threads change lists and dicts by
    single atomic calls, and a lost entry only delays a decision."""

    def __init__(self, types: Sequence[Type], first: Shapes | None = None) -> None:
        self._types = types
        self.fixed = False
        """whether all plans must be for exact shapes"""
        self.expects = True
        """whether plans with open dims may predict dims"""
        self._met: list[_Met] = [] if first is None else [_Met(first, {}, 0)]
        # Misses since the last open plan, and the hits before them.
        self._misses, self._hits = len(self._met), 0
        self._open: list[OpenShapes] = []
        self._uses: dict[Shapes, int] = {}

    def open(self, shapes: Shapes, hits: int) -> OpenShapes | None:
        """Return what to compile for shapes without a plan: open shapes, or None for a plan of
        exactly these. ``hits``: runs of the session that had a plan, the last one's included. A
        batch that is fed a thousand times before the next is a reason for plans of exact shapes."""
        if not self._may_open(shapes):
            return None
        for known in self._open:
            if known.fit(shapes):
                return None if self._is_often(shapes) else known
        if any(met.shapes == shapes for met in self._met):
            return None  # another thread compiles that plan, or the plan was dropped
        self._misses += 1
        growth, times = self._meet(shapes)
        growing = {i for i, _ in growth}
        stays = any(s and len(s) > 1 for i, s in enumerate(shapes) if i not in growing)
        may_grow = bool(growth) and stays  # a cache grows beside fixed dims
        # If most runs miss, any plan that fits is better than none; but growth may soon be known.
        repeats = may_grow and sum(met.growth == growth for met in self._met) > 1
        if self._misses >= CHANGED * (1 + repeats) and hits - self._hits < self._misses:
            places = self._changing(shapes)
            return self._opened(shapes, places, {}, hits) if places else None
        # Growth seen before, beside other dims, is another sequence: do not wait for three steps.
        like = [o for o in self._open if growth and o.growth == growth and _of_ranks(o, shapes)]
        if not may_grow or (times < GROWN and not like):
            return None  # batches grow alike only by chance
        places = set(growth).union(*[_differences(known, shapes) for known in like])
        return self._opened(shapes, places, growth, hits)

    def _may_open(self, shapes: Shapes) -> bool:
        """Whether a plan for these shapes may have open dims. Feeds that the model does not take
        raise an error where their own plan is compiled; names of dims are not compared here."""
        for type_, shape in zip(self._types, shapes, strict=False):
            declared = type_.shape if isinstance(type_, TensorType) else None
            if declared is not None and shape is not None:
                if len(declared) != len(shape):
                    return False
                for a, b in zip(declared, shape, strict=True):
                    if isinstance(a, int) and a != b:
                        return False
        return not self.fixed

    def _opened(
        self, shapes: Shapes, places: Set[Place], growth: Mapping[Place, int], hits: int
    ) -> OpenShapes:
        """Return a new plan's shapes: ``shapes`` with ``places`` open. Without growth, equal dims
        in later runs would be a coincidence, so no dims are predicted."""
        expects = self.expects and bool(growth)
        new = OpenShapes(_without(shapes, places), growth, self._alike(places), expects)
        self._open = [new, *self._open[: _MOST_OPEN - 1]]
        self._misses, self._hits = 0, hits
        return new

    def _changing(self, shapes: Shapes) -> set[Place]:
        """Return where the last shapes of equal ranks differ from ``shapes``."""
        return set().union(*[_differences(m, shapes) for m in self._met if _of_ranks(m, shapes)])

    def _meet(self, shapes: Shapes) -> tuple[Mapping[Place, int], int]:
        """Return by how much shapes have grown since earlier ones, and how often before that."""
        new = _Met(shapes, {}, 0)
        for met in self._met:
            growth = _growth(met.shapes, shapes)
            if growth and min(growth.values()) > 0:  # if shorter, another sequence begins
                times = met.times + 1 if met.growth == growth else 1
                new = _Met(shapes, growth, times) if times >= new.times else new
        self._met = [*self._met[1 - _SEQUENCES :], new]
        return new.growth, new.times

    def _alike(self, places: Set[Place]) -> list[list[Place]]:
        """Return the places of dims of one name, for the names of dims in ``places``."""
        named: dict[str, list[Place]] = {}
        for i, type_ in enumerate(self._types):
            for axis, dim in enumerate((isinstance(type_, TensorType) and type_.shape) or ()):
                if isinstance(dim, str):
                    named.setdefault(dim, []).append((i, axis))
        return [own for own in named.values() if not places.isdisjoint(own)]

    def forget(self) -> None:
        """Stop predicting dims that inference leaves open."""
        self.expects = False  # for good: each wrong prediction costs a second run
        self._open = []

    def _is_often(self, shapes: Shapes) -> bool:
        uses = self._uses.pop(shapes, 0) + 1  # reinserted at the end, since the oldest are dropped
        if uses > OFTEN:
            return True
        self._uses[shapes] = uses
        if len(self._uses) > _RECENT:
            for oldest in list(self._uses)[:-_RECENT]:
                self._uses.pop(oldest, None)
        return False


@dataclass(frozen=True)
class _Met:
    """Shapes of a run, by how much they had grown since others, and how often before that."""

    shapes: Shapes
    growth: Mapping[Place, int]
    times: int


def _of_ranks(known: OpenShapes | _Met, shapes: Shapes) -> bool:
    """Whether inputs have as many dims as those of ``known``."""
    pairs = zip(known.shapes, shapes, strict=True)
    return all((a and len(a)) == (b and len(b)) for a, b in pairs)


def _differences(known: OpenShapes | _Met, shapes: Shapes) -> set[Place]:
    """Return the places of dims that differ from those of ``known``, of the same ranks."""
    return {
        (i, axis)
        for i, (own, shape) in enumerate(zip(known.shapes, shapes, strict=True))
        for axis, (a, b) in enumerate(zip(own or (), shape or (), strict=True))
        if a != b
    }


def _without(shapes: Shapes, places: Set[Place]) -> tuple[tuple[int | None, ...] | None, ...]:
    """Return ``shapes`` with None at ``places``."""
    return tuple([
        shape and tuple([None if (i, j) in places else dim for j, dim in enumerate(shape)])
        for i, shape in enumerate(shapes)
    ])  # fmt: skip


def _growth(earlier: Shapes, later: Shapes) -> dict[Place, int]:
    """Return by how much dims have grown, by input and axis; empty if ranks differ."""
    growth: dict[Place, int] = {}
    for i, (old, new) in enumerate(zip(earlier, later, strict=True)):
        if old != new:
            if old is None or new is None or len(old) != len(new):
                return {}
            growth |= {
                (i, axis): n - o for axis, (o, n) in enumerate(zip(old, new, strict=True)) if n != o
            }
    return growth
