"""Data classes and named tuples that are quick to define: most of the time to import Penstock was
the definition of its data classes, each of whose methods Python's decorator compiles from text.

``dataclass`` takes what Python's does, for classes without ``InitVar`` whose bases, too, are data
classes of this module or none. All methods but ``__init__`` are closures, and ``__init__`` is
compiled once a class has several instances, which most classes in a process have not. ``field``,
``fields``, ``replace`` and ``KW_ONLY`` are Python's for these classes. Python's own functions take
them as well: what they read of a class is made when they first do, so that ``dataclasses`` need not
be imported before.

``NamedTuple`` is Python's without ``_make`` and ``_asdict``. Python's compiles the annotation of
each field, and a method.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect
    from dataclasses import KW_ONLY, dataclass, field, fields, replace
    from typing import NamedTuple
else:
    KW_ONLY = "KW_ONLY"

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        return (lambda c: _defined(c, **options)) if cls is None else _defined(cls)

    def field(**options: Any) -> Any:
        return RecordField(**options)

    def fields(record: Any) -> tuple[RecordField, ...]:
        return tuple(record.__record_fields__.values())

    def replace(record: Any, /, **changes: Any) -> Any:
        cls = record.__class__
        specs = getattr(cls, "__record_fields__", None)
        if specs is None:
            raise TypeError(f"a {cls.__name__} is no data class")
        if cls.__dict__.get("__record_is_plain__") and changes.keys() <= specs.keys():
            copy, put = object.__new__(cls), object.__setattr__
            for name in specs:
                put(copy, name, changes[name] if name in changes else getattr(record, name))
            return copy
        for name, f in specs.items():
            if not f.init and name in changes:
                raise TypeError(f"{name} of {cls.__name__} cannot be given")
            if f.init and name not in changes:
                changes[name] = getattr(record, name)
        return cls(**changes)

    class _NamedTupleType(type):
        """Makes a subclass of ``tuple`` of a class with annotations, in their order."""

        def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> type:
            if bases and bases[0] is NamedTuple:
                bases, members = (tuple,), _tuple_members(members)
            return super().__new__(cls, name, bases, members)

    class NamedTuple(metaclass=_NamedTupleType):
        """A tuple with names for its elements."""


__all__ = ["KW_ONLY", "NamedTuple", "dataclass", "field", "fields", "replace"]

_MISSING: Any = object()
FEW = 128
"""instances of a class that cost less than to compile its ``__init__``"""


class RecordField:
    """A field of a data class: what ``dataclasses.field`` takes, its name and its annotation."""

    __slots__ = (
        *("compare", "default", "default_factory", "hash", "init", "kw_only", "metadata"),
        *("name", "repr", "type"),
    )

    def __init__(
        self,
        *,
        default: Any = _MISSING,
        default_factory: Any = _MISSING,
        init: bool = True,
        repr: bool = True,
        hash: bool | None = None,
        compare: bool = True,
        metadata: Any = None,
        kw_only: bool | None = None,
    ) -> None:
        if default is not _MISSING and default_factory is not _MISSING:
            raise ValueError("a field has a default or a default_factory, not both")
        self.name, self.type = "", ""
        self.default, self.default_factory = default, default_factory
        self.init, self.repr, self.compare, self.hash = init, repr, compare, hash
        self.metadata, self.kw_only = metadata or {}, kw_only

    def of_python(self) -> Any:
        """The same field as Python's decorator takes it."""
        from dataclasses import MISSING, field

        options: dict[str, Any] = {name: getattr(self, name) for name in RecordField.__slots__}
        del options["name"], options["type"]
        for name in ("default", "default_factory"):
            options[name] = MISSING if options[name] is _MISSING else options[name]
        return field(**options)


