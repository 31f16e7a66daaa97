"""Conversion of variables to inputs and outputs, so that runs are stateless.

::

    h = VarHandleOp "sum"                      inputs x, sum
    a = ReadVariableOp(h)
    b = Add(a, x)                  becomes     b = Add(sum, x)
    AssignVariableOp(h, b)
    y = ReadVariableOp(h)                      outputs y = b, sum/next = b

Branches return the values that they assign, and loops carry them. Variables without assignments
become constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

import numpy as np

from penstock.core.errors import InvalidInput
from penstock.core.records import NamedTuple, dataclass, field, replace
from penstock.core.types import TensorType, Type, find_dtype, type_of
from penstock.frontends.load import check_and_sort
from penstock.ir.graph import Graph, Model, Node, Value, clone, is_framed, sort
from penstock.ir.op import Role
from penstock.ops.common.shape_rules import element_number
from penstock.ops.onnx.control_flow import loop_carried
from penstock.ops.registry import TENSORFLOW, standard
from penstock.ops.tensorflow.common import dims_of
from penstock.ops.tensorflow.state import VARIABLES, Store, variable_name
from penstock.passes.context import PassContext
from penstock.passes.dead_code import prune
from penstock.passes.pipeline import STRUCTURE, run_passes

_NEXT = "/next"
_ASSIGN = "Assign"


class CarriedModel(NamedTuple):
    """A ``model`` without variables, the outputs to feed back, by input name, and the initial
    values of inputs that have one."""

    model: Model
    state: Mapping[str, str]
    initial: Mapping[str, np.ndarray]


def assigns_variables(graph: Graph) -> bool:
    """Whether a run of a graph changes variables."""
    return any(_update_of(node) is not None for node in graph.walk())


def carry_variables(model: Model) -> CarriedModel:
    """Return a model whose variables are inputs, and their assigned values outputs. Raises
    ``InvalidInput`` for unsupported uses of variables."""
    graph = clone(model.graph)
    run_passes(STRUCTURE, graph, PassContext())
    if is_framed(graph):
        raise InvalidInput(f"{model!r} has loops of frames, which carry no variables")
    # Sorting by control edges gives the order of side effects.
    sort(graph)
    prune(graph)  # assignments that never run
    names = {value.name for value in (*graph.inputs, *graph.outputs)}
    assigned = _assigned(graph.nodes, {})
    carrier = _Carrier()
    state, initial = {}, {}
    for variable, (attrs, label) in _variables(graph).items():
        first = _initial(attrs, variable)
        if variable not in assigned:
            if first is None:
                raise InvalidInput(f"variable {variable!r} of {label} has no value")
            carrier.values[variable] = Value(variable, const=first)
            continue
        fed = Value(variable, _type(attrs, first))
        if variable in names:
            raise InvalidInput(f"{variable!r} is a variable, and an input or output")
        graph.inputs.append(fed)
        carrier.values[variable], state[variable] = fed, variable + _NEXT
        if first is not None:
            initial[variable] = first
    carrier.rewrite(graph)
    for variable, output in state.items():
        # An output has a separate name, even if it equals an input.
        named = Value(output, carrier.values[variable].type)
        graph.nodes.append(Node(standard("Identity"), [carrier.values[variable]], [named]))
        graph.outputs.append(named)
    prune(graph)
    carried = replace(model, graphs={**model.graphs, model.entry: graph}, artifact=None)
    check_and_sort(carried)
    return CarriedModel(carried, state, initial)


def _variables(graph: Graph) -> dict[str, tuple[Mapping[str, object], str]]:
    """Return the attributes of variables by name, and the labels of their nodes."""
    found: dict[str, tuple[Mapping[str, object], str]] = {}
    for node in graph.walk():
        if node.op.domain == TENSORFLOW and node.op.name in VARIABLES:
            found.setdefault(variable_name(node.attrs, node.name), (node.attrs, node.label))
    return found


def _initial(attrs: Mapping[str, object], name: str) -> np.ndarray | None:
    store = attrs["store"]
    assert isinstance(store, Store)
    return store.initial.get(name)


def _type(attrs: Mapping[str, object], initial: np.ndarray | None) -> Type:
    if initial is not None:
        return type_of(initial)
    return TensorType(find_dtype(str(attrs.get("dtype", ""))), dims_of(attrs.get("shape")))  # type: ignore[arg-type]


def _update_of(node: Node) -> str | None:
    """Return the operation that computes a variable's new value from the old one and an input, ""
    for the input itself; None if a node is no assignment."""
    name = node.op.name
    if node.op.domain != TENSORFLOW or not name.startswith(_ASSIGN):
        return None
    update = name.removeprefix(_ASSIGN).removesuffix("VariableOp")
    return update if update in ("", "Add", "Sub") else None


def _assigned(nodes: Sequence[Node], handles: Mapping[Value, str]) -> set[str]:
    """Return the variables that nodes, or their nested graphs, assign."""
    known, found = {**handles}, set[str]()
    for node in nodes:
        _name_handles(node, known)
        if _update_of(node) is not None and (name := _named(node, known)) is not None:
            found.add(name)
        for _, inner in node.graphs:
            found |= _assigned(inner.nodes, {**known, **_inner_handles(node, inner, known)})
    return found


def _name_handles(node: Node, handles: dict[Value, str]) -> None:
    """Record the variable that the first output of a node refers to, if any."""
    output = next(iter(node.outputs), None)
    if output is None:
        return
    if node.op.domain == TENSORFLOW and node.op.name in VARIABLES:
        handles[output] = variable_name(node.attrs, node.name)
    elif "forwards handle" in node.op.traits or node.op.full_name == "Identity":
        source = node.inputs[0]
        if source is not None and source in handles:
            handles[output] = handles[source]


def _inner_handles(node: Node, inner: Graph, handles: Mapping[Value, str]) -> dict[Value, str]:
    """Return the inputs of a loop's body that are handles, which it carries unchanged."""
    if node.op.role is not Role.LOOP:
        return {}
    given = zip(inner.inputs, node.inputs, strict=True)
    return {x: handles[value] for x, value in given if value is not None and value in handles}


