"""The stages of opening a model and running it once, for ``bench.open`` and its counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import process_time
from typing import Any

STAGES = ("load", "simplify", "fuse", "place", "lower", "plan", "schedule", "write", "bind", "run")


class Clock:
    """The processor time spent in each stage, without that in stages inside of it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.stack = ["run"]
        self.since = process_time()

    def switch(self) -> None:
        now = process_time()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.switch()
            self.stack.append(stage)
            try:
                return function(*arguments, **options)
            finally:
                self.switch()
                self.stack.pop()

        return call

    def replace(self, owner: Any, name: str, stage: str) -> None:
        setattr(owner, name, self.timed(stage, getattr(owner, name)))


def watch(clock: Clock) -> None:
    """Let the clock see the stages of all sessions."""
    from penstock.compiler import lowering, scheduling, stages
    from penstock.compiler.compiler import Compiler
    from penstock.passes.lowering.assign_backends import AssignBackends
    from penstock.passes.lowering.fuse import Fuse
    from penstock.session import opening

    clock.replace(opening, "load", "load")
    clock.replace(Compiler, "structure", "simplify")
    clock.replace(lowering, "optimize", "simplify")
    clock.replace(Fuse, "run", "fuse")
    clock.replace(AssignBackends, "run", "place")
    clock.replace(lowering, "run_passes", "lower")
    clock.replace(stages, "compile_plan", "plan")
    clock.replace(stages, "plan_arena", "schedule")
    clock.replace(scheduling, "arrange", "schedule")
    clock.replace(stages, "write_program", "write")
    clock.replace(stages, "LinearExecutor", "bind")
