"""Data classes and named tuples that are quick to define: most of the time to import Penstock was
the definition of its data classes, each of whose methods Python's decorator compiles from text.

``dataclass`` takes what Python's does. All methods but ``__init__`` are closures, and ``__init__``
is compiled once a class has several instances, which most classes in a process have not.

``NamedTuple`` is Python's without ``_make`` and ``_asdict``. Python's compiles the annotation of
each field, and a method.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
    from typing import NamedTuple
else:

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        return (lambda c: _defined(c, **options)) if cls is None else _defined(cls)

    class _NamedTupleType(type):
        """Makes a subclass of ``tuple`` of a class with annotations, in their order."""

        def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> type:
            if bases and bases[0] is NamedTuple:
                bases, members = (tuple,), _tuple_members(members)
            return super().__new__(cls, name, bases, members)

    class NamedTuple(metaclass=_NamedTupleType):
        """A tuple with names for its elements."""


__all__ = ["NamedTuple", "dataclass"]

_MISSING = dataclasses.MISSING
_FEW = 32
"""instances of a class that cost less than to compile its ``__init__``"""


def _defined(
    cls: type,
    *,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    frozen: bool = False,
    slots: bool = False,
    **more: Any,
) -> type:
    own = cls.__dict__
    has_hash = own.get("__hash__") is not None
    methods: dict[str, Any] = {}
    cls.__doc__ = cls.__doc__ or cls.__name__  # else it is made of the signature, by ``inspect``
    texts = dict(own.get("__annotations__", ()))
    # Python's decorator searches texts for what these are; all others are fields.
    kinds = ("ClassVar", "InitVar", "KW_ONLY")
    apart = {name: text for name, text in texts.items() if any(kind in str(text) for kind in kinds)}
    cls.__annotations__ = dict.fromkeys(texts, object) | apart
    cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, **more)(cls)
    cls.__annotations__ = texts
    fields = dataclasses.fields(cls)
    for f in fields:
        f.type = texts.get(f.name, f.type)
    if repr:
        methods["__repr__"] = _repr([f.name for f in fields if f.repr])
    compared = [f for f in fields if f.compare]
    if eq:
        methods["__eq__"] = _eq(_values([f.name for f in compared]))
        hashed = [f.name for f in fields if (f.compare if f.hash is None else f.hash)]
        if not has_hash:
            methods["__hash__"] = _hash(_values(hashed)) if frozen else None
    if frozen:
        methods |= {"__setattr__": _set_frozen, "__delattr__": _delete_frozen}
        if slots:
            methods |= {"__getstate__": _state, "__setstate__": _set_state}
    if init:
        methods |= {
            "__init__": _late_init(cls, fields, frozen),
            "__signature__": _LateSignature(),
        }
    for name, method in methods.items():
        if name == "__hash__" or name not in own:
            setattr(cls, name, method)
    return cls


def _values(names: list[str]) -> Callable[[Any], Any]:
    return attrgetter(*names) if names else lambda self: ()


def _repr(names: list[str]) -> Callable[[Any], str]:
    def represent(self: Any) -> str:
        values = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{type(self).__qualname__}({values})"

    return represent


def _eq(values: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def equals(self: Any, other: object) -> Any:
        if other.__class__ is self.__class__:
            return values(self) == values(other)
        return NotImplemented

    return equals


def _hash(values: Callable[[Any], Any]) -> Callable[[Any], int]:
    def hashed(self: Any) -> int:
        return hash(values(self))

    return hashed


def _set_frozen(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delete_frozen(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


def _late_init(cls: Any, fields: tuple[Any, ...], frozen: bool) -> Callable[..., None]:
    """An ``__init__`` of ``cls`` that replaces itself by a compiled one after ``_FEW`` calls, or
    for arguments that do not fit, which that refuses."""
    positional = [f.name for f in fields if f.init and not f.kw_only]
    names = {f.name for f in fields if f.init}
    needed = {f.name for f in fields if f.default is f.default_factory is _MISSING} & names
    put, calls = object.__setattr__, 0

    def first_init(self: Any, *arguments: Any, **values: Any) -> None:
        nonlocal calls
        calls += 1
        given = dict(zip(positional, arguments, strict=False))
        fit = len(given) == len(arguments) and given.keys().isdisjoint(values)
        given |= values
        if calls > _FEW or not fit or not needed <= given.keys() <= names:
            return compiled()(self, *arguments, **values)
        for f in fields:
            if f.name in given:
                put(self, f.name, given[f.name])
            elif f.default_factory is not _MISSING:
                put(self, f.name, f.default_factory())
            elif f.default is not _MISSING:
                put(self, f.name, f.default)
        if hasattr(cls, "__post_init__"):
            self.__post_init__()
        return None

    def compiled() -> Callable[..., None]:
        cls.__init__ = init = _init(cls, fields, frozen)
        return init

    first_init.compiled = compiled  # type: ignore[attr-defined]
    return first_init


class _LateSignature:
    """The signature of a class whose ``__init__`` is compiled now at the latest."""

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        late = getattr(owner.__init__, "compiled", None)
        signature = inspect.signature(owner.__init__ if late is None else late())
        return signature.replace(parameters=[*signature.parameters.values()][1:])


def _init(cls: Any, fields: tuple[Any, ...], frozen: bool) -> Callable[..., None]:
    scope: dict[str, Any] = {"__missing__": _MISSING, "__set__": object.__setattr__}
    heads: tuple[list[str], list[str]] = (["self"], [])  # positional parameters, and by keyword
    body = []
    for f in fields:
        value = f.name
        default, factory = f"__default_{f.name}__", f"__factory_{f.name}__"
        if f.default is not _MISSING:
            scope[default] = f.default
            value = f"{f.name}={default}"
        elif f.default_factory is not _MISSING:
            scope[factory] = f.default_factory
            value = f"{f.name}=__missing__"
        if f.init:
            heads[f.kw_only].append(value)
        elif f.default is _MISSING and f.default_factory is _MISSING:
            continue
        given = f.name if f.init else default
        if f.default_factory is not _MISSING:
            given = f"{factory}() if {f.name} is __missing__ else {f.name}" if f.init else factory
            given += "" if f.init else "()"
        body.append(f"__set__(self, {f.name!r}, {given})" if frozen else f"self.{f.name} = {given}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    head = ", ".join([*heads[0], *(["*", *heads[1]] if heads[1] else [])])
    exec(f"def __init__({head}):\n  " + "\n  ".join(body or ["pass"]), scope)
    init: Callable[..., None] = scope["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


def _tuple_members(members: dict[str, Any]) -> dict[str, Any]:
    """The members of a class of named tuples, from those that its definition has."""
    names = tuple(members.get("__annotations__", ()))
    defaults = {name: members[name] for name in names if name in members}
    tail = tuple(defaults.values())
    count, optional = len(names), len(tail)
    make = tuple.__new__

    def new(cls: Any, *arguments: Any, **values: Any) -> Any:
        if not values:
            missing = count - len(arguments)
            if not missing:
                return make(cls, arguments)
            if 0 < missing <= optional:
                return make(cls, arguments + tail[-missing:])
        given = dict(zip(names, arguments, strict=False))
        fit = len(given) == len(arguments) and given.keys().isdisjoint(values)
        given = {**defaults, **given, **values}
        if not fit or len(given) != count or given.keys() - {*names}:
            raise TypeError(f"{cls.__name__}() takes {', '.join(names)}")
        return make(cls, [given[name] for name in names])

    def replaced(self: Any, **values: Any) -> Any:
        return new(type(self), **{**dict(zip(names, self, strict=True)), **values})

    def represent(self: Any) -> str:
        values = ", ".join([f"{n}={x!r}" for n, x in zip(names, self, strict=True)])
        return f"{type(self).__name__}({values})"

    own: dict[str, Any] = {
        "__new__": new,
        "__repr__": represent,
        "__getnewargs__": lambda self: tuple(self),
        "_replace": replaced,
        "_fields": names,
        "__match_args__": names,
        "__slots__": (),
    }
    own |= {name: property(itemgetter(i)) for i, name in enumerate(names)}
    return own | {name: x for name, x in members.items() if name not in own}
