"""What is measured of a candidate: the error of its outputs, and the time of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TypeAlias

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidInput
from penstock.core.records import NamedTuple, dataclass
from penstock.core.types import NamedValues
from penstock.observers.profile import Profile
from penstock.ops.internal.fused import parts
from penstock.quantizing.samples import Sample, Samples, spread
from penstock.session.session import Session

Outputs: TypeAlias = NamedValues
Metric: TypeAlias = Callable[[Sequence[Outputs], Sequence[Outputs]], float]
"""A user's measure of the error: from the outputs of the float model and of the candidate for each
sample to a number, which is 0 if they are equally good"""

_TURNS, _FEWEST = 40, 5  # runs of each session, at most and at least


class OutputError(NamedTuple):
    """The error of one output, or the largest of all: ``rms``, the root of the mean of squared
    differences in the worst sample, and ``largest``, the largest difference of an element, both as
    shares of the spread of the float model's output: its largest element less its smallest."""

    rms: float
    largest: float


@dataclass(frozen=True, eq=False)
class FloatReference:
    """The outputs of the float model for samples, and the spread of each output."""

    samples: Samples
    outputs: Sequence[Outputs]
    spreads: Mapping[str, float]

    @classmethod
    def of(cls, session: Session, samples: Samples) -> FloatReference:
        """Run the float model. Raises ``InvalidInput`` where no output can be compared."""
        outputs = [session.run(sample) for sample in samples]
        spreads = {}
        for name in outputs[0]:
            arrays = [o[name] for o in outputs]
            if not all(_comparable(a) for a in arrays):
                continue
            low, high = min(float(a.min()) for a in arrays), max(float(a.max()) for a in arrays)
            # An output that is the same for all samples has no spread: its size stands for it.
            spread = high - low
            spreads[name] = spread if spread > 0 else max(abs(high), 1.0)
        if not spreads:
            raise InvalidInput(
                "no output of the model is a tensor of finite real numbers, by which errors are "
                "measured; give a metric of your own (metric=)"
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
                own = _difference(wanted[name], outputs[name], whole)
                worst[name] = OutputError(*map(max, zip(worst[name], own, strict=True)))
        return worst

    def mean_square(self, session: Session) -> float:
        """The mean over samples of squared errors, of the outputs together: unlike the errors of
        the worst sample, those of layers nearly add up."""
        total = 0.0
        for sample, wanted in zip(self.samples, self.outputs, strict=True):
            checkpoint()
            outputs = session.run(sample)
            own = [_difference(wanted[n], outputs[n], s).rms for n, s in self.spreads.items()]
            total += max(own) ** 2
        return total / len(self.outputs)

    def error(self, session: Session, metric: Metric | None) -> float:
        """The error that is bounded: the largest of all outputs, or the metric's."""
        if metric is None:
            return max(own.rms for own in self.errors(session).values())
        value = float(metric(self.outputs, [session.run(sample) for sample in self.samples]))
        if math.isnan(value):
            raise InvalidInput("the metric is not a number; it must be one, 0 for no error")
        return value


def _comparable(array: object) -> bool:
    if not isinstance(array, np.ndarray) or not array.size or array.dtype.kind not in "f":
        return False
    return bool(np.isfinite(array).all())


def _difference(wanted: np.ndarray, array: np.ndarray, spread: float) -> OutputError:
    # Such as the boxes of a detector, of which a candidate may find another number.
    if wanted.shape != array.shape:
        return OutputError(math.inf, math.inf)
    difference = np.abs(array.astype(np.float64) - wanted)
    if not np.isfinite(difference).all():
        return OutputError(math.inf, math.inf)
    rms = math.sqrt(float(np.mean(np.square(difference)))) / spread
    return OutputError(rms, float(difference.max()) / spread)


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
