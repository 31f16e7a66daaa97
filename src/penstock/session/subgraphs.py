"""Which part of a model a set of feeds, fetches and targets needs, and what it is fed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np

from penstock.analysis.type_inference import infer_types
from penstock.errors import InvalidInput
from penstock.executors.base import Executor
from penstock.ir.graph import Graph, Node, Value, clone
from penstock.ops.tensorflow.control_flow import is_framed
from penstock.passes.dead_code import cut, unfed
from penstock.session.compiler import compiling
from penstock.session.feeds import checked, convert
from penstock.types import ANY, AnyType, TensorType, Type

# Sets of feeds and fetches that are remembered.
_MOST = 256

_ndarray = np.ndarray


class Subgraph:
    """The part of a model that one set of feeds and fetches needs."""

    def __init__(self, graph: Graph, outputs: Iterable[str]) -> None:
        self.graph = graph
        self.names = tuple(value.name for value in graph.inputs)
        self.types = tuple(value.type for value in graph.inputs)
        self.dtypes = tuple(
            kind.dtype if isinstance(kind, TensorType) else None for kind in self.types
        )
        # Whether a plan depends on the dtypes of what is fed, and not on shapes alone.
        self.loose = None in self.dtypes
        self.outputs = tuple(outputs)
        self.lock = threading.Lock()  # held by the thread that compiles
        self.dropped = False  # so that nobody will ask for its plans again
        # The plan of the last run: most sessions see the same shapes again and again.
        self.last: tuple[Any, Executor | None] = (None, None)

    def values(self, feeds: Mapping[str, Any]) -> list[Any]:
        """The fed values in order, checked and converted. Raises ``KeyError`` for other names."""
        values = []
        for name, kind, dtype in zip(self.names, self.types, self.dtypes, strict=True):
            value = feeds[name]
            if value.__class__ is not _ndarray or value.dtype != dtype:
                value = convert(name, value, kind)
            values.append(value)
        if len(values) != len(feeds):
            raise KeyError
        return values

    def key(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """What of the fed values a plan depends on."""
        if self.loose:
            return tuple([(x.shape, x.dtype) if x.__class__ is _ndarray else None for x in values])
        return tuple([x.shape if x.__class__ is _ndarray else None for x in values])


class Request:
    """A signature, and its outputs in the order in which somebody wants them."""

    __slots__ = ("_reordered", "names", "signature")

    def __init__(self, signature: Subgraph, names: Sequence[str]) -> None:
        self.signature = signature
        self.names = tuple(names)
        self._reordered = self.names != signature.outputs

    def named(self, outputs: Sequence[Any]) -> dict[str, Any]:
        """The outputs of a run by name."""
        found = dict(zip(self.signature.outputs, outputs, strict=False))
        return {name: found[name] for name in self.names} if self._reordered else found


class Subgraphs:
    """The parts of one model that were asked for so far. ``main`` is what its inputs and outputs
    need, ``all`` asks for all outputs.

    ``aliases``: other names of values. ``prepare`` makes a part as simple as can be.
    """

    def __init__(
        self,
        graph: Graph,
        aliases: Mapping[str, str],
        prepare: Callable[[Graph], Graph],
    ) -> None:
        self._graph = graph
        self._aliases = aliases
        self._prepare = prepare
        self._lock = threading.Lock()
        # Both in the order of their last use. Requests are found by names in the order in which
        # they are given, signatures by sets of names.
        self._requests: OrderedDict[Any, Request] = OrderedDict()
        self._signatures: OrderedDict[Any, Subgraph] = OrderedDict()
        self._values = _values_by_name(graph)
        inputs, outputs = ([v.name for v in values] for values in (graph.inputs, graph.outputs))
        self.main = self._made(inputs, outputs, ())
        self.all = Request(self.main, outputs)

    def __len__(self) -> int:
        """How many are remembered beside the main one."""
        return len(self._signatures)

    def clear(self) -> None:
        """Forget them."""
        with self._lock:
            self._requests.clear()
            self._signatures.clear()

    def forked(self) -> None:
        """In a forked child: nobody compiles, and nobody holds a lock."""
        self._lock = threading.Lock()
        for signature in (self.main, *self._signatures.values()):
            signature.lock = threading.Lock()

    def resolve(
        self,
        feeds: Mapping[str, Any] | None,
        fetches: Sequence[str] | None,
        targets: Sequence[str] | None,
    ) -> tuple[Request, Any, list[Any]]:
        """The part of the model to run, the key of its plan, and the values fed."""
        if feeds is None:
            feeds = {}
        if feeds and self._aliases and isinstance(feeds, Mapping):
            feeds = self.renamed(feeds)
        request = self.all
        if fetches is not None or targets is not None or len(feeds) != len(self.main.names):
            request = self._request(feeds, fetches, targets)
        try:
            values = request.signature.values(feeds)
        except (KeyError, TypeError):  # perhaps other values of the model than its inputs
            request = self._request(feeds, fetches, targets)
            values = request.signature.values(feeds)
        return request, request.signature.key(values), values

    def _request(
        self,
        feeds: Mapping[str, Any],
        fetches: Sequence[str] | None,
        targets: Sequence[str] | None,
    ) -> Request:
        # A dict is one, which takes a tenth of the time to ask.
        if feeds.__class__ is not dict and not isinstance(feeds, Mapping):
            raise InvalidInput(f"feeds must map names to values, not be a {type(feeds).__name__}")
        if isinstance(fetches, str) or isinstance(targets, str):
            what, name = ("fetches", fetches) if isinstance(fetches, str) else ("targets", targets)
            raise InvalidInput(f"{what} must be a list of names; did you mean [{name!r}]?")
        fetched = self.main.outputs if fetches is None else tuple(fetches)
        key = (frozenset(feeds), fetched, tuple(targets or ()))
        with self._lock:
            found = self._requests.get(key)
            if found is not None:
                self._requests.move_to_end(key)
                return found
        signature = self._signature(
            list(feeds), dict.fromkeys(fetched), dict.fromkeys(targets or ())
        )
        with self._lock:
            found = self._requests.setdefault(
                key, Request(signature, tuple(dict.fromkeys(fetched)))
            )
            while len(self._requests) > _MOST:
                self._requests.popitem(last=False)
        return found

    def _signature(
        self, feeds: Collection[str], fetches: Collection[str], targets: Collection[str]
    ) -> Subgraph:
        """What a set of feeds, fetches and targets needs, in whatever order they are given."""
        main = self.main
        key = (frozenset(feeds), frozenset(fetches), frozenset(targets))
        if key == (frozenset(main.names), frozenset(main.outputs), frozenset()):
            return main
        with self._lock:
            found = self._signatures.get(key)
            if found is not None:
                self._signatures.move_to_end(key)
                return found
        made = self._made(feeds, fetches, targets)
        with self._lock:
            found = self._signatures.setdefault(key, made)
            while len(self._signatures) > _MOST:
                _, old = self._signatures.popitem(last=False)
                old.dropped = True
                for each in [k for k, v in self._requests.items() if v.signature is old]:
                    del self._requests[each]
        return found

    def _made(
        self, feeds: Collection[str], fetches: Collection[str], targets: Collection[str]
    ) -> Subgraph:
        with compiling():
            fed = [self.value(name, "feed") for name in feeds]
            fetched = [self.value(name, "fetch") for name in fetches]
            more, nodes = self._targets(targets)
            graph = cut(self._graph, fed, [*fetched, *more], nodes)
            missing = unfed(graph)
            if missing:
                names = ", ".join(f"{v.name!r} ({v.type})" for v in missing)
                raise InvalidInput(f"the fetches need inputs that were not fed: {names}")
            for value in graph.inputs:
                if isinstance(value.type, AnyType):
                    value.type = self._inferred.get(value.name, ANY)
                value.type = checked(value.type)
            graph = self._prepare(graph)
        return Subgraph(graph, fetches)

    @cached_property
    def _inferred(self) -> dict[str, Type]:
        """What is known of the values that the model declares no type of: dtypes, no shapes.

        Which shapes fit a value that is fed instead of computed, the graph behind it decides.
        """
        graph = clone(self._graph)
        infer_types(graph)
        return {
            name: TensorType(value.type.dtype)
            for name, value in _values_by_name(graph).items()
            if isinstance(value.type, TensorType)
        }

    def _targets(self, names: Collection[str]) -> tuple[list[Value], list[Node]]:
        """What must be computed that nobody fetches: values, or nodes. A node of a frame may run
        many times and has no one value, so that where there are frames, all are nodes."""
        values: list[Value] = []
        nodes: list[Node] = []
        for name in names:
            value = self._values.get(self._aliases.get(name, name))
            node = self._nodes.get(name) if value is None else value.producer
            if value is not None and (node is None or not self._framed):
                values.append(value)
            elif node is not None:
                nodes.append(node)
            else:
                hint = suggest(name, [*self._values, *self._aliases, *self._nodes])
                raise InvalidInput(f"no target is {name!r}: {hint}")
        return values, nodes

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        """Every node of the outermost graph that has a name."""
        return {node.name: node for node in self._graph.nodes if node.name}

    @cached_property
    def _framed(self) -> bool:
        return is_framed(self._graph)

    def renamed(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Feeds by the names that values have, not by aliases of these."""
        aliases = self._aliases
        if aliases.keys().isdisjoint(feeds):
            return feeds
        found: dict[str, Any] = {}
        for name, value in feeds.items():
            known = name if name in self._values else aliases.get(name, name)
            if known in found:
                raise InvalidInput(f"{known!r} is fed twice, once as {name!r}; feed it once")
            found[known] = value
        return found

    def value(self, name: str, role: str) -> Value:
        found = self._values.get(name)
        if found is None:
            found = self._values.get(self._aliases.get(name, name))
        if found is None:
            ports = self._graph.inputs if role == "feed" else self._graph.outputs
            hint = suggest(name, [*self._values, *self._aliases], [v.name for v in ports])
            raise InvalidInput(f"cannot {role} {name!r}: {hint}")
        return found


def _values_by_name(graph: Graph) -> dict[str, Value]:
    """Every value of the outermost graph that can be fed or fetched."""
    found = {value.name: value for value in graph.inputs}
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                found.setdefault(value.name, value)
    for value in graph.outputs:
        found.setdefault(value.name, value)
    return found


def suggest(name: str, names: Iterable[str], usual: Iterable[str] = ()) -> str:
    """What to say of a name that is none of ``names``; ``usual`` are those to be told first."""
    names = list(dict.fromkeys(names))
    alike = [other for other in names if other.casefold() == name.casefold()]
    close = alike or get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return "the model has no such value; did you mean " + " or ".join(map(repr, close)) + "?"
    shown = list(usual) or names
    more = ", ..." if len(shown) > 8 else ""
    return f"the model has no such value; it has {', '.join(map(repr, shown[:8]))}{more}"
