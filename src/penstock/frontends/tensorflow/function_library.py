"""The functions of a GraphDef: their schemas, and which of them are recursive."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.algorithms.dag import on_cycles
from penstock.core.checkpoints import with_checkpoints
from penstock.core.limits import Limits
from penstock.core.records import cached_property
from penstock.frontends.common.diagnostics import TensorError
from penstock.frontends.common.expansion import Census, expanded_size, expanded_sizes
from penstock.frontends.tensorflow.proto.graphdef_pb2 import (
    FunctionDef,
    FunctionDefLibrary,
    NodeDef,
    OpDef,
)
from penstock.frontends.tensorflow.schemas import Argument, TfSchema, schemas, type_of_attribute
from penstock.frontends.tensorflow.tensors import (
    ConstantReader,
    FunctionReference,
    decode_attribute,
    type_name,
)


class FunctionLibrary:
    """Functions by name. ``recursive`` are those that call themselves, and remain functions;
    ``called`` has those of them that are called and not yet imported, by their name in the model.
    ``problems`` lists faults of the library; ``constants`` reads those of all its users.
    """

    def __init__(self, proto: FunctionDefLibrary, where: str, limits: Limits) -> None:
        self.functions: dict[str, FunctionDef] = {}
        self.problems: list[str] = []
        self.limits = limits
        self.constants = ConstantReader(limits)
        self.called: dict[str, FunctionReference] = {}
        self.names: dict[str, str] = {}
        self._schemas: dict[str, TfSchema] = {}
        for function in proto.function:
            name = function.signature.name
            if not name or name in self.functions or name in schemas():
                self.problems.append(
                    f"{where} has a function {name!r} whose name is empty, or that of another "
                    "function or operation; rename it"
                )
            self.functions[name] = function
        self.recursive = _recursive(
            {
                name: {callee for node in function.node_def for callee in called_functions(node)}
                for name, function in self.functions.items()
            }
        )
        for name, function in self.functions.items():
            try:
                self._schemas[name] = self._schema(function.signature)
            except (TensorError, RecursionError) as error:
                self.problems.append(f"function {name!r} of {where}: {error}")

    def expanded_nodes(self, nodes: Iterable[NodeDef]) -> int:
        """Return the number of nodes once calls of non-recursive functions are expanded."""
        return expanded_size(_census(nodes), self._sizes)

    @cached_property
    def _sizes(self) -> Mapping[Any, int]:
        functions = {
            name: _census(function.node_def)
            for name, function in self.functions.items()
            if name not in self.recursive
        }
        return expanded_sizes(functions)

    def uncalled(self) -> FunctionLibrary:
        """Return the same functions for the import of another graph."""
        library = copy.copy(self)  # schemas and constants are shared; calls belong to one graph
        library.called, library.names = {}, {}
        return library

    def schema(self, name: str) -> TfSchema | None:
        """Return the schema of nodes whose operation is the function ``name``."""
        return self._schemas.get(name)

    def returns_argument(self, name: str, index: int) -> bool:
        """Return whether result ``index`` of a function is its argument ``index``, or a copy."""
        function = self.functions[name]
        arguments, results = function.signature.input_arg, function.signature.output_arg
        if not index < min(len(arguments), len(results)):
            return False
        copies = {n.name: n.input[0] for n in function.node_def if n.op == "Identity" and n.input}
        source = function.ret.get(results[index].name, "").partition(":")[0]
        for _ in copies:
            source = copies.get(source, source).partition(":")[0]
        return source == arguments[index].name

    def _schema(self, signature: OpDef) -> TfSchema:
        defaults = {
            attr.name: decode_attribute(attr.default_value, {}, self.limits)
            for attr in signature.attr
            if attr.HasField("default_value")
        }
        inputs, outputs = [
            tuple(map(_argument, side)) for side in (signature.input_arg, signature.output_arg)
        ]
        types = {x.name: type_of_attribute(x.type, {}) for x in signature.attr if x.type}
        return TfSchema(inputs, outputs, types, defaults)

    def remaining_name(self, function: FunctionReference) -> str:
        """Return the name in the model of a function that remains one, and mark it as called."""
        attrs = sorted(function.attrs.items())
        key = f"{function.name} {attrs!r}" if attrs else function.name
        name = self.names.get(key)
        if name is None:
            used = sum(1 for other in self.names if other.split(" ")[0] == function.name)
            name = function.name if not used else f"{function.name}_{used}"
            self.names[key] = name
            self.called[name] = function
        return name


def _argument(proto: OpDef.ArgDef) -> Argument:
    count = proto.type_list_attr or proto.number_attr
    dtype = proto.type_attr or (type_name(proto.type) if proto.type else "")
    return Argument(proto.name, count, dtype, proto.is_ref)


def _census(nodes: Iterable[NodeDef]) -> Census:
    census: Counter[str | None] = Counter()
    for node in with_checkpoints(nodes):
        census.update((None, *called_functions(node)))
        if "cond" in node.attr:  # of a While, computed before the loop and in its body
            census[node.attr["cond"].func.name] += 1
    return census


def called_functions(node: NodeDef) -> Iterator[str]:
    """Yield names in a node that may be functions: its operation, and some attributes."""
    yield node.op
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (function.name for function in value.list.func)


def _recursive(calls: Mapping[str, set[str]]) -> set[str]:
    """Return the functions that call themselves, directly or through others."""
    names = list(calls)
    index = {name: i for i, name in enumerate(names)}
    successors = [[index[callee] for callee in calls[name] if callee in index] for name in names]
    return {names[i] for i in on_cycles(successors)}
