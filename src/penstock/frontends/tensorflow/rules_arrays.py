"""Rules of reductions, and of operations on shapes and positions of elements.

Axes that are attributes in ONNX must be constants, or there is an operation of the domain
"tensorflow" that takes them as inputs.
"""

from __future__ import annotations

from penstock.frontends.common.diagnostics import InexpressibleError
from penstock.frontends.tensorflow.conversion import Conversion, Rule, registering
from penstock.ir.graph import Value
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW

RULES: dict[str, Rule] = {}

rule = registering(RULES)


def vector(c: Conversion, index: int) -> Value:
    """Input ``index``, of integers, as the vector of int64 that ONNX takes."""
    elements = c.integers(index)
    if elements is not None:
        return c.constant(elements)
    flat = c.emit("Reshape", [c.inputs[index], c.constant([-1])])
    return c.emit("Cast", [flat], {"to": element_number("int64")})


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
    c.emit_final(_REDUCTIONS[c.op], [c.inputs[0], vector(c, 1)], attrs)


@rule("ArgMax", "ArgMin")
def arg(c: Conversion) -> None:
    axis = c.integer(1)
    if axis is None:
        raise InexpressibleError(
            "its dimension is not a constant; export the model with a constant one"
        )
    attrs = {"axis": axis, "keepdims": 0}
    if c.attrs["output_type"] == "int64":
        c.emit_final(c.op, c.inputs[:1], attrs)
        return
    index = c.emit(c.op, c.inputs[:1], attrs)
    c.emit_final("Cast", [index], {"to": element_number(c.attrs["output_type"])})


@rule("Cumsum", "Cumprod")
def cumulative(c: Conversion) -> None:
    name = {"Cumsum": "CumSum", "Cumprod": "CumProd"}[c.op]
    c.emit_final(name, attrs={key: int(c.attrs[key]) for key in ("exclusive", "reverse")})


@rule("TopKV2", "TopK")
def top_k(c: Conversion) -> None:
    count = vector(c, 1) if c.op == "TopKV2" else c.constant([c.attrs["k"]])
    attrs = {"axis": -1, "largest": 1, "sorted": int(c.attrs["sorted"])}
    values, indices = c.outputs
    raw = Value(f"{c.name}#indices", indices.type)
    c.emit_final("TopK", [c.inputs[0], count], attrs, outputs=[values, raw])
    c.emit_extra_output(
        indices, "Cast", [raw], {"to": element_number(c.attrs.get("index_type", "int32"))}
    )


# Shapes.


@rule("Reshape")
def reshape(c: Conversion) -> None:
    """A 0 in a shape is a dim of 0, not a copy of the input's dim."""
    c.emit_final("Reshape", attrs={"allowzero": 1})


@rule("Squeeze")
def squeeze(c: Conversion) -> None:
    axes = c.attrs["squeeze_dims"]
    c.emit_final("Squeeze", [c.inputs[0], c.constant(axes)] if axes else [c.inputs[0]])


@rule("ExpandDims")
def expand_dims(c: Conversion) -> None:
    c.emit_final("Unsqueeze", [c.inputs[0], vector(c, 1)])


@rule("Transpose")
def transpose(c: Conversion) -> None:
    order = c.integers(1)
    if order is None:
        c.emit_same_op(())
    else:
        c.emit_final("Transpose", c.inputs[:1], {"perm": order})


@rule("BroadcastTo")
def broadcast_to(c: Conversion) -> None:
    c.emit_final("Expand", [c.inputs[0], vector(c, 1)])


@rule("Tile")
def tile(c: Conversion) -> None:
    c.emit_final("Tile", [c.inputs[0], vector(c, 1)])


@rule("ConcatV2")
def concat_v2(c: Conversion) -> None:
    _concat(c, c.inputs[:-1], len(c.inputs) - 1)


@rule("Concat")
def concat(c: Conversion) -> None:
    _concat(c, c.inputs[1:], 0)


def _concat(c: Conversion, values: list[Value], axis_at: int) -> None:
    axis = c.integer(axis_at)
    if axis is None:
        c.emit_final("ConcatV2", [*values, c.inputs[axis_at]], domain=TENSORFLOW)
    else:
        c.emit_final("Concat", values, {"axis": axis})


@rule("Split")
def split(c: Conversion) -> None:
    axis, value = c.inputs
    c.emit_final("Split", [value, axis], {"num_split": len(c.outputs)}, domain=TENSORFLOW)


# Padding.


def pads(c: Conversion, index: int) -> Value:
    """Paddings [n, 2] in ONNX's order: first those at the beginning of each axis."""
    array = c.input_constant(index)
    if array is not None:
        return c.constant(array.T.reshape(-1))
    swapped = c.emit("Transpose", [c.inputs[index]], {"perm": [1, 0]})
    flat = c.emit("Reshape", [swapped, c.constant([-1])])
    return c.emit("Cast", [flat], {"to": element_number("int64")})


@rule("Pad", "PadV2")
def pad(c: Conversion) -> None:
    c.emit_final("Pad", [c.inputs[0], pads(c, 1), *c.inputs[2:]], {"mode": "constant"})


@rule("MirrorPad")
def mirror_pad(c: Conversion) -> None:
    if c.attrs.get("mode") == "REFLECT":
        c.emit_final("Pad", [c.inputs[0], pads(c, 1)], {"mode": "reflect"})
    else:
        c.emit_same_op({"mode"})


# Elements by position.


@rule("Gather")
def gather(c: Conversion) -> None:
    c.emit_final("GatherV2", c.inputs, {"batch_dims": 0}, domain=TENSORFLOW)


@rule("GatherV2")
def gather_v2(c: Conversion) -> None:
    c.emit_same_op({"batch_dims"})


@rule("GatherNd")
def gather_nd(c: Conversion) -> None:
    c.emit_final("GatherND", attrs={"batch_dims": 0})


@rule("TensorScatterUpdate", "TensorScatterAdd")
def tensor_scatter(c: Conversion) -> None:
    mode = "add" if c.op == "TensorScatterAdd" else "none"
    c.emit_final("ScatterND", attrs={"reduction": mode})


@rule("ReverseSequence")
def reverse_sequence(c: Conversion) -> None:
    lengths = c.emit("Cast", [c.inputs[1]], {"to": element_number("int64")})
    attrs = {"batch_axis": c.attrs["batch_dim"], "time_axis": c.attrs.get("seq_dim", 0)}
    c.emit_final("ReverseSequence", [c.inputs[0], lengths], attrs)


def _unique(c: Conversion) -> None:
    c.emit_same_op({"out_idx"})


RULES.update(dict.fromkeys(("Unique", "UniqueWithCounts"), _unique))
