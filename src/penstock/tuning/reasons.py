"""Why a step runs where it does: the backends that could run it, and what each would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from penstock.backends.base import Backend, Where
from penstock.backends.kernels import KernelTable
from penstock.core.records import dataclass
from penstock.ops.internal.fused import is_fused, parts
from penstock.ops.internal.transfer import REORDER, is_transfer
from penstock.plan.plan import Step
from penstock.tuning.measure import CostModel, compared
from penstock.tuning.placement import wanted


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that has a kernel for a step, and the seconds that it is expected to take there:
    ``measured`` on this machine, or else estimated. The name "apart" stands for the nodes of a
    fused step one by one, each where it takes least."""

    backend: str
    seconds: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a step runs on its backend, in words, and what it was compared with."""

    text: str
    candidates: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        if not self.candidates:
            return self.text
        kinds = {True: "measured", False: "estimated"}
        costs = [f"{c.backend} {c.seconds * 1e6:.1f} us" for c in self.candidates]
        kind = " and ".join(dict.fromkeys(kinds[c.measured] for c in self.candidates))
        return f"{self.text} ({', '.join(costs)}, {kind})"


class Reasons:
    """The reasons for the placement of steps, by the costs that are known now."""

    def __init__(
        self, backends: Sequence[Backend], overrides: Mapping[str, Where], costs: CostModel
    ) -> None:
        self._backends = backends
        self._overrides = overrides
        self._costs = costs
        self._kernels = KernelTable()

    def of(self, step: Step) -> Reason:
        """Why ``step`` runs where it does."""
        node = step.node
        if step.control:
            return Reason("control flow of the program itself")
        if is_transfer(node):
            return Reason("a copy between the memories of two backends")
        if node.op is REORDER:
            return Reason("a copy into the order of dims that the next kernel reads")
        if wanted(node, self._overrides):
            return Reason("place= says so")
        candidates = self._candidates(step)
        if len(candidates) <= 1:
            return Reason("the only backend with a kernel for it", tuple(candidates))
        least = min(candidates, key=lambda candidate: candidate.seconds)
        if least.backend == step.backend:
            return Reason("takes least", tuple(candidates))
        return Reason("took least in its plan, with what is around it", tuple(candidates))

    def _candidates(self, step: Step) -> list[Candidate]:
        """The backends that could run a step, in the session's order; of a fused one also "apart",
        if its parts have kernels."""
        node, costs = step.node, self._costs
        among = [b for b in self._backends if b.fuses or not is_fused(node)]
        expected, measured = compared(costs, node, among) if among else ((), False)
        found = [
            Candidate(b.name, seconds, measured)
            for b, seconds in zip(among, expected, strict=True)
            if seconds < inf and self._kernels.accepts(b, node)
        ]
        if is_fused(node):
            each = [min(compared(costs, part, self._backends)[0]) for part in parts(node)]
            if sum(each) < inf:
                found.append(Candidate("apart", sum(each), measured=False))
        return found
