"""The rules of valid models, checked before anything else touches a graph.

``verify`` first walks the nested graphs, which bounds depth and size, so that all later work is
linear in the model. Then it runs ``_CHECKS``. A check is a generator of sentences that name the
value, or the node by its origin, and say what to do. No check recurses: a file must not be able to
exhaust the stack by nesting.

Rules of a format (schemas, opsets, existing functions) are checked by its front end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from math import prod

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import InvalidModel, ProblemList
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import dataclass, field
from penstock.core.types import (
    STRING,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    accepts,
    dtypes,
    is_dtype,
    type_of,
)
from penstock.ir.graph import Graph, Model, Node, Value, dependencies, ordered
from penstock.ir.op import Role

MAX_DIM = 2**63 - 1


def verify(
    model: Model, limits: Limits = DEFAULT_LIMITS, *, partial: bool = False
) -> Mapping[Graph, list[Node]]:
    """Raise ``InvalidModel`` with all problems of ``model`` if it is not valid. Return the nodes of
    each graph in an order in which they can run (``ordered``).

    The message lists at most ``errors.MAX_PROBLEMS`` problems and counts the others. Graphs that
    are nested too deep, have too many nodes or contain themselves are reported alone.

    ``partial``: the model is a graph that is being compiled. Its functions are elsewhere, and an If
    may have no outputs, if it is kept for its side effects.
    """
    if model.entry not in model.graphs:
        names = ", ".join(repr(name) for name in list(model.graphs)[:5]) or "none"
        raise InvalidModel(
            f"the model starts with graph {model.entry!r}, but its graphs are: {names}; "
            "name one of them as its entry"
        )
    index = _Index(model, limits, partial)
    problems = ProblemList()
    for check in _CHECKS:
        for problem in check(index):
            problems.add(problem)
    problems.raise_any()
    return index.orders  # set by the last check


@dataclass(slots=True)
class _Scope:
    """A graph and its place in the model."""

    graph: Graph
    parent: int  # the index of the enclosing scope; -1 for a graph of the model
    carrier: Node | None  # the node that has the graph as an attribute
    attribute: str
    depth: int
    values: list[Value] = field(default_factory=list)  # its inputs, then its nodes' outputs

    def __str__(self) -> str:
        if self.carrier is None:
            return f"graph {self.graph.name!r}"
        return f"the {self.attribute} of {self.carrier.label}"


class _Index:
    """All graphs of a model in preorder, and the graph of each node and value."""

    def __init__(self, model: Model, limits: Limits, partial: bool) -> None:
        self.functions = model.functions
        self.limits = limits
        self.partial = partial
        self.scopes = _nesting([*model.graphs.values(), *model.functions.values()], limits)
        self.home: dict[Node, int] = {}
        self.defined: dict[Value, int] = {}
        # A dict as an ordered set: problems are reported in the order of the file.
        self.constants: dict[Value, None] = {}
        self.orders: dict[Graph, list[Node]] = {}
        # Each node with its scope and the index of that.
        self.nodes: list[tuple[int, _Scope, Node]] = []
        for i, scope in enumerate(self.scopes):
            read: list[Value | None] = [*scope.graph.outputs]
            defined: list[Value | None] = [*scope.graph.inputs]
            for node in with_checkpoints(scope.graph.nodes):
                # A node that is listed twice keeps its first place; a check reports it.
                self.home.setdefault(node, i)
                defined += node.outputs
                read += node.inputs
            self.nodes += zip(repeat(i), repeat(scope), scope.graph.nodes)
            scope.values += filter(None, defined)
            for value in scope.values:
                self.defined.setdefault(value, i)
            # As in ``_is_constant``, for all values that are read.
            self.constants |= {
                v: None for v in filter(None, read) if not v.is_held or v.const is not None
            }

    def within(self, inner: int, outer: int) -> bool:
        """Whether scope ``inner`` is ``outer`` or nested in it."""
        while inner > outer:  # the index of a scope is larger than those of enclosing scopes
            inner = self.scopes[inner].parent
        return inner == outer


def _nesting(roots: Iterable[Graph], limits: Limits) -> list[_Scope]:
    """Return the scopes of all graphs. Raises ``InvalidModel`` for cycles and above the limits."""
    scopes: list[_Scope] = []
    seen: set[Graph] = set()
    nodes = 0
    # Reversed, so that scopes come in preorder.
    stack = [_Scope(graph, -1, None, "", 1) for graph in roots][::-1]
    while stack:
        scope = stack.pop()
        if scope.graph in seen:
            raise InvalidModel(
                f"{scope} is a graph that also stands elsewhere, or around itself; "
                "give each place a copy of its own"
            )
        if excess := limits.beyond("max_depth", scope.depth):
            raise InvalidModel(f"{scope} nests deeper {excess}")
        nodes += len(scope.graph.nodes)
        if excess := limits.beyond("max_nodes", nodes):
            raise InvalidModel(f"the model has more nodes {excess}")
        seen.add(scope.graph)
        position = len(scopes)
        scopes.append(scope)
        inner = [
            _Scope(graph, position, node, name, scope.depth + 1)
            for node in scope.graph.nodes
            if node.nests
            for name, graph in node.graphs
        ]
        stack.extend(reversed(inner))
    return scopes


def _is_constant(value: Value) -> bool:
    """Whether a value has contents, even if they were set without ``set_constant``."""
    return not value.is_held or value.const is not None


def _described(value: Value) -> str:
    if _is_constant(value):
        return f"constant {value.name!r}"
    if value.producer is not None:
        return f"{value.name!r}, made by {value.producer.label}"
    return f"input {value.name!r}"


# The checks, in the order in which they report.

Check = Callable[[_Index], Iterator[str]]


def _check_repeated_nodes(index: _Index) -> Iterator[str]:
    """A node is listed once."""
    seen: set[Node] = set()
    for _, scope, node in with_checkpoints(index.nodes):
        if node in seen:
            yield f"{node.label} is listed again in {scope}; a node runs once: make a copy of it"
        seen.add(node)


def _check_graph_lists(index: _Index) -> Iterator[str]:
    """A graph is an attribute, not in a list, so that walks over nested graphs find it."""
    for _, _, node in with_checkpoints(index.nodes):
        for name, attribute in node.attrs.items():
            # The lists of a tree ensemble are long: collect their types without a Python loop.
            if isinstance(attribute, list | tuple) and Graph in {*map(type, attribute)}:
                yield (
                    f"attribute {name!r} of {node.label} is a list with graphs in it; "
                    "give each graph an attribute of its own"
                )


def _check_graph_inputs(index: _Index) -> Iterator[str]:
    """An input is listed once, and has neither a producer nor contents."""
    for i, scope in enumerate(index.scopes):
        seen: set[Value] = set()
        for value in scope.graph.inputs:
            if value in seen or index.defined[value] != i:
                yield f"input {value.name!r} of {scope} is an input twice; list it once"
            seen.add(value)
            if value.producer is not None:
                yield (
                    f"input {value.name!r} of {scope} is also made by {value.producer.label}; "
                    "it can be one of these only"
                )
            if _is_constant(value):
                yield f"input {value.name!r} of {scope} is a constant; take it off the inputs"


def _check_node_outputs(index: _Index) -> Iterator[str]:
    """Each value has one producer, to which it refers."""
    for _, _, node in with_checkpoints(index.nodes):
        outputs = node.outputs
        if not outputs and node.op.pure and not (index.partial and node.graphs):
            yield f"{node.label} ({node.op.name}) has no outputs; give it one, or remove it"
        values = [*filter(None, outputs)]
        if len({*values}) < len(values):
            yield f"{node.label} lists one value twice among its outputs; make two values"
        for value in values:
            if value.producer is not node:
                other = "no node" if value.producer is None else value.producer.label
                yield (
                    f"{value.name!r} is an output of {node.label}, but names {other} as its "
                    "producer; a value has one producer, and names it"
                )
            if not value.is_held or value.const is not None:
                yield (
                    f"{value.name!r} is a constant and an output of {node.label}; "
                    "use a new value for the constant"
                )


def _check_names(index: _Index) -> Iterator[str]:
    """A name is unique in its graph and all graphs nested in that."""
    # One entry per name suffices: an entry of an outer graph is never replaced, since the value
    # that would replace it is reported instead.
    latest: dict[str, tuple[int, Value]] = {}
    for i, scope in enumerate(index.scopes):
        for value in with_checkpoints(scope.values):
            name = value.name
            if not name:
                yield f"a value of {scope} ({_described(value)}) has no name; name it"
                continue
            home, other = latest.get(name, (-1, None))
            if other is None or not index.within(i, home):
                latest[name] = (i, value)
            elif other is not value and home == i:
                yield (
                    f"two values of {scope} are named {name!r} ({_described(other)}, and "
                    f"{_described(value)}); rename one"
                )
            elif other is not value:
                yield (
                    f"{_described(value)}, in {scope} has the name of a value of "
                    f"{index.scopes[home]}, and hides it; rename one"
                )


def _check_reads(index: _Index) -> Iterator[str]:
    """A value that is read is a constant, or defined in the same graph or an enclosing one."""
    plain = {value for value in index.constants if value.producer is None}
    for i, _, node in with_checkpoints(index.nodes):
        for value in filter(None, node.inputs):
            # Most are constants or belong to the same graph.
            if value in plain or (index.defined.get(value) == i and value not in index.constants):
                continue
            if (fault := _unreadable(index, i, value)) is not None:
                yield f"{node.label} reads {value.name!r}, {fault}"
    for i, scope in enumerate(index.scopes):
        for value in scope.graph.outputs:
            if (fault := _unreadable(index, i, value)) is not None:
                yield f"{scope} gives {value.name!r} as an output, {fault}"


def _unreadable(index: _Index, reader: int, value: Value) -> str | None:
    """Return why ``value`` cannot be read in scope ``reader``, or None if it can."""
    if _is_constant(value):
        if value.producer is None:
            return None
        return (
            f"a constant with a producer ({value.producer.label}); set its producer to None, or "
            "do not make it a constant"
        )
    home = index.defined.get(value)
    if home is not None:
        if index.within(reader, home):
            return None
        return (
            f"which belongs to {index.scopes[home]} and is not known outside of it; make it an "
            "output there, or an input here"
        )
    if value.producer is None:
        around = " or of a graph around it" if index.scopes[reader].parent >= 0 else ""
        return (
            f"which nothing makes: it is neither a constant nor an input or a node's output of "
            f"{index.scopes[reader]}{around}; add what makes it, or correct the name"
        )
    if value.producer in index.home:
        return f"but {value.producer.label}, its producer, does not list it among its outputs"
    return f"but {value.producer.label}, which makes it, is not in the model; add that node"


def _check_control_inputs(index: _Index) -> Iterator[str]:
    """Control inputs and targets are nodes of the same graph."""
    for i, scope, node in with_checkpoints(index.nodes):
        for other in node.control_inputs:
            if index.home.get(other) != i:
                yield (
                    f"{node.label} has {other.label} as a control input, which is not a node of "
                    f"{scope}; it can only wait for nodes of its own graph"
                )
    for i, scope in enumerate(index.scopes):
        for other in scope.graph.targets:
            if index.home.get(other) != i:
                yield f"{scope} has {other.label} as a target, which is not a node of that graph"


# Requirements on control-flow nodes, and on their graphs.
_CONTROL_FLOW: Mapping[Role | None, tuple[str, str]] = {
    Role.IF: (
        "an If has one input, the condition",
        "a branch takes nothing and gives one value for each output of its If",
    ),
    Role.LOOP: (
        "a Loop has an output for each carried value, then one for each that it collects",
        "the body of a Loop takes the iteration, the condition and the carried values, and gives "
        "the condition and one value for each output of the node",
    ),
    Role.SCAN: (
        "num_scan_inputs of the inputs of a Scan are sequences, the others states, and each state "
        "is an output",
        "the body of a Scan takes the states and a slice of each sequence, and gives one value "
        "for each output of the node",
    ),
    Role.SEQUENCE_MAP: (
        "a SequenceMap has at least one input, a sequence",
        "the body of a SequenceMap takes an element for each input and gives one for each output",
    ),
}


def _arity(node: Node) -> tuple[bool, int, int]:
    """Return whether a control-flow node has the inputs and outputs that it needs, and the numbers
    of inputs and outputs that its graphs must have."""
    inputs, outputs = len(node.inputs), len(node.outputs)
    if node.op.role is Role.IF:
        return inputs == 1, 0, outputs
    if node.op.role is Role.LOOP:
        return outputs >= inputs - 2, max(2, inputs), 1 + outputs
    if node.op.role is Role.SCAN:
        return 0 <= _scan_states(node) <= outputs, inputs - (node.op.version <= 8), outputs
    return inputs >= 1, inputs, outputs


def _scan_states(node: Node) -> int:
    count = node.attrs.get("num_scan_inputs")
    # Up to version 8 the first input held sequence lengths.
    return -1 if type(count) is not int else len(node.inputs) - count - (node.op.version <= 8)


def _check_control_flow(index: _Index) -> Iterator[str]:
    """The inputs and outputs of a node's graphs fit the node."""
    for _, _, node in with_checkpoints(index.nodes):
        if node.op.role not in _CONTROL_FLOW:
            continue
        of_node, of_graphs = _CONTROL_FLOW[node.op.role]
        fits, *wanted = _arity(node)
        if not fits:
            yield f"{node.label} has {_counts(node)}: {of_node}"
        for name in ("then_branch", "else_branch") if node.op.role is Role.IF else ("body",):
            graph = node.attrs.get(name)
            if not isinstance(graph, Graph):
                yield f"{node.label} needs a graph as its attribute {name!r}"
            elif [len(graph.inputs), len(graph.outputs)] != wanted:
                yield (
                    f"the {name} of {node.label} has {_counts(graph)} instead of {wanted[0]} and "
                    f"{wanted[1]}: {of_graphs}"
                )


