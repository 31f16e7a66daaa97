"""Costs by rates that were measured on this machine, for ``ExpertOptions(cost_model=...)``.

``tools/calibrate.py`` measures the rates of all backends together, and writes them to a file::

    costs = CalibratedCosts.read("rates.json")
    session = ps.compile(model, expert=ps.ExpertOptions(cost_model=costs))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from pathlib import Path

from penstock.backends.base import Backend, HostBackend
from penstock.core.errors import PenstockError
from penstock.host.machine import machine_name
from penstock.ir.graph import Node
from penstock.ops.work_estimate import Rates, RateTable
from penstock.tuning.measure import Cost


class CalibratedCosts:
    """Costs by ``rates``, tables by the names of backends; other backends have their own."""

    def __init__(self, rates: Mapping[str, RateTable]) -> None:
        self.rates = rates

    @classmethod
    def read(cls, path: str | Path) -> CalibratedCosts:
        """The costs in a file. Raises ``PenstockError`` if it was written on another machine, with
        other versions of libraries, or is damaged."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            machine, tables = content["machine"], content["rates"]
            rates = {
                backend: {family: _rates_of(numbers) for family, numbers in table.items()}
                for backend, table in tables.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PenstockError(f"{path} has no rates of tools/calibrate.py: {error}") from error
        if machine != machine_name():
            raise PenstockError(
                f"the rates in {path} were measured on {machine}, and this is {machine_name()}: "
                "measure them anew with tools/calibrate.py"
            )
        return cls(rates)

    def write(self, path: str | Path) -> None:
        """Write a file for ``read``."""
        tables = {
            backend: {family: list(rates) for family, rates in table.items()}
            for backend, table in self.rates.items()
        }
        text = json.dumps({"machine": machine_name(), "rates": tables}, indent=1)
        Path(path).write_text(text, encoding="utf-8")

    def cost(self, node: Node, backend: Backend, threads: int | None = None) -> Cost:
        """The seconds of a node on one core: they compare backends, however many threads run."""
        table = self.rates.get(backend.name)
        if table is not None and isinstance(backend, HostBackend):
            # A copy: the backend may belong to several sessions, with other costs.
            backend = copy(backend)
            backend.rates = {**backend.rates, **table}
        return Cost(backend.seconds(node))


def _rates_of(numbers: list[float]) -> Rates:
    """Rates that were read. Raises ``ValueError`` for what no machine has."""
    rates = Rates(*map(float, numbers))
    # Work is divided by these three; the others are seconds.
    if not all(rate >= 0 for rate in rates) or 0 in rates[1:4]:
        raise ValueError(f"{numbers} are no rates")
    return rates
