"""``penstock.compare``: how far the outputs of two models, or of two runtimes, are apart."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TypeAlias

import numpy as np

from penstock.core.errors import InvalidInput, OptionError, shortened, wrong_type
from penstock.core.records import dataclass
from penstock.core.types import JsonObject, NamedValues, RunValue, TensorType, Type, type_of
from penstock.executors.feeds import convert
from penstock.observers.values import Difference, comparable, difference
from penstock.peers.engines import PEERS, EngineJob, Options
from penstock.peers.process import EngineProcess
from penstock.session.session import Session, compile

ModelSource: TypeAlias = RunValue
"""a ``Session``, or what ``penstock.compile`` takes as a model"""


@dataclass(frozen=True)
class OutputDifference:
    """The difference of one output: its name in each, its types there, and the ``difference`` of
    the numbers; None where there are none to compare, of which ``same`` says whether they are
    equal."""

    name: str
    other_name: str
    type: str
    other_type: str
    difference: Difference | None
    same: bool

    def within(self, tolerance: float) -> bool:
        """Whether no element differs by more than this share of the largest one."""
        gap = self.difference
        return self.same if gap is None else gap.relative <= tolerance and not gap.nonfinite

    def describe(self) -> JsonObject:
        """The difference as plain data, as ``penstock compare --json`` prints it."""
        gap = self.difference
        figures = {} if gap is None else {**asdict(gap), "relative": gap.relative}
        return {
            "name": self.name,
            "other_name": self.other_name,
            "type": self.type,
            "other_type": self.other_type,
            "same_shape": gap is not None,
            "same": self.same,
            **figures,
        }


@dataclass(frozen=True)
class Comparison:
    """Result of ``penstock.compare``: ``outputs`` in the order of the first model, and ``labels``,
    the names of the two sides."""

    labels: tuple[str, str]
    outputs: tuple[OutputDifference, ...]

    @property
    def relative(self) -> float:
        """The largest difference of an output as a share of its largest element; infinite if one
        differs in another way: its shape, its kind of value, or NaN."""
        return max([_relative(output) for output in self.outputs], default=0.0)

    def within(self, tolerance: float) -> bool:
        """Whether no output differs by more than ``tolerance`` of its largest element.

        Args:
            tolerance: A share, such as 1e-5.
        """
        return all(output.within(tolerance) for output in self.outputs)

    def __str__(self) -> str:
        lines = [f"first:  {self.labels[0]}", f"second: {self.labels[1]}"]
        for output in self.outputs:
            names = output.name
            if output.other_name != output.name:
                names += f" and {output.other_name}"
            lines.append(f"{names}: {_words(output)}")
        return "\n".join(lines)


def _relative(output: OutputDifference) -> float:
    gap = output.difference
    if gap is None or gap.nonfinite:
        return 0.0 if gap is None and output.same else float("inf")
    return gap.relative


def _words(output: OutputDifference) -> str:
    gap = output.difference
    if gap is None:
        if output.same:
            return f"equal, {output.type}"
        return f"{output.type} in the first, {output.other_type} in the second"
    at = list(gap.index)
    apart = f"{gap.nonfinite} elements are NaN or infinite in one alone, " if gap.nonfinite else ""
    return (
        f"{apart}{gap.relative:.3g} of the largest element at most, {gap.largest:.6g} at {at}: "
        f"{gap.one:.6g} and {gap.other:.6g}"
    )


def compare(
    first: ModelSource,
    second: ModelSource | None = None,
    *,
    feeds: NamedValues,
    against: str | Options | None = None,
) -> Comparison:
    """Run two models, or one in two ways, on the same feeds and compare their outputs.

    Inputs and outputs are matched by name, or by position if the names differ. Floats are converted
    to the types of the second model's inputs. Raises ``InvalidInput`` if inputs or outputs do not
    match, and ``PenstockError`` if another runtime is not installed or fails.

    Args:
        first: A ``Session``, or a model as ``penstock.compile`` takes it.
        second: The same; by default the first model.
        feeds: Inputs of the first model by name.
        against: How to run the second model: with another runtime, ``"onnxruntime"``,
            ``"openvino"`` or ``"litert"``, which reads the model's file in a process of its own; or
            with other options of ``penstock.compile``. By default like the first.
    """
    if against is not None and not isinstance(against, str | Mapping):
        raise wrong_type("against", against, "the name of a runtime, or options of compiling")
    if isinstance(against, str) and against not in PEERS:
        raise OptionError(f"against={shortened(against)!r} is not one of {', '.join(PEERS)}")
    if second is None and not against:
        raise OptionError("compare needs a second model, or against=")
    one = _session(first, {})
    given = {
        port.name: convert(port.name, feeds[port.name], port.type)
        for port in one.inputs
        if port.name in feeds
    }
    outputs = one.run({**feeds, **given})
    source = first if second is None else second
    if isinstance(against, str):
        other, label = _outputs_of_peer(EngineJob(against, _path(source), given), list(outputs))
    else:
        session = _session(source, against or {})
        other, label = session.run(_fitted(given, session)), _label(session)
    differences = compare_outputs(outputs, other)
    return Comparison((_label(one), label), tuple(differences))


def _session(source: ModelSource, options: Options) -> Session:
    if isinstance(source, Session):
        return source if not options else compile(source.model, **options)
    return compile(source, **options)


def _label(session: Session) -> str:
    path = session.model.path
    name = "" if path is None else f"{os.path.basename(path)}: "
    return f"{name}{session.effective.line(session.options)}"


def _path(source: ModelSource) -> str:
    """The file of a model, which other runtimes read."""
    path = source.model.path if isinstance(source, Session) else source
    if isinstance(path, str | os.PathLike):
        return os.path.abspath(path)
    raise InvalidInput("other runtimes read files: give the path of the model")


def _outputs_of_peer(job: EngineJob, names: Sequence[str]) -> tuple[dict[str, RunValue], str]:
    """The outputs of another runtime, by Penstock's names, and what is said of it."""
    with closing(EngineProcess(job)) as process:
        outputs, _ = process.run()
        label = f"{os.path.basename(job.path)}: {job.engine} {process.loaded.version}"
    if len(outputs) != len(names):
        raise InvalidInput(f"{job.engine} has {len(outputs)} outputs, Penstock {len(names)}")
    return dict(zip(names, outputs, strict=True)), label