def _counts(whole: Node | Graph) -> str:
    return f"{len(whole.inputs)} inputs and {len(whole.outputs)} outputs"


def _check_scan_lists(index: _Index) -> Iterator[str]:
    """List attributes of a Scan have one integer for each sequence."""
    for _, _, node in with_checkpoints(index.nodes):
        if node.op.role is not Role.SCAN:
            continue
        for side, values in (("input", node.inputs), ("output", node.outputs)):
            count = len(values) - _scan_states(node)
            for name in (f"scan_{side}_axes", f"scan_{side}_directions"):
                entries = node.attrs.get(name)
                if not isinstance(entries or [], list | tuple):
                    yield f"{node.label} has {name} {entries!r:.100}, which must be a list"
                elif entries and len(entries) != count:
                    yield (
                        f"{node.label} has {len(entries)} {name} for {count} sequences; "
                        "give one for each"
                    )
                elif entries and any(type(entry) is not int for entry in entries):
                    yield f"{node.label} has {name} {entries!r:.100}, which must be integers"


def _check_primitives(index: _Index) -> Iterator[str]:
    """Nodes of operations with a fixed arity have it, and an Enter has its attributes. Frames are
    checked in ``analysis.frames``, only for the nodes that a run needs."""
    for _, _, node in with_checkpoints(index.nodes):
        arity = node.op.arity
        if arity is None:
            continue
        name, attrs = node.op.name, node.attrs
        ends = (("inputs", node.inputs), ("outputs", node.outputs))
        for (side, values), count in zip(ends, arity, strict=True):
            if len(values) != count if count is not None else not values:
                yield f"{node.label}: {name} has {len(values)} {side} instead of {count or 'some'}"
        if any(value is None for value in (*node.inputs, *node.outputs)):
            yield f"{node.label}: {name} leaves out an input or an output, but has no optional one"
        if node.op.role is not Role.ENTER:
            continue
        frame, limit = attrs.get("frame_name"), attrs.get("parallel_iterations", 1)
        if not isinstance(frame, str) or not frame:
            yield f"{node.label} enters a frame without a name; give it a frame_name"
        if type(limit) is not int or limit < 1:  # a bool is not accepted as a number
            yield f"{node.label} allows {limit!r} parallel_iterations; at least one must be allowed"


