"""What is measured of a candidate: the error of its outputs, and the time of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TypeAlias

from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidInput, shortened
from penstock.core.records import dataclass
from penstock.core.types import NamedValues
from penstock.observers.profile import Profile
from penstock.ops.internal.fused import parts
from penstock.quantizing.samples import Sample, Samples, spread
from penstock.session.session import Session
from penstock.tuning.output_error import OutputError, output_error, spreads_of

Outputs: TypeAlias = NamedValues
Metric: TypeAlias = Callable[[Sequence[Outputs], Sequence[Outputs]], float]
"""A user's measure of the error: from the outputs of the float model and of the candidate for each
sample to a number, which is 0 if they are equally good"""

_TURNS, _FEWEST = 40, 5  # runs of each session, at most and at least


@dataclass(frozen=True, eq=False)
class FloatReference:
    """The outputs of the float model for samples, and the spread of each output."""

    samples: Samples
    outputs: Sequence[Outputs]
    spreads: Mapping[str, float]

    @classmethod
    def of(cls, session: Session, samples: Samples) -> FloatReference:
        """Run the float model. Raises ``InvalidInput`` where no output can be compared."""
        outputs = []
        for sample in samples:
            checkpoint()
            outputs.append(session.run(sample))
        spreads = spreads_of(outputs)
        if not spreads:
            raise InvalidInput(
                "for these samples no output of the model has finite real numbers, by which errors "
                "are measured: look for NaN in the samples, or give a metric of your own (metric=)"
            )
        return cls(samples, outputs, spreads)

    def spread_out(self, count: int) -> FloatReference:
        """The reference for at most ``count`` of the samples."""
        indices = spread(len(self.samples), count)
        outputs = [self.outputs[i] for i in indices]
        return FloatReference(self.samples.subset(indices), outputs, self.spreads)

    def errors(self, session: Session) -> dict[str, OutputError]:
        """The error of each output."""
        worst = dict.fromkeys(self.spreads, OutputError(0.0, 0.0))
        for sample, wanted in zip(self.samples, self.outputs, strict=True):
            checkpoint()
            outputs = session.run(sample)
            for name, whole in self.spreads.items():
                own = output_error(wanted[name], outputs[name], whole)
                worst[name] = OutputError(*map(max, zip(worst[name], own, strict=True)))
        return worst

    def mean_square(self, session: Session) -> float:
        """The mean over samples of squared errors, of the outputs together: unlike the errors of
        the worst sample, those of layers nearly add up."""
        total = 0.0
        for sample, wanted in zip(self.samples, self.outputs, strict=True):
            checkpoint()
            outputs = session.run(sample)
            own = [output_error(wanted[n], outputs[n], s).rms for n, s in self.spreads.items()]
            total += max(own) ** 2
        return total / len(self.outputs)

    def error(self, session: Session, metric: Metric | None) -> float:
        """The error that is bounded: the largest of all outputs, or the metric's."""
        if metric is None:
            return max(own.rms for own in self.errors(session).values())
        result = metric(self.outputs, [session.run(sample) for sample in self.samples])
        try:
            value = float(result)
        except (TypeError, ValueError):
            value = math.nan
        if math.isnan(value):
            raise InvalidInput(
                f"the metric is not a number but {shortened(repr(result))}; it must be one, 0 for "
                "no error"
            )
        return value


def seconds_in_turns(
    sessions: Sequence[Session], sample: Sample, seconds: float = 1.5
) -> list[float]:
    """The seconds of a run of each of several sessions, which take turns, so that what slows the
    machine down slows all of them down: those of the fastest, since other processes only add. No
    turn begins after as many ``seconds``."""
    taken: list[list[float]] = [[] for _ in sessions]
    for session in sessions:
        # The number of threads of kernels is chosen in the first runs.
        for _ in range(3):
            session.run(sample)
    begin = perf_counter()
    for turn in range(_TURNS):
        if turn >= _FEWEST and perf_counter() - begin > seconds:
            break
        checkpoint()
        # The order changes, as each may leave caches warm for the next.
        for i in range(len(sessions)) if turn % 2 else reversed(range(len(sessions))):
            start = perf_counter()
            sessions[i].run(sample)
            taken[i].append(perf_counter() - start)
    return list(map(min, taken))


def step_seconds_of(
    session: Session, sample: Sample, runs: int = 5
) -> dict[tuple[str, ...], float]:
    """The seconds of each step of a session, by the names of the nodes in it: of the fastest of a
    few runs."""
    profile = Profile()
    # The first observed run compiles a program of its own.
    session.run(sample, observers=[Profile()])
    for _ in range(runs):
        session.run(sample, observers=[profile])
    found: dict[tuple[str, ...], float] = {}
    for entry in profile:
        names = tuple(part.name for part in parts(entry.step.node))
        found[names] = found.get(names, 0.0) + entry.best * entry.count / max(profile.runs, 1)
    return found
