"""Operations with graph attributes, written as current ones: Scan-8 and FlexAttention."""

from __future__ import annotations

import numpy as np

from penstock.analysis.schemas import ELEMENT_TYPES
from penstock.core.types import BOOL, FLOAT32
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.onnx.node_upgrade import NodeUpgrade
from penstock.ir.graph import Graph, Value
from penstock.ir.op import AttrDict

_PRECISIONS = {ELEMENT_TYPES[name] for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")}


def flex_attention(old: NodeUpgrade) -> None:
    """Write out the definition of ONNX::

        scores = score_mod(Q sqrt(scale) @ (K sqrt(scale))^T)     in softmax_precision from here on
        Y      = prob_mod(Softmax(scores)) @ V

    With fewer heads in K and V than in Q, each of them serves as many adjacent heads of Q.
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
    """Return input ``index`` with each head repeated, so that it has as many heads as Q."""
    q, x = old.input(0), old.input(index)
    shapes = old.shape(0), old.shape(index)
    heads = [shape[1] for shape in shapes if shape is not None and len(shape) == 4]
    if len(heads) == 2 and isinstance(heads[0], int) and heads[0] == heads[1]:
        return x
    batch, own = (old.emit("Shape", [x], start=i, end=i + 1) for i in (0, 1))
    rest = old.emit("Shape", [x], start=2, end=4)
    wanted = old.emit("Shape", [q], start=1, end=2)
    copies = old.emit("Div", [wanted, own])
    apart = old.emit("Unsqueeze", [x, [2]])
    copied = old.emit("Expand", [apart, old.emit("Concat", [batch, own, copies, rest], axis=0)])
    return old.emit("Reshape", [copied, old.emit("Concat", [batch, wanted, rest], axis=0)])


def _root_of_scale(old: NodeUpgrade, q: Value) -> Value:
    """Return the square root of the scale, by default the head size to the power of -1/4."""
    if "scale" in old.attrs:
        return old.like(float(np.sqrt(np.float32(old.attrs["scale"]))), q)
    size = old.cast(old.emit("Shape", [q], start=3, end=4), "float32")
    root = old.emit("Pow", [size, old.constant(-0.25, FLOAT32)])
    return old.emit("CastLike", [root, q])


def _modified(old: NodeUpgrade, value: Value, key: str) -> Value:
    """Apply a graph attribute to ``value``, as a branch of an If that is always taken, since
    branches can read outer values."""
    graph: Graph | None = old.attrs.get(key)
    if graph is None:
        return value
    graph.inputs = [value]  # replaces its input when its contents are imported
    true = old.constant(True, BOOL)
    return old.emit("If", [true], then_branch=graph, else_branch=Graph([], [value], [], "unused"))


def scan_8(old: NodeUpgrade) -> None:
    """Write Scan-8 as a Scan over the batch, whose body is a Scan over one sequence.

    ::

        old   (lengths?, *states [batch, ...], *inputs [batch, time, ...]) -> (*states, *outputs)
        outer scans states, inputs and lengths along axis 0; inner scans a sequence along axis 0

    With lengths, a sequence is cut to its length first, and its outputs are padded with zeros to
    the full length afterwards.
    """
    lengths, *values = old.inputs
    n = old.attrs["num_scan_inputs"]
    if not 0 < n <= len(values) or None in values:
        raise NodeError(f"has {len(values)} states and inputs, of which {n} are scanned")
    states = len(values) - n
    directions = old.attrs.get("directions") or [0] * n
    if len(directions) != n:
        raise NodeError(f"has {len(directions)} directions for {n} scanned inputs")

    inner = NodeUpgrade(
        old.name, [], old.outputs, {}, types=old.types, unique=old.unique, origin=old.origin
    )
    rows = [Value(inner.fresh("row")) for _ in values]
    results: list[Value | None] = [Value(inner.fresh("result")) for _ in old.outputs]
    attrs = {"body": old.attrs["body"], "num_scan_inputs": n, "scan_input_directions": directions}
    if lengths is None:
        inner.become("Scan", rows, attrs, results)
        outputs = [value for value in results if value is not None]
    else:
        length = Value(inner.fresh("length"))
        outputs = _scan_of_length(inner, rows, length, states, attrs, results)
        rows, values = [*rows, length], [*values, lengths]
    body = Graph(rows, outputs, inner.nodes, f"{old.name}, one of the batch")
    old.become("Scan", values, {"body": body, "num_scan_inputs": len(values)})


def _scan_of_length(
    inner: NodeUpgrade,
    rows: list[Value],
    length: Value,
    states: int,
    attrs: AttrDict,
    results: list[Value | None],
) -> list[Value]:
    """Scan the first ``length`` entries of a sequence, and pad the outputs."""
    zero = inner.constant([0])
    end = inner.emit("Reshape", [length, [1]])
    cut = [inner.emit("Slice", [row, zero, end, zero]) for row in rows[states:]]
    full = inner.emit("Shape", [rows[states]], start=0, end=1)
    inner.become("Scan", rows[:states] + cut, attrs, results)
    outputs = [value for value in results if value is not None]
    missing = inner.emit("Sub", [full, end])
    pads = inner.emit("Concat", [zero, missing], axis=0)
    padded = [inner.emit("Pad", [value, pads, None, zero]) for value in outputs[states:]]
    return outputs[:states] + padded