def _check_calls(index: _Index) -> Iterator[str]:
    """A call names a function of the model and has its number of inputs and outputs."""
    for _, _, node in with_checkpoints(index.nodes):
        if node.op.role is not Role.CALL or index.partial:
            continue
        name = node.attrs.get("function")
        function = index.functions.get(name) if isinstance(name, str) else None
        if function is None:
            yield f"{node.label} calls {name!r}, which is not a function of the model"
            continue
        here, there = [(len(x.inputs), len(x.outputs)) for x in (node, function)]
        if here != there:
            yield (
                f"{node.label} calls {name!r} with {here[0]} values for {here[1]}, but that takes "
                f"{there[0]} and gives {there[1]}"
            )


def _check_types(index: _Index) -> Iterator[str]:
    """Types have known dtypes, and dims whose product is within limits."""
    sound: set[int] = set()  # ids: many values share a type, and all types outlive this loop
    for values in (*(scope.values for scope in index.scopes), index.constants):
        for value in with_checkpoints(values):
            type_ = value.type
            if id(type_) in sound:
                continue
            if isinstance(type_, TensorType):  # most types
                fault = _tensor_fault(type_, index.limits)
            else:
                fault = _type_fault(type_, index.limits)
            if fault is None:
                sound.add(id(type_))
            else:
                yield f"{_described(value)}: {fault}"