def _defined(
    cls: Any,
    *,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    frozen: bool = False,
    slots: bool = False,
    weakref_slot: bool = False,
    kw_only: bool = False,
) -> type:
    cls.__doc__ = cls.__doc__ or cls.__name__
    declared = _declared(cls, kw_only)
    every: dict[str, RecordField] = {}
    for base in cls.__mro__[-2:0:-1]:
        every |= base.__dict__.get("__record_fields__", {})
    every |= declared
    specs = [*every.values()]
    if slots:
        cls = _with_slots(cls, [*declared], weakref_slot)
    own = cls.__dict__
    methods: dict[str, Any] = {}
    if repr:
        methods["__repr__"] = _repr([f.name for f in specs if f.repr])
    if eq:
        methods["__eq__"] = _eq(_values([f.name for f in specs if f.compare]))
        if own.get("__hash__") is None:
            methods["__hash__"] = _hash(_values(_hashed(specs))) if frozen else None
    if frozen:
        methods |= {"__setattr__": _set_frozen, "__delattr__": _delete_frozen}
        if slots:
            methods |= {"__getstate__": _state, "__setstate__": _set_state}
    if init:
        methods["__init__"] = _late_init(cls, specs, frozen)
        methods["__signature__"] = _LateSignature()
    methods["__match_args__"] = tuple([f.name for f in specs if f.init and not f.kw_only])
    methods["__record_fields__"] = every
    methods["__record_is_plain__"] = init and _is_plain(cls, specs)
    for name in ("__dataclass_fields__", "__dataclass_params__"):
        setattr(cls, name, _LateAttribute(name))
    for name, method in methods.items():
        if name == "__hash__" or name not in own:
            setattr(cls, name, method)
    return cls


def _declared(cls: Any, kw_only: bool) -> dict[str, RecordField]:
    """The fields that a class itself has, whose defaults are left as its attributes."""
    own, declared = cls.__dict__, {}
    for name, text in own.get("__annotations__", {}).items():
        if "ClassVar" in str(text):
            continue
        if "KW_ONLY" in str(text):
            kw_only = True
            continue
        default = own.get(name, _MISSING)
        if isinstance(default, RecordField):
            f = default
            if f.default is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, f.default)
        else:
            # A slot of a base has the name of a field, which is no default.
            is_slot = type(default).__name__ == "member_descriptor"
            f = RecordField(default=_MISSING if is_slot else default)
        f.name, f.type = name, text
        f.kw_only = kw_only if f.kw_only is None else f.kw_only
        declared[name] = f
    return declared


def _hashed(specs: list[RecordField]) -> list[str]:
    return [f.name for f in specs if (f.compare if f.hash is None else f.hash)]


def _is_plain(cls: Any, specs: list[RecordField]) -> bool:
    """Whether ``replace`` may set the fields, as an ``__init__`` of ours would."""
    own_code = "__init__" in cls.__dict__ or hasattr(cls, "__post_init__")
    return not own_code and cls.__new__ is object.__new__ and all(f.init for f in specs)


def _with_slots(cls: Any, names: list[str], weakref: bool) -> Any:
    """The class anew, with slots for these fields but for those that its bases have."""
    taken: set[str] = set()
    for base in cls.__mro__[1:-1]:
        slots = base.__dict__.get("__slots__", ())
        taken.update((slots,) if isinstance(slots, str) else slots)
    slots = [name for name in names if name not in taken]
    if weakref and "__weakref__" not in taken:
        slots.append("__weakref__")
    members = dict(cls.__dict__)
    for name in (*names, "__dict__", "__weakref__"):
        members.pop(name, None)
    members["__slots__"] = tuple(slots)
    anew = type(cls)(cls.__name__, cls.__bases__, members)
    anew.__qualname__ = cls.__qualname__
    return anew


