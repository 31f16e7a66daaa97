"""Numbers that record what is computed from them, so that it can be computed again for others.

Kernels of one node for several numbers of rows differ by a few numbers, which the same lines of
Python compute. A trace of these lines is run again in a tenth of their time::

    >>> trace = NumberTrace()
    >>> rows = trace.number(100)
    >>> blocks = -(-rows // 64) if rows > 64 else 1
    >>> formula = trace.formula(("dense", rows, blocks))
    >>> formula([200]), formula([10])
    (('dense', 200, 4), None)

An operation on a traced number is a step of its trace, and its result is a traced number. What
Python needs as a plain number or truth value, as in ``if rows > 64`` or ``range(rows)``, is a
*guard*: the formula holds for other numbers only if the guard has the same value for them.

As a ``TracedNumber`` is no ``int``, no code reads the number without a guard; as it says that its
``__class__`` is ``int``, ``isinstance(rows, int)`` is true, and annotations call it one. It has no
hash, since a cache that kept it would give it to others.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

_Operation: TypeAlias = Callable[..., Any]
_Value: TypeAlias = Any
_Step: TypeAlias = tuple[int, _Operation, int, int, _Value]
"""the place of the result, a function, the places of its arguments (the second is -1 for none), and
the value that it must have, or ``_ANY``"""
_Gather: TypeAlias = tuple[Callable[[Sequence[_Value]], tuple[_Value, ...]], _Operation | None]
"""a function from all values to the elements of a tuple, and a function of these, or None"""

_ANY = object()
# Operations that leave a number as it is, except that they may turn it into a ``float``.
_NEUTRAL = frozenset(
    [(operator.mul, 1), (operator.floordiv, 1), (operator.add, 0), (operator.sub, 0)]
)


class UntraceableError(Exception):
    """Traced numbers were used in a way that no trace records."""


class NumberTrace:
    """The steps from traced numbers to what is computed from them."""

    __slots__ = ("_guards", "_known", "_steps")

    def __init__(self) -> None:
        # Functions and the places of their arguments; or None and a constant.
        self._steps: list[tuple[_Operation | None, _Value]] = []
        self._known: dict[object, _Value] = {}
        self._guards: dict[int, _Value] = {}

    def number(self, value: int) -> int:
        """Return an argument of the formula, in their order; all before any is used."""
        return self._traced(None, None, value)

    def _traced(self, function: _Operation | None, of: _Value, value: _Value) -> _Value:
        self._steps.append((function, of))
        return TracedNumber(self, len(self._steps) - 1, value)

    def _place(self, x: _Value) -> int:
        if type(x) is TracedNumber:
            return x.place
        key = x if type(x) is int else (type(x), repr(x))  # 0.0 and -0.0 are equal
        place: int | None = self._known.get(key)
        if place is None:
            if not isinstance(x, int | float | np.number):
                raise UntraceableError(f"an operation with {x!r}")
            self._known[key] = place = len(self._steps)
            self._steps.append((None, x))
        return place

    def computed(self, function: _Operation, *numbers: float) -> _Value:
        """Record a step, and return its value as a traced number."""
        # Not `isinstance`, which is true for traced numbers.
        if type(numbers[-1]) is int and (function, numbers[-1]) in _NEUTRAL:
            return numbers[0]
        key = function, *map(self._place, numbers)
        known = self._known.get(key)
        if known is None:
            given: Sequence[_Value] = numbers
            value = function(*[x.value if type(x) is TracedNumber else x for x in given])
            self._known[key] = known = self._traced(function, key[1:], value)
        return known

    def guard(self, function: _Operation, *numbers: float) -> _Value:
        """Record a step that must have the same value for other numbers, and return it."""
        number = self.computed(function, *numbers)
        self._guards[number.place] = number.value
        return number.value

    def formula(self, result: tuple[_Value, ...]) -> NumberFormula:
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
        return NumberFormula([*values[::-1], *nest.constants], steps[::-1], nest.tuples())


class NumberFormula:
    """Computes a result for other numbers; None if a guard has another value for these. ``values``:
    constants at the places where ``steps`` and ``tuples`` read them. The last is the result."""

    __slots__ = ("_steps", "_tuples", "_values")

    def __init__(
        self, values: Sequence[_Value], steps: Sequence[_Step], tuples: Sequence[_Gather]
    ) -> None:
        self._values, self._steps, self._tuples = values, steps, tuples

    def __call__(self, numbers: Sequence[int]) -> _Value:
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


class _Nest:
    """The tuples of a nest, the innermost first. Places are those of ``count`` steps, then those of
    ``constants``, then those of tuples, negative as long as constants are added."""

    def __init__(self, count: int) -> None:
        self.read: set[int] = set()
        self.constants: list[_Value] = []
        self._count = count
        self._tuples: list[tuple[_Operation | None, list[int]]] = []

    def place(self, x: _Value) -> int:
        """Return the place of an element."""
        if type(x) is TracedNumber:
            self.read.add(x.place)
            return x.place
        if isinstance(x, np.ndarray) and x.dtype.hasobject:
            raise UntraceableError("an array of objects, which may be traced numbers")
        function, elements = (x.function, x.arguments) if type(x) is Deferred else (None, x)
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


def _one(place: int, values: Sequence[_Value]) -> tuple[_Value]:
    return (values[place],)


class Deferred:
    """``function(*arguments)``, to be called when all arguments are known."""

    __slots__ = ("arguments", "function")

    def __init__(self, function: _Operation, arguments: tuple[_Value, ...]) -> None:
        self.function, self.arguments = function, arguments


class TracedNumber:
    """A number of a ``trace``, with its value there."""

    __slots__ = ("place", "trace", "value")
    __array_ufunc__ = None  # numbers of NumPy leave operations to this class

    def __init__(self, trace: NumberTrace, place: int, value: float) -> None:
        self.trace, self.place, self.value = trace, place, value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    def __hash__(self) -> int:
        raise UntraceableError("a traced number as a key")

    def __repr__(self) -> str:
        return repr(self.trace.guard(operator.pos, self))  # type: ignore[arg-type]

    def __format__(self, spec: str) -> str:
        return format(self.trace.guard(operator.pos, self), spec)  # type: ignore[arg-type]

    def __divmod__(self, other: float) -> tuple[float, float]:
        return self // other, self % other  # type: ignore[operator]

    def __rdivmod__(self, other: float) -> tuple[float, float]:
        return other // self, other % self  # type: ignore[operator]


def _define_operations() -> None:
    def operation(function: _Operation) -> _Operation:
        return lambda self, *others: self.trace.computed(function, self, *others)

    def reflected(function: _Operation) -> _Operation:
        return lambda self, other: self.trace.computed(function, other, self)

    def guard(function: _Operation) -> _Operation:
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
TRACED = frozenset([TracedNumber, Deferred])
"""the classes of what is not known before the formula is called"""


def deferred(function: _Operation, *arguments: _Value) -> _Value:
    """Return ``function(*arguments)``; or, where an argument is traced, a part of a formula's
    result that is computed last."""
    if TRACED.isdisjoint(map(type, arguments)):
        return function(*arguments)
    return Deferred(function, arguments)


def int64s(*rows: Sequence[int] | None) -> list[_Value]:
    """Return an array of int64 for each row of numbers, ``Deferred`` where some are traced; None
    for None."""
    arrays: list[_Value] = []
    for row in rows:
        if row is None:
            arrays.append(None)
        elif TRACED.isdisjoint(map(type, row)):
            arrays.append(np.array(row, np.int64))
        else:
            arrays.append(Deferred(_int64s, tuple(row)))
    return arrays


def _int64s(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def computed(function: _Operation, *numbers: float) -> _Value:
    """Return ``function(*numbers)``, of at most two; a traced number where one of them is."""
    given: Sequence[_Value] = numbers
    for number in given:
        if type(number) is TracedNumber:
            return number.trace.computed(function, *numbers)
    return function(*numbers)


EXTREMES = (min, max), (partial(computed, min), partial(computed, max))
"""``min`` and ``max``, and the same of two numbers, without a guard of which it is: index it by
``type(x) in TRACED``, which takes no calls where nothing is traced"""
