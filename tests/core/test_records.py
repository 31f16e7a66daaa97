"""Data classes that are quick to define behave as Python's."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import pprint
from dataclasses import KW_ONLY, FrozenInstanceError
from typing import Any, NamedTuple

import pytest

from penstock.core import records
from penstock.core.records import FEW

OPTIONS: list[dict[str, Any]] = [
    {},
    {"frozen": True},
    {"slots": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "slots": True, "eq": False},
    {"slots": True, "weakref_slot": True, "repr": False},
    {"kw_only": True},
]


def pair(module: Any, options: dict[str, Any]) -> tuple[type, type]:
    """A class that a module makes, and one that inherits from it."""
    decorate, field = module.dataclass, module.field

    @decorate(**options)
    class Base:
        a: int
        b: str = "b"
        c: list[int] = field(default_factory=list, compare=False)

    @decorate(**options)
    class Derived(Base):
        _: KW_ONLY
        d: float = field(default=0.5, repr=False)
        e: int = field(default=7, init=False)

        def __post_init__(self) -> None:
            self.seen(self.a)

        def seen(self, a: int) -> None:
            assert a == self.a

    return Base, Derived


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_record_behaves_as_a_data_class_of_python(options: dict[str, Any]) -> None:
    ours, theirs = pair(records, options), pair(dataclasses, options)
    for own, other in zip(ours, theirs, strict=True):
        x, y = own(a=1, c=[2]), other(a=1, c=[2])
        assert dataclasses.asdict(x) == dataclasses.asdict(y)
        if options.get("repr", True):
            assert repr(x) == repr(y)
        assert (x == own(a=1)) == (y == other(a=1))
        assert (x == own(a=2)) == (y == other(a=2))
        assert x != y
        assert (own.__hash__ is None) == (other.__hash__ is None)
        assert dataclasses.asdict(dataclasses.replace(x, b="x")) == {
            **dataclasses.asdict(y),
            "b": "x",
        }
        assert dataclasses.asdict(copy.copy(x)) == dataclasses.asdict(y)
        assert hasattr(x, "__dict__") == hasattr(y, "__dict__")
        changed = records.replace(x, b="x")
        assert dataclasses.asdict(changed) == dataclasses.asdict(dataclasses.replace(y, b="x"))
        for wrong in ({"e": 1} if own is ours[1] else {"f": 1}, {"f": 2}):
            with pytest.raises((TypeError, ValueError)):
                records.replace(x, **wrong)
        assert [f.name for f in records.fields(own)] == [f.name for f in dataclasses.fields(other)]
        assert own.__match_args__ == other.__match_args__
        assert own.__annotations__ == other.__annotations__
        types = [(f.name, f.type, f.kw_only) for f in dataclasses.fields(own)]
        assert types == [(f.name, f.type, f.kw_only) for f in dataclasses.fields(other)]
        for wrong in ({}, {"a": 1, "f": 2}):
            with pytest.raises(TypeError):
                own(**wrong)
        if options.get("frozen"):
            assert (hash(x) == hash(own(a=1))) == (hash(y) == hash(other(a=1)))
            for change in (lambda x=x: setattr(x, "a", 2), lambda x=x: delattr(x, "a")):
                with pytest.raises(FrozenInstanceError):
                    change()


def test_init_is_compiled_after_a_few_instances() -> None:
    base, derived = pair(records, {})
    late = base.__init__
    for _ in range(2 * FEW):
        derived(1)
    assert base.__init__ is late
    few = [base(1, "x", c=[3]) for _ in range(3)]
    assert base.__init__ is late
    many = [base(1, "x", c=[3]) for _ in range(2 * FEW)]
    assert base.__init__ is not late
    assert few[0] == many[-1]
    assert few[0].c == many[-1].c == [3]


def test_signature_of_record_is_that_of_data_class() -> None:
    ours, theirs = pair(records, {}), pair(dataclasses, {})
    for own, other in zip(ours, theirs, strict=True):
        names = [(p.name, p.kind) for p in inspect.signature(own).parameters.values()]
        assert names == [(p.name, p.kind) for p in inspect.signature(other).parameters.values()]

    class Own(ours[0]):  # type: ignore[misc, name-defined]
        def __init__(self, x: int) -> None:
            super().__init__(x)

    assert [*inspect.signature(Own).parameters] == ["x"]
    assert Own.__signature__ == Own.__signature__  # type: ignore[attr-defined]  # as often as asked


@records.dataclass(frozen=True, slots=True)
class Pickled:
    a: int
    b: tuple[int, ...] = ()


def test_frozen_record_with_slots_is_pickled() -> None:
    assert pickle.loads(pickle.dumps(Pickled(1, (2,)))) == Pickled(1, (2,))


def test_record_is_shown_by_pprint_like_a_data_class() -> None:
    assert pprint.pformat(Pickled(1, (2,))) == repr(Pickled(1, (2,)))


def test_field_with_hash_false_is_compared_but_not_hashed() -> None:
    @records.dataclass(frozen=True)
    class Partly:
        a: int
        b: int = records.field(default=0, hash=False)

    assert hash(Partly(1, 2)) == hash(Partly(1, 3))
    assert Partly(1, 2) != Partly(1, 3)


def test_own_init_is_kept() -> None:
    @records.dataclass(frozen=True, slots=True)
    class Sum:
        total: int

        def __init__(self, *terms: int) -> None:
            object.__setattr__(self, "total", sum(terms))

    assert Sum(1, 2) == Sum(3)
    assert [*inspect.signature(Sum).parameters] == ["terms"]


class Ours(records.NamedTuple):
    """A tuple."""

    first: int
    second: str = "x"

    @property
    def both(self) -> str:
        return f"{self.first}{self.second}"


class Pythons(NamedTuple):
    """A tuple."""

    first: int
    second: str = "x"

    @property
    def both(self) -> str:
        return f"{self.first}{self.second}"


def test_named_tuple_is_as_pythons() -> None:
    ours, pythons = Ours(1), Pythons(1)
    assert ours == pythons == (1, "x")
    assert repr(ours) == "Ours(first=1, second='x')"
    assert ours.both == pythons.both
    assert ours._replace(first=2) == pythons._replace(first=2)
    assert Ours._make([3, "y"]) == Ours(second="y", first=3) == Pythons._make([3, "y"])
    assert inspect.signature(Ours) == inspect.signature(Pythons).replace(
        parameters=[
            inspect.Parameter(name, p.kind, default=p.default)
            for name, p in inspect.signature(Pythons).parameters.items()
        ]
    )
    for name in ("_fields", "_field_defaults", "__match_args__", "__doc__", "__module__"):
        assert getattr(Ours, name) == getattr(Pythons, name)
    assert pickle.loads(pickle.dumps(ours)) == ours
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'first'"):
        Ours()
    with pytest.raises(TypeError, match="unexpected keyword argument 'third'"):
        Ours(1, third=3)
    for wrong in ([], [1, "x", 2]):
        with pytest.raises(TypeError, match=f"Ours has 2 elements, not {len(wrong)}"):
            Ours._make(wrong)
    with pytest.raises(TypeError, match="Ours has no third"):
        ours._replace(third=3)
    assert not hasattr(ours, "__dict__")
