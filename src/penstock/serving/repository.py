"""The models of a server, by name and version, which can be loaded, reloaded and unloaded.

A folder of versions is a model, as in a Triton repository; any other path is the model's only
version, 1::

    models/
        mobilenet/1/model.penstock      versions are numbers, and each has one model
        mobilenet/2/model.onnx          the highest is the default
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import time
from typing import TypeAlias

from penstock.core.errors import InvalidInput, PenstockError
from penstock.core.types import JsonObject
from penstock.serving.histogram import Histogram
from penstock.serving.protocol import InferenceRequest, describe_port
from penstock.serving.refusals import HasPorts
from penstock.serving.replicas import Replicas
from penstock.serving.sequences import SequenceRun, Sequences
from penstock.session.ahead import compile_ahead

PLATFORM = "penstock"

Served: TypeAlias = "Replicas | Sequences"
"""runs the requests of a model, stateless or with state"""


class UnknownModel(PenstockError):  # noqa: N818
    """A request names a model or a version that the server does not have."""


class Durations:
    """The number of requests, and their total nanoseconds."""

    def __init__(self) -> None:
        self.count = self.ns = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += round(seconds * 1e9)

    def describe(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


class ServedModel:
    """One version of a model, and the statistics of its requests. ``inputs`` and ``outputs``: those
    for which the protocol has a datatype."""

    def __init__(self, name: str, version: str, replicas: Served) -> None:
        self.name = name
        self.version = version
        self.replicas = replicas
        session = replicas.session
        # Clients do not see the state of a stateful model.
        self.ports: HasPorts = replicas if isinstance(replicas, Sequences) else session
        try:
            compile_ahead(session)  # now, while no request waits
        except BaseException:
            replicas.close()
            raise
        fixed = replicas.fixed if isinstance(replicas, Sequences) else []
        ports = [describe_port(port.name, port.type) for port in (*self.ports.inputs, *fixed)]
        self.inputs = [port for port in ports if port is not None]
        ports = [describe_port(port.name, port.type) for port in self.ports.outputs]
        self.outputs = [port for port in ports if port is not None]
        everything = len(self.outputs) == len(ports)
        self.fetches = None if everything else [port["name"] for port in self.outputs]
        """the fetches of requests that name no outputs (None: all outputs)"""
        self.succeeded, self.failed = Durations(), Durations()
        self.last = 0
        self._lock = threading.Lock()

    def runner_of(self, asked: InferenceRequest) -> Replicas | SequenceRun:
        """Return the runner of a request. Raises ``InvalidInput`` if it belongs to a sequence and
        the model has none, or the other way round."""
        if isinstance(self.replicas, Sequences):
            return self.replicas.of(asked.sequence)
        if asked.sequence is not None:
            raise InvalidInput(
                f'the request has a "sequence_id", but model {self.name!r} is served without '
                "state: start the server with penstock serve --stateful"
            )
        return self.replicas

    def record(self, seconds: float, ok: bool) -> None:
        """Count a request that has ended."""
        with self._lock:
            (self.succeeded if ok else self.failed).add(seconds)
            # In milliseconds since 1970, as Triton's statistics have it.
            self.last = round(time() * 1000)

    def configuration(self) -> JsonObject:
        """Return the model's configuration in Triton's format: its tensors, and batching."""
        replicas = self.replicas
        # Triton's maximum batch size; dims are then those of one row.
        most = replicas.max_batch if replicas.max_batch > 1 else 0

        def ports(of: list[JsonObject]) -> list[JsonObject]:
            return [
                {
                    "name": port["name"],
                    "data_type": "TYPE_" + port["datatype"].replace("BYTES", "STRING"),
                    "dims": port["shape"][1:] if most else port["shape"],
                }
                for port in of
            ]

        delay = round(replicas.max_delay * 1e6)
        batching = {"dynamic_batching": {"max_queue_delay_microseconds": delay}} if most else {}
        if isinstance(replicas, Sequences):
            batching = replicas.configuration()
        return {
            "name": self.name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": most,
            "input": ports(self.inputs),
            "output": ports(self.outputs),
            "instance_group": [{"count": replicas.count, "kind": "KIND_CPU"}],
            **batching,
        }

    def statistics(self) -> JsonObject:
        counts, histograms = self.replicas.counts, self.replicas.histograms
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": self.last,
            "inference_count": self.succeeded.count,
            "execution_count": counts.batches,
            "inference_stats": {
                "success": self.succeeded.describe(),
                "fail": self.failed.describe(),
                "queue": _durations(histograms.queue_seconds),
                "compute_infer": _durations(histograms.compute_seconds),
            },
        }


def _durations(of: Histogram) -> dict[str, int]:
    return {"count": of.count, "ns": round(of.total * 1e9)}


class ModelRepository:
    """The models at ``paths``, by name. ``make`` compiles the model at a path; ``own`` maps some
    names to other functions. The constructor loads all models, and raises errors of ``make``."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        make: Callable[[Path], Served],
        own: Mapping[str, Callable[[Path], Served]] | None = None,
    ) -> None:
        self._paths = dict(paths)
        self._make, self._own = make, own or {}
        self._lock = threading.Lock()
        self._models: dict[str, dict[str, ServedModel]] = {}
        for name in self._paths:
            self.load(name)

    def find(self, name: str, version: str | None = None) -> ServedModel:
        """Return a version of a model, by default the highest. Raises ``UnknownModel``."""
        # Without the lock: versions of a model are replaced as a whole, and never changed.
        versions = self._models.get(name)
        if not versions:
            have = ", ".join(map(repr, list(self._models))) or "none"
            raise UnknownModel(f"unknown model {name!r}; available are {have}")
        found = versions.get(version or max(versions, key=int))
        if found is None:
            raise UnknownModel(
                f"model {name!r} has no version {version!r}; available are {', '.join(versions)}"
            )
        return found

    def versions(self, name: str) -> list[str]:
        """Return the loaded versions of a model."""
        return sorted(self._models.get(name, ()), key=int)

    def all(self) -> list[ServedModel]:
        """Return all loaded versions of all models."""
        # A copy of the list, since models may be loaded meanwhile.
        return [model for versions in list(self._models.values()) for model in versions.values()]

    def load(self, name: str) -> None:
        """Load all versions of a model from its path. Once all are loaded they replace the current
        versions, which finish the requests that they have begun."""
        path = self._paths.get(name)
        if path is None:
            raise UnknownModel(
                f"model {name!r} has no path; models with paths are {', '.join(self._paths)}"
            )
        make = self._own.get(name, self._make)
        with self._lock:
            versions: dict[str, ServedModel] = {}
            try:
                for version, file in _versions(path).items():
                    versions[version] = ServedModel(name, version, make(file))
            except BaseException:
                _close(versions)
                raise
            # In one step: ``find`` looks without the lock.
            before, self._models[name] = self._models.get(name, {}), versions
        # Without the lock: closing waits for runs, and other models may be loaded meanwhile.
        _close(before)

    def unload(self, name: str) -> None:
        """Stop serving a model; running requests end normally."""
        with self._lock:
            versions = self._models.pop(name, None)
        if versions is None:
            raise UnknownModel(f"model {name!r} is not loaded")
        _close(versions)

    def index(self) -> list[dict[str, str]]:
        """Return all models with paths, and whether each is loaded."""
        entries = []
        for name in self._paths:
            versions = self.versions(name)
            entries += [{"name": name, "version": v, "state": "READY"} for v in versions]
            if not versions:
                entries.append({"name": name, "state": "UNAVAILABLE", "reason": "unloaded"})
        return entries

    def close(self) -> None:
        """Unload all models."""
        for name in list(self._models):
            self.unload(name)


def _close(versions: Mapping[str, ServedModel]) -> None:
    for model in versions.values():
        model.replicas.close()


def _versions(path: Path) -> dict[str, Path]:
    """Return the paths of a model's versions."""
    folders = [p for p in path.iterdir() if p.name.isdecimal()] if path.is_dir() else []
    versions = {}
    for folder in sorted(folders, key=lambda folder: int(folder.name)):
        files = [p for p in folder.iterdir() if not p.name.startswith(".")]
        if len(files) != 1:
            raise PenstockError(f"{folder} must contain exactly one model file, not {len(files)}")
        versions[folder.name] = files[0]
    return versions or {"1": path}
