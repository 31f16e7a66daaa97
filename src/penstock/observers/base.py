"""The protocol of observers: traces, profiles, recorded ranges and guards.

An observed run executes a program of its own, in which each step stands between calls of the
observer; other runs pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from penstock.core.errors import PenstockError, RunError
from penstock.core.records import dataclass
from penstock.core.types import RunValue, RunValues

if TYPE_CHECKING:
    from penstock.plan.plan import Step, StepTable


@dataclass(frozen=True, eq=False, slots=True)
class ObservedRun:
    """One run as observers see it: its plan, the name of its executor, and the most threads that
    a kernel of the run uses."""

    table: StepTable
    executor: str
    threads: int = 1


class Observer:
    """Is notified of the events of a run as they happen. Every method does nothing by default.

    Methods are called on the thread of the event; in a parallel run, on several at once. The events
    of one step come in the order ``step_ready``, ``step_begin``, ``step_end`` (in a loop, once an
    iteration), between ``run_begin`` and ``run_end``::

        run_begin
            step_begin(Loop)
                step_begin(Add) step_end(Add)       in each iteration
            step_end(Loop)
        run_end

    An exception that an observer raises ends the run with a ``RunError`` whose cause it is, or with
    itself if it is a ``PenstockError``. Then no more events come but ``run_end``; exceptions that
    this raises are dropped if the run has failed before.
    """

    def run_begin(self, run: ObservedRun) -> None:
        """The run begins."""

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        """The run has ended, with ``error`` unless that is None. Steps in progress never end."""

    def step_ready(self, run: ObservedRun, step: Step) -> None:
        """All inputs of ``step`` are ready. Not called for steps whose order is fixed before the
        run: those are ready when they begin."""

    def step_begin(self, run: ObservedRun, step: Step, inputs: RunValues) -> None:
        """``step`` begins. ``inputs`` has a value, or None, for each of ``step.inputs``. Weights
        that only a kernel holds, in an order of its own, are converted back when they are read."""

    def step_end(self, run: ObservedRun, step: Step, outputs: RunValues) -> None:
        """``step`` has ended. ``outputs`` has a value for each of ``step.outputs``, None for
        omitted ones. They are in memory of the run: read them during the call only."""

    def transfer(self, run: ObservedRun, step: Step, nbytes: int) -> None:
        """``step``, about to end, has copied ``nbytes`` to the memory of another backend."""

    def allocation(self, run: ObservedRun, nbytes: int) -> None:
        """The run allocated ``nbytes`` of memory, or freed them if negative: its arena, and values
        allocated during the run."""


def named_outputs(
    run: ObservedRun, step: Step, outputs: RunValues
) -> Iterator[tuple[str, RunValue]]:
    """The outputs of a step with their names, but for omitted ones."""
    for slot, value in zip(step.outputs, outputs, strict=True):
        if slot >= 0:
            yield run.table.slots[slot].name, value


def _forwarded(name: str) -> Callable[..., None]:
    def notify(self: Observers, *event: object) -> None:
        for observer in self.observers:
            # A failure ends the run, of which no events come then but its end.
            if not self._failed:
                self._notify(observer, name, *event)

    return notify


class Observers(Observer):
    """The observers of one run as one, called in their order; what they raise is explained."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = tuple(observers)
        self._failed = False

    run_begin = _forwarded("run_begin")
    step_ready = _forwarded("step_ready")
    step_begin = _forwarded("step_begin")
    step_end = _forwarded("step_end")
    transfer = _forwarded("transfer")
    allocation = _forwarded("allocation")

    def run_end(self, run: ObservedRun, error: BaseException | None) -> None:
        # Every observer is called, even if one of them raises.
        with suppress(*[Exception] if error else []), ExitStack() as stack:
            # The stack calls them back in the reverse order.
            for observer in reversed(self.observers):
                stack.callback(self._notify, observer, "run_end", run, error)

    def _notify(self, observer: Observer, name: str, *event: object) -> None:
        try:
            getattr(observer, name)(*event)
        except PenstockError:
            self._failed = True
            raise
        except Exception as error:
            self._failed = True
            raise RunError(f"the observer {observer!r} failed in {name}: {error!r}") from error
