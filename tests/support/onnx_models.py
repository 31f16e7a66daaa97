"""Small ONNX models, written down in few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from penstock.analysis.verify import verify
from penstock.core.errors import InvalidModel
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.frontends.onnx.importer import load_onnx
from penstock.ir.graph import Model, sort
from tests.support.graphs import interpret

FLOAT = TensorProto.FLOAT


def graph_of(
    nodes: Sequence[NodeProto],
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    initializers: Sequence[TensorProto] = (),
    name: str = "g",
) -> GraphProto:
    infos = [helper.make_tensor_value_info(i, FLOAT, [2]) for i in inputs]
    outs = [onnx.ValueInfoProto(name=o) for o in outputs]
    return helper.make_graph(nodes, name, infos, outs, initializers)


def model_of(*nodes: NodeProto, opset: int = 21, **graph: Any) -> onnx.ModelProto:
    return helper.make_model(
        graph_of(nodes, **graph), opset_imports=[helper.make_opsetid("", opset)], ir_version=10
    )


def node(op: str, inputs: str, outputs: str, name: str = "", **attrs: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), name=name or None, **attrs)


def tensor(name: str, array: Any) -> TensorProto:
    return numpy_helper.from_array(np.asarray(array), name)


def interpret_model(model: Model, *feeds: Any) -> list[Any]:
    """Verify a model and return the outputs of its main graph for ``feeds``, in order."""
    verify(model)
    sort(model.graph)
    with np.errstate(all="ignore"):
        return interpret(model.graph, feeds)


def problems(proto: onnx.ModelProto, limits: Limits = DEFAULT_LIMITS) -> tuple[str, ...]:
    with pytest.raises(InvalidModel) as caught:
        load_onnx(proto, limits)
    return caught.value.problems
