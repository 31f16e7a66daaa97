"""The parallel executor: as it clusters by itself, and with every step a task."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock import compiling
from penstock.grouping import OneByOne
from penstock.measuring import Costs
from penstock.threads import Workers
from tests.executors.conformance import ExecutorConformance


class OfAllSteps(OneByOne):
    """Every step is a task, and worth a worker."""

    promising = True
    makespan = 0.0
    serial = 1.0

    def __init__(self, *arguments: object) -> None:
        pass


class Unmeasured(Costs):
    """What nobody has measured is estimated."""

    def complete(self, *, single_threaded: bool) -> None:
        pass


class TestParallel(ExecutorConformance):
    executor = "parallel"


class EveryStepATask(ExecutorConformance):
    executor = "parallel"
    threads = 4

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def every_step_a_task(cls) -> Iterator[None]:
        workers = Workers("test", cls.threads)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiling, "Clustered", OfAllSteps)
            patch.setattr(compiling, "Costs", Unmeasured)
            patch.setattr(compiling, "HAND_OVER_S", 0.0)
            patch.setattr(compiling, "pool", lambda: workers)
            yield
        workers.close()


class TestParallelStepByStep(EveryStepATask):
    threads = 4


class TestParallelOnOneThread(EveryStepATask):
    threads = 1
