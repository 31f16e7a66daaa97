"""What opening a model and running it once does, in counts: they depend on the model alone.

The first model of a process makes what all later ones share, so each is opened twice, and counted
the second time. Calls are those of functions of Python, in the stage in which they were made.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

from bench.open import STAGES, Clock, watch

HERE = os.path.dirname(__file__)

COLUMNS = {
    "nodes": "of the model",
    "steps": "of the plan",
    "passes": "that ran on a graph",
    "idle": "of them changed nothing",
    "types": "nodes whose types were inferred",
    "kernels": "that backends were asked for",
    "costs": "questions for the estimated cost of a node",
    "records": "copied with changes",
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
        from penstock.passes.pipeline import PASSES

        self.ran = self.idle = 0
        for step in PASSES.values():
            step.run = self.counted(step.run)

    def counted(self, run: Callable[..., bool]) -> Callable[..., bool]:
        def call(graph: Any, context: Any) -> bool:
            changed = run(graph, context)
            self.ran += 1
            self.idle += not changed
            return changed

        return call


def counted(source: Any, feeds: Mapping[str, Any]) -> tuple[dict[str, int], Calls]:
    """The figures of ``COLUMNS`` for a model that is loaded and run once, and its calls."""
    import penstock as ps
    from penstock.analysis.type_inference import node_types
    from penstock.backends.dynamic_shapes import estimates
    from penstock.core import records
    from penstock.ir.contract import checked_kernel

    ps.compile(source, threads=1, cache=False).run(feeds)
    clock = Clock()
    watch(clock)
    passes, calls = Passes(), Calls(clock)
    sys.setprofile(calls)
    try:
        session = ps.compile(source, threads=1, cache=False)
        session.run(feeds)
    finally:
        sys.setprofile(None)
    figures = (
        len(list(ps.load(source).graph.walk())),
        len(list(session.inspect.plan.steps)),
        passes.ran,
        passes.idle,
        calls.of(node_types),
        calls.of(checked_kernel),
        calls.of(estimates),
        calls.of(records.replace),
    )
    return dict(zip(COLUMNS, figures, strict=True)), calls
