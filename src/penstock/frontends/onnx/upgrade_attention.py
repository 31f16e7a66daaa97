"""FlexAttention: attention whose scores and probabilities are modified by graphs of the model."""

from __future__ import annotations

import numpy as np

from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.onnx.node_upgrade import NodeUpgrade
from penstock.frontends.onnx.tensors import ELEMENT_TYPES
from penstock.ir.graph import Graph, Value
from penstock.types import BOOL, FLOAT32

_PRECISIONS = {ELEMENT_TYPES[name] for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")}


def flex_attention(old: NodeUpgrade) -> None:
    """Write out the definition of ONNX::

        scores = score_mod(Q sqrt(scale) @ (K sqrt(scale))^T)     in softmax_precision from here on
        Y      = prob_mod(Softmax(scores)) @ V

    With fewer heads in K and V than in Q, each of them serves as many neighbouring heads of Q.
    """
    q = old.input(0)
    attrs = old.attrs
    dtype = old.dtype(0)
    precision = attrs.get("softmax_precision")
    if precision is None:
        if dtype is None:
            raise InexpressibleError(
                "the element type of Q is not known before a run; set softmax_precision"
            )
        precision = ELEMENT_TYPES["DOUBLE" if dtype == np.float64 else "FLOAT"]
    if precision not in _PRECISIONS:
        raise NodeError(
            f"has softmax_precision {precision}, which is no floating-point type; use one"
        )
    k, v = _with_heads_of_q(old, 1), _with_heads_of_q(old, 2)
    factor = _root_of_scale(old, q)
    scaled = old.emit("Transpose", [old.emit("Mul", [k, factor])], perm=[0, 1, 3, 2])
    scores = old.emit("MatMul", [old.emit("Mul", [q, factor]), scaled])
    scores = _modified(old, old.emit("Cast", [scores], to=precision), "score_mod")
    probabilities = _modified(old, old.emit("Softmax", [scores], axis=-1), "prob_mod")
    result = old.emit("MatMul", [probabilities, old.emit("Cast", [v], to=precision)])
    old.become("CastLike", [result, v])


def _with_heads_of_q(old: NodeUpgrade, index: int) -> Value:
    """Input ``index`` with each head repeated, so that it has as many heads as Q."""
    q, x = old.input(0), old.input(index)
    shapes = old.shape(0), old.shape(index)
    heads = [shape[1] for shape in shapes if shape is not None and len(shape) == 4]
    if len(heads) == 2 and isinstance(heads[0], int) and heads[0] == heads[1]:
        return x
    batch, own = (old.emit("Shape", [x], start=i, end=i + 1) for i in (0, 1))
    rest = old.emit("Shape", [x], start=2, end=4)
    wanted = old.emit("Shape", [q], start=1, end=2)
    copies = old.emit("Div", [wanted, own])
    apart = old.emit("Unsqueeze", [x, old.constant([2])])
    copied = old.emit("Expand", [apart, old.emit("Concat", [batch, own, copies, rest], axis=0)])
    return old.emit("Reshape", [copied, old.emit("Concat", [batch, wanted, rest], axis=0)])


def _root_of_scale(old: NodeUpgrade, q: Value) -> Value:
    """The square root of the scale, by default the head size to the power of -1/4."""
    if "scale" in old.attrs:
        return old.like(float(np.sqrt(np.float32(old.attrs["scale"]))), q)
    size = old.emit("Cast", [old.emit("Shape", [q], start=3, end=4)], to=ELEMENT_TYPES["FLOAT"])
    root = old.emit("Pow", [size, old.constant(-0.25, FLOAT32)])
    return old.emit("CastLike", [root, q])


def _modified(old: NodeUpgrade, value: Value, key: str) -> Value:
    """Apply a graph among the attributes to ``value``: as a branch of an If that is always taken,
    since branches can read outer values.
    """
    graph: Graph | None = old.attrs.get(key)
    if graph is None:
        return value
    graph.inputs = [value]  # stands for its input when its contents are imported
    true = old.constant(True, BOOL)
    return old.emit("If", [true], then_branch=graph, else_branch=Graph([], [value], [], "unused"))
