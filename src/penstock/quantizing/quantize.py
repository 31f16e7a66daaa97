"""``penstock.quantize``: a smaller and faster model with a bounded error."""

from __future__ import annotations

import hashlib
import math
import os
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.compiler.compiler import progress_of
from penstock.compiler.options import make
from penstock.core.checkpoints import Progress, cancelled_by, checkpoint, reporting
from penstock.core.errors import (
    DeadlineExceeded,
    InvalidInput,
    OptionError,
    PenstockError,
    check_count,
    wrong_type,
)
from penstock.core.option_records import option, takes
from penstock.core.records import KW_ONLY, cached_property, dataclass, replace
from penstock.core.types import JsonObject
from penstock.frontends.load import load
from penstock.frontends.onnx.writer import onnx_bytes, onnx_message
from penstock.host.machine import machine_name
from penstock.host.native import library
from penstock.host.replace_file import replacing
from penstock.host.stop_condition import StopCondition
from penstock.ir.graph import Model
from penstock.quantizing.layers import ROUNDING
from penstock.quantizing.measuring import Metric, seconds_in_turns
from penstock.quantizing.record import Point, Record
from penstock.quantizing.report import describe_search, error_text, report_of_layers
from penstock.quantizing.samples import Samples, Source, samples_of
from penstock.quantizing.search import Goal, Search
from penstock.quantizing.source import float_model
from penstock.quantizing.tflite_rewriting import TfliteRewriter
from penstock.session.session import compile

if TYPE_CHECKING:
    from penstock.executors.control import CancelToken

DEFAULT_ERROR = 0.01
"""the bound on the error where no goal is stated: one percent of the spread of an output"""
# Parts of the time to a deadline in which layers are measured one by one, and in which choices
# among them are tried. The rest is for the storage of weights.
_LAYERS_SHARE, _CHOICES_SHARE = 0.6, 0.85
ModelLike: TypeAlias = "Model | str | os.PathLike[str] | bytes"
_SESSION, _TFLITE = ".penstock", ".tflite"


