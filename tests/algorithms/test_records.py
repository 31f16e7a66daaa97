"""Data classes that are quick to define behave as Python's."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import KW_ONLY, FrozenInstanceError, field
from typing import Any

import pytest

from penstock.algorithms import records

OPTIONS: list[dict[str, Any]] = [
    {},
    {"frozen": True},
    {"slots": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "slots": True, "eq": False},
    {"slots": True, "weakref_slot": True, "repr": False},
    {"kw_only": True},
]


def pair(decorate: Any, options: dict[str, Any]) -> tuple[type, type]:
    """A class, and one that inherits from it."""

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
    ours, theirs = pair(records.dataclass, options), pair(dataclasses.dataclass, options)
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
        assert own.__match_args__ == other.__match_args__
        for wrong in ({}, {"a": 1, "f": 2}):
            with pytest.raises(TypeError):
                own(**wrong)
        if options.get("frozen"):
            assert (hash(x) == hash(own(a=1))) == (hash(y) == hash(other(a=1)))
            for change in (lambda x=x: setattr(x, "a", 2), lambda x=x: delattr(x, "a")):
                with pytest.raises(FrozenInstanceError):
                    change()


def test_init_is_compiled_by_the_first_instance() -> None:
    base, derived = pair(records.dataclass, {})
    late = base.__init__
    derived(1)
    assert base.__init__ is late
    base(1)
    assert base.__init__ is not late
    assert base(1, "x", [3]) == base(1, "x")


@records.dataclass(frozen=True, slots=True)
class Pickled:
    a: int
    b: tuple[int, ...] = ()


def test_frozen_record_with_slots_is_pickled() -> None:
    assert pickle.loads(pickle.dumps(Pickled(1, (2,)))) == Pickled(1, (2,))
