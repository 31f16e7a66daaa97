"""What opening a model and running it once does, in counts: they depend on the model alone.

The first model of a process makes what all later ones share, so each is opened twice, and counted
the second time; then run with other shapes, if the model leaves any dims open. Calls are those of
functions of Python, in the stage in which they were made.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.open_stages import STAGES, Clock, watch

if TYPE_CHECKING:
    from penstock.ir.graph import Model

HERE = os.path.dirname(__file__)

COLUMNS = {
    "nodes": "of the model",
    "steps": "of the plan",
    "passes": "that ran on a graph",
    "idle": "of them changed nothing",
    "types": "nodes whose types were inferred",
    "kernels": "that the backends native and numpy were asked for",
    "costs": "questions for the estimated cost of a node",
    "records": "copied with changes",
    "further": "calls of the first run with all open dims doubled, 0 where the model refuses that",
}
"""What is counted beside calls."""


class Calls:
    """A profiler that counts the calls of each function in each stage."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.counts: Counter[tuple[str, CodeType]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and not frame.f_code.co_filename.startswith(HERE):
            self.counts[self.clock.stack[-1], frame.f_code] += 1

    def of_stages(self) -> dict[str, int]:
        found = dict.fromkeys(STAGES, 0)
        for (stage, _), count in self.counts.items():
            found[stage] += count
        return found

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def of(self, function: Callable[..., Any]) -> int:
        return sum(n for (_, code), n in self.counts.items() if code is function.__code__)

    def most_called(self, most: int, stage: str = "") -> list[tuple[int, str]]:
        """The functions that were called most often, in ``stage`` or in all."""
        by_code: Counter[CodeType] = Counter()
        for (where, code), count in self.counts.items():
            if stage in ("", where):
                by_code[code] += count
        return [
            (n, f"{c.co_filename}:{c.co_firstlineno} {c.co_qualname}")
            for c, n in by_code.most_common(most)
        ]


class Passes:
    """Counts the runs of passes, and those that change nothing."""

    def __init__(self) -> None:
        from penstock.passes.pipeline import DEVICES, LOWER, OPTIMIZE, SPLIT, STRUCTURE

        self.ran = self.idle = 0
        # Passes of one name may be several objects.
        every = (*STRUCTURE, *OPTIMIZE, *LOWER, *DEVICES, *SPLIT)
        for step in {id(step): step for step in every}.values():
            step.run = self.counted(step.run)

    def counted(self, run: Callable[..., bool]) -> Callable[..., bool]:
        def call(graph: Any, context: Any) -> bool:
            changed = run(graph, context)
            self.ran += 1
            self.idle += not changed
            return changed

        return call


def doubled(model: Model, feeds: Mapping[str, Any]) -> dict[str, Any] | None:
    """Feeds that have twice the size along each dim that the model leaves open; None if there is
    no such dim."""
    larger, is_open = {}, False
    for value in model.graph.inputs:
        array = np.asarray(feeds[value.name])
        for axis, dim in enumerate(getattr(value.type, "shape", None) or ()):
            if not isinstance(dim, int):
                array, is_open = np.concatenate([array, array], axis), True
        larger[value.name] = array
    return larger if is_open else None


def calls_of(run: Callable[[], object], clock: Clock) -> Calls:
    """The calls of Python's functions while ``run`` is called."""
    calls = Calls(clock)
    sys.setprofile(calls)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def counted(source: Any, feeds: Mapping[str, Any]) -> tuple[dict[str, int], Calls]:
    """The figures of ``COLUMNS`` for a model that is loaded and run once, and its calls."""
    import penstock as ps
    from penstock.analysis.type_inference import node_types
    from penstock.backends.native.backend import NativeBackend
    from penstock.backends.numpy import NumpyBackend
    from penstock.backends.specializing import estimates
    from penstock.core import records

    model = ps.load(source)
    larger = doubled(model, feeds)
    before = ps.compile(source, threads=1, cache=False)
    before.run(feeds)
    if larger is not None:
        try:
            before.run(larger)
        except ps.PenstockError:
            larger = None
    clock = Clock()
    watch(clock)
    passes, sessions = Passes(), []

    def first() -> None:
        sessions.append(ps.compile(source, threads=1, cache=False))
        sessions[0].run(feeds)

    calls = calls_of(first, clock)
    (session,) = sessions
    ran = passes.ran, passes.idle
    figures = (
        len(list(model.graph.walk())),
        len(list(session.inspect.plan.steps)),
        *ran,
        calls.of(node_types),
        calls.of(NativeBackend.kernel) + calls.of(NumpyBackend.kernel),
        calls.of(estimates),
        calls.of(records.replace),
        0 if larger is None else calls_of(lambda: session.run(larger), clock).total,
    )
    return dict(zip(COLUMNS, figures, strict=True)), calls
