"""Packages of TFLite and Circle models, as a folder or a zip file, converted to one graph.

The manifest connects outputs of models to inputs of others. The entries of all models become one
graph, whose names are made unique. A package is not trusted: its files must lie inside it, and a
file in a zip is read only up to the size that the limits allow.
"""

from __future__ import annotations

import json
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from posixpath import normpath
from typing import Any, BinaryIO, cast

from penstock.core.errors import InvalidModel, shortened
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.types import dtype_name
from penstock.frontends.common.builder import NodeBuilder, UniqueNames
from penstock.frontends.common.diagnostics import InexpressibleError
from penstock.frontends.common.inferred_types import InferredTypes
from penstock.frontends.common.model_files import open_inside, open_path
from penstock.frontends.tflite.conversion import dequantized, emit_quantized
from penstock.frontends.tflite.importer import FileTotals, importing
from penstock.frontends.tflite.tensors import DeclaredTensor
from penstock.ir.graph import Graph, Model, Value
from penstock.ops.common.shape_rules import element_number

MANIFEST = "metadata/MANIFEST"
_MAX_TEXT = 2**20
_CHUNK = 2**20
_MAX_GROWTH = 1100  # deflate expands a byte to at most 1032
_MAX_MODELS = 1024
_TYPES = ("tflite", "circle")


def is_package(source: Path | bytes) -> bool:
    """Whether a folder or a zip file has a manifest."""
    if isinstance(source, Path) and source.is_dir():
        return (source / MANIFEST).exists()
    with _opened(source) as file:
        if file.read(4) != b"PK\x03\x04":
            return False
        try:
            return _top(zipfile.ZipFile(file)) is not None
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            return False


def load_package(
    source: Path | bytes, limits: Limits = DEFAULT_LIMITS, map_weights: bool = False
) -> Model:
    """Read a package. Raises ``InvalidModel`` for violations of the format or of ``limits``, which
    bound all of its files together, and ``Unsupported`` for operators without a kernel. Models in a
    folder are mapped into memory if ``map_weights``; those in a zip file are always read."""
    path = source if isinstance(source, Path) else Path("the bytes given")
    if path.is_dir() and path is source:
        return _Package(path, partial(open_inside, path), limits, map_weights).model()
    with _opened(source) as file, zipfile.ZipFile(file) as archive:
        # Programs that unpack such a file differ in which of them they use.
        if len(archive.infolist()) > len(archive.NameToInfo):
            raise InvalidModel(f"the package {path.name!r} has several files of one name")
        opened = partial(_open_entry, archive, _top(archive) or "")
        model = _Package(path, opened, limits, False).model()
        model.path = None if isinstance(source, bytes) else model.path
        return model


def _opened(source: Path | bytes) -> BinaryIO:
    return BytesIO(source) if isinstance(source, bytes) else open_path(source)


def _top(archive: zipfile.ZipFile) -> str | None:
    """Return the prefix of the names of a package's files in a zip: "", or the one folder that
    was packed; ``None`` without a manifest."""
    tops = {name.partition("/")[0] + "/" for name in archive.namelist()}
    places = ("", *tops) if len(tops) == 1 else ("",)
    return next((top for top in places if top + MANIFEST in archive.NameToInfo), None)


def _open_entry(archive: zipfile.ZipFile, top: str, name: str) -> BinaryIO:
    """Open a file of a zip. Raises ``ValueError`` with a reason."""
    if name.startswith("/") or ".." in name.replace("\\", "/").split("/"):
        raise ValueError("that leads out of the package")
    entry = archive.NameToInfo.get(top + normpath(name))
    if entry is None:
        raise ValueError("there is no such file")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("that is compressed by another method than deflate")
    # The upper half is the mode of Unix, or 0 if the archive was created elsewhere.
    if (entry.external_attr >> 16) & 0o170000 not in (0, 0o100000):
        raise ValueError("that is a symbolic link or no regular file; pack the file")
    if entry.file_size > _MAX_GROWTH * (entry.compress_size + 1):
        raise ValueError("that says to expand further than deflate can")
    try:
        return cast(BinaryIO, archive.open(entry))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
        raise ValueError(str(error)) from error


def _read(file: BinaryIO, most: int) -> bytes:
    """Return the contents of a file. Raises ``ValueError`` if it has more than ``most`` bytes or is
    damaged."""
    parts: list[bytes] = []  # read(n) of a large n would first allocate n bytes
    try:
        while part := file.read(min(_CHUNK, most + 1)):
            parts.append(part)
            most -= len(part)
            if most < 0:
                raise ValueError("with it, the package has more bytes than its limit")
    except (zipfile.BadZipFile, EOFError, OSError, zlib.error) as error:
        raise ValueError(str(error)) from error
    return b"".join(parts)