class _LateAttribute:
    """What Python's ``dataclasses`` reads of a class, taken from a class with the same fields that
    Python's decorator has made."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: Any) -> Any:
        import dataclasses

        home = next(c for c in owner.__mro__ if "__record_fields__" in c.__dict__)
        specs = home.__record_fields__
        members = {f.name: f.of_python() for f in specs.values()}
        members["__annotations__"] = dict.fromkeys(specs, object)
        decorate = dataclasses.dataclass(init=False, repr=False, eq=False)
        same: Any = decorate(type(home.__name__, (), members))
        for f in dataclasses.fields(same):
            f.type = specs[f.name].type
        for name in ("__dataclass_fields__", "__dataclass_params__"):
            setattr(home, name, getattr(same, name))
        return getattr(same, self.name)


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
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delete_frozen(self: Any, name: str) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__record_fields__]


def _set_state(self: Any, state: list[Any]) -> None:
    for name, value in zip(self.__record_fields__, state, strict=True):
        object.__setattr__(self, name, value)


def _late_init(cls: Any, specs: list[RecordField], frozen: bool) -> Callable[..., None]:
    """An ``__init__`` of ``cls`` that replaces itself by a compiled one after ``FEW`` calls, or
    for arguments that do not fit, which that refuses."""
    positional = [f.name for f in specs if f.init and not f.kw_only]
    names = {f.name for f in specs if f.init}
    defaults = {f.name: f.default for f in specs if f.default is not _MISSING}
    factories = {f.name: f.default_factory for f in specs if f.default_factory is not _MISSING}
    count = len(names | defaults.keys() | factories.keys())
    # What sets a slot, whether or not the class is frozen.
    slots: dict[str, Any] = {
        f.name: getattr(getattr(cls, f.name, None), "__set__", None) for f in specs
    }
    has_slots = None not in slots.values()
    setters = [slots[name] for name in positional]
    all_positional = len(positional) == count
    finish = hasattr(cls, "__post_init__")
    calls = 0

    def first_init(self: Any, *arguments: Any, **values: Any) -> None:
        nonlocal calls
        calls += 1
        if all_positional and not values and len(arguments) == count and calls <= FEW:
            if has_slots:
                for put, value in zip(setters, arguments, strict=True):
                    put(self, value)
            else:
                self.__dict__.update(zip(positional, arguments, strict=True))
        else:
            state = dict(zip(positional, arguments, strict=False))
            state.update(values)
            fit = len(state) == len(arguments) + len(values) and state.keys() <= names
            if len(state) < count:
                for name, value in defaults.items():
                    state.setdefault(name, value)
                for name, factory in factories.items():
                    if name not in state:
                        state[name] = factory()
            if not fit or len(state) != count or calls > FEW:
                return compiled()(self, *arguments, **values)
            if has_slots:
                for name, value in state.items():
                    slots[name](self, value)
            else:
                self.__dict__.update(state)
        if finish:
            self.__post_init__()
        return None

    def compiled() -> Callable[..., None]:
        cls.__init__ = init = _init(cls, specs, frozen)
        return init

    first_init.compiled = compiled  # type: ignore[attr-defined]
    return first_init


class _LateSignature:
    """The signature of a class whose ``__init__`` is compiled now at the latest."""

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        import inspect

        late = getattr(owner.__init__, "compiled", None)
        signature = inspect.signature(owner.__init__ if late is None else late())
        return signature.replace(parameters=[*signature.parameters.values()][1:])


def _init(cls: Any, specs: list[RecordField], frozen: bool) -> Callable[..., None]:
    scope: dict[str, Any] = {"__missing__": _MISSING, "__set__": object.__setattr__}
    heads: tuple[list[str], list[str]] = (["self"], [])  # positional parameters, and by keyword
    body = []
    for f in specs:
        value = f.name
        default, factory = f"__default_{f.name}__", f"__factory_{f.name}__"
        if f.default is not _MISSING:
            scope[default] = f.default
            value = f"{f.name}={default}"
        elif f.default_factory is not _MISSING:
            scope[factory] = f.default_factory
            value = f"{f.name}=__missing__"
        if f.init:
            heads[bool(f.kw_only)].append(value)
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
