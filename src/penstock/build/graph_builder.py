"""The builder of a model: its inputs, nodes, branches, loops, functions and outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.analysis.type_constraints import check_types
from penstock.analysis.type_inference import node_types
from penstock.build.node_rules import check_added_node, operation_of, output_count, with_defaults
from penstock.build.symbolic import Operand, SymbolicValue
from penstock.core.errors import InvalidModel
from penstock.core.records import dataclass, field
from penstock.core.types import BOOL, INT64, Dim, TensorType, Type, constant_type, without_data
from penstock.frontends.common.builder import UniqueNames
from penstock.ir.device_name import DeviceName
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ir.op import Attrs, Op
from penstock.ops.internal.case import CASE, expand_case
from penstock.ops.registry import TENSORFLOW, standard

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

Outputs: TypeAlias = Any
"""The outputs of a node: a value, a tuple of several, or None, which type checkers cannot tell"""
Returned: TypeAlias = "Operand | Sequence[Operand] | None"
"""The results of a function that builds the graph of a branch or a body"""
ElementType: TypeAlias = "DTypeLike | Type"
"""A dtype as NumPy takes it, or a type of values"""
InputType: TypeAlias = "ElementType | tuple[ElementType, Sequence[Dim] | None]"
"""The type of an input of a graph, perhaps with its shape"""

_FOLDER = str(Path(__file__).parent)


@dataclass(eq=False)
class _OpenGraph:
    """A graph whose nodes are being added; ``label`` names it in messages."""

    label: str
    nodes: list[Node] = field(default_factory=list)


class GraphBuilder:
    """Builds a model node by node.

    Nodes are added by ``op`` and by the operators of values. The types of their results are
    inferred at once, so that a node that cannot run raises ``InvalidModel`` in the line that adds
    it. Inside of the functions that ``cond``, ``case``, ``loop``, ``graph`` and ``function`` take,
    nodes are added to the graph of the branch or body; these functions are called while the model
    is built, and may be called twice.

    A builder makes one model: ``model`` ends its use.

    Args:
        name: The name of the graph.
    """

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self._graphs = [_OpenGraph(f"graph {name!r}")]
        self._inputs: list[Value] = []
        self._outputs: dict[str, Value] = {}
        self._targets: list[Node] = []
        self._functions: dict[str, Graph] = {}
        self._later: dict[Value, Value | None] = {}
        # Constants have none: they are visible everywhere.
        self._homes: dict[Value, _OpenGraph] = {}
        self._names = UniqueNames(list)
        self._results: dict[str, Value] = {}  # of nodes, by name
        self._scopes: list[str] = []
        self._device = ""
        self._after: list[Node] = []
        self._finished = False

    # Values.

    def input(
        self, name: str, dtype: ElementType, shape: Sequence[Dim] | None = None
    ) -> SymbolicValue:
        """Add an input of the model.

        Args:
            name: Its name in feeds.
            dtype: What NumPy takes for one (``str`` for strings), or a type of
                ``penstock.core.types``, such as a ``SequenceType``.
            shape: Its dims: each a number, a name (dims of one name are equal) or ``None``; without
                a shape the rank is unknown.
        """
        value = Value(self._own_name(name), _type(dtype, shape))
        self._inputs.append(value)
        return self._known(value, self._graphs[0])

    def constant(
        self, data: ArrayLike, dtype: DTypeLike | None = None, *, name: str = ""
    ) -> SymbolicValue:
        """A constant: a copy of an array, or of numbers.

        Args:
            data: An array, or numbers.
            dtype: By default that of the array; of numbers, float32 for floats and int64 for
                integers.
            name: By default one is made.
        """
        array = np.array(data, dtype)  # a copy: the caller may go on to change its own
        if dtype is None and not isinstance(data, np.ndarray | np.generic):
            array = array.astype({"f": np.float32, "U": object}.get(array.dtype.kind, array.dtype))
        elif array.dtype.kind == "U":
            array = array.astype(object)
        value = Value(self._new_name(name or "constant"), constant_type(array), const=array)
        return SymbolicValue(self, value)

    def as_value(
        self, x: Operand, *, like: SymbolicValue | None = None, dtype: DTypeLike | None = None
    ) -> SymbolicValue:
        """``x`` if it is a value, else a constant. Raises ``TypeError`` for a fraction where
        ``like`` is of integers.

        Args:
            x: A value, or what ``constant`` takes.
            like: A value whose dtype Python numbers, and lists of them, take.
            dtype: The dtype of the constant, without ``like``.
        """
        if isinstance(x, SymbolicValue):
            return self._own(x)
        kind = np.asarray(x).dtype.kind if isinstance(x, bool | int | float | list | tuple) else ""
        if like is None or kind not in ("b", "i", "f"):
            return self.constant(x, dtype)
        if like.dtype is None:
            return self.single("CastLike", self.constant(x), like)
        if kind == "f" and like.dtype.kind in "iub":
            raise TypeError(f"{like.name!r} is {like.dtype}, and {x} is not: use astype first")
        return self.constant(x, like.dtype)

    def later(self, like: SymbolicValue) -> SymbolicValue:
        """A value of the type of ``like`` that stands for one that ``define`` names, for the back
        edges of TensorFlow's loops::

            again = b.later(like=start)
            i, _ = b.op("Merge", b.op("Enter", start, ...), again, domain="tensorflow")
            ...
            b.define(again, b.op("NextIteration", i + 1, domain="tensorflow"))

        Args:
            like: A value of the same type.
        """
        value = Value(self._new_name("later"), like.type)
        self._later[value] = None
        return self._known(value, self._graphs[-1])

    def define(self, later: SymbolicValue, value: SymbolicValue) -> None:
        """Let a value made by ``later`` be another one.

        Args:
            later: A value that ``later`` made.
            value: What it stands for.
        """
        if self._later.get(later.value, later) is not None:
            raise ValueError(f"{later.name!r} is not a value of later() that waits for its meaning")
        self._later[later.value] = self._own(value).value

    # Nodes.

    def op(
        self,
        op: str,
        *inputs: Operand | None,
        domain: str = "",
        version: int | None = None,
        outputs: int | None = None,
        name: str = "",
        **attrs: object,
    ) -> Outputs:
        """Add a node, and return its output, or a tuple if it has several, or ``None`` if it has
        none. Raises ``InvalidModel`` if there is no such operation, or if it does not take these
        inputs or attributes.

        Args:
            op: The name of the operation.
            inputs: Values, what ``constant`` takes, and ``None`` for an optional input that is left
                out.
            domain: "" for ONNX's operations, "ai.onnx.ml", "com.microsoft", "tensorflow" for those
                of TensorFlow that ONNX lacks, "tflite", or one of yours
                (``penstock.extend.operator``).
            version: A version of the domain's operators whose meaning the node has; by default the
                newest.
            outputs: The number of outputs, by default the least.
            name: The name of the node, by default one after the operation.
            attrs: Numbers, strings, lists, arrays, graphs that ``graph`` makes, and dtypes where an
                attribute stands for one.
        """
        operation, schema = operation_of(op, domain, version)
        values = [None if x is None else self.as_value(x).value for x in inputs]
        complete = with_defaults(operation, schema, attrs, values)
        if outputs is None:
            outputs = output_count(operation, schema, complete)
        node = self._node(operation, values, complete, name or op.lower(), outputs)
        check_added_node(node, schema, attrs)
        return self._add(node)

    def single(
        self, op: str, *inputs: Operand | None, domain: str = "", **attrs: Any
    ) -> SymbolicValue:
        """As ``op``, for operations with one output.

        Args:
            op: The name of the operation.
            inputs: As of ``op``.
            domain: As of ``op``.
            attrs: As of ``op``.
        """
        result = self.op(op, *inputs, domain=domain, **attrs)
        assert isinstance(result, SymbolicValue)
        return result

    def _node(
        self, op: Op, inputs: Sequence[Value | None], attrs: Attrs, name: str, outputs: int
    ) -> Node:
        name = self._new_name(name)
        results = [Value(name if outputs == 1 else f"{name}:{i}") for i in range(outputs)]
        self._results.update((value.name, value) for value in results)
        node = Node(op, inputs, results, attrs, name=name, control_inputs=self._after)
        node.device = self._device
        node.origin = f"{name} in {_caller()}"
        return node

    def _add(self, node: Node) -> Outputs:
        """Add a node to the innermost graph; its results."""
        if self._finished:
            raise RuntimeError("model() has ended the use of this GraphBuilder: begin another")
        types = node_types(node)
        for value, type_ in zip(node.outputs, types, strict=False):
            if value is not None:
                value.type = type_
        graph = self._graphs[-1]
        graph.nodes.append(node)
        results = tuple(self._known(v, graph) for v in node.outputs if v is not None)
        return results[0] if len(results) == 1 else results or None

    def _known(self, value: Value, graph: _OpenGraph) -> SymbolicValue:
        self._homes[value] = graph
        return SymbolicValue(self, value)

    def _own(self, x: SymbolicValue) -> SymbolicValue:
        """``x``, which must be visible in the innermost graph."""
        if x.builder is not self:
            raise InvalidModel(f"{x.name!r} is a value of another GraphBuilder")
        home = self._homes.get(x.value)
        if home is not None and home not in self._graphs:
            raise InvalidModel(
                f"{x.name!r} is a value of {home.label}, and read outside of it: return it there"
            )
        return x

    def _new_name(self, name: str) -> str:
        """A name that nothing else has, in the scope."""
        return self._names.unique("/".join([*self._scopes, name]))

    def _own_name(self, name: str) -> str:
        """The name of an input or an output; a result of a node that has it gets another. Raises
        ``InvalidModel`` if an input or an output has it."""
        if self._names.unique(name) != name:
            if name not in self._results:
                raise InvalidModel(f"there is an input or an output {name!r}: choose another name")
            self._results.pop(name).name = self._names.unique(name)
        return name

    # Where nodes run, and after which.

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Let the names of what is added begin with ``name/``.

        Args:
            name: What stands before a slash.
        """
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    @contextmanager
    def device(self, name: str) -> Iterator[None]:
        """Let the nodes that are added run on a device.

        Args:
            name: ``"cpu:1"``, or a part of a full name (see ``penstock.ir.device_name``).
        """
        before, self._device = self._device, str(DeviceName.parse(name))
        try:
            yield
        finally:
            self._device = before

    @contextmanager
    def after(self, *values: SymbolicValue) -> Iterator[None]:
        """Let the nodes that are added wait for others.

        Args:
            values: Values whose makers run before.
        """
        nodes = [value.producer for value in (self._own(x).value for x in values)]
        before, self._after = self._after, [*self._after, *[n for n in nodes if n is not None]]
        try:
            yield
        finally:
            self._after = before

    # Control flow.

    def cond(
        self, condition: Operand, then: Callable[[], Returned], otherwise: Callable[[], Returned]
    ) -> Outputs:
        """The results of ``then()`` if the condition is true in a run, else those of
        ``otherwise()``. Only the nodes of one branch run. Branches may read all values around them.

        Args:
            condition: A tensor of one truth value.
            then: Called without arguments; returns a value or several.
            otherwise: As ``then``, for the other case; returns as many values.
        """
        branches = {
            "then_branch": self._graph("the then branch", (), then),
            "else_branch": self._graph("the else branch", (), otherwise),
        }
        self._same_results(list(branches.values()))
        inputs = [self._truth(condition).value]
        count = len(branches["then_branch"].outputs)
        return self._add(self._node(standard("If"), inputs, branches, "if", count))

    def case(
        self,
        index: Operand,
        branches: Sequence[Callable[[], Returned]],
        default: Callable[[], Returned],
    ) -> Outputs:
        """The results of ``branches[index]()``, or of ``default()``. To pass values on then,
        return them from it.

        Args:
            index: An integer tensor of one element.
            branches: Called without arguments; each returns a value or several.
            default: As ``branches``, for an index that is negative or too large.
        """
        graphs = [self._graph(f"branch {i}", (), f) for i, f in enumerate(branches)]
        bypass = self._graph("the default branch", (), default)
        self._same_results([*graphs, bypass])
        attrs = {f"branch_{i}": graph for i, graph in enumerate(graphs)}
        inputs = [self.as_value(index).value]
        node = self._node(CASE, inputs, {**attrs, "default": bypass}, "case", len(bypass.outputs))
        try:
            *before, tree = expand_case(node)
        except ValueError as error:
            raise InvalidModel(f"{node.label}: {error}") from error
        for each in before:
            self._add(each)
        return self._add(tree)

    def loop(
        self,
        body: Callable[..., Returned],
        *initial: Operand,
        times: Operand | None = None,
        condition: Callable[..., Operand] | None = None,
    ) -> Outputs:
        """Call ``body`` again and again; return the last ``carried``, then the stacked values.
        Raises ``ValueError`` without ``times`` and ``condition``, since the loop would not end.

        If a carried value gets another shape in ``body``, ``body`` is called once more with values
        of the dims that both have in common.

        Args:
            body: ``body(i, *carried)``; ``i`` counts from 0. It returns new values of all
                ``carried``; further values that it returns are collected from all turns and stacked
                along a new first axis.
            initial: What ``carried`` are at first.
            times: The number of turns, an integer or a value.
            condition: ``condition(*carried)``: whether to take another turn, asked before each.
        """
        if times is None and condition is None:
            raise ValueError("a loop needs times= or condition=, or it does not end")
        start = [self.as_value(x) for x in initial]
        go = None if condition is None else self._truth(condition(*start)).value
        limit = None if times is None else self.as_value(times, dtype=INT64).value
        types = [without_data(x.type) for x in start]
        while True:
            graph = self._body(body, condition, types)
            attrs = {"body": graph}
            inputs = [limit, go, *[x.value for x in start]]
            node = self._node(standard("Loop"), inputs, attrs, "loop", len(graph.outputs) - 1)
            node_types(node)  # widens the types of the body's inputs
            settled = [value.type for value in graph.inputs[2:]]
            if settled == types:  # else the body has built nodes for types that do not hold
                return self._add(node)
            types = settled

    def _body(
        self,
        body: Callable[..., Returned],
        condition: Callable[..., Operand] | None,
        types: Sequence[Type],
    ) -> Graph:
        """The graph of a Loop that carries values of these types."""
        inputs = [self._plain_input("i", TensorType(INT64, ()))]
        inputs += [self._plain_input("carried", type_) for type_ in types]
        proceed = self._plain_input("proceed", TensorType(BOOL, ()))

        def turn(i: SymbolicValue, *carried: SymbolicValue) -> list[Operand]:
            results = list(_listed(body(i, *carried)))
            if len(results) < len(carried):
                raise InvalidModel(
                    f"the body of a loop returns {len(results)} values for {len(carried)} that it "
                    "carries; return each, also if it stays as it is"
                )
            after = [self.as_value(x) for x in results[: len(carried)]]
            if condition is None:
                return [SymbolicValue(self, proceed), *results]
            return [self._truth(condition(*after)), *after, *results[len(carried) :]]

        graph = self._graph("the body of a loop", inputs, turn)
        graph.inputs.insert(1, proceed)  # between the iteration and what is carried
        return graph

    def graph(self, function: Callable[..., Returned], *types: InputType, name: str = "") -> Graph:
        """A graph for an attribute, such as the ``body`` of Scan or SequenceMap.

        Args:
            function: Gets a value of each of ``types``; returns a value or several.
            types: Each a dtype, a pair of dtype and shape, or a type.
            name: The name of the graph in messages.
        """
        pairs = [x if isinstance(x, tuple) else (x, None) for x in types]
        inputs = [self._plain_input("x", _type(*pair)) for pair in pairs]
        return self._graph(name or "a nested graph", inputs, function)

    def function(
        self, name: str, body: Callable[..., Returned], *types: InputType
    ) -> Callable[..., Outputs]:
        """Add a function to the model, and return a Python function that adds calls of it.

        Args:
            name: Its name in the model.
            body: Gets a value of each of ``types``, and reads no others. It may call the function
                itself, with ``call``.
            types: As of ``graph``.
        """
        if name in self._functions:
            raise InvalidModel(f"there is a function {name!r} already; choose another name")
        # A function reads no values of the graphs around it.
        outside, self._graphs = self._graphs, []
        try:
            self._functions[name] = self.graph(body, *types, name=name)
        finally:
            self._graphs = outside
        return lambda *inputs: self.call(name, *inputs, outputs=len(self._functions[name].outputs))

    def call(self, function: str, *inputs: Operand, outputs: int = 1) -> Outputs:
        """Add a call of a function of the model.

        Args:
            function: The name of a function, which may be added later.
            inputs: Its inputs.
            outputs: The number of its outputs.
        """
        values = [self.as_value(x).value for x in inputs]
        attrs = {"function": function}
        node = self._node(standard("Call", TENSORFLOW), values, attrs, function, outputs)
        return self._add(node)

    def _graph(
        self, label: str, inputs: Sequence[Value], function: Callable[..., Returned]
    ) -> Graph:
        """The graph of what ``function`` does with ``inputs``."""
        open_ = _OpenGraph(label)
        self._graphs.append(open_)
        after, self._after = self._after, []  # nodes outside; the node with the graph waits
        try:
            results = _listed(function(*[self._known(value, open_) for value in inputs]))
            values = [self.as_value(x) for x in results]
            outputs = [
                self.single("Identity", x).value if x.value.const is not None else x.value
                for x in values
            ]
        finally:
            self._graphs.pop()
            self._after = after
        return Graph(inputs, outputs, open_.nodes, self._new_name("graph"))

    def _same_results(self, graphs: Sequence[Graph]) -> None:
        first, *others = [[value.dtype for value in graph.outputs] for graph in graphs]
        for dtypes in others:
            pairs = zip(first, dtypes, strict=False)
            if len(dtypes) != len(first) or any(a and b and a != b for a, b in pairs):
                text = " and ".join(f"({', '.join(map(str, x))})" for x in (first, dtypes))
                raise InvalidModel(f"branches return values of {text}; all must return the same")

    def _truth(self, x: Operand) -> SymbolicValue:
        value = self.as_value(x, dtype=bool)
        if value.dtype is not None and value.dtype != BOOL:
            raise InvalidModel(f"a condition must be a truth value, not {value.type}")
        if value.shape is not None and any(isinstance(d, int) and d != 1 for d in value.shape):
            raise InvalidModel(f"a condition must have one element, not be a {value.type}")
        return value

    def _plain_input(self, name: str, type_: Type) -> Value:
        return Value(self._new_name(name), type_)

    # The model.

    def output(self, name: str, value: Operand) -> None:
        """Add an output of the model.

        Args:
            name: Its name in results and fetches.
            value: A value, or what ``constant`` takes.
        """
        if name in self._outputs:
            raise InvalidModel(f"there is an output {name!r} already: choose another name")
        source = self.as_value(value)
        if source.name != name:
            source = self._renamed(source.value, name)
        self._results.pop(name, None)
        self._outputs[name] = source.value

    def _renamed(self, value: Value, name: str) -> SymbolicValue:
        """A copy of a value that has this name."""
        node = Node(standard("Identity"), [value], [Value(self._own_name(name))])
        node.name, node.origin = f"{name}/output", f"{name} in {_caller()}"
        result: SymbolicValue = self._add(node)
        return result

    def target(self, *values: SymbolicValue) -> None:
        """Let nodes run though no output may need them.

        Args:
            values: Values whose makers run.
        """
        nodes = [self._own(x).value.producer for x in values]
        self._targets += [node for node in nodes if node is not None]

    def model(self, metadata: Mapping[str, str] | None = None) -> Model:
        """The model. Raises ``InvalidModel`` if it has no outputs, or a value of ``later`` has no
        definition.

        Args:
            metadata: Texts by name, for ``Model.metadata``.
        """
        if not self._outputs and not self._targets:
            raise InvalidModel("the model has no outputs; add one with output()")
        nodes, outputs = self._graphs[0].nodes, list(self._outputs.values())
        graph = Graph(self._inputs, outputs, nodes, self.name, self._targets)
        self._resolve([graph, *self._functions.values()])
        self._finished = True
        return Model(
            {self.name: graph},
            self.name,
            dict(self._functions),
            dict(metadata or {}),
            check_types=check_types,
        )

    def _resolve(self, roots: Sequence[Graph]) -> None:
        """Let all nodes read the definitions of values of ``later``."""
        missing = [value.name for value, meaning in self._later.items() if meaning is None]
        if missing:
            raise InvalidModel(f"{missing[0]!r} has no definition; give it one with define()")
        meanings = {value: meaning for value, meaning in self._later.items() if meaning}
        if not meanings:
            return
        for graph in [inner for root in roots for inner in root.graphs()]:
            graph.outputs = [meanings.get(value, value) for value in graph.outputs]
            for node in graph.nodes:
                node.inputs = [None if v is None else meanings.get(v, v) for v in node.inputs]


def _type(dtype: ElementType, shape: Sequence[Dim] | None = None) -> Type:
    """The type of values of a dtype and a shape; a ``Type`` stays as it is."""
    if isinstance(dtype, Type):
        return dtype
    element = np.dtype(dtype)
    element = np.dtype(object) if element.kind == "U" else element
    return TensorType(element, None if shape is None else tuple(shape))


def _listed(results: Returned) -> Sequence[Operand]:
    """The results of a function of a branch or body, as a sequence."""
    if results is None:
        return ()
    return results if isinstance(results, tuple | list) else (results,)


def _caller() -> str:
    """The file and the line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