def _type_fault(type_: Type, limits: Limits) -> str | None:
    for _ in range(limits.max_depth):  # a loop, since a file may nest types arbitrarily deep
        if isinstance(type_, TensorType):
            return _tensor_fault(type_, limits)
        if isinstance(type_, SequenceType | OptionalType):
            type_ = type_.element
        elif isinstance(type_, MapType):
            if not is_dtype(type_.key):
                return f"no map has keys of dtype {type_.key!r}"
            type_ = type_.value
        else:
            return None
    return f"its type nests deeper than Limits.max_depth = {limits.max_depth}"


def _tensor_fault(type_: TensorType, limits: Limits) -> str | None:
    if type_.dtype is not None and not is_dtype(type_.dtype):
        return f"no tensor has dtype {type_.dtype!r}; use one of {', '.join(dtypes())}"
    if type_.shape is None:
        return None
    if len(type_.shape) > limits.max_dims:
        return f"it has {len(type_.shape)} dims, more than Limits.max_dims = {limits.max_dims}"
    elements, static = 1, True
    for dim in type_.shape:
        if isinstance(dim, int):
            if not 0 <= dim <= MAX_DIM:
                return f"dim {dim} is not between 0 and 2**63 - 1"
            # A dim of 0 counts as 1: strides are products of the others.
            elements *= dim or 1
        elif dim is None or isinstance(dim, str):
            static = False
        else:
            return f"dim {dim!r} is neither an int, nor a name, nor None (unknown)"
    if elements > limits.max_elements:
        return (
            f"its dims {list(type_.shape)} multiply to more than Limits.max_elements = "
            f"{limits.max_elements}"
        )
    if type_.data is not None:
        size = 0 if 0 in type_.shape else elements
        if len(type_.shape) > 1 or (static and size != len(type_.data)):
            return f"its known contents, {len(type_.data)} elements, do not fit {type_}"
    return None


