"""Data classes whose definition takes a tenth of the time of ``dataclasses``.

Python's decorator compiles each method of each class from text, which would take a fifth of the
time from the start of a process to the first result of a small model. Here all methods except
``__init__`` are closures, and ``__init__`` is compiled only for classes with many instances::

    definition      __init__ is `first_init`, a closure that interprets its arguments
    call FEW + 1    __init__ is replaced by a function that is compiled from text

``dataclass``, ``field``, ``fields``, ``replace`` and ``KW_ONLY`` work as in ``dataclasses``. Not
supported are ``InitVar``, ``order``, ``match_args``, ``unsafe_hash``, ``init`` of the decorator,
``kw_only`` of a field, and base classes that are data classes of ``dataclasses``. The functions
``asdict``, ``fields`` and ``replace`` of ``dataclasses`` accept these classes, too; the attributes
that they read are computed on first access, so importing Penstock need not import ``dataclasses``.

``NamedTuple`` creates tuples like ``typing.NamedTuple``, but compiles no text for each annotation
and each class. Decision 70 has the figures.
"""

from __future__ import annotations

from collections import _tuplegetter  # type: ignore[attr-defined]
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect
    from dataclasses import KW_ONLY, dataclass, field, fields, replace
    from typing import NamedTuple

    from _typeshed import DataclassInstance
else:
    KW_ONLY = "KW_ONLY"

    def dataclass(cls: type | None = None, /, **options: object) -> object:
        return (lambda c: _defined(c, **options)) if cls is None else _defined(cls)

    def field(**options: object) -> RecordField:
        return RecordField(**options)

    def fields(record: object) -> tuple[RecordField, ...]:
        return tuple(record.__record_fields__.values())

    def replace(record: object, /, **changes: object) -> object:
        cls = record.__class__
        if not hasattr(cls, "__record_fields__"):
            raise TypeError(f"{cls.__name__} is not a data class")
        names, others = cls.__record_arguments__
        for name in others:
            if name in changes:
                raise TypeError(f"{name} of {cls.__name__} has init=False and cannot be replaced")
        for name in names:
            if name not in changes:
                changes[name] = getattr(record, name)
        return cls(**changes)

    class _NamedTupleType(type):
        """Creates a named tuple from a class with annotations, in their order."""

        def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, object]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, members)
            names = tuple(members.get("__annotations__", ()))
            defaults = {field: members.pop(field) for field in names if field in members}
            members["__new__"] = _constructor(names, (*defaults.values(),))
            for i, field in enumerate(names):
                # As in ``collections``: reads an element without a call of a Python function.
                members[field] = _tuplegetter(i, "")
            members |= {"_fields": names, "_field_defaults": defaults, "__match_args__": names}
            return type(name, (_Tuple,), {**members, "__slots__": ()})

    class NamedTuple(metaclass=_NamedTupleType):
        """A tuple with names for its elements."""

    class _Tuple(tuple):
        """Methods of all named tuples."""

        __slots__ = ()

        @classmethod
        def _make(cls, elements: Iterable[object]) -> _Tuple:
            new = tuple.__new__(cls, elements)
            if len(new) != len(cls._fields):
                raise TypeError(f"{cls.__name__} has {len(cls._fields)} elements, not {len(new)}")
            return new

        def _replace(self, /, **changes: object) -> _Tuple:
            new = self._make(map(changes.pop, self._fields, self))
            if changes:
                raise TypeError(f"{self.__class__.__name__} has no {', '.join(changes)}")
            return new

        def __getnewargs__(self) -> tuple[object, ...]:
            # For pickle and copy. Tuple's own method passes the whole tuple as one argument, but
            # this constructor takes the elements.
            return tuple(self)

        def __repr__(self) -> str:
            shown = [f"{name}={x!r}" for name, x in zip(self._fields, self, strict=True)]
            return f"{self.__class__.__name__}({', '.join(shown)})"

    # A constructor for each number of elements. Compiling one from text for each class, as
    # ``collections`` does, takes most of the time of defining a named tuple.
    _new = tuple.__new__
    _CONSTRUCTORS: tuple[FunctionType, ...] = (
        lambda cls: _new(cls),
        lambda cls, a: _new(cls, (a,)),
        lambda cls, a, b: _new(cls, (a, b)),
        lambda cls, a, b, c: _new(cls, (a, b, c)),
        lambda cls, a, b, c, d: _new(cls, (a, b, c, d)),
        lambda cls, a, b, c, d, e: _new(cls, (a, b, c, d, e)),
        lambda cls, a, b, c, d, e, f: _new(cls, (a, b, c, d, e, f)),
        lambda cls, a, b, c, d, e, f, g: _new(cls, (a, b, c, d, e, f, g)),
        lambda cls, a, b, c, d, e, f, g, h: _new(cls, (a, b, c, d, e, f, g, h)),
    )

    def _constructor(names: tuple[str, ...], defaults: tuple[object, ...]) -> FunctionType:
        """Return the ``__new__`` of a named tuple."""
        if len(names) < len(_CONSTRUCTORS):
            constructor = _CONSTRUCTORS[len(names)]
        else:
            listed = ", ".join([f"_{i}" for i in range(len(names))])
            constructor = eval(f"lambda cls, {listed}: _new(cls, ({listed}))")
        code = constructor.__code__.replace(co_varnames=("_cls", *names), co_name="__new__")
        return FunctionType(code, globals(), "__new__", defaults)


