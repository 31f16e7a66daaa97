"""Runtimes that run the same model: Penstock, and its peers where their packages are installed.

An engine is made once in a process, which imports its package; ``load`` then gives the function
that runs one model on feeds in the order of Penstock's inputs, and returns its outputs in order.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from penstock.core.records import dataclass, field
from penstock.core.types import NamedValues, RunValue

Options: TypeAlias = Mapping[str, Any]
"""options of ``penstock.compile``, by name"""
Run: TypeAlias = Callable[[NamedValues], list[RunValue]]

PENSTOCK = "penstock"


@dataclass(frozen=True)
class EngineJob:
    """A model and what to run it on: the engine of this name with this number of threads (None:
    its own default). ``options`` are Penstock's, ``modules`` are imported before."""

    engine: str
    path: str
    feeds: NamedValues
    threads: int | None = None
    options: Options = field(default_factory=dict)
    modules: tuple[str, ...] = ()


class Engine(Protocol):
    """A runtime. Its constructor imports ``package``, and raises ``ImportError`` if that is not
    installed."""

    package: str
    version: str

    def __init__(self) -> None: ...

    def load(self, job: EngineJob) -> Run:
        """The function that runs the model of a job."""

    def describe(self) -> str | None:
        """The executor of Penstock that ran last; of other engines None."""


class _Penstock:
    package = "penstock-runtime"

    def __init__(self) -> None:
        from penstock.core import VERSION
        from penstock.session.session import compile

        self.version = VERSION
        self._compile = compile

    def load(self, job: EngineJob) -> Run:
        options = {"threads": job.threads, **job.options}
        self._session = session = self._compile(job.path, **options)
        return lambda feeds: list(session.run(feeds).values())

    def describe(self) -> str | None:
        return self._session.effective.executor


class _Peer:
    def describe(self) -> str | None:
        return None


class _OnnxRuntime(_Peer):
    package = "onnxruntime"

    def __init__(self) -> None:
        import onnxruntime

        onnxruntime.disable_telemetry_events()
        self.version = onnxruntime.__version__
        self._module = onnxruntime

    def load(self, job: EngineJob) -> Run:
        options = self._module.SessionOptions()
        options.intra_op_num_threads = job.threads or 0
        options.log_severity_level = 3
        session = self._module.InferenceSession(
            job.path, options, providers=["CPUExecutionProvider"]
        )
        names = _names(job, [[port.name] for port in session.get_inputs()])
        return lambda feeds: session.run(None, {names[n]: x for n, x in feeds.items()})


class _OpenVino(_Peer):
    package = "openvino"

    def __init__(self) -> None:
        # Its reports are sent by this package alone; without it, there are none.
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        import openvino

        self.version = openvino.__version__
        self._core = openvino.Core()

    def load(self, job: EngineJob) -> Run:
        # Where the processor has bfloat16, it would round to it by default, which is another
        # comparison.
        config = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        if job.threads is not None:
            config["INFERENCE_NUM_THREADS"] = str(job.threads)
        compiled = self._core.compile_model(job.path, "CPU", config)
        inputs = compiled.inputs
        places = _names(job, [[i, *port.get_names()] for i, port in enumerate(inputs)])
        client = threading.local()  # requests cannot be shared

        def run(feeds: NamedValues) -> list[RunValue]:
            if not hasattr(client, "request"):
                client.request = compiled.create_infer_request()
            result = client.request.infer({places[n]: x for n, x in feeds.items()})
            return list(result.values())

        return run


class _LiteRt(_Peer):
    package = "ai-edge-litert"

    def __init__(self) -> None:
        from importlib.metadata import version

        from ai_edge_litert.interpreter import Interpreter

        self.version = version(self.package)
        self._interpreter = Interpreter

    def load(self, job: EngineJob) -> Run:
        lock = threading.Lock()  # an interpreter has one memory for its tensors
        interpreter = self._interpreter(model_path=job.path, num_threads=job.threads)
        details = interpreter.get_input_details()
        places = _names(job, [[port["index"], port["name"]] for port in details])
        for name, value in job.feeds.items():
            interpreter.resize_tensor_input(places[name], value.shape)
        interpreter.allocate_tensors()
        outputs = [port["index"] for port in interpreter.get_output_details()]

        def run(feeds: NamedValues) -> list[RunValue]:
            with lock:
                for name, value in feeds.items():
                    interpreter.set_tensor(places[name], value)
                interpreter.invoke()
                return [interpreter.get_tensor(i) for i in outputs]

        return run


ENGINES: dict[str, type[Engine]] = {
    PENSTOCK: _Penstock,
    "onnxruntime": _OnnxRuntime,
    "openvino": _OpenVino,
    "litert": _LiteRt,
}
PEERS = tuple(name for name in ENGINES if name != PENSTOCK)


def _names(job: EngineJob, ports: list[list[RunValue]]) -> dict[str, RunValue]:
    """Return the engine's name of each fed input: the first entry of its port. Inputs that no
    port's entries name are taken by position."""
    if len(ports) != len(job.feeds):
        raise ValueError(f"{job.engine} has {len(ports)} inputs, Penstock {len(job.feeds)}")
    by_name = {name: port[0] for port in ports for name in port}
    if job.feeds.keys() <= by_name.keys():
        return {name: by_name[name] for name in job.feeds}
    return dict(zip(job.feeds, (port[0] for port in ports), strict=True))


def environment() -> dict[str, str]:
    """The environment variables of an engine's process: nothing is reported to anyone."""
    return {**os.environ, "DO_NOT_TRACK": "1", "ORT_DISABLE_TELEMETRY": "1"}