def _check_constants(index: _Index) -> Iterator[str]:
    """A constant is an array that fits its type, and the bytes of all constants are bounded."""
    total = 0
    for value in with_checkpoints(index.constants):
        if not value.is_held:  # checked before its contents were released
            total += value.type.nbytes if isinstance(value.type, TensorType) else 0
            continue
        array = value.const
        if not isinstance(array, np.ndarray):
            yield f"constant {value.name!r} is a {type(array).__name__}; make it a NumPy array"
            continue
        total += array.nbytes
        declared = value.type
        if not isinstance(declared, TensorType) or not (
            (declared.dtype == array.dtype and declared.shape == array.shape)  # as usual
            or accepts(declared, type_of(array))
        ):
            yield (
                f"constant {value.name!r} is declared {declared} but holds {type_of(array)}; "
                "its contents must fit its type"
            )
        elif declared.data is not None and array.dtype.kind in "iu":
            contents = array.reshape(-1).tolist()
            if contents != [*declared.data]:
                yield (
                    f"constant {value.name!r} holds {contents}, but its type says "
                    f"{list(declared.data)}; its contents must fit its type"
                )
        if array.dtype == STRING and not all(isinstance(x, str) for x in array.flat):
            yield f"constant {value.name!r} has elements that are not strings; decode them to str"
    total += _bytes_of_attributes(index)
    if excess := index.limits.beyond("max_constant_bytes", total):
        yield f"the model's constants have {total} bytes, more {excess}"


def _bytes_of_attributes(index: _Index) -> int:
    """Return the bytes of arrays in attributes, such as those of TensorFlow's Const. Each array
    counts once, without repetition by strides of 0."""
    arrays = {
        id(attribute): attribute
        for _, _, node in with_checkpoints(index.nodes)
        for attribute in node.attrs.values()
        if isinstance(attribute, np.ndarray)
    }
    dims = [(a.itemsize, zip(a.shape, a.strides, strict=True)) for a in arrays.values()]
    return sum(itemsize * prod(n for n, stride in pairs if stride) for itemsize, pairs in dims)


def _check_cycles(index: _Index) -> Iterator[str]:
    """Dependencies within each graph have no cycle."""
    roots = [scope.graph for scope in index.scopes if scope.parent < 0]
    for graph, edges in (pair for root in roots for pair in dependencies(root)):
        try:
            index.orders[graph] = ordered(graph, edges)
        except InvalidModel as error:
            yield from error.problems


_CHECKS: tuple[Check, ...] = (
    _check_repeated_nodes,
    _check_graph_lists,
    _check_graph_inputs,
    _check_node_outputs,
    _check_names,
    _check_reads,
    _check_control_inputs,
    _check_control_flow,
    _check_scan_lists,
    _check_primitives,
    _check_calls,
    _check_types,
    _check_constants,
    _check_cycles,
)