@dataclass(frozen=True)
class QuantizeOptions:
    """The options of ``quantize``."""

    _: KW_ONLY
    max_error: float | None = option(
        None,
        "The largest error of an output: the root of the mean of its squared differences from the "
        "float model's, as a share of that output's spread, the largest element of all samples "
        "less the smallest. No sample's is larger, and a further one's with a probability of 1 % "
        "by the errors of these. Or, with ``metric``, what that may return. "
        f"{DEFAULT_ERROR} if no goal is given. The fastest choice within it is taken.",
    )
    time: float | None = option(
        None,
        "The most time of a run, as a share of the original's. Without ``max_error``, the choice "
        "of least error within it is taken.",
    )
    size: float | None = option(
        None,
        "The most bytes of the weights, as a share of the original's. Without ``max_error``, the "
        "choice of least error within it is taken.",
    )
    metric: Metric | None = option(
        None,
        "A function that measures the error in place of the outputs' differences. It is called "
        "with the outputs of the float model and of a candidate, each a sequence with a mapping "
        "of names to arrays for each sample, and returns a number, 0 for no error.",
    )
    independent_rows: bool = option(
        False,
        "Whether a row of a batch must not depend on others, as is needed if requests are "
        "joined: layers with the range of each run are then not used.",
    )
    threads: int | None = option(None, "Threads of the timed runs, as in ``compile``.")
    timeout: float | None = option(
        None,
        "Seconds after which the search ends with the best choice so far; ``DeadlineExceeded`` "
        "if no choice meets the goal by then.",
    )
    cancel: CancelToken | None = option(None, "A token that ends the search with ``Cancelled``.")
    resume: str | os.PathLike[str] | None = option(
        None,
        "A file for measurements, written during the search: a search that was stopped continues "
        "from it.",
    )
    output: str | os.PathLike[str] | None = option(
        None,
        "A file to write, as ``Quantized.save`` does. A name that ends in .tflite asks for the "
        "quantization of TFLite, and the model must then be a TFLite file.",
    )
    progress: bool | Progress = option(False, "Report the progress, as in ``compile``.")

    def __post_init__(self) -> None:
        for name in ("max_error", "time", "size"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise wrong_type(name, value, "a number")
            if not 0 < value < math.inf:
                raise OptionError(f"{name}={value!r} must be above 0, and finite")
        if self.output is not None and not Path(self.output).absolute().parent.is_dir():
            raise OptionError(f"output={str(self.output)!r} is in a folder that does not exist")
        if not isinstance(self.independent_rows, bool):
            raise wrong_type("independent_rows", self.independent_rows, "True or False")
        if self.threads is not None:
            check_count("threads", self.threads)
        if self.metric is not None and not callable(self.metric):
            raise wrong_type("metric", self.metric, "a function of two sequences of outputs")
        if self.metric is not None and self.max_error is None:
            raise OptionError("metric= needs max_error=, the largest value that it may return")

    @property
    def writes_tflite(self) -> bool:
        return self.output is not None and Path(self.output).suffix == _TFLITE

    @property
    def goal(self) -> Goal:
        """The goal of the search."""
        # A bound that most users of classifiers do not notice.
        no_goal = self.max_error is self.time is self.size is None
        return Goal(DEFAULT_ERROR if no_goal else self.max_error, self.time, self.size)


class Quantized:
    """The result of ``quantize``.

    Args:
        model: The quantized model.
        report: What was done and measured, as JSON can have it.
        threads: Those of the plans of a session that is saved.
        tflite: The model as a TFLite file, if it was quantized as one.
    """

    def __init__(
        self, model: Model, report: JsonObject, threads: int | None, tflite: bytes | None = None
    ) -> None:
        self.model = model
        self.report = report
        self._threads = threads
        self._tflite = tflite

    @cached_property
    def onnx(self) -> bytes:
        """The model as the bytes of an ONNX file, of standard operations, and of
        ``com.microsoft.MatMulNBits`` for weights in blocks."""
        return onnx_bytes(self.model)

    @property
    def tflite(self) -> bytes:
        """The model as the bytes of a TFLite file. Raises ``PenstockError`` if it was not quantized
        as one."""
        if self._tflite is None:
            raise PenstockError(
                "the model was quantized for ONNX; for TFLite's codes, call quantize with "
                "output='NAME.tflite' and a TFLite file"
            )
        return self._tflite

    @property
    def html(self) -> str:
        """The report as a page that needs no other file and no network."""
        return report_of_layers(self.report)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model: as a saved session if the name ends in ``.penstock``, as TFLite if it
        ends in ``.tflite``, else as ONNX. Raises ``OSError``, and what ``tflite`` and ``onnx``
        raise.

        Args:
            path: The file.
        """
        target = Path(path)
        if target.suffix == _SESSION:
            with compile(self.model, threads=self._threads, cache=False) as session:
                session.save(target)
            return
        with replacing(target) as file:
            file.write(self.tflite if target.suffix == _TFLITE else self.onnx)

    def __repr__(self) -> str:
        own = self.report
        return (
            f"Quantized({own['model']!r}: time {own['time']:.2f}, size {own['size']:.2f}, "
            f"error {error_text(own['error'])} on samples held out)"
        )


@takes(QuantizeOptions, after=(object,))
def quantize(model: ModelLike, data: Source, **options: object) -> Quantized:
    """Quantize a model: choose a type for each layer, by measured times and errors, so that the
    model becomes as fast as the stated error allows. Layers that are not faster when quantized stay
    as they are.

    A quarter of the samples is held out: choices whose error is too large on them are rejected.
    Raises ``InvalidInput`` for samples that do not fit the model, ``Unsupported`` for models that
    cannot be written as ONNX, and ``PenstockError`` if no choice meets the goal; it says what is
    possible.

    Args:
        model: What ``penstock.load`` takes, or a model that it returned.
        data: Samples: the path of a folder of ``.npz`` files with arrays by the names of inputs (of
            ``.npy`` files for a model with one input), or of one such file, whose arrays have the
            samples along an axis in front; or an iterable of mappings, or of arrays for one input;
            or a function that returns such an iterator.
    """
    own = make(QuantizeOptions, "quantize", **options)
    stop = StopCondition(None, own.cancel, "quantizing")
    with cancelled_by(stop), reporting(progress_of(own.progress)):
        loaded = model if isinstance(model, Model) else load(model)
        _check_output(loaded, own.output)
        rewriter: TfliteRewriter | None = None
        if own.writes_tflite:
            rewriter = TfliteRewriter(_tflite_source(model), loaded.entry)
            folded, form = rewriter.model, rewriter.data
        else:
            # An ONNX file has the dims of the inputs, to which those of TFLite cannot be resized.
            loaded = replace(loaded, resizable=False)
            folded = float_model(loaded)
            # Before anything is measured: it must be possible.
            form = onnx_message(folded, weights=False).SerializeToString(deterministic=True)
        names = [value.name for value in folded.graph.inputs]
        samples = samples_of(data, names)
        run = partial(compile, threads=own.threads, cache=False)
        # Not from the cache of sessions: a candidate is used once.
        search = Search(run(loaded), folded, samples, own.goal, run, own.metric, rewriter=rewriter)
        if own.independent_rows:
            search.leave_out(["dynamic"])
        loaded_kernels = library()
        if loaded_kernels is None or not loaded_kernels.multiplies_bfloat16:
            search.leave_out(ROUNDING)
        if own.resume is not None:
            search.record = Record.at(Path(own.resume), _key(folded, form, samples, own))
        point = _found(search, own.timeout)
        quantized = _result(search, point, own)
        if own.output is not None:
            quantized.save(own.output)
        return quantized


def _check_output(model: Model, output: str | os.PathLike[str] | None) -> None:
    """Raise ``OptionError`` if the file of the float model would be replaced."""
    if output is None or model.path is None:
        return
    if all(map(os.path.exists, (output, model.path))) and os.path.samefile(output, model.path):
        raise OptionError(f"output={os.fspath(output)!r} is the model itself: name another file")


def _tflite_source(model: ModelLike) -> bytes:
    """The TFLite file that a model was read from. Raises ``InvalidInput`` if it was none."""
    source = model.path if isinstance(model, Model) else model
    what, data = "a model in memory", source if isinstance(source, bytes) else b""
    if isinstance(source, str | os.PathLike):
        what = os.fspath(source)
        data = Path(source).read_bytes() if Path(source).is_file() else b""
    if data[4:8] != b"TFL3":
        raise InvalidInput(
            f"{what} is no TFLite file, and of others no TFLite file can be made: write ONNX, with "
            "an output that ends in .onnx, or give the TFLite file itself"
        )
    return data


def _found(search: Search, timeout: float | None) -> Point:
    """The best point; if time is over, the best one so far."""
    if timeout is not None:
        begin = perf_counter()
        search.layers_until = begin + _LAYERS_SHARE * timeout
        search.choices_until = begin + _CHOICES_SHARE * timeout
    point: Point | None = None
    try:
        with cancelled_by(StopCondition(timeout, None, "quantizing")):
            point = search.run()
    except DeadlineExceeded:
        if not any(map(search.meets, search.record.points)):
            raise
    if point is not None and search.meets(point):
        return point
    # Each point was measured on all samples, so any of them may be chosen.
    points = [p for p in search.record.points if search.meets(p)]
    if not points:
        assert point is not None
        raise PenstockError(_possible(search, point))
    if search.goal.max_error is None:
        return min(points, key=lambda p: p.limit)
    return search.best(search.goal.max_error)


def _possible(search: Search, point: Point) -> str:
    """Return the message for a goal that was not reached, with the best results that were."""
    goal = search.goal
    wanted = [
        f"{name} {value:g}"
        for name, value in (("error", goal.max_error), ("time", goal.time), ("size", goal.size))
        if value is not None
    ]
    tried = sorted(search.record.points, key=lambda p: p.limit)
    others = [point, *[p for p in tried if p is not point]]
    lines = [f"error {p.limit:.3g} with time {p.time:.2f} and size {p.size:.2f}" for p in others]
    return (
        f"no choice that was tried has {' and '.join(wanted)}; possible are: {'; '.join(lines[:6])}"
    )


def _key(model: Model, form: bytes, samples: Samples, options: QuantizeOptions) -> str:
    """Return a digest of the inputs of measurements; ``form`` is the float model, or all of it
    except its weights."""
    digest = hashlib.blake2b(form, digest_size=16)
    inputs = dict.fromkeys([value for node in model.graph.walk() for value in node.inputs])
    weights = [(v.name, v.peek) for v in inputs if v is not None and v.peek is not None]
    for named in (weights, *[sample.items() for sample in samples]):
        checkpoint()
        for name, array in named:
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            # Of texts that are objects, bytes would be addresses.
            if array.dtype == object:
                digest.update(repr(array.tolist()).encode())
            else:
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    metric = options.metric
    own = None if metric is None else getattr(metric, "__qualname__", type(metric).__qualname__)
    given = options.goal, own, options.independent_rows, options.threads
    digest.update(repr((*given, machine_name())).encode())
    return digest.hexdigest()


def _result(search: Search, point: Point, options: QuantizeOptions) -> Quantized:
    """The model of a point, written and read again, with its measurements."""
    while True:
        form = search.form(point.choice)
        written, data = search.with_graph(form), form.data
        # The last measurement is of the model as the file has it, not as it was built.
        if data is None:
            content = onnx_bytes(written)
            del form, written
            written = load(content)
        session = search.compile(written)
        seconds = seconds_in_turns([session, search.original], search.sample)
        other = search.instead(point, seconds[0] / seconds[1])
        if other is None:
            break
        point = other
    errors = search.reference_held.largest_errors(session)
    report = describe_search(search, point, session, errors, seconds)
    return Quantized(written, report, options.threads, data)
