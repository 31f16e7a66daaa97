"""What watches runs: the one protocol behind traces, profiles, recorded ranges and guards.

A run that is observed runs a program of its own, in which each step stands between calls of the
observer (``codegen.py``); one that is not pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from penstock.plan.plan import Step, StepTable


@dataclass(frozen=True, eq=False, slots=True)
class ObservedRun:
    """One run, as observers are told of it: what runs, and by which executor."""

    table: StepTable
    executor: str


class Observer:
    """Is told what a run does, while it does it. Every method does nothing unless overridden.

    Calls come from the thread that does what they tell of: of a parallel run, from several at once.
    For one step they come in the order ``step_ready``, ``step_begin``, ``step_end`` (of a step in a
    loop, again in each iteration), all between ``run_begin`` and ``run_end``. The steps of an If or
    a loop come between its own ``step_begin`` and ``step_end``. What an observer raises ends the
    run with that error.
    """

    def run_begin(self, run: ObservedRun) -> None:
        """A run begins."""

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        """It has ended, with ``error`` unless that is None. Steps in progress never end."""

    def step_ready(self, run: ObservedRun, step: Step) -> None:
        """All that ``step`` waits for is there. Steps that run in an order fixed before the run
        are ready when they begin, and this is not called for them."""

    def step_begin(self, run: ObservedRun, step: Step, inputs: Sequence[Any]) -> None:
        """``step`` begins. ``inputs``: a value (or None) for each of ``step.inputs``."""

    def step_end(self, run: ObservedRun, step: Step, outputs: Sequence[Any]) -> None:
        """``step`` has ended. ``outputs``: a value for each of ``step.outputs``, None for those
        left out; they are the run's own memory, to be looked at during the call only."""

    def transfer(self, run: ObservedRun, step: Step, nbytes: int) -> None:
        """``step``, which is about to end, has brought ``nbytes`` to another backend's memory."""

    def allocation(self, run: ObservedRun, nbytes: int) -> None:
        """The run took ``nbytes`` more of memory, or gave them back where negative: its arena, and
        values allocated on the way."""


class Observers(Observer):
    """Several observers as one, told in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = tuple(observers)

    def run_begin(self, run: ObservedRun) -> None:
        for observer in self.observers:
            observer.run_begin(run)

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        with ExitStack() as stack:  # all are told, whatever one of them raises
            for observer in reversed(self.observers):
                stack.callback(observer.run_end, run, error)

    def step_ready(self, run: ObservedRun, step: Step) -> None:
        for observer in self.observers:
            observer.step_ready(run, step)

    def step_begin(self, run: ObservedRun, step: Step, inputs: Sequence[Any]) -> None:
        for observer in self.observers:
            observer.step_begin(run, step, inputs)

    def step_end(self, run: ObservedRun, step: Step, outputs: Sequence[Any]) -> None:
        for observer in self.observers:
            observer.step_end(run, step, outputs)

    def transfer(self, run: ObservedRun, step: Step, nbytes: int) -> None:
        for observer in self.observers:
            observer.transfer(run, step, nbytes)

    def allocation(self, run: ObservedRun, nbytes: int) -> None:
        for observer in self.observers:
            observer.allocation(run, nbytes)
