"""The subgraphs of a model: which part a set of feeds, fetches and targets needs."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock.compiler.subgraph import NO_PLAN, Extract, Subgraph, compile_guard
from penstock.core.errors import MAX_PROBLEMS, InvalidInput, quoted, suggest
from penstock.core.records import NamedTuple, cached_property
from penstock.core.types import (
    ANY,
    AnyType,
    DataFrame,
    Feeds,
    NamedValues,
    RunValue,
    RunValues,
    TensorType,
    Type,
)
from penstock.host.fork import shared_lock
from penstock.ir.graph import Graph, Node, Value, captures, clone, is_framed

if TYPE_CHECKING:
    from penstock.compiler.compiler import Compiler

_LOCK = shared_lock()  # one lock for all sessions, since only new requests take it
MAX_SUBGRAPHS = 256
"""subgraphs, and requests for them, that a session remembers in addition to its main one"""


class Request(NamedTuple):
    """A subgraph, and its outputs in the order that the caller asked for. ``others``: their own
    names where the caller gave other ones."""

    subgraph: Subgraph
    names: tuple[str, ...]
    others: Mapping[str, str] = MappingProxyType({})

    def named(self, outputs: RunValues) -> dict[str, RunValue]:
        """Return the outputs of a run by name."""
        own = self.subgraph.outputs
        by_name = dict(zip(own, outputs, strict=False))  # the outputs of targets come last
        if self.names == own:
            return by_name
        return {name: by_name[self.others.get(name, name)] for name in self.names}


class Subgraphs:
    """The subgraphs of one model that were requested so far; the least recently used are dropped.

    ``main`` is the subgraph from the model's inputs to its outputs; the caller may pass it.
    ``all`` is the request for all of these outputs. ``graph`` returns the whole model's graph.
    ``aliases``: other names of values. ``compiler`` simplifies the graphs of new subgraphs, and
    ``on_evict`` is called with each subgraph that is dropped.
    """

    def __init__(
        self,
        graph: Callable[[], Graph],
        aliases: Mapping[str, str],
        compiler: Compiler,
        on_evict: Callable[[Subgraph], None],
        main: Subgraph | None = None,
    ) -> None:
        self._graph = graph
        self._made_graph: dict[str, Graph] = {}
        self._aliases = aliases
        self._compiler = compiler
        self._on_evict = on_evict
        self.packs = ""
        """which rows that a mask hides runs leave out, as ``PackRows`` says; empty for none"""
        self.devices: Any = None
        """the ``DevicePorts`` of a session with backends on devices"""
        self.ports_only = False
        """whether only the model's inputs may be fed and only its outputs fetched, since other
        values may soon be gone"""
        # Requests by names in the given order, for speed; reading and setting one are atomic.
        self._requests: dict[Any, Request] = {}
        # Subgraphs by sets of names, in the order of their last use.
        self._subgraphs: OrderedDict[Any, Subgraph] = OrderedDict()
        self._whole: Extract | None = None
        if main is None:
            fed = tuple([value.name for value in self.graph.inputs])
            names = {value: name for name, value in self._shared.items()}
            fetched = tuple([names.get(value.name, value.name) for value in self.graph.outputs])
            self._whole = Extract(fed, fetched)
            main = self.extracted(self._whole, compiler)
        self.main = main
        self._main_key = (frozenset(main.names), frozenset(main.outputs), frozenset[str]())
        self.all = Request(main, main.outputs)

    @property
    def graph(self) -> Graph:
        """The graph of the whole model."""
        # Atomic, so that all threads get the same graph, whose values are looked up by name.
        return self._made_graph.get("") or self._made_graph.setdefault("", self._graph())

    @cached_property
    def values(self) -> dict[str, Value]:
        """Every value that can be fed or fetched, by name."""
        return _values_by_name(self.graph)

    @cached_property
    def _shared(self) -> dict[str, str]:
        """The inputs by names that are also aliases of outputs: such a name means the input when
        it is fed and the output when it is fetched."""
        outputs = {value.name for value in self.graph.outputs}
        aliases = {value.name: self._aliases.get(value.name, "") for value in self.graph.inputs}
        return {name: value for name, value in aliases.items() if value in outputs}

    def __len__(self) -> int:
        """The number of subgraphs that are remembered in addition to the main one."""
        return len(self._subgraphs)

    def clear(self) -> None:
        """Forget all subgraphs except the main one."""
        with _LOCK:
            self._requests.clear()
            self._subgraphs.clear()

    def forked(self) -> None:
        """Make new locks in a forked child, where no thread would release the old ones."""
        for subgraph in (self.main, *self._subgraphs.values()):
            subgraph.lock = threading.RLock()

    def resolve(
        self,
        feeds: Feeds | None,
        fetches: Sequence[str] | None,
        targets: Sequence[str] | None,
        stay: bool = False,
    ) -> tuple[Request, Any, list[Any]]:
        """Return the request, the key of its plan, and the fed values. With ``stay``, results stay
        on the device that computes them. Raises ``InvalidInput``."""
        if fetches is not None and isinstance(fetches, Mapping):
            raise InvalidInput(self._swapped(feeds, fetches))
        if feeds is None:
            feeds = {}
        # A dict is a Mapping, and comparing classes takes a tenth of the time of isinstance.
        if feeds.__class__ is not dict and not isinstance(feeds, Mapping):
            feeds = self._columns(feeds)
        if feeds and self._aliases:
            feeds = self._without_aliases(feeds)
        if self.devices is not None:
            fed = self.devices.fed(feeds)
            if fed or stay:
                request = self._request(feeds, fetches, targets)
                subgraph, feeds = self.devices.variant(request.subgraph, feeds, fed, stay)
                values = subgraph.values(feeds)
                request = request._replace(subgraph=subgraph)
                return request, subgraph.key(values), values
        request = self.all
        if fetches is not None or targets is not None or len(feeds) != len(self.main.names):
            request = self._request(feeds, fetches, targets)
        try:
            values = request.subgraph.values(feeds)
        except (KeyError, TypeError):  # perhaps other values of the model than its inputs
            feeds = dict(feeds)  # a copy, since another thread may change the caller's
            request = self._request(feeds, fetches, targets)
            values = request.subgraph.values(feeds)
        packed = self.packed(request.subgraph, values)
        if packed is not request.subgraph:
            request = request._replace(subgraph=packed)
        return request, request.subgraph.key(values), values

    def packed(self, subgraph: Subgraph, values: RunValues) -> Subgraph:
        """Return the variant that leaves out the rows that a mask among the values hides, or
        ``subgraph`` if no mask does."""
        if not self.packs or subgraph.not_packed or not subgraph.masks:
            return subgraph
        from penstock.compiler.padding import unpadded

        if self._compiler.context.options.reproducible:  # padding may change bits of other rows
            subgraph.least_mask = 0
        return unpadded(subgraph, values, self.packs) or subgraph

    def _columns(self, table: DataFrame) -> NamedValues:
        """Return the columns of a table (a DataFrame of pandas or polars) that are inputs of the
        model. Raises ``InvalidInput`` for other objects and for missing columns."""
        if not hasattr(table, "columns"):
            raise InvalidInput(
                f"feeds must map names to values, not be a {type(table).__name__}; write "
                f"run({{{', '.join(f'{name!r}: ...' for name in self.main.names)}}}), or call the "
                "session with inputs by position"
            )
        columns = [*table.columns]
        if missing := [name for name in self.main.names if name not in columns]:
            raise InvalidInput(
                f"the {type(table).__name__} has no columns of the names of these inputs: "
                f"{', '.join(map(quoted, missing[:MAX_PROBLEMS]))}. For a model with one input, "
                "call the session with the table, or feed it by the name of the input"
            )
        return {name: table[name] for name in self.main.names}

    @staticmethod
    def _swapped(feeds: Any, fetches: Mapping[str, Any]) -> str:
        """Return the call to write instead of one with arguments in ONNX Runtime's order."""
        fed = f"{{{', '.join(f'{str(name)[:40]!r}: ...' for name in fetches)}}}"
        named = isinstance(feeds, list | tuple) and all(isinstance(n, str) for n in feeds)
        call = f"run({fed}, {list(feeds)!r:.200})" if named and feeds else f"run({fed})"
        return (
            f"run takes feeds first and the names to fetch second: write {call}. It returns a "
            "mapping of names to values; penstock.compat.onnxruntime has ONNX Runtime's interface"
        )

    def _request(
        self, feeds: NamedValues, fetches: Sequence[str] | None, targets: Sequence[str] | None
    ) -> Request:
        for option, names in (("fetches", fetches), ("targets", targets)):
            if isinstance(names, str):
                raise InvalidInput(f"{option} must be a list of names; did you mean [{names!r}]?")
        try:
            fetched = self.main.outputs if fetches is None else tuple(fetches)
            targeted = () if targets is None else tuple(targets)
            fed = tuple(feeds)  # read once: another thread may change them
            key = (frozenset(fed), fetched, targeted)
            request = self._requests.get(key)
        except TypeError as error:
            message = f"fetches and targets must be lists of names, which are strings: {error}"
            raise InvalidInput(message) from error
        if request is None:
            for name in (*fed, *fetched, *targeted):
                if not isinstance(name, str):
                    raise InvalidInput(
                        f"feeds, fetches and targets have names, which are strings; {name!r:.40} "
                        "is none"
                    )
            outputs = tuple(dict.fromkeys(fetched))
            others = self._others(outputs)
            own = [others.get(name, name) for name in outputs]
            request = Request(self._subgraph(fed, own, targeted), outputs, others)
            # Orders of names are many, and each is cheap to resolve again: no order of use is kept.
            if len(self._requests) >= MAX_SUBGRAPHS:
                self._requests.clear()
            self._requests[key] = request
        return request

    def _others(self, fetched: Sequence[str]) -> Mapping[str, str]:
        """Return the names of the main outputs that are fetched by other names of theirs, if all
        of these are: their plan is there, or will be."""
        own = {name: self._aliases[name] for name in fetched if name in self._aliases}
        are_all = len(fetched) == len(self.main.outputs) and {*own.values()} == {*self.main.outputs}
        return own if are_all and self.values.keys().isdisjoint(own) else {}

    def _subgraph(
        self, feeds: Collection[str], fetches: Collection[str], targets: Collection[str]
    ) -> Subgraph:
        """Return the subgraph of feeds, fetches and targets in any order."""
        key = (frozenset(feeds), frozenset(fetches), frozenset(targets))
        if key == self._main_key:  # the main subgraph is never forgotten
            return self.main
        if self.ports_only:
            self._check_ports(feeds, (*fetches, *targets))
        with _LOCK:
            subgraph = self._subgraphs.get(key)
            if subgraph is not None:
                self._subgraphs.move_to_end(key)
                return subgraph
        # Done without the lock: simplifying a graph may take long, and threads that ask for other
        # subgraphs must not wait.
        extract = Extract(tuple(feeds), tuple(fetches), tuple(dict.fromkeys(targets)))
        extracted = self.extracted(extract, self._compiler)
        with _LOCK:
            subgraph = self._subgraphs.setdefault(key, extracted)
            excess = max(0, len(self._subgraphs) - MAX_SUBGRAPHS)
            evicted = [self._subgraphs.popitem(last=False)[1] for _ in range(excess)]
        for oldest in evicted:
            # Some of the requests may refer to the subgraph that is forgotten.
            self._requests.clear()
            self._on_evict(oldest)
        return subgraph

    def extracted(self, extract: Extract, compiler: Compiler) -> Subgraph:
        """Return the part of the model that ``extract`` selects, simplified by ``compiler``."""
        with compile_guard():
            graph = self._cut(extract)
            subgraph = Subgraph(graph, extract.fetches, compiler.structure(graph))
        subgraph.extract = extract
        return subgraph

    def fix_shapes(self) -> None:
        """Have a plan for each set of shapes from now on: none with open dims, and none without
        rows that a mask hides, which would be looked for in the graph."""
        self.main.varying.fixed = True
        self.packs = ""

    def restrict(self) -> None:
        """Accept only feeds of inputs and fetches of outputs from now on; forget the others."""
        self.ports_only = True
        with _LOCK:
            self._requests.clear()
            keys = [key for key in self._subgraphs if self._inside(key[0], key[1] | key[2])]
            forgotten = [self._subgraphs.pop(key) for key in keys]
        for subgraph in forgotten:
            self._on_evict(subgraph)

    def _inside(self, feeds: Iterable[str], fetches: Iterable[str]) -> list[str]:
        """Return the names that are not inputs, or not outputs."""
        main, value_of = self.main, self._aliases.get
        outputs = {*main.outputs, *[value_of(name, name) for name in main.outputs]}
        inside = [name for name in feeds if value_of(name, name) not in main.names]
        return inside + [name for name in fetches if outputs.isdisjoint((name, value_of(name)))]

    def _check_ports(self, feeds: Iterable[str], fetches: Iterable[str]) -> None:
        """Raise ``InvalidInput`` unless only inputs are fed and only outputs fetched."""
        if inside := self._inside(feeds, fetches):
            raise InvalidInput(
                f"cannot feed or fetch {', '.join(map(quoted, inside[:MAX_PROBLEMS]))} after "
                "quantize_after: the quantized model has the inputs and outputs of the model alone"
            )

    def successor(self, graph: Graph) -> Subgraphs:
        """Return the subgraphs of another model that has the same inputs and outputs."""
        ports = {*self.main.names, *[value.name for value in graph.outputs]}
        aliases = {name: value for name, value in self._aliases.items() if value in ports}
        other = Subgraphs(lambda: graph, aliases, self._compiler, self._on_evict)
        other.packs, other.devices, other.ports_only = self.packs, self.devices, self.ports_only
        return other

    def known(self) -> list[Subgraph]:
        """Return the remembered subgraphs, the main one last."""
        with _LOCK:
            return [*self._subgraphs.values(), self.main]

    def counterpart(self, subgraph: Subgraph) -> Subgraph:
        """Return the subgraph with the inputs and outputs of a subgraph of another model."""
        return self._subgraph(subgraph.names, subgraph.outputs, ())

    def retire(self) -> None:
        """Forget all subgraphs and their plans, since the session runs another model."""
        for subgraph in self.known():
            subgraph.retired = True
            self._on_evict(subgraph)
        self.clear()

    def emitting(self, names: tuple[str, ...]) -> Subgraph:
        """Return the main subgraph with runs that report the named values as they are computed.
        Raises ``InvalidInput`` for a name of no value, or of several values."""
        if self.ports_only:
            self._check_ports((), names)
        subgraph = self.main.variants.get(("emits", names))
        if subgraph is None:
            from penstock.compiler.emitting import emit_values

            with compile_guard():
                graph = clone(self.graph)
                emit_values(graph, {name: self._aliases.get(name, name) for name in names})
                subgraph = Subgraph(graph, self.main.outputs, self._compiler.structure(graph))
            subgraph = self.main.variants.setdefault(("emits", names), subgraph)
        return subgraph

    def _cut(self, extract: Extract) -> Graph:
        from penstock.executors.feeds import checked
        from penstock.passes.dead_code import cut

        if extract is self._whole:  # the whole model needs no look-up of values by name
            graph = cut(self.graph, self.graph.inputs, self.graph.outputs)
        else:
            fed = [self.value(name, "feed") for name in extract.feeds]
            fetched = [self.value(name, "fetch") for name in extract.fetches]
            target_values, nodes = self._targets(extract.targets)
            graph = cut(self.graph, fed, [*fetched, *target_values], nodes)
        if missing := captures(graph):
            names = ", ".join(f"{quoted(v.name)} ({v.type})" for v in missing[:MAX_PROBLEMS])
            if len(missing) > MAX_PROBLEMS:
                names += f" and {len(missing) - MAX_PROBLEMS} more"
            raise InvalidInput(f"the fetches need inputs that were not fed: {names}")
        for value in graph.inputs:
            # A value that is fed in the middle of the model has the type that is computed there,
            # unless the model declares more.
            if isinstance(value.type, AnyType):
                value.type = self._inferred.get(value.name, ANY)
            value.type = checked(value.type)
        return graph

    @cached_property
    def _inferred(self) -> dict[str, Type]:
        """Dtypes of the values whose types the model does not declare. Shapes are left open: the
        graph behind a fed value decides which shapes fit."""
        graph = clone(self.graph)
        self._compiler.infer(graph)
        types = {name: value.type for name, value in _values_by_name(graph).items()}
        return {name: TensorType(t.dtype) for name, t in types.items() if isinstance(t, TensorType)}

    def _targets(self, names: Collection[str]) -> tuple[list[Value], list[Node]]:
        """Return targets as values to compute or nodes to run. In graphs with frames all are nodes:
        a node of a frame runs many times and so has no single value."""
        values: list[Value] = []
        nodes: list[Node] = []
        framed = bool(names) and is_framed(self.graph)
        by_name = {node.name: node for node in self.graph.nodes if names and node.name}
        for name in names:
            value = self.values.get(self._aliases.get(name, name))
            node = by_name.get(name) if value is None else value.producer
            if value is not None and (node is None or not framed):
                values.append(value)
            elif node is not None:
                nodes.append(node)
            else:
                hint = suggest(name, [*self.values, *self._aliases, *by_name])
                raise InvalidInput(f"no target is {quoted(name)}: {hint}")
        return values, nodes

    def _without_aliases(self, feeds: NamedValues) -> Mapping[str, Any]:
        """Return feeds by value names. Raises ``InvalidInput`` if a value is fed twice."""
        aliases = self._aliases
        if aliases.keys().isdisjoint(feeds):
            return feeds
        by_value: dict[str, Any] = {}
        for name, value in feeds.items():
            value_name = name if name in self.values else aliases.get(name, name)
            if value_name in by_value:
                raise InvalidInput(f"{value_name!r} is fed twice, once as {name!r}; feed it once")
            by_value[value_name] = value
            if name != value_name and value_name not in self.main.aliases:
                self.main.aliases[value_name] = name
                self.main.last = NO_PLAN  # which knows the other names only
        return by_value

    def value(self, name: str, role: str) -> Value:
        """Return the value of a name or alias, to "feed" or "fetch". Raises ``InvalidInput``."""
        own = self._shared.get(name, name) if role == "fetch" else name
        value = self.values.get(own) or self.values.get(self._aliases.get(name, name))
        if value is None:
            ports = self.graph.inputs if role == "feed" else self.graph.outputs
            hint = suggest(name, [*self.values, *self._aliases], [v.name for v in ports])
            node = next((n for n in self.graph.walk() if n.name == name), None)
            if node is not None:
                output_names = " and ".join([repr(v.name) for v in node.outputs if v is not None])
                hint = f"that is a node, and its outputs are {output_names or 'none'}"
            raise InvalidInput(f"cannot {role} {quoted(name)}: {hint}")
        return value


def _values_by_name(graph: Graph) -> dict[str, Value]:
    """Return every value of the outermost graph that can be fed or fetched, by name; also constants
    that only nested graphs read, where a name means one of them."""
    inside = [value for node in graph.nodes for value in (*node.inputs, *node.outputs) if value]
    values: dict[str, Value] = {}
    for value in (*graph.inputs, *inside, *graph.outputs):
        values.setdefault(value.name, value)
    read = [v for node in graph.nodes for v in _constants_of_graphs(node)]
    nested = dict.fromkeys([v for v in read if v.name not in values])  # in order, unlike a set
    counts = Counter([value.name for value in nested])
    values.update((value.name, value) for value in nested if counts[value.name] == 1)
    return values


def _constants_of_graphs(node: Node) -> Iterator[Value]:
    """The constants that the graphs of a node read."""
    for _, inner in node.graphs:
        read = [graph.outputs for graph in inner.graphs()] + [part.inputs for part in inner.walk()]
        for value in chain.from_iterable(read):
            if value is not None and value.is_constant:
                yield value
