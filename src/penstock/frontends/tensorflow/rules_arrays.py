"""Rules of reductions, and of operations on shapes and positions of elements.

Axes that are attributes in ONNX must be constants, or there is an operation of the domain
"tensorflow" that takes them as inputs.
"""

from __future__ import annotations

from penstock.frontends.tensorflow.conversion import Conversion, rule
from penstock.ir.graph import Value
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW

# Operations whose second input ONNX takes as a vector of int64; the first six are reductions.
_VECTOR_INPUT = {
    "Max": "ReduceMax",
    "Mean": "ReduceMean",
    "Min": "ReduceMin",
    "Prod": "ReduceProd",
    "Sum": "ReduceSum",
    "EuclideanNorm": "ReduceL2",
    "BroadcastTo": "Expand",
    "ExpandDims": "Unsqueeze",
    "Tile": "Tile",
}


@rule(*_VECTOR_INPUT)
def vector_input(c: Conversion) -> None:
    attrs = {}
    if "keep_dims" in c.attrs:
        attrs = {"keepdims": int(c.attrs["keep_dims"]), "noop_with_empty_axes": 1}
    c.emit_final(_VECTOR_INPUT[c.op], [c.inputs[0], c.vector(1)], attrs)


@rule("ArgMax", "ArgMin")
def arg(c: Conversion) -> None:
    (axis,) = c.constant_integers(1, "dimension")
    attrs = {"axis": axis, "keepdims": 0}
    if c.attrs["output_type"] == "int64":
        c.emit_final(c.op, c.inputs[:1], attrs)
        return
    index = c.emit(c.op, c.inputs[:1], attrs)
    c.emit_final("Cast", [index], {"to": element_number(c.attrs["output_type"])})


@rule("TopKV2", "TopK")
def top_k(c: Conversion) -> None:
    count = c.vector(1) if c.op == "TopKV2" else c.constant([c.attrs["k"]])
    attrs = {"axis": -1, "largest": 1, "sorted": int(c.attrs["sorted"])}
    values, indices = c.outputs
    raw = Value(f"{c.stem}#indices", indices.type)
    c.emit_final("TopK", [c.inputs[0], count], attrs, outputs=[values, raw])
    number = element_number(c.attrs.get("index_type", "int32"))
    c.emit_extra_output(indices, "Cast", [raw], {"to": number})


@rule("Squeeze")
def squeeze(c: Conversion) -> None:
    axes = c.attrs["squeeze_dims"]
    c.emit_final("Squeeze", [c.inputs[0], c.constant(axes)] if axes else [c.inputs[0]])


@rule("Transpose")
def transpose(c: Conversion) -> None:
    order = c.integers(1)
    if order is None:
        c.emit_same_op(())
    else:
        c.emit_final("Transpose", c.inputs[:1], {"perm": order})


@rule("Concat", "ConcatV2")
def concat(c: Conversion) -> None:
    position = -1 if c.op == "ConcatV2" else 0
    values = c.inputs[:-1] if c.op == "ConcatV2" else c.inputs[1:]
    axis = c.integer(position)
    if axis is None:
        c.emit_final("ConcatV2", [*values, c.inputs[position]], domain=TENSORFLOW)
    else:
        c.emit_final("Concat", values, {"axis": axis})


@rule("Split")
def split(c: Conversion) -> None:
    axis, value = c.inputs
    c.emit_final("Split", [value, axis], {"num_split": len(c.outputs)}, domain=TENSORFLOW)


@rule("Pad", "PadV2")
def pad(c: Conversion) -> None:
    inputs = [c.inputs[0], c.vector(1, transposed=True), *c.inputs[2:]]
    c.emit_final("Pad", inputs, {"mode": "constant"})


@rule("MirrorPad")
def mirror_pad(c: Conversion) -> None:
    if c.attrs.get("mode") == "REFLECT":
        c.emit_final("Pad", [c.inputs[0], c.vector(1, transposed=True)], {"mode": "reflect"})
    else:
        c.emit_same_op({"mode"})


@rule("Gather", "ResourceGather")
def gather(c: Conversion) -> None:
    source, indices = c.inputs
    if c.op == "ResourceGather":
        source = c.variable(source, c.attrs.get("dtype"))
    attrs = {"batch_dims": c.attrs.get("batch_dims", 0)}
    c.emit_final("GatherV2", [source, indices], attrs, domain=TENSORFLOW)


@rule("ReverseSequence")
def reverse_sequence(c: Conversion) -> None:
    lengths = c.emit("Cast", [c.inputs[1]], {"to": element_number("int64")})
    attrs = {"batch_axis": c.attrs["batch_dim"], "time_axis": c.attrs.get("seq_dim", 0)}
    c.emit_final("ReverseSequence", [c.inputs[0], lengths], attrs)
