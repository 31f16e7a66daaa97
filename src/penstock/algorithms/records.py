"""Data classes that are quick to define: most of the time to import Penstock was the definition of
its data classes, each of whose methods Python's decorator compiles from text.

``dataclass`` takes what Python's does, of classes whose annotations are strings. All methods but
``__init__`` are closures, and ``__init__`` is compiled once a class has several instances, which
most classes in a process have not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        return (lambda c: _defined(c, **options)) if cls is None else _defined(cls)


__all__ = ["dataclass"]

_MISSING = dataclasses.MISSING
_FEW = 16
"""instances of a class that cost less than to compile its ``__init__``"""
_FIELD: Any = dataclasses._FIELD  # type: ignore[attr-defined]


def _defined(
    cls: type,
    *,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    frozen: bool = False,
    slots: bool = False,
    kw_only: bool = False,
    weakref_slot: bool = False,
) -> type:
    own = cls.__dict__
    has_hash = own.get("__hash__") is not None
    by_name = _fields(cls, kw_only)
    fields = tuple(by_name.values())
    if slots:
        cls = _with_slots(cls, [*by_name, *(["__weakref__"] if weakref_slot else [])])
    methods: dict[str, Any] = {
        "__dataclass_fields__": by_name,
        "__dataclass_params__": SimpleNamespace(frozen=frozen),  # for derived classes of Python's
        "__match_args__": tuple([f.name for f in fields if f.init and not f.kw_only]),
    }
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
        methods["__init__"] = _late_init(cls, fields, frozen)
    for name, method in methods.items():
        if name == "__hash__" or name not in own:
            setattr(cls, name, method)
    return cls


def _fields(cls: type, kw_only: bool) -> dict[str, Any]:
    """The fields of a class by name: those of its bases, then its own."""
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        fields |= getattr(base, "__dataclass_fields__", {})
    for name, annotation in cls.__annotations__.items():
        if annotation == "KW_ONLY":
            kw_only = True
        elif not annotation.startswith("ClassVar"):
            default = cls.__dict__.get(name, _MISSING)
            explicit = isinstance(default, dataclasses.Field)
            f: Any = default if explicit else dataclasses.field(default=default)
            if explicit and f.default is _MISSING:
                delattr(cls, name)
            elif explicit:
                setattr(cls, name, f.default)
            f.name, f.type, f._field_type = name, annotation, _FIELD
            f.kw_only = kw_only if f.kw_only is _MISSING else f.kw_only
            fields[name] = f
    return fields


def _with_slots(cls: type, names: list[str]) -> type:
    """The class with slots of these names, but those that its bases have."""
    inherited = {slot for base in cls.__mro__[1:] for slot in base.__dict__.get("__slots__", ())}
    members = {name: x for name, x in cls.__dict__.items() if name not in names}
    members.pop("__dict__", None)
    members.pop("__weakref__", None)
    members |= {"__slots__": tuple([name for name in names if name not in inherited])}
    slotted = type(cls)(cls.__name__, cls.__bases__, members)
    slotted.__qualname__ = cls.__qualname__
    return slotted


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
    calls = 0

    def first_init(self: Any, *arguments: Any, **values: Any) -> None:
        nonlocal calls
        calls += 1
        given = dict(zip(positional, arguments, strict=False))
        fit = len(given) == len(arguments) and given.keys().isdisjoint(values)
        given |= values
        if calls > _FEW or not fit or not needed <= given.keys() <= names:
            cls.__init__ = init = _init(cls, fields, frozen)
            return init(self, *arguments, **values)
        for f in fields:
            if f.name in given:
                object.__setattr__(self, f.name, given[f.name])
            elif f.default_factory is not _MISSING:
                object.__setattr__(self, f.name, f.default_factory())
            elif f.default is not _MISSING:
                object.__setattr__(self, f.name, f.default)
        if hasattr(cls, "__post_init__"):
            self.__post_init__()
        return None

    return first_init


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
