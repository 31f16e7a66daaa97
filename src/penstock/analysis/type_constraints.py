"""The types that ONNX's schemas allow, checked once for each node of a loaded model.

Types of values are propagated from the graph's inputs, node by node, without shapes and in the
notation of the schemas::

    x: tensor(int64)          y = Softmax(x)      T of Softmax-13 is tensor(float), ..., and not
                                                  tensor(int64): a problem
    p: tensor(float)          q = Gather(p, x)    T is tensor(float) and Tind tensor(int64), so q
                                                  is T, tensor(float)
    r = Cast<to = BOOL>(q)                        the schema leaves T2 open: ask the operation

A node may have types that any version of its operation with the same meaning allows, since later
versions allow more types. Unknown types are not checked; where a model leaves the types of its
inputs open, they are checked when it is fed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, TypeAlias

from penstock.analysis.schemas import (
    DTYPE_NAMES,
    ELEMENT_TYPES,
    OnnxSchema,
    SchemaPort,
    find_schema,
    newest_opset,
)
from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import ProblemList
from penstock.core.types import (
    ANY,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    dtype_name,
    dtype_named,
)
from penstock.ir.graph import Contents, Graph, Node, Value
from penstock.ir.op import Op, Role
from penstock.ops.onnx.control_flow import is_control, loop_carried
from penstock.ops.registry import MICROSOFT

TypeName = str | None
"""A type in the notation of schemas, such as "seq(tensor(float))"; None if it is unknown."""


def check_types(graph: Graph, fed: Mapping[str, Type]) -> None:
    """Raise ``InvalidModel`` with all nodes of a sorted graph whose types ONNX does not allow.

    ``fed``: types of fed values, by name.
    """
    checker = _Checker({name: name_of(type_) for name, type_ in fed.items()})
    with suppress(RecursionError):  # Limits refuses graphs that are nested as deep as that
        checker.check(graph)
    checker.problems.raise_any()


def type_faults(node: Node) -> Sequence[str]:
    """Return the faults of the types of a node's inputs by ONNX's rules, as ends of sentences that
    begin with the node."""
    names = [None if value is None else name_of(value.type) for value in node.inputs]
    return _outcome(node.op, len(node.outputs), names)[0]


# Names of types.

_ELEMENTS = {
    DTYPE_NAMES[code]: f"tensor({name.lower()})" for name, code in ELEMENT_TYPES.items() if code
}
_TENSORS = {name: dtype for dtype, name in _ELEMENTS.items()}


def name_of(type_: Type) -> TypeName:
    """Return the name of a type, or None if a part of it is unknown."""
    if isinstance(type_, TensorType):
        return None if type_.dtype is None else _ELEMENTS.get(dtype_name(type_.dtype))
    if isinstance(type_, SequenceType | OptionalType):
        inner = name_of(type_.element)
        outer = "seq" if isinstance(type_, SequenceType) else "optional"
        return None if inner is None else f"{outer}({inner})"
    if isinstance(type_, MapType):
        key, value = _ELEMENTS.get(dtype_name(type_.key)), name_of(type_.value)
        return None if key is None or value is None else f"map({key[7:-1]},{value})"
    return None


@lru_cache(maxsize=256)
def _type(name: TypeName) -> Type:
    """Return the type of a name. It is unknown for maps, from which no type is computed."""
    if name is None:
        return ANY
    if name in _TENSORS:
        return TensorType(dtype_named(_TENSORS[name]))
    outer, _, inner = name[:-1].partition("(")
    if outer == "seq":
        return SequenceType(_type(inner))
    return OptionalType(_type(inner)) if outer == "optional" else ANY


# Schemas.


_FLOATS = frozenset({"tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"})
_ANYTHING = SchemaPort("zero_point", "", 0, True, frozenset())
_FLOAT = SchemaPort("X", "T", 0, True, _FLOATS)

# Operations of ONNX Runtime, for which the onnx package has no schemas, with kernels that would
# truncate their results to integers.
_MICROSOFT = {
    "DequantizeLinear": (_ANYTHING, _FLOAT, _ANYTHING),
    "QuantizeLinear": (_FLOAT, _FLOAT, _ANYTHING),
}


def _schemas(op: Op) -> Iterator[OnnxSchema]:
    """Yield the schemas of the versions that ``op`` covers, newest first. The last of their inputs
    and outputs stands for all further ones."""
    if op.domain == MICROSOFT and op.name in _MICROSOFT:
        inputs, outputs = _MICROSOFT[op.name], (_ANYTHING,)
        yield OnnxSchema(op.name, op.domain, op.version, 0, 0, 0, 0, {}, inputs, outputs)
    version = min(op.version, newest_opset(op.domain))
    while version >= max(op.since, 1):
        schema = find_schema(op.name, op.domain, version)
        if schema is None:
            return
        yield schema
        version = schema.version - 1


@cache
def _newest(op: Op) -> OnnxSchema | None:
    """Return the schema of an operation's newest version, or None if it is not ONNX's."""
    return next(_schemas(op), None)


@lru_cache(maxsize=4096)
def _allowed_before(op: Op, side: str, index: int, type_: str) -> bool:
    """Whether an older version of an operation allows a type that the newest does not."""
    for schema in _schemas(op):
        formals = getattr(schema, side)
        if formals and type_ in formals[min(index, len(formals) - 1)].types:
            return True
    return False


_Outcome: TypeAlias = tuple[Sequence[str], tuple[TypeName, ...]]
"""The verdict of a schema on a node with inputs of certain types: faults, as ends of sentences that
begin with the node, and the types of its outputs, None where the operation decides."""


def _outcome(op: Op, outputs: int, inputs: Sequence[TypeName]) -> _Outcome:
    schema = _newest(op)
    if schema is None:
        return (), (None,) * outputs
    faults: list[str] = []
    bound: dict[str, tuple[str, str]] = {}
    last = len(schema.inputs) - 1
    for i, type_ in enumerate(inputs):
        if type_ is None or last < 0:
            continue
        port = schema.inputs[min(i, last)]
        variable = port.variable
        if not port.takes(type_) and not _allowed_before(op, "inputs", i, type_):
            faults.append(
                f"reads {type_} as input {i} ({port.name}), for which {schema} takes "
                f"{_listed(port.types)}; insert a Cast, or correct the type"
            )
        elif variable:
            name, other = bound.setdefault(variable, (port.name, type_))
            if other != type_:
                faults.append(
                    f"reads {other} as {name} and {type_} as input {i} ({port.name}), which must "
                    f"be of one type, {variable} of {schema}; insert a Cast"
                )
    last = len(schema.outputs) - 1
    if last < 0:
        return faults, (None,) * outputs
    names: list[TypeName] = []
    for i in range(outputs):
        port = schema.outputs[min(i, last)]
        only = next(iter(port.types)) if len(port.types) == 1 else None
        names.append(bound.get(port.variable, ("", only))[1])
    return faults, tuple(names)


def _listed(types: frozenset[str]) -> str:
    names = sorted(types)
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


# Models.


class _ValueTypes(dict["Value | None", TypeName]):
    """The types of values, by these; None stands for an input that is left out. Those of constants
    and of inputs of graphs are found when they are first asked for."""

    def __init__(self, fed: Mapping[str, TypeName]) -> None:
        super().__init__({None: None})
        self._fed = fed

    def __missing__(self, value: Value | None) -> TypeName:
        assert value is not None
        type_: Any = value.type
        if value.name in self._fed and not value.is_constant:
            name = self._fed[value.name]
        elif type_.__class__ is TensorType and type_.dtype is not None:  # as of most
            name = _ELEMENTS.get(dtype_name(type_.dtype))
        else:
            name = name_of(type_)
        self[value] = name
        return name


class _Checker:
    """The types of the values of one model, and the problems with them."""

    def __init__(self, fed: Mapping[str, TypeName]) -> None:
        self.problems = ProblemList()
        self._fed = fed
        self._types = _ValueTypes(fed)
        self._outcomes: dict[tuple[Any, ...], _Outcome] = {}  # most nodes of a model are alike

    def check(self, graph: Graph) -> None:
        """Check all nodes of ``graph`` and of its nested graphs."""
        types, outcomes = self._types, self._outcomes
        for node in with_checkpoints(graph.nodes):
            outputs = node.outputs
            inputs = [*map(types.__getitem__, node.inputs)]
            key = (node.op, len(outputs), *inputs)
            outcome = outcomes.get(key)
            if outcome is None:
                outcome = outcomes[key] = _outcome(node.op, len(outputs), inputs)
            faults, names = outcome
            if len(outputs) == 1 and (value := outputs[0]) is not None:  # most nodes; faster
                types[value] = names[0]
            else:
                types.update(zip(outputs, names, strict=True))
                # An output that is left out has overwritten the entry of None.
                types[None] = None
            if faults:
                self._report(node, faults)
            elif None in names:
                self._ask_operation(node, inputs)
            if self._fed:
                fed = [v for v in outputs if v is not None and v.name in self._fed]
                types.update((v, self._fed[v.name]) for v in fed)

    def _report(self, node: Node, faults: Sequence[str]) -> None:
        self.problems.add(*[f"{node.op.name} ({node.label}) {fault}" for fault in faults])
        for _, graph in node.graphs:
            self.check(graph)

    def _ask_operation(self, node: Node, inputs: Sequence[TypeName]) -> None:
        """Set the types of outputs that the schema leaves open, as the operation infers them."""
        if is_control(node):
            inferred = list(self._with_graphs(node, inputs))
        else:
            inferred = list(map(name_of, self._inferred(node, inputs)))
        schema = _newest(node.op)
        for i, (value, name) in enumerate(zip(node.outputs, inferred, strict=False)):
            if value is None or name is None or self._types.get(value) is not None:
                continue
            self._types[value] = name
            if schema is None:
                continue
            port = schema.outputs[min(i, len(schema.outputs) - 1)]
            if not port.takes(name) and not _allowed_before(node.op, "outputs", i, name):
                allowed = _listed(port.types)
                fault = f"gives {name} as output {i} ({port.name}), for which {schema} "
                self.problems.add(f"{node.op.name} ({node.label}) {fault}gives {allowed}")

    def _inferred(self, node: Node, inputs: Sequence[TypeName]) -> Sequence[Type]:
        pairs = list(zip(node.inputs, inputs, strict=True))
        types = [None if v is None else v.type if v.is_constant else _type(t) for v, t in pairs]
        try:
            return node.op.infer(types, node.attrs, Contents(node.inputs))
        except Exception:  # compiling reports it, if the node is needed
            return ()

    def _with_graphs(self, node: Node, inputs: Sequence[TypeName]) -> Iterator[TypeName]:
        """Yield the types of the outputs of a node whose graphs an executor runs. A loop's body is
        checked for the types of its first iteration."""
        role = node.op.role
        if role is Role.IF:
            branches: list[Graph] = [node.attrs["then_branch"], node.attrs["else_branch"]]
            for branch in branches:
                self.check(branch)
            for a, b in zip(*[branch.outputs for branch in branches], strict=True):
                yield self._same(node, a, self._types[a], self._types[b], "the other branch")
            return
        body: Graph = node.attrs["body"]
        if role is Role.LOOP:
            inputs = ["tensor(int64)", "tensor(bool)", *inputs[2:]]
        elif role is Role.SEQUENCE_MAP:
            inputs = [t[4:-1] if t and t.startswith("seq(") else t for t in inputs]
        self._types.update(zip(body.inputs, inputs, strict=True))
        self.check(body)
        if role is Role.LOOP:
            condition = body.outputs[0]
            self._same(node, condition, self._types[condition], "tensor(bool)", "a condition")
        entering, leaving = loop_carried(node)
        for value, before in zip(body.outputs[leaving], inputs[entering], strict=True):
            yield self._same(node, value, self._types[value], before, "the iteration before")
        for name in map(self._types.__getitem__, body.outputs[leaving.stop :]):
            yield f"seq({name})" if name and role is Role.SEQUENCE_MAP else name

    def _same(self, node: Node, value: Value, a: TypeName, b: TypeName, other: str) -> TypeName:
        """Return the common type of an output of a graph of ``node`` and of the value that must
        have the same type; one may be the optional of the other."""
        for wide, narrow in ((a, b), (b, a)):
            if wide == f"optional({narrow})":
                return wide
        if a is not None and b is not None and a != b:
            self.problems.add(
                f"{node.op.name} ({node.label}): {value.name!r} is {a}, but {b} as {other}; "
                "they must be of one type: insert a Cast"
            )
            return None
        return a or b
