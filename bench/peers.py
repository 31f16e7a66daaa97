"""Engines: how each loads a model and runs it, with a given number of threads.

With no threads, 0, it is the engine's own default.

An engine is made once in a process, which imports its library; ``load`` then gives the function
that runs one model, from inputs by name to outputs in the model's order. Nothing else is imported
here, so that what a process holds besides numpy is the engine's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

_PROFILED = 20
ONEDNN = Path(sys.prefix, "lib", "libdnnl.so.3")  # of the package onednn-cpu-gomp

Run = Callable[[dict[str, np.ndarray]], list[np.ndarray]]


class Engine(Protocol):
    """``module`` must be importable. ``reads_files``: false where a model is made in the process,
    so that the time and the memory of loading it say nothing."""

    module: ClassVar[str]
    reads_files: ClassVar[bool]

    def __init__(self, threads: int) -> None: ...

    def load(self, path: Path) -> Run: ...


class Penstock:
    module = "penstock"
    reads_files = True
    backends: ClassVar[list[str] | None] = None

    def __init__(self, threads: int) -> None:
        # Penstock imports what it needs when that is first used, its peers all of it at once: what
        # loading a model imports is imported here, so that all loads are timed without imports.
        import penstock.backends.registry
        import penstock.frontends.onnx.importer
        import penstock.session.session

        registry = penstock.backends.registry
        # Peers' libraries are there when they are imported; so are these, once they are looked for.
        for backend in self.backends or registry.available():
            importlib.import_module(registry.BACKENDS[backend].rpartition(".")[0])
        self.compile = penstock.session.session.compile
        self.threads = threads or None

    def load(self, path: Path) -> Run:
        self.session = session = self.compile(
            path, backends=self.backends, threads=self.threads, limits=self.limits()
        )
        return lambda feeds: list(session.run(feeds).values())

    def limits(self) -> Any:
        return None

    def inside(self, feeds: dict[str, np.ndarray]) -> float:
        """Seconds that a run of the model loaded last spends in kernels, each at its best."""
        from penstock.observers.profile import Profile

        profile = Profile()
        for _ in range(_PROFILED):
            self.session.run(feeds, observers=[profile])
        return sum(entry.best * entry.count for entry in profile) / _PROFILED


class PenstockOfManyShapes(Penstock):
    """With 32 MiB of plans."""

    def limits(self) -> Any:
        from penstock.core.limits import Limits

        return Limits(max_plans_bytes=2**25)


class PenstockNumpy(Penstock):
    """The backend that defines what operations mean: all outputs are compared with its."""

    backends: ClassVar[list[str] | None] = ["numpy"]


class PenstockNative(Penstock):
    """Compiled kernels alone."""

    backends: ClassVar[list[str] | None] = ["native", "numpy"]


class OnnxRuntime:
    module = "onnxruntime"
    reads_files = True

    def __init__(self, threads: int) -> None:
        import onnxruntime

        onnxruntime.disable_telemetry_events()
        self.ort = onnxruntime
        self.threads = threads

    def load(self, path: Path) -> Run:
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 4
        session = self.ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda feeds: session.run(None, feeds)


class OpenVino:
    module = "openvino"
    reads_files = True
    hint = "LATENCY"

    def __init__(self, threads: int) -> None:
        # Its reports are sent by this package alone; without it, there are none.
        sys.modules["openvino_telemetry"] = None
        import openvino

        self.core = openvino.Core()
        self.config = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": self.hint,
            "INFERENCE_NUM_THREADS": threads,
        }

    def load(self, path: Path) -> Run:
        compiled = self.core.compile_model(path, "CPU", self.config)
        client = threading.local()  # requests cannot be shared

        def run(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            if not hasattr(client, "request"):
                client.request = compiled.create_infer_request()
            return list(client.request.infer(feeds).values())

        return run


class OpenVinoOfManyRequests(OpenVino):
    """As it divides its threads among requests that come at the same time."""

    hint = "THROUGHPUT"


class LiteRt:
    """Its default kernels and delegate."""

    module = "ai_edge_litert"
    reads_files = True

    def __init__(self, threads: int) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self.open, self.threads = Interpreter, threads or None

    def load(self, path: Path, shapes: Mapping[str, Sequence[int]] | None = None) -> Run:
        """``shapes``: those of the inputs, where they are other than the file declares."""
        interpreter = self.open(model_path=str(path), num_threads=self.threads)
        for detail in interpreter.get_input_details() if shapes else ():
            interpreter.resize_tensor_input(detail["index"], shapes[detail["name"]])
        interpreter.allocate_tensors()
        fed = [(detail["index"], detail["name"]) for detail in interpreter.get_input_details()]
        fetched = [detail["index"] for detail in interpreter.get_output_details()]

        def run(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            for index, name in fed:
                interpreter.set_tensor(index, feeds[name])
            interpreter.invoke()
            return [interpreter.get_tensor(index) for index in fetched]

        return run


class OneDnn:
    """Primitives of oneDNN, for models of one operation."""

    module = "onnx"
    reads_files = True

    def __init__(self, threads: int) -> None:
        from bench import onednn

        self.library, self.load_operation = onednn.Library(ONEDNN, threads), onednn.load

    def load(self, path: Path) -> Run:
        self.operation, run = self.load_operation(self.library, path)
        return run


class Torch:
    """The module that the ONNX file was exported from, made again, with the same weights."""

    module = "transformers"
    reads_files = False

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.torch = torch

    def load(self, path: Path) -> Run:
        from bench.exports import make

        module = self.prepare(make(path.stem))

        def run(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            with self.torch.inference_mode():
                return [module(*map(self.torch.from_numpy, feeds.values())).numpy()]

        return run

    def prepare(self, module):
        return module


class TorchCompiled(Torch):
    def prepare(self, module):
        return self.torch.compile(module)


ENGINES: dict[str, type[Engine]] = {
    "penstock": Penstock,
    "penstock-numpy": PenstockNumpy,
    "penstock-native": PenstockNative,
    "penstock-shapes": PenstockOfManyShapes,
    "onnxruntime": OnnxRuntime,
    "onednn": OneDnn,
    "litert": LiteRt,
    "openvino": OpenVino,
    "openvino-throughput": OpenVinoOfManyRequests,
    "torch": Torch,
    "torch-compiled": TorchCompiled,
}
REFERENCE = "penstock-numpy"
PEERS = ["onnxruntime", "openvino", "torch", "torch-compiled"]


def installed(engine: str) -> bool:
    if engine == "onednn":  # its package has no module
        return ONEDNN.exists()
    return importlib.util.find_spec(ENGINES[engine].module) is not None


def environment(cache: Path, checkout: str | None = None) -> dict[str, str]:
    """The environment variables of an engine's process, which may keep files in ``cache``; with
    ``checkout``, it imports the Penstock of that folder instead of the one imported here."""
    # Folders of PYTHONPATH come before site-packages, which name the folder of this one.
    own = {"PYTHONPATH": str(Path(checkout, "src"))} if checkout else {}
    return {
        **os.environ,
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "ORT_DISABLE_TELEMETRY": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        **own,
    }
