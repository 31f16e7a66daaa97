"""Operations whose values are on several devices: AllReduce and Broadcast.

``AllReduce(x0, x1, ...) -> (y0, y1, ...)``: every output is the sum of all inputs, or what else
``reduction`` names: "sum", "mean", "max" or "min". The inputs have one type, which is that of the
outputs.

``Broadcast(x) -> (y0, y1, ...)``: every output is the input; ``copies`` is their number.

With ``place={"AllReduce": ["torch", "torch:1"]}``, input and output i are in the memory of the i-th
backend (``backends/group.py``). Elsewhere they are operations like any other, by the kernels here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import ANY, ShapeError, TensorType, Type
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.registry import operator, standard

DOMAIN = "penstock"
REDUCTIONS = {"sum": "Sum", "mean": "Mean", "max": "Max", "min": "Min"}
"""the operation of ONNX that combines as many tensors, by the attribute ``reduction``"""


def reduction_of(attrs: Attrs) -> str:
    """The operation of ONNX that an AllReduce applies. Raises ``ShapeError`` if there is none."""
    reduction = attrs.get("reduction", "sum")
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ShapeError(f"reduction {reduction!r} is not one of {', '.join(REDUCTIONS)}")
    return REDUCTIONS[reduction]


def _infer_all_reduce(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    reduction_of(attrs)
    tensors = [rules.tensor(types, i).without_data() for i in range(len(types))]
    dtype, ranks = rules.same_dtype(types, range(len(types))), {t.rank for t in tensors} - {None}
    shapes = [t.shape for t in tensors if t.shape is not None]
    dims = [{d for d in column if isinstance(d, int)} for column in zip(*shapes, strict=False)]
    if len(ranks) > 1 or any(len(column) > 1 for column in dims):
        raise ShapeError(f"inputs of one shape are needed, not {', '.join(map(str, tensors))}")
    result = TensorType(dtype, shapes[0] if shapes else None)
    return [result] * len(types)


def _expect_outputs(node: Node, count: int) -> None:
    if len(node.outputs) != count or count < 1:
        raise ShapeError(f"{count} outputs are needed, and there are {len(node.outputs)}")


@operator("AllReduce", domain=DOMAIN, infer=_infer_all_reduce)
def all_reduce(node: Node, types: Types) -> Kernel:
    _expect_outputs(node, len(node.inputs))
    reduction = reduction_node(node)
    combine = reduction.op.compile(reduction, types).function
    count = len(node.outputs)

    def function(*inputs: np.ndarray) -> Any:
        if any(x.shape != inputs[0].shape for x in inputs):
            shapes = ", ".join(str(x.shape) for x in inputs)
            raise ShapeError(f"inputs of one shape are needed, not {shapes}")
        result = np.asarray(combine(*inputs))
        return result if count == 1 else (result, *[result.copy() for _ in range(count - 1)])

    return Kernel(function)


def reduction_node(node: Node) -> Node:
    """The node of ONNX that computes one of the outputs of an AllReduce."""
    first = node.outputs[0]
    result = Value(f"{node.name}/reduced", ANY if first is None else first.type)
    return Node(standard(reduction_of(node.attrs)), node.inputs, [result], name=node.name)


def _infer_broadcast(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    copies = attrs.get("copies")
    if not isinstance(copies, int) or copies < 1:
        raise ShapeError(f"copies= is the number of outputs, at least 1, not {copies!r}")
    return [rules.tensor(types, 0).without_data()] * copies


@operator("Broadcast", domain=DOMAIN, infer=_infer_broadcast, arity=(1, None))
def broadcast(node: Node, types: Types) -> Kernel:
    count = node.attrs["copies"]
    _expect_outputs(node, count)
    if count == 1:
        return Kernel(np.copy)
    return Kernel(lambda x: tuple([x.copy() for _ in range(count)]))
