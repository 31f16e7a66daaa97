"""Attributes of nodes: plain values, tensors, graphs, and references to attributes of a function.

A graph among the attributes is made empty, and noted for the importer, which fills it later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import AttributeProto, NodeProto, SparseTensorProto, TensorProto

from penstock.errors import InvalidModel
from penstock.frontends.common.diagnostics import Diagnostics, TensorError
from penstock.frontends.common.encoding import decode_text
from penstock.frontends.onnx.file import Apart
from penstock.frontends.onnx.schemas import LEGACY, TYPE_NAMES
from penstock.frontends.onnx.scopes import ImportContext, PendingGraph
from penstock.frontends.onnx.tensors import TensorReader
from penstock.frontends.onnx.types import value_type
from penstock.ir.graph import Graph
from penstock.types import STRING

PLAIN: Mapping[int, Callable[[AttributeProto], Any]] = {
    AttributeProto.FLOAT: lambda a: a.f,
    AttributeProto.INT: lambda a: a.i,
    AttributeProto.STRING: lambda a: decode_text(a.s),
    AttributeProto.FLOATS: lambda a: list(a.floats),
    AttributeProto.INTS: lambda a: list(a.ints),
    AttributeProto.STRINGS: lambda a: [decode_text(item) for item in a.strings],
    AttributeProto.TYPE_PROTO: lambda a: value_type(a.tp),
    AttributeProto.TYPE_PROTOS: lambda a: [value_type(item) for item in a.type_protos],
}
"""Readers of attributes by ``AttributeProto`` type, except for tensors and graphs."""

_FIELDS: Mapping[str, int] = {
    "f": AttributeProto.FLOAT,
    "i": AttributeProto.INT,
    "s": AttributeProto.STRING,
    "t": AttributeProto.TENSOR,
    "g": AttributeProto.GRAPH,
    "tp": AttributeProto.TYPE_PROTO,
    "sparse_tensor": AttributeProto.SPARSE_TENSOR,
}
_LISTS: Mapping[str, int] = {
    "floats": AttributeProto.FLOATS,
    "ints": AttributeProto.INTS,
    "strings": AttributeProto.STRINGS,
    "tensors": AttributeProto.TENSORS,
    "graphs": AttributeProto.GRAPHS,
    "type_protos": AttributeProto.TYPE_PROTOS,
    "sparse_tensors": AttributeProto.SPARSE_TENSORS,
}


def attribute_type(proto: AttributeProto) -> int:
    """The ``AttributeProto`` type; IR version 1 lacks it, so it is that of the field in use."""
    if proto.type:
        return proto.type
    for name, code in _FIELDS.items():
        if proto.HasField(name):
            return code
    return next((code for name, code in _LISTS.items() if getattr(proto, name)), 0)


def _strings(value: Any) -> np.ndarray:
    return np.array(value, STRING)


CONSTANTS: Mapping[str, tuple[int, Callable[[Any], np.ndarray]]] = {
    "value": (AttributeProto.TENSOR, np.asarray),
    "sparse_value": (AttributeProto.SPARSE_TENSOR, np.asarray),
    "value_float": (AttributeProto.FLOAT, lambda value: np.array(value, np.float32)),
    "value_floats": (AttributeProto.FLOATS, lambda value: np.array(value, np.float32)),
    "value_int": (AttributeProto.INT, lambda value: np.array(value, np.int64)),
    "value_ints": (AttributeProto.INTS, lambda value: np.array(value, np.int64)),
    "value_string": (AttributeProto.STRING, _strings),
    "value_strings": (AttributeProto.STRINGS, _strings),
}
"""Attributes that can be the value of a Constant: their type, and how to make an array of one."""


class AttributeReader:
    """Reads the attributes of one model's nodes. ``pending`` takes the graphs among them, which
    are empty until the importer fills them."""

    def __init__(
        self, tensors: TensorReader, diagnostics: Diagnostics, pending: list[PendingGraph]
    ) -> None:
        self.tensors = tensors
        self.diagnostics = diagnostics
        self.pending = pending

    def read(
        self,
        proto: AttributeProto,
        attrs: dict[str, Any],
        types: dict[str, int],
        name: str,
        context: ImportContext,
    ) -> None:
        """Add one attribute of node ``name`` to its ``attrs`` and their ``AttributeProto`` types.

        Raises ``InvalidModel`` for a graph beyond ``Limits.max_depth``; adds what else is wrong to
        the diagnostics.
        """
        key = decode_text(proto.name)
        if key in types:
            self.diagnostics.problem(
                f"{name} in {context.where} has attribute {key!r} twice; remove one"
            )
        if proto.ref_attr_name:
            referred = self.referred(proto, name, context)
            if referred is None:
                return
            proto, context = referred
        if key in LEGACY:
            return
        code = types[key] = attribute_type(proto)
        read_plain = PLAIN.get(code)
        if read_plain is not None:
            try:
                attrs[key] = read_plain(proto)
            except InvalidModel as error:
                self.diagnostics.problem(f"attribute {key!r} of {name} in {context.where}: {error}")
        elif code == AttributeProto.GRAPH:
            where = f"{key} of {name} in {context.where}"
            self.diagnostics.check_depth(context.depth + 1, where)
            graph = attrs[key] = Graph([], [], [], decode_text(proto.g.name))
            self.pending.append((graph, proto.g, context.nested(where)))
        elif code in (AttributeProto.TENSOR, AttributeProto.SPARSE_TENSOR):
            tensor = proto.t if code == AttributeProto.TENSOR else proto.sparse_tensor
            attrs[key] = self.tensor(tensor, "attribute", key, f"of {name} in {context.where}")
        elif code in (AttributeProto.TENSORS, AttributeProto.SPARSE_TENSORS):
            tensors = proto.tensors if code == AttributeProto.TENSORS else proto.sparse_tensors
            where = f"of {name} in {context.where}"
            attrs[key] = [self.tensor(tensor, "attribute", key, where) for tensor in tensors]
        else:
            fault = "is a list of graphs" if code == AttributeProto.GRAPHS else "has no value"
            self.diagnostics.problem(
                f"attribute {key!r} of {name} in {context.where} {fault}, which no operation "
                "takes; remove it"
            )

    def referred(
        self, proto: AttributeProto, name: str, context: ImportContext
    ) -> tuple[AttributeProto, ImportContext] | None:
        """The attribute that one within a function refers to, and the context that it was written
        in; ``None`` if the call leaves it out."""
        while proto.ref_attr_name:
            wanted = proto.ref_attr_name
            if context.call is None:
                self.diagnostics.problem(
                    f"attribute {decode_text(proto.name)!r} of {name} in {context.where} refers to "
                    f"attribute {decode_text(wanted)!r} of a function, but is in none; give it a "
                    "value"
                )
                return None
            given = context.call.attributes.get(wanted)
            if given is None or given[0] is proto:
                return None
            proto, context = given
        return proto, context

    def constant(self, proto: NodeProto, index: int, context: ImportContext) -> np.ndarray | None:
        """The value of a Constant node, or ``None`` if something is wrong with it."""
        name = f"{context.prefix}{decode_text(proto.name) or f'Constant_{index}'}"
        attrs: dict[str, Any] = {}
        types: dict[str, int] = {}
        for attribute in proto.attribute:
            self.read(attribute, attrs, types, name, context)
        given = [key for key in attrs if key in CONSTANTS]
        if len(given) != 1 or len(types) != 1:
            self.diagnostics.problem(
                f"{name} in {context.where} is a Constant with attributes {sorted(types)}; it must "
                f"have one of {', '.join(CONSTANTS)}"
            )
            return None
        code, to_array = CONSTANTS[given[0]]
        if types[given[0]] != code:
            self.diagnostics.problem(
                f"{given[0]} of {name} in {context.where} is of kind "
                f"{TYPE_NAMES.get(types[given[0]])}, not {TYPE_NAMES[code]}; write it as that"
            )
            return None
        array = to_array(attrs[given[0]])
        array.flags.writeable = False
        return array

    def tensor(
        self, proto: TensorProto | Apart | SparseTensorProto, role: str, name: str, where: str
    ) -> np.ndarray:
        """The contents of a tensor; an empty array if something is wrong with it."""
        try:
            if isinstance(proto, SparseTensorProto):
                return self.tensors.read_sparse(proto)
            return self.tensors.read(proto)
        except TensorError as error:
            self.diagnostics.problem(f"{role} {name!r} {where}: {error}")
            return np.empty(0, np.float32)
