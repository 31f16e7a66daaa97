"""``Session.quantize_after``: a session that quantizes its model with recorded feeds.

::

    runs of the session          threads of this process          a process of its own
    1 ... runs   feeds of some
                 are recorded -> written to files          ->     penstock quantize, on one thread,
    as before                                                     with the lowest priority
    as before                    plans compiled, errors and   <-  the quantized model
                                 times of both compared
    ...          either way      the models are exchanged

The search runs in a process of its own since it needs the interpreter and the processor's caches,
which runs would otherwise share. If it fails in any way, the session continues unchanged.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, cast

import numpy as np

from penstock.compiler.compiler import AFTER_LOWERING
from penstock.compiler.subgraph import Subgraph
from penstock.compiler.subgraphs import Subgraphs
from penstock.core.checkpoints import cancelled_by
from penstock.core.errors import Cancelled, OptionError, Unsupported, check_count, wrong_type
from penstock.core.records import replace
from penstock.core.types import STRING, JsonObject, NamedValues, TensorType
from penstock.executors.base import Executor
from penstock.executors.control import CancelToken, compile_run
from penstock.frontends.load import load
from penstock.host.fork import renewed
from penstock.host.log import INFO, WARNING, log
from penstock.host.stop_condition import StopCondition
from penstock.ir.graph import Model
from penstock.session.feed_recorder import FEWEST, MOST_BYTES, FeedRecorder, RecordedFeeds
from penstock.session.inspection import SessionParts
from penstock.session.quantize_process import QuantizeProcess, write_sample
from penstock.session.run import RunChooser
from penstock.session.saving import has_state
from penstock.tuning.output_error import output_error, spreads_of
from penstock.tuning.trial import faster

State: TypeAlias = Literal["recording", "searching", "swapped", "kept"]

_HELD_OUT = 4  # every fourth sample, as in ``quantize``
# The most held-out samples to compare again here; the search has compared all of them.
_COMPARED = 16
_MOST_SAMPLES = 10_000
# Seconds that closing waits for the thread to release its files.
_ENDING = 5.0
_WHOLE_INPUTS = ("float32", "weights8", "weights16")
"""types of layers whose inputs are not codes: in a session they save no time"""

_AT_EXIT: weakref.WeakSet[BackgroundQuantization] = weakref.WeakSet()


class Quantizable(Protocol):
    """A ``penstock.Session``."""

    def _parts(self) -> SessionParts: ...

    def _choose_by(self, chooser: RunChooser | None) -> None: ...

    def _adopt(self, model: Model, subgraphs: Subgraphs) -> None: ...


class BackgroundQuantization:
    """The result of ``Session.quantize_after``: its progress and its outcome.

    ``state`` is "recording" until enough runs are recorded, "searching" until a model is chosen,
    then "swapped" if runs use it, or "kept" if the session keeps its own model, for the ``reason``.
    ``samples`` is the number of recorded runs, once the search begins; ``report`` is the report of
    ``penstock.quantize``, once it has ended. If requests of a session are ``joined`` into batches,
    their rows must not depend on one another.
    """

    def __init__(
        self,
        session: Quantizable,
        runs: int,
        max_error: float,
        samples: int,
        timeout: float,
        joined: bool = False,
    ) -> None:
        self.max_error = max_error
        self._joined = joined
        self.state: State = "recording"
        self.reason: str | None = None
        self.report: JsonObject | None = None
        self.samples = 0
        self._timeout = timeout
        self._others: RunChooser | None = None
        # Weak, so that dropping the session ends the search.
        self._session = weakref.ref(session)
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._token = CancelToken()
        self._process: QuantizeProcess | None = None
        self._thread: threading.Thread | None = None
        parts = session._parts()
        # None once recording has ended: it refers to the model that may be replaced.
        self._recorder: FeedRecorder | None = FeedRecorder(
            runs, samples, parts.subgraphs, self._search
        )
        # Unless the process exits, when there is time to wait for the thread.
        self._finalizer = weakref.finalize(session, self._stop)
        self._finalizer.atexit = False
        _AT_EXIT.add(self)
        renewed(self)

    def begin(self, others: RunChooser | None) -> None:
        """Record runs from now on. ``others`` is the session's current chooser of runs, if any."""
        session = self._session()
        assert session is not None and self._recorder is not None
        session._parts().subgraphs.restrict()
        self._others = self._recorder.others = others
        self._recorder.installed = self._install
        self._install()

    def _install(self) -> None:
        """Make the session ask the recorder, whose ``due`` changes after each recorded run."""
        session = self._session()
        with self._lock:
            if session is not None and self.state == "recording":
                session._choose_by(self._recorder)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until runs use the quantized model or it is known that they will not. Return whether
        they use it. Recording makes progress only by runs of the session.

        Args:
            timeout: Seconds to wait at most.
        """
        return self._ended.wait(timeout)

    def cancel(self) -> None:
        """Stop recording or searching, if that has not ended. The session keeps its model."""
        self._stop()
        thread = self._thread
        # Not under the lock, which the thread takes while it ends.
        if thread is not None and thread is not threading.current_thread():
            thread.join(_ENDING)

    def _stop(self) -> None:
        """``cancel``, without waiting."""
        self._token.cancel()
        with self._lock:
            if self._process is not None:
                self._process.kill()
            if self.state == "recording":
                self._keep("it was cancelled")

    def forked(self) -> None:
        """Keep the model in a forked child: only the parent has the thread of the search."""
        self._lock, self._process, self._thread = threading.RLock(), None, None
        if self._recorder is not None:
            self._recorder.forked()
        if self.state == "searching":
            self._keep("the process was forked during the search; its parent goes on")

    def __repr__(self) -> str:
        reason = "" if self.reason is None else f": {self.reason}"
        return f"BackgroundQuantization({self.state}{reason})"

    # The end of recording, and the thread.

    def _search(self) -> None:
        """Begin the search, on a run's thread."""
        session = self._session()
        with self._lock:
            recorder, self._recorder = self._recorder, None
            if self.state != "recording" or session is None or recorder is None:
                return
            session._choose_by(self._others)
            feeds = recorder.kept.feeds
            self.samples = len(feeds)
            if not recorder.kept.is_enough:
                held = MOST_BYTES >> 20
                self._keep(f"{FEWEST} feeds of this model are more than {held} MiB")
                return
            self.state = "searching"
            thread = threading.Thread(
                target=self._run, args=(feeds,), name="penstock-quantize", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the process exits or has too many threads
                self._keep(str(error), WARNING)
                return
            self._thread = thread

    def _run(self, feeds: list[RecordedFeeds]) -> None:
        folder: Path | None = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="penstock-"))
            with cancelled_by(StopCondition(None, self._token, "quantizing")):
                self._quantize(feeds, folder)
        except Cancelled:
            self._keep("it was cancelled")
        except Exception as error:  # the session continues, whatever the error
            self._keep(f"{type(error).__name__}: {error}", WARNING)
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            self._thread = None

    def _quantize(self, feeds: list[RecordedFeeds], folder: Path) -> None:
        held = [*feeds[_HELD_OUT - 1 :: _HELD_OUT]] or [feeds[-1]]
        samples = folder / "samples"
        samples.mkdir()
        for i, sample in enumerate(feeds):
            write_sample(samples / f"{i:06}.npz", sample)
        feeds.clear()  # they may be large, and the search takes long
        content = self._searched(samples, folder)
        session = self._session()
        if session is None:
            raise Cancelled("the session is gone")
        assert self.report is not None
        if all(layer["type"] in _WHOLE_INPUTS for layer in self.report["layers"]):
            self._keep(f"no choice with an error of {self.max_error:g} saves time")
            return
        model = load(content, limits=session._parts().options.limits)
        reason = self._exchange(session, model, held[:_COMPARED])
        if reason is not None:
            self._keep(reason)

    def _keep(self, reason: str, level: int = INFO) -> None:
        """Record that the session keeps its model, and why."""
        with self._lock:
            if self.state in ("swapped", "kept"):
                return
            self.state, self.reason = "kept", reason
            session = self._session()
            if session is not None:
                if self._recorder is not None:
                    session._choose_by(self._others)
                session._parts().subgraphs.ports_only = False
            self._end()
        log(level, "quantize_after: the session keeps its model: %s", reason)

    def _end(self) -> None:
        self._recorder = None
        self._finalizer.detach()
        self._ended.set()

    # The search.

    def _searched(self, samples: Path, folder: Path) -> bytes:
        """Return the quantized model that the process finds, as the bytes of an ONNX file, or of a
        TFLite file whose inputs can be resized as the original's."""
        source = self._source(folder)
        output = folder / f"quantized{'.tflite' if is_tflite(source[0]) else '.onnx'}"
        if self._joined:
            source = [*source, "--independent-rows"]
        with self._lock:
            self._check_cancelled()
            self._process = process = QuantizeProcess(
                source, samples, output, self.max_error, self._timeout
            )
        try:
            self.report = process.report()
        finally:
            with self._lock:
                self._process = None
            self._check_cancelled()
        return process.output.read_bytes()

    def _check_cancelled(self) -> None:
        if self._token.cancelled:
            raise Cancelled("quantizing was cancelled")

    def _source(self, folder: Path) -> list[str]:
        """Return the model's command-line arguments: its file, or one that is written now."""
        session = self._session()
        if session is None:
            raise Cancelled("the session is gone")
        parts = session._parts()
        model = parts.model
        if model.path is not None and os.path.exists(model.path):
            return [model.path, *_signature(model)]
        from penstock.frontends.onnx.writer import onnx_bytes

        path = folder / "model.onnx"
        path.write_bytes(onnx_bytes(model))
        parts.executors.release()
        return [str(path)]

    # The exchange.

    def _exchange(
        self, session: Quantizable, model: Model, held: Sequence[RecordedFeeds]
    ) -> str | None:
        """Let the session run a model if it is as good as the search found. Return why not."""
        parts = session._parts()
        old, new = parts.subgraphs, parts.subgraphs.successor(model.graph)
        before, after = old.main, new.main
        if (before.names, before.outputs) != (after.names, after.outputs):
            return "the quantized model has other inputs or outputs"
        parts.executors.keep()  # cache the plans of the original model first
        parts.plans.unbounded = True
        try:
            error, is_faster = self._compared(parts, new, held)
            if error > self.max_error:
                return f"its error in this process is {error:.3g}, more than {self.max_error:g}"
            if not is_faster:
                return "the quantized model is no faster with the options of the session"
            for subgraph in old.known():
                compile_plans(parts, subgraph, new.counterpart(subgraph))
            own = replace(model, metadata=parts.model.metadata, about=parts.model.about)
            with self._lock:
                self._check_cancelled()
                new.ports_only = True
                session._adopt(own, new)
                self.state = "swapped"
                self._end()
        finally:
            if self.state != "swapped":
                new.retire()
            parts.plans.unbounded = False
        assert self.report is not None
        log(
            INFO,
            "quantize_after: runs use the quantized model from now on: error %.3g, %.2f of the "
            "time in the search",
            error,
            self.report["time"],
        )
        return None

    def _compared(
        self, parts: SessionParts, new: Subgraphs, held: Sequence[RecordedFeeds]
    ) -> tuple[float, bool]:
        """Return the error of the new model on held-out samples, as ``quantize`` measures it, and
        whether it is faster than the session's."""
        wanted = [_run(parts, parts.subgraphs, sample) for sample in held]
        outputs = [_run(parts, new, sample) for sample in held]
        errors = [
            output_error(one[name], other[name], spread).rms
            for name, spread in spreads_of(wanted).items()
            for one, other in zip(wanted, outputs, strict=True)
        ]
        error = max(errors, default=math.inf)
        del wanted, outputs
        usual, values = _prepared(parts, parts.subgraphs, held[0])
        other, _ = _prepared(parts, new, held[0])
        return error, faster(other, usual, values, 1.0)[0] is other