def _named(node: Node, handles: Mapping[Value, str]) -> str | None:
    """Return the variable that the first input of a node refers to."""
    first = node.input(0)
    if first is not None:
        return handles.get(first)
    return variable_name(node.attrs, "") if node.attrs.get("shared_name") else None


@dataclass(eq=False)
class _Carrier:
    """Rewrites nodes in execution order: ``values`` maps variables to their current values,
    ``handles`` maps values to the variables that they refer to."""

    values: dict[str, Value] = field(default_factory=dict)
    handles: dict[Value, str] = field(default_factory=dict)
    new: dict[Value, Value] = field(default_factory=dict)
    before: dict[Node, Sequence[Node]] = field(default_factory=dict)
    """control inputs of removed nodes"""
    numbers: Iterator[int] = field(default_factory=count)

    def rewrite(self, graph: Graph) -> None:
        """Rewrite the nodes of a graph, keeping its inputs."""
        nodes: list[Node] = []
        for node in graph.nodes:
            node.control_inputs = self._awaited(node)
            node.inputs = [None if v is None else self.new.get(v, v) for v in node.inputs]
            replacement = self._replaced(node)
            if node not in replacement:
                self.before[node] = node.control_inputs
            nodes += replacement
        graph.nodes = nodes
        graph.outputs = [self.new.get(v, v) for v in graph.outputs]
        graph.targets = [node for node in graph.targets if node not in self.before]

    def _fresh(self, name: str) -> str:
        """Return a unique name for a value of a graph, which must shadow no outer name."""
        return f"{name}/{next(self.numbers)}"

    def _awaited(self, node: Node) -> list[Node]:
        waits: dict[Node, None] = {}
        for before in node.control_inputs:
            waits |= dict.fromkeys(self.before.get(before, [before]))
        return [*waits]

    def _replaced(self, node: Node) -> list[Node]:
        _name_handles(node, self.handles)
        if node.outputs and node.outputs[0] in self.handles and _update_of(node) is None:
            return []
        if node.graphs:
            return self._nested(node)
        given = [v for v in node.inputs if v is not None and v in self.handles]
        if not given and not (node.op.domain == TENSORFLOW and node.op.name == "ReadVariableOp"):
            return [node]
        name, update = _named(node, self.handles), _update_of(node)
        value = None if name is None else self.values.get(name)
        if name is None or value is None or len(given) > 1:
            raise InvalidInput(f"{node.label} uses a variable in a way that is not carried")
        if update is not None:
            return self._assign(node, name, value, update)
        y = next(iter(node.outputs), None)
        if y is None:
            raise InvalidInput(
                f"{node.label} changes variable {name!r} in a way that is not carried"
            )
        if node.op.name == "ReadVariableOp":
            self.new[y] = value
            return []
        if node.op.name in ("VarIsInitializedOp", "IsVariableInitialized"):
            self.new[y] = Value(y.name, const=np.array(True))
            return []
        if node.op.name == "VariableShape":
            shape = Value(self._fresh(f"{name}/shape"))
            to = {"to": element_number(str(node.attrs.get("out_type", "int32")))}
            cast = node.derived([shape], [y], to, op=standard("Cast"))
            return [node.derived([value], [shape], {}, op=standard("Shape")), cast]
        raise InvalidInput(f"{node.label} uses variable {name!r} in a way that is not carried")

    def _assign(self, node: Node, name: str, value: Value, update: str) -> list[Node]:
        given = node.inputs[1]
        assert given is not None
        if not update:
            self.values[name] = given
            return []
        result = Value(self._fresh(f"{name}/value"), value.type)
        self.values[name] = result
        return [node.derived([value, given], [result], {}, op=standard(update))]

    # Nodes with graphs.

    def _nested(self, node: Node) -> list[Node]:
        changed = _assigned([node], self.handles)
        # In the same order in all branches.
        order = [name for name in self.values if name in changed]
        if node.op.role is Role.LOOP:
            self._loop(node, order)
        elif node.op.role is Role.IF or not changed:
            for _, inner in node.graphs:
                self._inner(inner).add_outputs(inner, order)
        else:
            raise InvalidInput(f"{node.label} assigns variables in each of its iterations")
        if node.op.role is Role.IF:
            self._take(node, order, len(node.outputs))
        return [node]

    def _inner(self, graph: Graph, fed: Mapping[str, Value] | None = None) -> _Carrier:
        """Rewrite ``graph``, with ``fed`` in place of current values, and return its carrier."""
        values = {**self.values, **(fed or {})}
        inner = _Carrier(values, self.handles, self.new, self.before, self.numbers)
        inner.rewrite(graph)
        return inner

    def add_outputs(self, graph: Graph, names: Sequence[str], at: int | None = None) -> None:
        """Add the values of variables to a graph's outputs."""
        at = len(graph.outputs) if at is None else at
        for name in names:
            # A separate value for each: two outputs may not be the same value.
            y = Value(self._fresh(f"{name}{_NEXT}"), self.values[name].type)
            graph.nodes.append(Node(standard("Identity"), [self.values[name]], [y]))
            graph.outputs.insert(at, y)
            at += 1

    def _take(self, node: Node, names: Sequence[str], at: int) -> None:
        """Let a node return the values of variables, starting at output ``at``."""
        for place, name in enumerate(names, at):
            y = Value(self._fresh(f"{name}{_NEXT}"), self.values[name].type)
            y.producer = node
            node.outputs.insert(place, y)
            self.values[name] = y

    def _loop(self, node: Node, names: Sequence[str]) -> None:
        body: Graph = node.attrs["body"]
        self._drop_handles(node, body)
        entering, leaving = loop_carried(node)
        fed = {
            name: Value(self._fresh(f"{name}/carried"), self.values[name].type) for name in names
        }
        body.inputs += fed.values()
        inner = self._inner(body, fed)
        inner.add_outputs(body, names, leaving.stop)
        node.inputs += [self.values[name] for name in names]
        self._take(node, names, entering.stop - entering.start)

    def _drop_handles(self, node: Node, body: Graph) -> None:
        """Remove the handles that a loop carries, as they are invariant."""
        entering, leaving = loop_carried(node)
        self.handles |= _inner_handles(node, body, self.handles)
        places = [
            i
            for i, value in enumerate(node.inputs[entering])
            if value is not None and value in self.handles
        ]
        for i in reversed(places):
            own, result = body.inputs[entering.start + i], node.outputs[i]
            if result is not None:
                self.handles[result] = self.handles[own]
            del node.inputs[entering.start + i], body.inputs[entering.start + i]
            del body.outputs[leaving.start + i], node.outputs[i]
