"""Rules: reductions, shapes, and where elements are.

Axes that ONNX has as attributes must be constants; where they are not, an operation of our own
takes them as inputs.
"""

from __future__ import annotations

import numpy as np

from penstock.frontends.tensorflow.conversion import (
    Conversion,
    InexpressibleError,
    Rule,
    registering,
)
from penstock.ir.graph import Value
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW

RULES: dict[str, Rule] = {}

rule = registering(RULES)


def vector(c: Conversion, index: int) -> Value:
    """Input ``index`` of integers as a vector of int64, which is what ONNX takes."""
    found = c.integers(index)
    if found is not None:
        return c.known(found, np.int64)
    flat = c.node("Reshape", [c.inputs[index], c.known([-1], np.int64)])
    return c.node("Cast", [flat], {"to": element_number("int64")})


# Along axes.

_REDUCTIONS = {
    "Max": "ReduceMax",
    "Mean": "ReduceMean",
    "Min": "ReduceMin",
    "Prod": "ReduceProd",
    "Sum": "ReduceSum",
    "EuclideanNorm": "ReduceL2",
}


@rule(*_REDUCTIONS)
def reduction(c: Conversion) -> None:
    attrs = {"keepdims": int(c.attrs["keep_dims"]), "noop_with_empty_axes": 1}
    c.end(_REDUCTIONS[c.op], [c.inputs[0], vector(c, 1)], attrs)


@rule("ArgMax", "ArgMin")
def arg(c: Conversion) -> None:
    axis = c.integer(1)
    if axis is None:
        raise InexpressibleError("its dimension is known only during a run")
    attrs = {"axis": axis, "keepdims": 0}
    if c.attrs["output_type"] == "int64":
        c.end(c.op, c.inputs[:1], attrs)
        return
    found = c.node(c.op, c.inputs[:1], attrs)
    c.end("Cast", [found], {"to": element_number(c.attrs["output_type"])})


@rule("Cumsum", "Cumprod")
def cumulative(c: Conversion) -> None:
    name = {"Cumsum": "CumSum", "Cumprod": "CumProd"}[c.op]
    c.end(name, attrs={key: int(c.attrs[key]) for key in ("exclusive", "reverse")})


@rule("TopKV2", "TopK")
def top_k(c: Conversion) -> None:
    count = vector(c, 1) if c.op == "TopKV2" else c.known([c.attrs["k"]], np.int64)
    attrs = {"axis": -1, "largest": 1, "sorted": int(c.attrs["sorted"])}
    values, places = c.outputs
    raw = Value(f"{c.name}#places", places.type)
    c.end("TopK", [c.inputs[0], count], attrs, outputs=[values, raw])
    c.further(places, "Cast", [raw], {"to": element_number(c.attrs.get("index_type", "int32"))})


# Shapes.


@rule("Reshape")
def reshape(c: Conversion) -> None:
    """A 0 in a shape is a dim of 0, not one that is kept."""
    c.end("Reshape", attrs={"allowzero": 1})


@rule("Squeeze")
def squeeze(c: Conversion) -> None:
    axes = c.attrs["squeeze_dims"]
    c.end("Squeeze", [c.inputs[0], c.known(axes, np.int64)] if axes else [c.inputs[0]])


@rule("ExpandDims")
def expand_dims(c: Conversion) -> None:
    c.end("Unsqueeze", [c.inputs[0], vector(c, 1)])


@rule("Transpose")
def transpose(c: Conversion) -> None:
    order = c.integers(1)
    if order is None:
        c.own(())
    else:
        c.end("Transpose", c.inputs[:1], {"perm": order})


@rule("BroadcastTo")
def broadcast_to(c: Conversion) -> None:
    c.end("Expand", [c.inputs[0], vector(c, 1)])


@rule("Tile")
def tile(c: Conversion) -> None:
    c.end("Tile", [c.inputs[0], vector(c, 1)])


@rule("ConcatV2")
def concat_v2(c: Conversion) -> None:
    _concat(c, c.inputs[:-1], len(c.inputs) - 1)


@rule("Concat")
def concat(c: Conversion) -> None:
    _concat(c, c.inputs[1:], 0)


def _concat(c: Conversion, values: list[Value], axis_at: int) -> None:
    axis = c.integer(axis_at)
    if axis is None:
        c.end("ConcatV2", [*values, c.inputs[axis_at]], domain=TENSORFLOW)
    else:
        c.end("Concat", values, {"axis": axis})


@rule("Split")
def split(c: Conversion) -> None:
    axis, value = c.inputs
    c.end("Split", [value, axis], {"num_split": len(c.outputs)}, domain=TENSORFLOW)


# Padding.


def pads(c: Conversion, index: int) -> Value:
    """Paddings [n, 2] as ONNX has them: all in front, then all behind."""
    found = c.constant(index)
    if found is not None:
        return c.known(found.T.reshape(-1), np.int64)
    swapped = c.node("Transpose", [c.inputs[index]], {"perm": [1, 0]})
    flat = c.node("Reshape", [swapped, c.known([-1], np.int64)])
    return c.node("Cast", [flat], {"to": element_number("int64")})


@rule("Pad", "PadV2")
def pad(c: Conversion) -> None:
    c.end("Pad", [c.inputs[0], pads(c, 1), *c.inputs[2:]], {"mode": "constant"})


@rule("MirrorPad")
def mirror_pad(c: Conversion) -> None:
    if c.attrs.get("mode") == "REFLECT":
        c.end("Pad", [c.inputs[0], pads(c, 1)], {"mode": "reflect"})
    else:
        c.own({"mode"})


# Elements by their places.


@rule("Gather")
def gather(c: Conversion) -> None:
    c.end("GatherV2", c.inputs, {"batch_dims": 0}, domain=TENSORFLOW)


@rule("GatherV2")
def gather_v2(c: Conversion) -> None:
    c.own({"batch_dims"})


@rule("GatherNd")
def gather_nd(c: Conversion) -> None:
    c.end("GatherND", attrs={"batch_dims": 0})


@rule("TensorScatterUpdate", "TensorScatterAdd")
def tensor_scatter(c: Conversion) -> None:
    mode = "add" if c.op == "TensorScatterAdd" else "none"
    c.end("ScatterND", attrs={"reduction": mode})


@rule("ReverseSequence")
def reverse_sequence(c: Conversion) -> None:
    lengths = c.node("Cast", [c.inputs[1]], {"to": element_number("int64")})
    attrs = {"batch_axis": c.attrs["batch_dim"], "time_axis": c.attrs.get("seq_dim", 0)}
    c.end("ReverseSequence", [c.inputs[0], lengths], attrs)


def _unique(c: Conversion) -> None:
    c.own({"out_idx"})


RULES.update(dict.fromkeys(("Unique", "UniqueWithCounts"), _unique))
