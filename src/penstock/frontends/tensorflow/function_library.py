"""The library of functions of a graph: what they take and give, and which call themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.algorithms.dag import strongly_connected_components
from penstock.frontends.tensorflow.attrs import Function, attribute
from penstock.frontends.tensorflow.proto.graphdef_pb2 import (
    AttrValue,
    FunctionDef,
    FunctionDefLibrary,
    NodeDef,
    OpDef,
)
from penstock.frontends.tensorflow.schemas import Argument, Schema, schemas
from penstock.frontends.tensorflow.tensors import TensorError, type_name
from penstock.limits import Limits


class Library:
    """Functions by name. ``called`` are those that remain functions, by the name that they have in
    the model, until somebody has imported them."""

    def __init__(
        self, proto: FunctionDefLibrary, where: str, limits: Limits, problems: list[str]
    ) -> None:
        self.functions: dict[str, FunctionDef] = {}
        self.limits = limits
        self.called: dict[str, tuple[FunctionDef, Mapping[str, Any]]] = {}
        self.names: dict[str, str] = {}
        self._schemas: dict[str, Schema] = {}
        for function in proto.function:
            name = function.signature.name
            if not name or name in self.functions or name in schemas():
                problems.append(f"{where} has a function {name!r} whose name is not its own")
            self.functions[name] = function
        self.recursive = _recursive(
            {
                name: {called for node in function.node_def for called in calls(node)}
                for name, function in self.functions.items()
            }
        )
        for name, function in self.functions.items():
            try:
                self._schemas[name] = self._schema(function.signature)
            except (TensorError, RecursionError) as error:
                problems.append(f"function {name!r} of {where}: {error}")

    def schema(self, name: str) -> Schema | None:
        """What a node takes and gives whose operation is the function ``name``."""
        return self._schemas.get(name)

    def _schema(self, signature: OpDef) -> Schema:
        defaults = {
            each.name: attribute(each.default_value, {}, self.limits)
            for each in signature.attr
            if each.HasField("default_value")
        }
        inputs = tuple([_argument(each) for each in signature.input_arg])
        outputs = tuple([_argument(each) for each in signature.output_arg])
        return Schema(signature.name, inputs, outputs, defaults)

    def named(self, function: Function) -> str:
        """The name in the model of a function that remains one; noted as called."""
        attrs = dict(function.attrs)
        key = f"{function.name} {sorted(attrs.items())!r}" if attrs else function.name
        found = self.names.get(key)
        if found is None:
            used = sum(1 for each in self.names if each.split(" ")[0] == function.name)
            found = function.name if not used else f"{function.name}_{used}"
            self.names[key] = found
            self.called[found] = (self.functions[function.name], attrs)
        return found


def _argument(proto: OpDef.ArgDef) -> Argument:
    count = proto.type_list_attr or proto.number_attr
    kind = proto.type_attr or (type_name(proto.type) if proto.type else "")
    return Argument(proto.name, count, kind, proto.is_ref)


def calls(node: NodeDef) -> Iterator[str]:
    """What a node names that may be a function: its operation, and those among its attributes."""
    yield node.op
    for value in node.attr.values():
        yield from _functions_of(value)


def _functions_of(value: AttrValue) -> Iterator[str]:
    if value.HasField("func"):
        yield value.func.name
    elif value.HasField("list"):
        for each in value.list.func:
            yield each.name


def _recursive(calls: Mapping[str, set[str]]) -> set[str]:
    """The functions that call themselves, directly or through others."""
    names = list(calls)
    index = {name: i for i, name in enumerate(names)}
    successors = [[index[callee] for callee in calls[name] if callee in index] for name in names]
    return {
        names[i]
        for component in strongly_connected_components(successors)
        for i in component
        if len(component) > 1 or i in successors[i]
    }
