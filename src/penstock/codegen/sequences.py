"""Sequences of a program: consecutive steps that one call into compiled code runs.

Steps whose kernels are compiled, and bound to memory ahead of the run, need nothing of Python
between one another. The writer gathers them, and writes one call, with what it replaces:

    sequence_0(v0)                          arrays that are known only during the run
    # fused_1(v0)
    # conv_2(*a2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat

from penstock.core.records import dataclass
from penstock.core.types import RunValue, RunValues
from penstock.host.native import library_of
from penstock.plan.plan import Step


@dataclass(frozen=True, slots=True, eq=False)
class CallSequence:
    """Steps that one call runs, and the ``slots`` whose arrays it is given, in their order."""

    steps: tuple[Step, ...]
    slots: tuple[int, ...]


class Gathering:
    """Consecutive ``steps`` that are to be one sequence, as far as they have been met, and slots
    that are ``released`` behind them; and the ``sequences`` so far, by name. If it is not
    ``enabled``, each step has a call of its own."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.steps: list[Step] = []
        self.released: list[int] = []
        self.sequences: dict[str, CallSequence] = {}

    def take(self) -> tuple[list[Step], list[int]]:
        """The steps that were gathered and what is released behind them; the next are gathered
        from the beginning."""
        steps, released = self.steps, self.released
        self.steps, self.released = [], []
        return steps, released

    def add(self, steps: Sequence[Step], slots: Iterable[int]) -> tuple[str, CallSequence]:
        """The sequence of ``steps``, which is given the arrays of ``slots``, and its name."""
        name = f"sequence_{len(self.sequences)}"
        # A value that several steps read is one argument of the call.
        sequence = CallSequence(tuple(steps), tuple(dict.fromkeys(slots)))
        self.sequences[name] = sequence
        return name, sequence


def is_joinable(step: Step) -> bool:
    """Whether a step can be one of a sequence."""
    kernel = step.kernel
    if kernel is None or kernel.binder is None or kernel.binder.compiled_call is None:
        return False
    # A new array for each result is Python's work.
    if step.outputs and not step.into:
        return False
    # Checks and copies are Python's, too.
    return step.contract is None and not step.copied


def bound_sequence(
    sequence: CallSequence,
    values: RunValues,
    bind: Callable[[Step], tuple[Callable[..., RunValue], tuple[RunValue, ...]]],
) -> Callable[..., None]:
    """The function of a sequence in one arena. ``bind`` binds the kernel of a step; ``values[i]``
    stands for the array of slot i in what it returns, if that is known only during the run. An
    error that a step raises has the attribute ``place_in_sequence``."""
    place = {id(values[slot]): i for i, slot in enumerate(sequence.slots)}
    calls = []
    for step in sequence.steps:
        assert step.kernel is not None and step.kernel.binder is not None
        assert step.kernel.binder.compiled_call is not None
        function, arguments = bind(step)
        native = step.kernel.binder.compiled_call(function, arguments)
        if isinstance(function, partial) and not function.keywords:  # the call of which takes time
            first: tuple[RunValue, ...] = function.args
            function, arguments = function.func, (*first, *arguments)
        # Of each argument the place among the arrays that the sequence is called with, or -1.
        places = tuple(map(place.get, map(id, arguments), repeat(-1)))
        if max(places, default=-1) >= 0:
            pairs = zip(arguments, places, strict=True)
            arguments = tuple([x if i < 0 else None for x, i in pairs])
        calls.append((function, arguments, places, native))
    compiled = library_of(native for *_, native in calls)
    assert compiled is not None  # else no steps are gathered
    arity = len(sequence.slots)
    run: Callable[..., None] = compiled.functions.Sequence(tuple(calls), arity, compiled.call).run
    return run
