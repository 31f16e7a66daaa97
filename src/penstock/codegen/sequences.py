"""Call sequences: consecutive steps that a single call into compiled code runs.

Steps whose kernels are compiled, and bound to memory ahead of the run, need no Python in between.
The writer gathers them into one call, and lists the replaced calls as comments:

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
from penstock.host.native import library
from penstock.plan.plan import Step


@dataclass(frozen=True, slots=True, eq=False)
class CallSequence:
    """Steps that one call runs, and the ``slots`` whose arrays are its arguments, in order."""

    steps: tuple[Step, ...]
    slots: tuple[int, ...]


class Gathering:
    """Consecutive ``steps`` gathered so far for one sequence, slots ``released`` after them, and
    finished ``sequences`` by name. If not ``enabled``, each step has a separate call."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.steps: list[Step] = []
        self.released: list[int] = []
        self.sequences: dict[str, CallSequence] = {}

    def take(self) -> tuple[list[Step], list[int]]:
        """Return the gathered steps and the slots released after them, and start anew."""
        steps, released = self.steps, self.released
        self.steps, self.released = [], []
        return steps, released

    def add(self, steps: Sequence[Step], slots: Iterable[int]) -> tuple[str, CallSequence]:
        """Add the sequence of ``steps``, with the arrays of ``slots`` as arguments; return it and
        its name."""
        name = f"sequence_{len(self.sequences)}"
        # A value that several steps read is passed once.
        sequence = CallSequence(tuple(steps), tuple(dict.fromkeys(slots)))
        self.sequences[name] = sequence
        return name, sequence


def is_joinable(step: Step) -> bool:
    """Whether a step can be part of a sequence."""
    kernel = step.kernel
    if kernel is None or kernel.binder is None or kernel.binder.compiled_call is None:
        return False
    # New arrays for results are allocated in Python.
    if step.outputs and not step.into:
        return False
    # Checks and copies are done in Python, too.
    return step.contract is None and not step.copied


def bound_sequence(
    sequence: CallSequence,
    values: RunValues,
    bind: Callable[[Step], tuple[Callable[..., RunValue], tuple[RunValue, ...]]],
) -> Callable[..., None]:
    """Return the function of a sequence in one arena. ``bind`` binds the kernel of a step;
    ``values[i]`` is the array of slot i, or its placeholder if known only at run time. An error
    that a step raises has the attribute ``place_in_sequence``."""
    place = {id(values[slot]): i for i, slot in enumerate(sequence.slots)}
    calls = []
    for step in sequence.steps:
        assert step.kernel is not None and step.kernel.binder is not None
        compiled_call = step.kernel.binder.compiled_call
        assert compiled_call is not None
        function, arguments = bind(step)
        native = compiled_call(function, arguments)
        if isinstance(function, partial) and not function.keywords:  # calling a partial takes time
            first: tuple[RunValue, ...] = function.args
            function, arguments = function.func, (*first, *arguments)
        # Index of each argument among the sequence's arguments, or -1.
        places = tuple(map(place.get, map(id, arguments), repeat(-1)))
        if max(places, default=-1) >= 0:
            pairs = zip(arguments, places, strict=True)
            arguments = tuple([x if i < 0 else None for x, i in pairs])
        calls.append((function, arguments, places, native))
    compiled = library()
    assert compiled is not None  # otherwise no steps are gathered
    arity = len(sequence.slots)
    run: Callable[..., None] = compiled.functions.Sequence(tuple(calls), arity, compiled.call).run
    return run
