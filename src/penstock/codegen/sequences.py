"""Sequences of a program: consecutive steps that one call into compiled code runs.

Steps whose kernels are compiled, and bound to memory ahead of the run, need nothing of Python
between one another. The writer gathers them, and writes one call, with what it replaces:

    sequence_0(v0)                          arrays that are known only during the run
    # fused_1(v0)
    # conv_2(*a2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.backends.sequence import BoundStep, sequence_of
from penstock.core.records import dataclass
from penstock.plan.plan import Step


@dataclass(frozen=True, slots=True, eq=False)
class CallSequence:
    """Steps that one call runs, and the ``slots`` whose arrays it is given, in their order."""

    steps: tuple[Step, ...]
    slots: tuple[int, ...]


def is_joinable(step: Step) -> bool:
    """Whether a step can be one of a sequence."""
    kernel = step.kernel
    if kernel is None or kernel.binder is None or kernel.binder.compiled_call is None:
        return False
    if step.outputs and not step.into:
        return False
    return step.contract is None and not step.copied


def bound_sequence(
    sequence: CallSequence,
    values: Sequence[Any],
    bind: Callable[[Step], tuple[Callable[..., Any], tuple[Any, ...]]],
) -> Callable[..., None]:
    """The function of a sequence in one arena. ``bind`` binds the kernel of a step; ``values[i]``
    stands for the array of slot i in what it returns, if that is known only during the run."""
    place = {id(values[slot]): i for i, slot in enumerate(sequence.slots)}
    steps = []
    for step in sequence.steps:
        assert step.kernel is not None and step.kernel.binder is not None
        function, arguments = bind(step)
        places = (-1,) * len(arguments)
        if place:
            places = tuple([place.get(id(argument), -1) for argument in arguments])
        steps.append(BoundStep(step.kernel.binder, function, arguments, places))
    run = sequence_of(steps, len(sequence.slots))
    assert run is not None
    return run
