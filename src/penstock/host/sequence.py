"""Sequences: bound calls that follow one another, made by one call of compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from penstock.core.records import NamedTuple
from penstock.host.native import library


class SequenceBinder(Protocol):
    """What has bound a kernel (``ir.kernel.Binder``), as far as sequences ask it."""

    @property
    def compiled_call(self) -> Callable[..., object] | None:
        """Gives the compiled form of a bound call."""


class BoundStep(NamedTuple):
    """A step of a sequence: its binder, what that has returned, and of each argument the
    place among the arrays that the sequence is called with, or -1."""

    binder: SequenceBinder
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    places: tuple[int, ...]


def sequence_of(steps: Sequence[BoundStep], arrays: int) -> Callable[..., None] | None:
    """A function of a number of ``arrays`` that runs steps in turn; None where no compiled kernels
    are installed. An error that a step raises has the attribute ``place_in_sequence``."""
    compiled = library()
    if compiled is None:
        return None
    calls = []
    for binder, function, arguments, places in steps:
        assert binder.compiled_call is not None
        native = binder.compiled_call(function, arguments)
        if isinstance(function, partial) and not function.keywords:  # the call of which takes time
            first: tuple[Any, ...] = function.args
            function, arguments = function.func, (*first, *arguments)
            places = (-1,) * len(first) + places
        if max(places, default=-1) >= 0:
            pairs = zip(arguments, places, strict=True)
            arguments = tuple([x if place < 0 else None for x, place in pairs])
        calls.append((function, arguments, places, native))
    run: Callable[..., None] = compiled.functions.Sequence(tuple(calls), arrays, compiled.call).run
    return run
