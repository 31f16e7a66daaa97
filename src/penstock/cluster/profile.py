"""Profiles of runs on a cluster: each worker measures its own steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from penstock.core.errors import wrong_type
from penstock.core.records import replace
from penstock.observers.profile import Profile, Row, StepRow


class ClusterProfile(Profile):
    """The steps of all workers, ``rows``, in ``runs`` runs of a graph, which took ``observed``
    seconds in total. ``alone``: the seconds of as many runs without measurement. Since workers run
    in parallel, the total time of their steps may exceed that of the runs."""

    def __init__(
        self, rows: Sequence[StepRow], runs: int, observed: float, alone: list[float]
    ) -> None:
        super().__init__()
        self._of_workers = rows
        self.runs, self.observed, self.alone = runs, observed, alone

    @property
    def inside(self) -> float:
        return sum(row.seconds for row in self._of_workers)

    def add(self, other: Profile) -> None:
        """Add the counts and seconds of another profile of runs on a cluster."""
        if not isinstance(other, ClusterProfile):
            raise wrong_type("other", other, "a profile of runs on a cluster")
        rows = {(row.worker, row.facts): row for row in self._of_workers}
        for row in other._of_workers:
            key = row.worker, row.facts
            own = rows.get(key)
            rows[key] = row if own is None else _sum(own, row)
        self._of_workers = [*rows.values()]
        self.runs += other.runs
        self.observed += other.observed
        self.alone += other.alone

    def __iter__(self) -> NoReturn:
        raise TypeError("use steps() for the steps of workers: their plans are not in this process")

    def steps(self) -> list[StepRow]:
        inside = self.inside or 1.0
        rows = [replace(row, share=row.seconds / inside) for row in self._of_workers]
        return sorted(rows, key=lambda row: -row.seconds)

    def by_worker(self) -> list[Row]:
        """The executions and the seconds of the steps of each worker."""
        return self._rows(lambda step: step.worker)


def _sum(one: StepRow, other: StepRow) -> StepRow:
    return replace(
        one,
        count=one.count + other.count,
        seconds=one.seconds + other.seconds,
        best=min(one.best, other.best),
    )
