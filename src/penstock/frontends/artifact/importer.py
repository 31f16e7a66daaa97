"""The model of an artifact. Its graphs are decoded and verified when they are needed: a session
that only runs saved plans never needs them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.analysis.verify import verify
from penstock.artifact.container import ArtifactFile, aligned
from penstock.artifact.decode import decode_graphs, decode_type
from penstock.core.limits import Limits
from penstock.core.records import cached_property
from penstock.frontends.common.model_files import open_path
from penstock.ir.graph import Graph, Model

GRAPH, FUNCTION = "graph ", "function "
"""the prefixes of the names of graphs and of functions in the document of the model"""


def load_artifact(
    source: str | os.PathLike[str] | bytes, limits: Limits, map_weights: bool
) -> Model:
    """Return the model of an artifact, a file or its contents. Raises ``InvalidModel``."""
    path = None if isinstance(source, bytes) else os.fspath(source)
    if isinstance(source, bytes):
        file = ArtifactFile(aligned(source), "the bytes given", limits)
    else:
        with open_path(os.fspath(source)) as opened:
            file = ArtifactFile(opened, os.fspath(source), limits, mapped=map_weights)
    head = file.head
    try:
        entry, names, functions = head["entry"], head["graphs"], head["functions"]
        text = [entry, *names, *functions, *head["signatures"]]
        for key in ("metadata", "about", "aliases"):
            texts = head.get(key, {}) if key == "about" else head[key]
            text += [*texts.keys(), *texts.values()]
        if {*map(type, text)} != {str} or entry not in names:
            raise ValueError("its head has other names than strings, or no entry")
        overridable = {str(name): decode_type(x) for name, x in head.get("overridable", ())}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise file.damaged(error) from error
    decoded = _Decoded(file, limits)
    model = Model(
        _Graphs(decoded, GRAPH, names),
        entry,
        _Graphs(decoded, FUNCTION, functions),
        metadata=head["metadata"],
        about=head.get("about", {}),
        aliases=head["aliases"],
        path=path,
        resizable=bool(head.get("resizable")),
        signatures=head["signatures"],
        overridable=overridable,
        artifact=file,
    )
    if head.get("checked"):
        model.check_types = _check_types
    decoded.model = model  # the model names the graphs that the file must have
    return model


def _check_types(graph: Graph, types: Mapping[str, Any]) -> None:
    from penstock.analysis.type_constraints import check_types

    check_types(graph, types)


class _Decoded:
    """The graphs of an artifact, decoded when they are first accessed."""

    model: Model

    def __init__(self, file: ArtifactFile, limits: Limits) -> None:
        self._file = file
        self._limits = limits

    @cached_property
    def graphs(self) -> dict[str, Graph]:
        from penstock.analysis.schemas import check_schemas, nodes_of

        graphs = decode_graphs(self._file.document("model"), self._file)
        parts: dict[str, dict[str, Graph]] = {GRAPH: {}, FUNCTION: {}}
        for name, graph in graphs.items():
            for prefix, part in parts.items():
                if name.startswith(prefix):
                    part[name.removeprefix(prefix)] = graph
        model = Model(parts[GRAPH], self.model.entry, parts[FUNCTION])
        named = {*self.model.graphs}, {*self.model.functions}
        if ({*parts[GRAPH]}, {*parts[FUNCTION]}) != named:
            raise self._file.damaged("it has other graphs than its head says")
        check_schemas(nodes_of(model))
        for graph, nodes in verify(model, self._limits).items():
            graph.nodes[:] = nodes
        return graphs


class _Graphs(Mapping[str, Graph]):
    """A mapping of graphs by name, of which at first only the names are known."""

    def __init__(self, decoded: _Decoded, prefix: str, names: Sequence[str]) -> None:
        self._decoded = decoded
        self._prefix = prefix
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Graph:
        if name not in self._names:
            raise KeyError(name)
        return self._decoded.graphs[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