def _prepared(
    parts: SessionParts, subgraphs: Subgraphs, feeds: NamedValues
) -> tuple[Executor, list[np.ndarray]]:
    request, key, values = subgraphs.resolve(feeds, None, None)
    return parts.executors.get(request.subgraph, key, values, exact=True), values


def _run(parts: SessionParts, subgraphs: Subgraphs, feeds: NamedValues) -> NamedValues:
    """Return the outputs for these feeds, in a run that is not counted as the user's."""
    executor, values = _prepared(parts, subgraphs, feeds)
    with compile_run() as control:
        outputs = executor.run(values, control)
    return cast(NamedValues, subgraphs.all.named(outputs))


def compile_plans(parts: SessionParts, before: Subgraph, after: Subgraph) -> None:
    """Compile for a subgraph the plans that another one has, the last used at the end."""
    for key in parts.plans.of(before):
        # Plans for many shapes are compiled when runs show that they pay off.
        if isinstance(key, tuple) and None not in key:
            parts.executors.get(after, key, _placeholders(after, key), exact=True)


def _placeholders(subgraph: Subgraph, key: tuple[Hashable, ...]) -> list[np.ndarray]:
    """Return values of these shapes without memory of their own."""
    shapes = cast("tuple[tuple[int, ...], ...]", key)
    return [
        np.broadcast_to(np.zeros((), cast(TensorType, type_).dtype), shape)
        for type_, shape in zip(subgraph.types, shapes, strict=True)
    ]


