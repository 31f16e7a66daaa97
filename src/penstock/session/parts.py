"""The executor of a batch that runs in parts, since it does not fit into the session's memory as a
whole (``compiler.parts``).

::

    [100, 512] ids, of which 34 fit      rows 0 to 33 | rows 34 to 67 | rows 66 to 99

All parts have the same number of rows, so that one plan serves them: the last one may compute some
rows again.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING

import numpy as np

from penstock.compiler.parts import Parts, part_of
from penstock.core.checkpoints import LOOK_S
from penstock.core.errors import PenstockError
from penstock.core.records import replace
from penstock.core.types import RunValue, RunValues, TensorType
from penstock.executors.arenas import holding_results
from penstock.executors.base import CompiledExecutor, Executor, InlineExecutor
from penstock.executors.control import Control

if TYPE_CHECKING:
    from penstock.executors.session_memory import SessionMemory
    from penstock.plan.plan import StepTable


class PartsExecutor(InlineExecutor):
    """Runs ``parts`` of a batch, one after another. ``find`` returns the executor of a part for its
    values; ``part`` is an example."""

    name = "parts"
    tasks = None
    arena_bytes = plan_bytes = 0  # the plans of the parts are counted separately

    def __init__(
        self,
        part: CompiledExecutor,
        find: Callable[[RunValues], Executor],
        memory: SessionMemory,
        parts: Parts,
    ) -> None:
        self._part, self._find, self._memory, self._parts = part, find, memory, parts
        self.table = _whole_table(part.table, parts)
        self.arena_plan, self.threads, self.rows = part.arena_plan, part.threads, parts.rows
        self._starts = [*range(0, parts.samples - self.rows + 1, self.rows)]
        if self._starts[-1] + self.rows < parts.samples:
            self._starts.append(parts.samples - self.rows)
        self.run_bytes = results_of_all(part.table, parts.samples, parts.rows)
        """bytes of the results of all rows, and of those of a part"""

    @property
    def needs_bytes(self) -> int:
        """Bytes that a run needs: those of a part, and the results of all rows."""
        return self._part.needs_bytes + self.run_bytes

    @property
    def source(self) -> str:
        """The generated program of a part."""
        starts = f"rows {', '.join(map(str, self._starts))} on"
        title = f"# runs for {self.rows} rows of {self._parts.samples} at a time: {starts}"
        return f"{title}\n{self._part.source}"

    def observed(self) -> Executor:
        """Return the same executor with observers, which see the steps of all parts."""
        find = self._find
        return PartsExecutor(
            self._part, lambda values: find(values).observed(), self._memory, self._parts
        )

    def trim(self) -> None:
        """Do nothing, since parts have plans of their own."""

    def run(self, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        # One run at a time: results of all rows wait for memory that the next part needs.
        memory, turn = self._memory, self._memory.turn
        if memory.in_parts:
            raise PenstockError(
                "a signal handler, a finalizer or a callback within a run in parts called the "
                "session, and would wait for that run to end; call it after the run has returned"
            )
        while not turn.acquire(timeout=LOOK_S):
            if control.stopped:
                control.stop()
        try:
            with holding_results(memory, self.run_bytes, control):
                memory.owner = get_ident()
                try:
                    return self._run(inputs, control)
                finally:
                    memory.owner, memory.next_part = 0, None
        finally:
            turn.release()

    def _run(self, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        results: list[RunValue] = []
        samples, rows, split = self._parts.samples, self.rows, self._parts.outputs
        for begin in self._starts:
            if control.stopped:
                control.stop()
            values = part_of(inputs, self._parts.inputs, begin, begin + rows)
            outputs = self._find(values).run(values, control)
            if not results:
                results = [
                    np.empty((samples, *value.shape[1:]), value.dtype) if own else value
                    for value, own in zip(outputs, split, strict=True)
                ]
            for result, value, own in zip(results, outputs, split, strict=True):
                if own:
                    result[begin : begin + rows] = value
            del outputs, value  # hold the results of one part only, beside those of all rows
        return tuple(results)


def results_of_all(part: StepTable, samples: int, rows: int) -> int:
    """Return the bytes of the results of all ``samples``, and of the results of a part of ``rows``
    samples, which still exist when another run may use the part's arena."""
    types = [part.slots[i].type for i in part.outputs]
    size = sum([t.nbytes if isinstance(t, TensorType) and t.static else 0 for t in types])
    return size * samples // rows + size


def _whole_table(table: StepTable, parts: Parts) -> StepTable:
    """Return the steps of a part, with the outputs of all samples."""
    slots = [*table.slots]
    for i, own in zip(table.outputs, parts.outputs, strict=True):
        type_ = slots[i].type
        if own and isinstance(type_, TensorType) and type_.shape is not None:
            whole = TensorType(type_.dtype, (parts.samples, *type_.shape[1:]))
            slots[i] = replace(slots[i], type=whole)
    return replace(table, slots=tuple(slots))
