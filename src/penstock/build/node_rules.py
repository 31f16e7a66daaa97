"""The rules for a node that is added to a graph: the schema of its operation, and its types."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import numpy as np

from penstock.analysis.schemas import OnnxSchema, find_schema, newest_opset, value_faults
from penstock.analysis.type_constraints import type_faults
from penstock.core.errors import InvalidModel, Unsupported
from penstock.core.types import dtype_name
from penstock.frontends.common.diagnostics import NO_KERNEL
from penstock.frontends.onnx.schema_protos import defaults
from penstock.frontends.tensorflow.schemas import TfSchema, schemas
from penstock.ir.graph import Node, Value
from penstock.ir.op import AttrDict, Attrs, Op
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW, find, registered

Schema = OnnxSchema | TfSchema | None
"""The schema of an operation of ONNX or TensorFlow; None for those of others."""


def operation_of(name: str, domain: str, version: int | None) -> tuple[Op, Schema]:
    """An operation, by default the newest of its name, and its schema. Raises ``InvalidModel`` if
    there is none, ``Unsupported`` if it has no kernel."""
    op = find(name, domain, version)
    schema: Schema = schemas().get(name) if domain == TENSORFLOW else None
    if schema is None and domain != TENSORFLOW:
        schema = find_schema(name, domain, newest_opset(domain) if version is None else version)
    if op is not None:
        return op, schema
    if schema is not None:
        raise Unsupported.of([(f"{domain}.{name}" if domain else name, NO_KERNEL, name)])
    known = {entry.name for entry in registered() if entry.domain == domain}
    close = get_close_matches(name, known, 3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    where = f"domain {domain!r}" if domain else "ONNX"
    raise InvalidModel(f"there is no operation {name!r} in {where}{hint}")


def with_defaults(op: Op, schema: Schema, attrs: Attrs, inputs: Sequence[Value | None]) -> AttrDict:
    """The attributes of a node as kernels read them, with those that its schema or its inputs
    imply."""
    given = {name: _plain(x, op.domain) for name, x in attrs.items()}
    if isinstance(schema, OnnxSchema):
        return {**defaults(schema), **{name: schema.as_kind(name, x) for name, x in given.items()}}
    if schema is None:
        return given
    single = [argument for argument in schema.inputs if not argument.count]
    for argument in schema.inputs:
        if argument.count:
            # One argument takes what others leave.
            given.setdefault(argument.count, len(inputs) - len(single))
        first = next((v for v in inputs if v is not None and v.dtype is not None), None)
        if argument.type in schema.attributes and first is not None and first.dtype is not None:
            given.setdefault(argument.type, dtype_name(first.dtype))
    return {**schema.defaults, **given}


def _plain(x: object, domain: str) -> object:
    """An attribute as it stands in a graph: Python numbers, lists of them, arrays, and names or
    numbers of dtypes."""
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, tuple):
        return [_plain(element, domain) for element in x]
    if isinstance(x, np.dtype) or (isinstance(x, type) and issubclass(x, np.generic)):
        name = dtype_name(np.dtype(x))
        return name if domain == TENSORFLOW else element_number(name)
    return int(x) if isinstance(x, bool) and domain != TENSORFLOW else x


def output_count(op: Op, schema: Schema, attrs: Attrs) -> int:
    """The number of outputs that a node has at least."""
    if isinstance(schema, OnnxSchema):
        return schema.min_output
    if isinstance(schema, TfSchema):
        return len(list(schema.outputs_of(attrs)))
    return 1 if op.arity is None or op.arity[1] is None else op.arity[1]


def check_added_node(node: Node, schema: Schema, given: Attrs) -> None:
    """Raise ``InvalidModel`` unless ``schema`` allows the node, whose attributes ``given`` are not
    by default."""
    faults = [*type_faults(node), *value_faults(node.op.name, given, node.attrs)]
    if isinstance(schema, OnnxSchema):
        faults = [*schema.node_faults(node, given), *faults]
    elif schema is not None:
        known = ", ".join(sorted(schema.attributes)) or "none"
        unknown = [name for name in given if name not in schema.attributes]
        faults += [f"has an attribute {name!r}; its attributes are {known}" for name in unknown]
    if faults:
        raise InvalidModel(f"{node.op.name} ({node.label}) {'; '.join(faults)}")