def is_tflite(path: str | None) -> bool:
    """Whether there is a TFLite file at a path."""
    if path is None or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(8)[4:] == b"TFL3"


def _signature(model: Model) -> list[str]:
    return ["--signature", model.entry] if model.entry in model.signatures else []


@atexit.register
def _cancel_all() -> None:
    for background in list(_AT_EXIT):
        background.cancel()


# Checks of arguments.


def check_arguments(runs: object, max_error: object, samples: object, timeout: object) -> None:
    """Raise ``TypeError`` or ``OptionError`` for invalid arguments of ``quantize_after``."""
    check_count("runs", runs, sys.maxsize)
    check_count("samples", samples, _MOST_SAMPLES)
    for name, value in (("max_error", max_error), ("timeout", timeout)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, value, "a number")
        if not 0 < value < float("inf"):
            raise OptionError(f"{name}={value!r} must be above 0, and finite")


def check_model(parts: SessionParts) -> None:
    """Raise ``OptionError`` for options that a quantized model cannot keep, ``Unsupported`` for a
    model that cannot be replaced."""
    options, context = parts.options, parts.compiler.context
    given = {
        "reproducible": (options.reproducible, "the same bits, and answers would change"),
        "cluster": (options.cluster is not None, "workers that have their parts already"),
        "devices": (options.devices is not None, "devices of a graph"),
        "memory": (options.memory is not None, "a bound, and two models are held for a while"),
        "place": (options.place is not None, "backends of nodes that may be gone"),
        "precision": (options.precision != "float32", f"{options.precision} in place of codes"),
    }
    for name, (wrong, meaning) in given.items():
        if wrong:
            raise OptionError(f"quantize_after cannot be used with {name}=: it asks for {meaning}")
    names = [backend.name for backend in context.backends]
    if "native" not in names:
        raise OptionError(
            f"quantize_after needs the backend 'native', whose kernels multiply codes; backends= "
            f"has {', '.join(names)}"
        )
    main, model = parts.subgraphs.main, parts.model
    if context.executor not in AFTER_LOWERING or main.framed:
        raise OptionError(
            f"quantize_after needs compiled plans, and the executor is {context.executor!r}"
        )
    faults = []
    if has_state(model):
        faults.append("variables, whose state a quantized model does not take over")
    if model.functions:
        faults.append("functions that nodes call, which quantize does not take")
    if model.resizable and not is_tflite(model.path):
        faults.append(
            "inputs that may be resized, as all of TFLite, which needs a file of TFLite to start "
            "from: load the model from its path"
        )
    for name, type_ in zip(main.names, main.types, strict=True):
        if not isinstance(type_, TensorType) or type_.dtype in (None, STRING):
            faults.append(f"an input {name!r} of type {type_}, and samples are tensors of numbers")
    if faults:
        raise Unsupported.of(
            [("quantize_after", f"the model has {fault}", model.entry) for fault in faults]
        )