import functools
from typing import TypeVar

__all__ = ["KW_ONLY", "NamedTuple", "changed_fields", "dataclass", "field", "fields", "replace"]

_MISSING: Any = object()
Reader = Callable[[object], object]
"""reads attributes of a record"""
_OF_PYTHON = ("__dataclass_fields__", "__dataclass_params__")
FEW = 64
"""calls of ``first_init`` that take about as long as compiling the ``__init__`` of a class"""


class RecordField:
    """A field of a data class: the options of ``dataclasses.field``, its name and annotation."""

    __slots__ = (
        *("compare", "default", "default_factory", "hash", "init", "kw_only", "metadata"),
        *("name", "repr", "type"),
    )

    def __init__(
        self,
        *,
        default: object = _MISSING,
        default_factory: Callable[[], object] = _MISSING,
        init: bool = True,
        repr: bool = True,
        hash: bool | None = None,
        compare: bool = True,
        metadata: dict[str, object] | None = None,
    ) -> None:
        self.name, self.type, self.kw_only = "", "", False
        self.default, self.default_factory = default, default_factory
        self.init, self.repr, self.compare, self.hash = init, repr, compare, hash
        self.metadata = metadata or {}


def _defined(
    cls: Any,
    *,
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
    # Fields of the farthest base come first, as in ``dataclasses``.
    for base in cls.__mro__[-2:0:-1]:
        every |= base.__dict__.get("__record_fields__", {})
    every |= declared
    specs = [*every.values()]
    if slots:
        cls = _with_slots(cls, [*declared], weakref_slot)
    own = cls.__dict__
    methods: dict[str, Any] = {
        **{name: _LateAttribute(name) for name in _OF_PYTHON},
        "__init__": _late_init(cls, specs, frozen),
        "__match_args__": tuple([f.name for f in specs if f.init and not f.kw_only]),
        "__record_fields__": every,
        "__record_arguments__": _arguments(specs),
        "__signature__": _LateSignature(),
    }
    if repr:
        methods["__repr__"] = _repr([f.name for f in specs if f.repr])
    if eq:
        methods["__eq__"] = _eq(_values([f.name for f in specs if f.compare]))
        # As in ``dataclasses``: a mutable class that compares by value is not hashable.
        if own.get("__hash__") is None:
            hashed = [f.name for f in specs if (f.compare if f.hash is None else f.hash)]
            methods["__hash__"] = _hash(_values(hashed)) if frozen else None
    if frozen:
        methods |= {"__setattr__": _refuse_change, "__delattr__": _refuse_change}
        # Unpickling sets the slots, which a frozen class refuses.
        if slots:
            methods |= {"__getstate__": _state, "__setstate__": _set_state}
    for name, method in methods.items():
        if name == "__hash__" or name not in own:  # keep methods that the class defines itself
            setattr(cls, name, method)
    return cls


def _arguments(specs: list[RecordField]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the fields that ``__init__`` takes, and those of the others."""
    return tuple([f.name for f in specs if f.init]), tuple([f.name for f in specs if not f.init])


def _declared(cls: Any, kw_only: bool) -> dict[str, RecordField]:
    """Return the fields that the class itself declares; its attributes become their defaults."""
    own, declared = cls.__dict__, {}
    for name, text in own.get("__annotations__", {}).items():
        # Annotations are strings. Evaluating them would need names that are imported only for type
        # checkers.
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
            f = RecordField(default=default)
        f.name, f.type, f.kw_only = name, text, kw_only
        declared[name] = f
    return declared


def _with_slots(cls: Any, names: list[str], weakref: bool) -> Any:
    """Create the class again with slots for these fields, except those of its bases."""
    taken = {slot for base in cls.__mro__[1:-1] for slot in base.__dict__.get("__slots__", ())}
    slots = [name for name in (*names, *["__weakref__"][: int(weakref)]) if name not in taken]
    members = dict(cls.__dict__)
    for name in (*names, "__dict__", "__weakref__"):
        members.pop(name, None)
    members["__slots__"] = tuple(slots)
    # Slots can only be given when a class is created.
    anew = type(cls)(cls.__name__, cls.__bases__, members)
    anew.__qualname__ = cls.__qualname__
    return anew


class _LateAttribute:
    """An attribute that Python's functions for data classes read, computed on the first access."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: Any) -> Any:
        import dataclasses

        home = next(c for c in owner.__mro__ if "__record_fields__" in c.__dict__)
        specs = []
        for f in home.__record_fields__.values():
            options = {option: getattr(f, option) for option in RecordField.__slots__}
            given = {option: x for option, x in options.items() if x is not _MISSING}
            specs.append((given.pop("name"), given.pop("type"), dataclasses.field(**given)))
        same = dataclasses.make_dataclass(home.__name__, specs, init=False, repr=False, eq=False)
        for name in _OF_PYTHON:
            setattr(home, name, getattr(same, name))
        return getattr(same, self.name)


def _values(names: list[str]) -> Reader:
    return attrgetter(*names) if names else lambda self: ()


def _repr(names: list[str]) -> Callable[[object], str]:
    def represent(self: object) -> str:
        values = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{type(self).__qualname__}({values})"

    return represent


def _eq(values: Reader) -> Callable[[object, object], bool]:
    def equals(self: object, other: object) -> bool:
        if other.__class__ is self.__class__:
            return bool(values(self) == values(other))
        return NotImplemented

    return equals


def _hash(values: Reader) -> Callable[[object], int]:
    def hashed(self: object) -> int:
        return hash(values(self))

    return hashed


def _refuse_change(self: object, name: str, *value: object) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")


def _state(self: Any) -> list[object]:
    return [getattr(self, name) for name in self.__record_fields__]


def _set_state(self: Any, state: list[object]) -> None:
    for name, value in zip(self.__record_fields__, state, strict=True):
        object.__setattr__(self, name, value)


def _late_init(cls: Any, specs: list[RecordField], frozen: bool) -> Callable[..., None]:
    """Return an ``__init__`` that interprets its arguments. It replaces itself with a compiled one
    after ``FEW`` calls, or for wrong arguments, which the compiled one refuses as Python does."""
    positional = [f.name for f in specs if f.init and not f.kw_only]
    names = {f.name for f in specs if f.init}
    has_post_init = hasattr(cls, "__post_init__")
    calls = 0

    def first_init(self: Any, *arguments: object, **values: object) -> None:
        nonlocal calls
        calls += 1
        given = dict(zip(positional, arguments, strict=False), **values)
        # No name is unknown or given twice.
        is_valid = len(given) == len(arguments) + len(values) and given.keys() <= names
        if not is_valid or calls > FEW:
            return compiled()(self, *arguments, **values)
        put = object.__setattr__  # a frozen class's own method raises
        for f in specs:
            name = f.name
            if name in given:
                put(self, name, given[name])
            elif f.default_factory is not _MISSING:
                put(self, name, f.default_factory())
            elif f.default is not _MISSING:
                put(self, name, f.default)
            elif f.init:
                return compiled()(self, *arguments, **values)
        if has_post_init:
            self.__post_init__()
        return None

    def compiled() -> Callable[..., None]:
        cls.__init__ = init = _init(cls, specs, frozen)
        return init

    first_init.compiled = compiled  # type: ignore[attr-defined]
    return first_init


class _LateSignature:
    """The signature of a class. Reading it compiles ``__init__``."""

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        import inspect

        late = getattr(owner.__init__, "compiled", None)
        signature = inspect.signature(owner.__init__ if late is None else late())
        return signature.replace(parameters=[*signature.parameters.values()][1:])


def _init(cls: Any, specs: list[RecordField], frozen: bool) -> Callable[..., None]:
    """Compile the ``__init__`` of a class from text."""
    scope: dict[str, Any] = {"__missing__": _MISSING, "__set__": object.__setattr__}
    heads: tuple[list[str], list[str]] = (["self"], [])  # positional and keyword-only parameters
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


def changed_fields(record: DataclassInstance, usual: DataclassInstance) -> str:
    """Return the representation of ``record`` with only the fields that differ from ``usual``, a
    record of the same class."""
    own = [
        f"{one.name}={getattr(record, one.name)!r}"
        for one in fields(record)
        if getattr(record, one.name) != getattr(usual, one.name)
    ]
    return f"{type(record).__name__}({', '.join(own)})"


# Properties that are computed once.


T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801, TID251
    """``functools.cached_property`` without the lock of Python 3.11, which all objects of a class
    share. A signal handler could interrupt the holder and wait for a thread that needs the lock,
    which would be a deadlock. Several threads may compute a value; all get the first stored."""

    def __get__(self, instance: object, owner: type | None = None) -> T:  # type: ignore[override]
        if instance is None:
            return self  # type: ignore[return-value]
        assert self.attrname is not None
        # ``setdefault`` is atomic.
        value: T = instance.__dict__.setdefault(self.attrname, self.func(instance))
        return value
