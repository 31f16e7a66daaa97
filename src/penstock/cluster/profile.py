"""Where the time of runs on a cluster goes: each worker measures its own steps."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.records import replace
from penstock.observers.profile import Profile, Row, StepRow


class ClusterProfile(Profile):
    """The steps of all workers, ``rows``, in ``runs`` runs of a graph that took ``observed``
    seconds, while workers measured, and ``alone`` those of as many that nothing measured. Workers
    run at the same time, so that their steps may take longer together than the runs."""

    def __init__(
        self, rows: Sequence[StepRow], runs: int, observed: float, alone: list[float]
    ) -> None:
        super().__init__()
        self._of_workers = rows
        self.runs, self.observed, self.alone = runs, observed, alone

    @property
    def inside(self) -> float:
        return sum(row.seconds for row in self._of_workers)

    def steps(self) -> list[StepRow]:
        inside = self.inside or 1.0
        rows = [replace(row, share=row.seconds / inside) for row in self._of_workers]
        return sorted(rows, key=lambda row: -row.seconds)

    def by_worker(self) -> list[Row]:
        """The executions and the seconds of the steps of each worker."""
        return self._rows(lambda step: step.worker)
