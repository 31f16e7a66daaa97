"""Kernels timed alone, as ``bench.onednn`` times primitives: called again and again on what they
read in a run. Within a run, memory is as the steps and the copies before have left it, which says
more about the size of the caches than about a kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.types import RunValue, RunValues
from penstock.ir.layout import ALIGNMENT
from penstock.observers.base import ObservedRun
from penstock.observers.profile import Profile
from penstock.plan.plan import Step


class KernelsAlone(Profile):
    """A profile of one run whose steps are at their best when they are called for ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self._inputs: list[RunValue] = []

    def step_begin(self, run: ObservedRun, step: Step, inputs: RunValues) -> None:
        # Copies, since an output may replace an input.
        self._inputs = [_copied(value) for value in inputs]
        super().step_begin(run, step, inputs)

    def step_end(self, run: ObservedRun, step: Step, outputs: RunValues) -> None:
        super().step_end(run, step, outputs)
        if step.kernel is not None:
            least = _least(*self._call(step, outputs), self.seconds)
            entry = self.entries[step.node, step.backend]
            entry.best = min(entry.best, least)

    def _call(self, step: Step, outputs: RunValues) -> tuple[Callable[..., Any], Sequence[Any]]:
        kernel = step.kernel
        assert kernel is not None
        if not step.into:
            return kernel.function, self._inputs
        workspace = _aligned(kernel.workspace) if kernel.workspace else None
        return kernel.bind(self._inputs, [_copied(value) for value in outputs], workspace)


def _copied(value: RunValue) -> RunValue:
    """A copy with the same order of dims, aligned as values of a run are."""
    if not isinstance(value, np.ndarray) or not value.size:
        return value
    layout = np.empty_like(value)
    memory = _aligned(layout.nbytes).view(value.dtype)
    copy = np.lib.stride_tricks.as_strided(memory, layout.shape, layout.strides)
    copy[...] = value
    return copy


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:size]


def _least(function: Callable[..., Any], arguments: Sequence[Any], within: float) -> float:
    """The least time of calls that take ``within`` seconds."""
    best, end = float("inf"), time.perf_counter() + within
    while (begin := time.perf_counter()) < end:
        function(*arguments)
        best = min(best, time.perf_counter() - begin)
    return best