def _fitted(feeds: NamedValues, session: Session) -> dict[str, RunValue]:
    """The feeds of one model as another takes them: by position where names differ, and of the
    float type that its inputs have."""
    names = [port.name for port in session.inputs]
    if len(names) != len(feeds):
        raise InvalidInput(
            f"the first model takes {', '.join(feeds)}, the second {', '.join(names)}: their "
            "inputs do not match"
        )
    values = [feeds[name] for name in names] if feeds.keys() == set(names) else feeds.values()
    return {
        port.name: _converted(value, port.type)
        for port, value in zip(session.inputs, values, strict=True)
    }


def _converted(value: RunValue, type_: Type | None) -> RunValue:
    """Floats as those of a type."""
    dtype = type_.dtype if isinstance(type_, TensorType) else None
    if dtype is None or not isinstance(value, np.ndarray) or value.dtype == dtype:
        return value
    return value.astype(dtype) if {value.dtype.kind, dtype.kind} == {"f"} else value


def compare_outputs(first: NamedValues, second: NamedValues) -> Iterable[OutputDifference]:
    """The differences of outputs, matched by name or, where names differ, by position. Raises
    ``InvalidInput`` if their numbers differ."""
    if len(first) != len(second):
        raise InvalidInput(
            f"the first model has outputs {', '.join(first)}, the second {', '.join(second)}: they "
            "do not match"
        )
    names = first if first.keys() == second.keys() else second
    for (name, one), other_name in zip(first.items(), names, strict=True):
        yield _difference(name, other_name, one, second[other_name])


def _difference(name: str, other_name: str, one: RunValue, other: RunValue) -> OutputDifference:
    a, b = comparable(one), comparable(other)
    numbers = a is not None and b is not None and a.shape == b.shape
    return OutputDifference(
        name,
        other_name,
        str(type_of(one)),
        str(type_of(other)),
        difference(a, b) if numbers and a is not None and b is not None else None,
        numbers or _equal(one, other),
    )


def _equal(one: RunValue, other: RunValue) -> bool:
    """Whether two values that are no tensors of numbers are the same."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)