class _Package:
    """A package. ``open_file`` opens one of its files, or raises ``ValueError`` with a reason."""

    def __init__(
        self, path: Path, open_file: Callable[[str], BinaryIO], limits: Limits, map_weights: bool
    ) -> None:
        self.path, self.open_file, self.limits = path, open_file, limits
        self.map_weights = map_weights
        self.totals = FileTotals()
        self.manifest = self.read_manifest()
        self.graphs: list[Graph] = []
        self.declared: dict[Value, DeclaredTensor] = {}

    def fault(self, message: str) -> InvalidModel:
        return InvalidModel(f"the package {self.path.name!r} {message}")

    def opened(self, name: Any) -> BinaryIO:
        try:
            if not isinstance(name, str):
                raise ValueError("that is not the name of a file")
            return self.open_file(name)
        except ValueError as error:
            raise self.fault(f"lists {name!r}, which cannot be read: {error}") from error

    def read(self, name: Any, most: int) -> bytes:
        with self.opened(name) as file:
            try:
                return _read(file, most)
            except ValueError as error:
                raise self.fault(f"lists {name!r}, which cannot be read: {error}") from error

    def read_manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads(self.read(MANIFEST, _MAX_TEXT))
        except (ValueError, RecursionError) as error:
            raise self.fault(f"has a {MANIFEST} that is not JSON: {error}") from error
        if not isinstance(manifest, dict):
            raise self.fault(f"has a {MANIFEST} that is not a JSON object")
        return manifest

    def entries(self, key: str) -> list[Any]:
        entries = self.manifest.get(key, [])
        if not isinstance(entries, list):
            raise self.fault(f"has {key!r} that is not a list")
        return entries

    def model(self) -> Model:
        names, types = self.entries("models"), self.entries("model-types")
        if not 0 < len(names) <= _MAX_MODELS:
            raise self.fault(f"lists {len(names)} models, not 1 to {_MAX_MODELS}")
        if types and (len(types) != len(names) or any(type not in _TYPES for type in types)):
            raise self.fault(f"has model types {types!r}: each model needs one of {_TYPES}")
        models = [
            self.import_model(name, type_)
            for name, type_ in zip(names, types or [None] * len(names), strict=True)
        ]
        self.graphs = [model.graph for model in models]
        fed = self.connect()
        inputs = self.ports(
            "pkg-inputs", [v for g in self.graphs for v in g.inputs if v not in fed]
        )
        sources = set(fed.values())
        outputs = [v for g in self.graphs for v in g.outputs if v not in sources]
        outputs = self.ports("pkg-outputs", outputs)
        if missing := [
            v.name for g in self.graphs for v in g.inputs if (v in fed) == (v in inputs)
        ]:
            raise self.fault(f"must feed input {missing[0]!r} once: by an input or an edge")
        self.rename(inputs + outputs)
        nodes = [node for graph in self.graphs for node in graph.nodes]
        graph = Graph(inputs, outputs, nodes, "main")
        return Model(
            {"main": graph},
            "main",
            metadata=models[0].metadata,
            path=str(self.path),
            aliases=models[0].aliases if len(models) == 1 else {},
            structure=self.structure(models, inputs, outputs),
            options=self.options(),
            resizable=True,
        )

    def import_model(self, name: Any, type_: str | None) -> Model:
        source: Any = partial(self.opened, name)
        if not self.path.is_dir():
            most = sys.maxsize if self.limits.max_bytes is None else self.limits.max_bytes
            # The sizes that a zip declares need not be true.
            source = self.read(name, most - self.totals.size)
        title = f"{shortened(str(name))} in {self.path.name}"
        with importing(
            source, title, self.limits, self.map_weights, self.totals, type_
        ) as importer:
            model = importer.model()
            self.declared |= importer.ports(model.graph)
            return model

    def options(self) -> dict[str, str]:
        """The settings of the configuration file, by key."""
        options = {}
        for file in self.entries("configs")[:1]:
            text = self.read(f"metadata/{file}", _MAX_TEXT).decode("utf-8", "replace")
            for line in map(str.strip, text.splitlines()):
                key, _, value = line.partition("=")
                if line and not line.startswith("#"):
                    options[key.strip()] = value.strip().strip("\"'")
        return options

    def structure(
        self, models: Sequence[Model], inputs: Sequence[Value], outputs: Sequence[Value]
    ) -> dict[str, list[str]]:
        """Describe the parts of the package, in lines by title."""
        names = [f"{i}: {name}" for i, name in enumerate(self.entries("models"))]
        places = {
            value: f"{index}:0:{io} {shortened(value.name)}"
            for index, graph in enumerate(self.graphs)
            for values in (graph.inputs, graph.outputs)
            for io, value in enumerate(values)
        }
        structure = {
            "models": names,
            "pkg-inputs": [places[value] for value in inputs],
            "pkg-outputs": [places[value] for value in outputs],
            "connections": [
                f"{shortened(edge['from'])} -> {shortened(', '.join(edge['to']))}"
                for edge in self.entries("model-connect")
            ],
        }
        for index, model in enumerate(models):
            for title, lines in model.structure.items():
                structure[f"{title} of model {index}"] = lines
        return structure

    def port(self, place: Any, inputs: bool) -> Value:
        """Return the value of ``model:subgraph:io``."""
        parts = place.split(":") if isinstance(place, str) else []
        if len(parts) == 3 and all(p.isascii() and p.isdigit() and len(p) < 9 for p in parts):
            model, subgraph, io = map(int, parts)
            if model < len(self.graphs) and subgraph == 0:
                graph = self.graphs[model]
                values = graph.inputs if inputs else graph.outputs
                if io < len(values):
                    return values[io]
        side = "input" if inputs else "output"
        raise self.fault(f"refers to {place!r}, which is no {side} of a model's first subgraph")

    def ports(self, key: str, otherwise: list[Value]) -> list[Value]:
        values = [self.port(place, key == "pkg-inputs") for place in self.entries(key)]
        if len(set(values)) < len(values):
            raise self.fault(f"lists a tensor twice in {key!r}")
        return values or otherwise

    def connect(self) -> dict[Value, Value]:
        """Replace the inputs at the ends of edges by the outputs at their starts."""
        fed: dict[Value, Value] = {}
        for edge in self.entries("model-connect"):
            if not isinstance(edge, dict) or not isinstance(edge.get("to"), list):
                raise self.fault("has an edge that is not an object with 'from' and 'to'")
            source = self.port(edge.get("from"), inputs=False)
            if source.producer is None:
                raise self.fault(f"has an edge from {source.name!r}, an input that is passed on")
            for place in edge["to"]:
                target = self.port(place, inputs=True)
                if target in fed:
                    raise self.fault(f"feeds {place!r} by two edges")
                fed[target] = source
        converted = {target: self.converted(fed[target], target) for target in fed}
        for graph in [g for entry in self.graphs for g in entry.graphs()]:
            graph.outputs = [converted.get(value, value) for value in graph.outputs]
            for node in graph.nodes:
                node.inputs = [None if v is None else converted.get(v, v) for v in node.inputs]
        return fed

    def converted(self, source: Value, target: Value) -> Value:
        """Return the value that feeds ``target``: ``source``, converted if its element type
        differs, or if both are quantized and their integers represent different numbers."""
        dtype, given, _ = self.declared[source]
        wanted_dtype, wanted, _ = self.declared[target]
        alike = given is None or wanted is None or given.equals(wanted)
        if str(dtype) == str(wanted_dtype) and alike:
            return source
        if dtype is None or wanted_dtype is None or "O" in (dtype.kind, wanted_dtype.kind):
            kinds = ["handle" if t is None else dtype_name(t) for t in (dtype, wanted_dtype)]
            edge = f"{source.name!r} to {target.name!r}, from {' to '.join(kinds)}"
            raise self.fault(f"has an edge from {edge}, which cannot be converted")
        name = f"{source.name}_to_{target.name}"
        builder = NodeBuilder(name, [source], [], {}, types=InferredTypes(), origin=name)
        try:
            real = source if given is None else dequantized(builder, source, given)
        except InexpressibleError as error:
            raise self.fault(f"has an edge from {source.name!r}: {error}") from error
        result = Value(name)
        if wanted is None:
            to = element_number(wanted_dtype.name)
            builder.append("Cast", "", [real], [result], {"to": to}, name)
        else:
            emit_quantized(builder, real, wanted, result, wanted_dtype)
        # Into any of them: the nodes of all models become those of one graph, sorted later.
        self.graphs[0].nodes += builder.nodes
        return result

    def rename(self, ports: list[Value]) -> None:
        """Give each value and node a unique name, those of the package first."""
        names = UniqueNames(list, numbered="{}#{}")
        values = dict.fromkeys(ports)
        for model, entry in enumerate(self.graphs):
            for graph in entry.graphs():
                values.update(dict.fromkeys(graph.inputs))
                for node in graph.nodes:
                    node.name = f"{model}/{node.name}" if len(self.graphs) > 1 else node.name
                    both = (*node.inputs, *node.outputs)
                    values.update(dict.fromkeys(v for v in both if v is not None))
        for value in values if len(self.graphs) > 1 else ():
            value.name = names.unique(value.name)
