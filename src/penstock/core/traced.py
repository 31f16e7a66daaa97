"""Numbers that record what is computed from them, so that it can be computed again for others.

Kernels of one node for several numbers of rows differ by a few numbers, which the same lines of
Python compute. A trace of these lines is run again in a tenth of their time::

    >>> trace = Trace()
    >>> rows = trace.number(100)
    >>> blocks = -(-rows // 64) if rows > 64 else 1
    >>> formula = trace.formula(("dense", rows, blocks))
    >>> formula([200]), formula([10])
    (('dense', 200, 4), None)

An operation on a traced number is a step of its trace, and its result is a traced number. What
Python needs as a plain number or truth value, as in ``if rows > 64`` or ``range(rows)``, is a
*guard*: the formula holds for other numbers only if the guard has the same value for them. As
a ``TracedNumber`` is no ``int``, no code can read the number without a guard; as it says that its
``__class__`` is, ``isinstance(rows, int)`` is true. It has no hash: caches must not keep it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial, wraps
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np

_Step: TypeAlias = tuple[int, Callable[..., Any], int, int, Any]
"""the place of the result, a function, the places of its arguments (the second is -1 for none), and
the value that it must have, or ``_ANY``"""
_ANY = object()
# Operations that leave any number as it is, except that they may turn it into a ``float``.
_NEUTRAL = frozenset(
    [(operator.mul, 1), (operator.floordiv, 1), (operator.add, 0), (operator.sub, 0)]
)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Gather: TypeAlias = tuple[Callable[[Sequence[Any]], tuple[Any, ...]], Callable[..., Any] | None]
"""a function from all values to the elements of a tuple, and a function of these, or None"""


class UntraceableError(Exception):
    """Traced numbers were used in a way that no trace records."""


class Trace:
    """The steps from traced numbers to what is computed from them."""

    __slots__ = ("_guards", "_known", "_steps")

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., Any] | None, Any]] = []
        self._known: dict[Any, TracedNumber | int] = {}
        self._guards: dict[int, Any] = {}

    def number(self, value: int) -> Any:
        """Return an argument of the formula, in their order; all before any is used."""
        return self._traced(None, None, value)

    def _traced(self, function: Callable[..., Any] | None, of: Any, value: Any) -> TracedNumber:
        self._steps.append((function, of))
        return TracedNumber(self, len(self._steps) - 1, value)

    def _place(self, x: Any) -> int:
        if type(x) is TracedNumber:
            return x.place
        key = type(x), repr(x)  # 0.0 and -0.0 are equal
        place = self._known.get(key)
        if place is None:
            if not isinstance(x, int | float | np.number):
                raise UntraceableError(f"an operation with {x!r}")
            self._known[key] = place = len(self._steps)
            self._steps.append((None, x))
        assert isinstance(place, int)
        return place

    def computed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Record a step, and return its value as a traced number."""
        if type(arguments[-1]) is int and (function, arguments[-1]) in _NEUTRAL:
            return arguments[0]
        key = function, *map(self._place, arguments)
        known = self._known.get(key)
        if known is None:
            value = function(*[x.value if type(x) is TracedNumber else x for x in arguments])
            self._known[key] = known = self._traced(function, key[1:], value)
        return known

    def guard(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Record a step that must have the same value for other numbers, and return it."""
        number = self.computed(function, *arguments)
        self._guards[number.place] = number.value
        return number.value

    def formula(self, result: Any) -> Formula:
        """Return the function from other numbers to ``result``, a nest of tuples with traced
        numbers among its elements. It ends the trace."""
        self._known.clear()  # which would hold numbers that hold the trace
        nest = _Nest(len(self._steps))
        nest.place(result)
        read = {*self._guards, *nest.read}
        values, steps = [], []
        for i in range(len(self._steps) - 1, -1, -1):
            function, of = self._steps[i]
            values.append(None if function else of)
            if function is not None and i in read:
                read.update(of)
                steps.append((i, function, *(*of, -1)[:2], self._guards.get(i, _ANY)))
        return Formula([*values[::-1], *nest.constants], steps[::-1], nest.tuples())


class _Nest:
    """The tuples of a nest, the innermost first. Places are those of ``count`` steps, then those of
    ``constants``, then those of tuples, negative as long as constants are added."""

    def __init__(self, count: int) -> None:
        self.read: set[int] = set()
        self.constants: list[Any] = []
        self._count = count
        self._tuples: list[tuple[Callable[..., Any] | None, list[int]]] = []

    def place(self, x: Any) -> int:
        """Return the place of an element."""
        if type(x) is TracedNumber:
            self.read.add(x.place)
            return x.place
        function, elements = (x.function, x.arguments) if type(x) is Deferred else (None, x)
        if isinstance(x, np.ndarray) and x.dtype.hasobject:
            raise UntraceableError("an array of objects, which may be traced numbers")
        if type(elements) is tuple:
            before = len(self.constants)
            places = [self.place(element) for element in elements]
            if function is not None or min(places, default=self._count) < self._count:
                self._tuples.append((function, places))
                return -len(self._tuples)
            del self.constants[before:]  # the tuple is one itself
        self.constants.append(x)
        return self._count + len(self.constants) - 1

    def tuples(self) -> list[_Gather]:
        """Return how to make each tuple."""
        first = self._count + len(self.constants) - 1
        every = [(f, [first - p if p < 0 else p for p in places]) for f, places in self._tuples]
        return [(itemgetter(*p) if len(p) > 1 else partial(_one, p[0]), f) for f, p in every]


def _one(place: int, values: Sequence[Any]) -> tuple[Any]:
    return (values[place],)


class Formula:
    """Computes a result for other numbers; None if a guard has another value for these. ``values``:
    constants at the places where ``steps`` and ``tuples`` read them. The last is the result."""

    __slots__ = ("_steps", "_tuples", "_values")

    def __init__(
        self, values: Sequence[Any], steps: Sequence[_Step], tuples: Sequence[_Gather]
    ) -> None:
        self._values, self._steps, self._tuples = values, steps, tuples

    def __call__(self, numbers: Sequence[int]) -> Any:
        values = [*self._values]
        values[: len(numbers)] = numbers
        for place, function, a, b, expected in self._steps:
            value = function(values[a]) if b < 0 else function(values[a], values[b])
            if expected is not _ANY and value != expected:
                return None
            values[place] = value
        for gather, make in self._tuples:
            elements = gather(values)
            values.append(elements if make is None else make(*elements))
        return values[-1]


class Deferred:
    """``function(*arguments)``, to be called when all arguments are known."""

    __slots__ = ("arguments", "function")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments


def deferred(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, where an argument is traced as a part of a formula's result
    that is computed last."""
    if _TRACED.isdisjoint(map(type, arguments)):
        return function(*arguments)
    return Deferred(function, arguments)


def minimum(a: Any, b: Any) -> Any:
    """Return ``min(a, b)``, without a guard of which it is."""
    if type(a) is TracedNumber or type(b) is TracedNumber:
        return computed(min, a, b)
    return min(a, b)


def maximum(a: Any, b: Any) -> Any:
    """Return ``max(a, b)``, without a guard of which it is."""
    if type(a) is TracedNumber or type(b) is TracedNumber:
        return computed(max, a, b)
    return max(a, b)


def computed(function: Callable[..., Any], *numbers: Any) -> Any:
    """Return ``function(*numbers)``, of at most two; a traced number where one of them is."""
    for number in numbers:
        if type(number) is TracedNumber:
            return number.trace.computed(function, *numbers)
    return function(*numbers)


def cached_unless_traced(function: _Function) -> _Function:
    """Return a function with a cache of the last 1,024 results, which does not keep traced ones."""
    cached = lru_cache(maxsize=1024)(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return cached(*arguments)
        except UntraceableError:  # from the hash of a traced number
            return function(*arguments)

    return call  # type: ignore[return-value]


def int64s(numbers: Iterable[int]) -> Any:
    """Return an array of int64; ``Deferred`` where numbers are traced."""
    own = tuple(numbers)
    return np.array(own, np.int64) if _TRACED.isdisjoint(map(type, own)) else Deferred(_int64s, own)


def _int64s(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


class TracedNumber:
    """A number of a ``trace``, with its value there."""

    __slots__ = ("place", "trace", "value")
    __array_ufunc__ = None  # numbers of NumPy leave operations to this class

    def __init__(self, trace: Trace, place: int, value: Any) -> None:
        self.trace, self.place, self.value = trace, place, value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    def __hash__(self) -> int:
        raise UntraceableError("a traced number as a key")

    def __repr__(self) -> str:
        return repr(self.trace.guard(operator.pos, self))

    def __format__(self, spec: str) -> str:
        return format(self.trace.guard(operator.pos, self), spec)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self


_TRACED = frozenset([TracedNumber, Deferred])


def _define_operations() -> None:
    def operation(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *others: self.trace.computed(function, self, *others)

    def reflected(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, other: self.trace.computed(function, other, self)

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *others: self.trace.guard(function, self, *others)

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift"):
        setattr(TracedNumber, f"__{name}__", operation(getattr(operator, name)))
        setattr(TracedNumber, f"__r{name}__", reflected(getattr(operator, name)))
    for function in (operator.neg, operator.pos, abs, math.ceil, math.floor, math.trunc, round):
        setattr(TracedNumber, f"__{function.__name__}__", operation(function))
    for name in ("lt", "le", "gt", "ge", "eq", "ne", "index"):
        setattr(TracedNumber, f"__{name}__", guard(getattr(operator, name)))
    for kind in (bool, int, float):
        setattr(TracedNumber, f"__{kind.__name__}__", guard(kind))


_define_operations()
