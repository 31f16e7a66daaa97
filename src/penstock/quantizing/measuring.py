"""Measurements of a candidate: the error of its outputs, and the time of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TypeAlias

from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidInput, shortened
from penstock.core.records import dataclass, replace
from penstock.core.types import NamedValues
from penstock.observers.profile import Profile
from penstock.ops.internal.fused import parts
from penstock.quantizing.array_store import ArrayStore
from penstock.quantizing.samples import Sample, Samples, spread
from penstock.session.session import Session
from penstock.tuning.output_error import OutputError, output_error, spreads_of

Outputs: TypeAlias = NamedValues
Metric: TypeAlias = Callable[[Sequence[Outputs], Sequence[Outputs]], float]
"""A user's measure of the error: from the outputs of the float model and of the candidate for each
sample to a number, which is 0 if they are equally good"""

EXCEEDING = 0.01
"""the probability that a further sample has a larger error than the bound"""
_TAIL = 4  # one in as many errors tells how far larger ones reach
_MOST_NAMED = 5  # samples that a message names
TURNS, _FEWEST = 40, 5  # runs of each session, at most and at least


@dataclass(frozen=True, eq=False)
class FloatReference:
    """The outputs of the float model for samples, and the spread of each output. With a ``metric``
    that measures the error."""

    samples: Samples
    outputs: ArrayStore
    spreads: Mapping[str, float]
    metric: Metric | None = None

    @classmethod
    def of(cls, session: Session, samples: Samples, metric: Metric | None = None) -> FloatReference:
        """Run the float model. Raises ``InvalidInput`` if it does not run on a sample, or if there
        is neither an output to compare nor a metric."""
        outputs = ArrayStore()
        for i, sample in enumerate(samples):
            checkpoint()
            try:
                outputs.append(session.run(sample))
            except InvalidInput as error:
                raise InvalidInput(f"{samples.where(i)}: {error}") from error
        spreads = spreads_of(outputs)
        if not spreads and metric is None:
            raise InvalidInput(
                "for these samples no output of the model has finite real numbers, by which errors "
                "are measured: look for NaN in the samples, or give a metric of your own (metric=)"
            )
        return cls(samples, outputs, spreads, metric)

    def subset(self, indices: Sequence[int]) -> FloatReference:
        """The reference for some of the samples."""
        outputs = self.outputs.subset(indices)
        return replace(self, samples=self.samples.subset(indices), outputs=outputs)

    def check_finite(self) -> None:
        """Raise ``InvalidInput`` if these samples have no error because no output has finite
        numbers, although outputs of others have."""
        if self.spreads and self.metric is None and not spreads_of(self.outputs):
            names = ", ".join(map(self.samples.where, range(min(len(self.samples), _MOST_NAMED))))
            raise InvalidInput(
                "no output of the model has finite real numbers for the samples held out, every "
                f"fourth ({names}): errors cannot be checked on them; look for NaN and for empty "
                "arrays in them, or give more samples"
            )

    def spread_out(self, count: int) -> FloatReference:
        """The reference for at most ``count`` of the samples."""
        return self.subset(spread(len(self.samples), count))

    def errors(self, session: Session) -> Iterator[dict[str, OutputError]]:
        """For each sample the error of each output."""
        for sample, wanted in zip(self.samples, self.outputs, strict=True):
            checkpoint()
            outputs = session.run(sample)
            yield {n: output_error(wanted[n], outputs[n], s) for n, s in self.spreads.items()}

    def largest_errors(self, session: Session) -> dict[str, OutputError]:
        """The largest error of each output in any sample."""
        worst = dict.fromkeys(self.spreads, OutputError(0.0, 0.0))
        for errors in self.errors(session):
            worst = {
                name: OutputError(*map(max, zip(worst[name], own, strict=True)))
                for name, own in errors.items()
            }
        return worst

    def rms(self, session: Session) -> list[float]:
        """The error of each sample: the largest of its outputs."""
        return [max(own.rms for own in errors.values()) for errors in self.errors(session)]

    def mean_square(self, session: Session) -> float:
        """The mean of squared errors over samples and outputs. Unlike errors of the worst sample,
        these nearly add up over layers. Without real outputs, it is the square of the metric."""
        if not self.spreads:
            return self.measured(session) ** 2
        return sum(own**2 for own in self.rms(session)) / len(self.outputs)

    def measured(self, session: Session) -> float:
        """Call the metric. Raises ``InvalidInput`` if it does not return a number."""
        assert self.metric is not None
        result = self.metric(self.outputs, ArrayStore(map(session.run, self.samples)))
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


def error_limit(errors: Sequence[float], exceeding: float = EXCEEDING) -> float:
    """Estimate the error that a further sample exceeds with a probability of at most ``exceeding``,
    from the errors of samples of the same distribution; at least the largest of them.

    The ``k`` largest errors, a quarter of all, exceed a threshold. The excess of a further error is
    assumed to be exponentially distributed, which holds approximately for a high threshold unless
    tails are heavy. Its mean is estimated from the k excesses, so the ratio of a further excess to
    their mean has the F distribution with 2 and 2k degrees of freedom."""
    ordered = sorted(errors)
    count, largest = len(ordered), ordered[-1]
    k = count // _TAIL
    if not k or not math.isfinite(largest):
        return largest
    threshold = ordered[-k - 1]
    mean = sum(own - threshold for own in ordered[-k:]) / k
    quantile = k * ((count * exceeding / k) ** (-1 / k) - 1)
    return max(largest, threshold + mean * quantile)


def seconds_in_turns(
    sessions: Sequence[Session], sample: Sample, seconds: float = 1.5, turns: int = TURNS
) -> list[float]:
    """Measure the seconds of a run of several sessions. They run in turn, so that other load on the
    machine affects all of them. Returns the minimum for each, since other processes only add time.
    At most ``turns``; none begins after ``seconds``."""
    taken: list[list[float]] = [[] for _ in sessions]
    for session in sessions:
        # The number of threads of kernels is chosen in the first runs.
        for _ in range(3):
            session.run(sample)
    begin = perf_counter()
    for turn in range(turns):
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
    # The first observed run compiles a separate program.
    session.run(sample, observers=[Profile()])
    for _ in range(runs):
        session.run(sample, observers=[profile])
    found: dict[tuple[str, ...], float] = {}
    for entry in profile:
        names = tuple(part.name for part in parts(entry.step.node))
        found[names] = found.get(names, 0.0) + entry.best * entry.count / max(profile.runs, 1)
    return found
