"""Rules of reductions, and of operations on shapes and positions of elements.

Axes that are attributes in ONNX must be constants, unless an operation of the domain "tensorflow"
takes them as inputs.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from penstock.core.types import STRING, find_dtype
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tensorflow.conversion import Conversion, rule
from penstock.frontends.tensorflow.rules import COMPLEX
from penstock.ir.graph import Value
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW, TFLITE

# Operations whose second input ONNX takes as an int64 vector; the first six are reductions.
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
        # Without axes TensorFlow reduces nothing, but ONNX by default reduces all.
        attrs = {"keepdims": int(c.attrs["keep_dims"]), "noop_with_empty_axes": 1}
    x, op, T = c.inputs[0], _VECTOR_INPUT[c.op], c.attrs.get("T")
    if c.op in ("EuclideanNorm", "Mean") and T in COMPLEX:  # which those of ONNX do not take
        parts = ("Real", "Imag") if c.op == "Mean" else ("ComplexAbs",)
        reduced = [
            c.emit(op, [c.emit(part, [x], domain=TENSORFLOW), c.vector(1)], attrs) for part in parts
        ]
        real, imaginary = reduced[0], reduced[-1] if c.op == "Mean" else c.like(0, reduced[0])
        c.emit_final("Complex", [real, imaginary], {"Tout": T}, domain=TENSORFLOW)
        return
    c.emit_final(op, [x, c.vector(1)], attrs)


@rule("ArgMax", "ArgMin")
def arg(c: Conversion) -> None:
    (axis,) = c.constant_integers(1, "dimension")
    attrs = {"axis": axis, "keepdims": 0, "skip_nan": 1}
    if c.attrs["output_type"] == "int64":
        c.emit_final(c.op, c.inputs[:1], attrs)
        return
    index = c.emit(c.op, c.inputs[:1], attrs)
    # ONNX's ArgMax and ArgMin only return int64.
    c.emit_final("Cast", [index], {"to": element_number(c.attrs["output_type"])})


@rule("TopKV2", "TopK", "ApproxTopK")
def top_k(c: Conversion) -> None:
    """On CPUs, TensorFlow computes ApproxTopK exactly, too, whatever ``recall_target`` is."""
    count = c.vector(1) if c.op == "TopKV2" else c.constant([c.attrs["k"]])
    attrs = {
        "axis": c.attrs.get("reduction_dimension", -1),
        "largest": int(c.attrs.get("is_max_k", True)),
        "sorted": int(c.attrs.get("sorted", True)),
    }
    values, indices = c.outputs
    raw = Value(f"{c.stem}#indices", indices.type)
    c.emit_final("TopK", [c.inputs[0], count], attrs, outputs=[values, raw])
    # ONNX's TopK only returns int64 indices.
    number = element_number(c.attrs.get("index_type", "int32"))
    c.emit_extra_output(indices, "Cast", [raw], {"to": number})


@rule("InTopK")
def in_top_k(c: Conversion) -> None:
    c.emit_final("InTopKV2", [*c.inputs, c.attrs["k"]], domain=TENSORFLOW)


@rule("Bincount")
def bincount(c: Conversion) -> None:
    """Convert to DenseBincount of one row: values may have any shape."""
    flat = c.constant([-1])
    values, size, weights = c.inputs
    inputs = [c.emit("Reshape", [values, flat]), size, c.emit("Reshape", [weights, flat])]
    c.emit_final("DenseBincount", inputs, {"binary_output": False}, domain=TENSORFLOW)


@rule("UniqueV2", "UniqueWithCountsV2")
def unique(c: Conversion) -> None:
    attrs = {"out_idx": c.attrs["out_idx"]}
    c.emit_final(c.op.removesuffix("V2"), attrs=attrs, domain=TENSORFLOW)


@rule("Bucketize")
def bucketize(c: Conversion) -> None:
    """Whole numbers are compared in float32."""
    boundaries = c.attrs["boundaries"]
    if any(not low <= high for low, high in pairwise(boundaries)):
        raise NodeError(f"has boundaries {boundaries}, which are not sorted; sort them")
    x = c.inputs[0]
    if not c.attrs["T"].startswith("float"):
        x = c.cast(x, "float32")
    c.emit_final("Bucketize", [x], {"boundaries": boundaries}, domain=TFLITE)


# Segments.


@rule(*(f"Segment{name}" for name in ("Sum", "Mean", "Max", "Min", "Prod")))
def segment(c: Conversion) -> None:
    attrs = {"reduction": c.op.removeprefix("Segment").lower()}
    c.emit_final("Segment", attrs=attrs, domain=TENSORFLOW)


@rule(*(f"UnsortedSegment{name}" for name in ("Sum", "Max", "Min", "Prod")))
def unsorted_segment(c: Conversion) -> None:
    attrs = {"reduction": c.op.removeprefix("UnsortedSegment").lower()}
    c.emit_final("Segment", attrs=attrs, domain=TFLITE)


_COUNTED = "WithNumSegments"


@rule(*(f"SparseSegment{name}{end}" for name in ("Sum", "Mean", "SqrtN") for end in ("", _COUNTED)))
def sparse_segment(c: Conversion) -> None:
    """Segments of rows selected by indices."""
    data, indices, *rest = c.inputs
    rows = c.emit("GatherV2", [data, indices], {"batch_dims": 0}, domain=TENSORFLOW)
    attrs = {"reduction": c.op.removeprefix("SparseSegment").removesuffix(_COUNTED).lower()}
    c.emit_final("Segment", [rows, *rest], attrs, domain=TENSORFLOW)


@rule("DynamicStitch", "ParallelDynamicStitch")
def stitch(c: Conversion) -> None:
    """Of rows with the same index, the parallel one may take any."""
    c.emit_final("DynamicStitch", domain=TENSORFLOW)


@rule(*(f"QuantizeAndDequantizeV{version}" for version in (2, 3, 4)))
def quantize_and_dequantize(c: Conversion) -> None:
    """The versions differ in where the number of bits is, and in defaults."""
    rest = {"num_bits": 0, "round_mode": "HALF_TO_EVEN"}
    c.emit_final("QuantizeAndDequantize", attrs=rest | c.attrs, domain=TENSORFLOW)


@rule("BlockLSTM", "BlockLSTMV2")
def block_lstm(c: Conversion) -> None:
    """The versions differ in the order of the gates, and in the bias, which V2 lacks."""
    second = c.op == "BlockLSTMV2"
    attrs = {"order": "ifco", "forget_bias": 0.0} if second else {"order": "icfo"}
    kept = {key: c.attrs[key] for key in c.attrs if key != "T"}
    c.emit_final("BlockLSTM", attrs=kept | attrs, domain=TENSORFLOW)


# Operations on tuples of indices; ONNX counts negative ones from the end.
_BY_TUPLES: dict[str, tuple[str, dict[str, int | str]]] = {
    "GatherNd": ("GatherND", {"batch_dims": 0}),
    "ResourceGatherNd": ("GatherND", {"batch_dims": 0}),
    "TensorScatterAdd": ("ScatterND", {"reduction": "add"}),
    "TensorScatterUpdate": ("ScatterND", {"reduction": "none"}),
}


def _check_policy(c: Conversion) -> None:
    """Refuse a node that ignores indices out of bounds: they are errors here, as by default on a
    CPU."""
    policy = c.attrs.get("bad_indices_policy", "")
    if policy not in ("", "DEFAULT", "ERROR"):
        raise NodeError(f"has bad_indices_policy {policy!r}; only 'DEFAULT' and 'ERROR' are known")


@rule("ScatterNd", "TensorScatterSub", "TensorScatterMax", "TensorScatterMin")
def by_own_tuples(c: Conversion) -> None:
    _check_policy(c)
    c.emit_same_op(())


@rule(*_BY_TUPLES)
def by_tuples(c: Conversion) -> None:
    _check_policy(c)
    x, indices, *updates = c.inputs
    if c.op == "ResourceGatherNd":
        x = c.variable(x, c.attrs.get("dtype"))
    known = c.input_constant(1)
    if known is None:
        indices = c.emit("NonNegative", [indices], domain=TENSORFLOW)
    elif known.size and known.min() < 0:
        raise NodeError(f"has an index {known.min()}, which is negative; indices count from 0")
    name, attrs = _BY_TUPLES[c.op]
    c.emit_final(name, [x, indices, *updates], attrs)


_REDUCTIONS = {
    "Update": "none",
    "Add": "add",
    "Sub": "add",
    "Mul": "mul",
    "Min": "min",
    "Max": "max",
}
SCATTERING = [f"ResourceScatter{end}" for end in _REDUCTIONS]
SCATTERING += ["ResourceScatterDiv", "ResourceStridedSliceAssign"]
SCATTERING += [f"ResourceScatterNd{end}" for end in ("Update", "Add", "Sub", "Min", "Max")]
"""operations that replace rows of variables, by numbers, tuples or slices, or reduce them"""


@rule("ResourceStridedSliceAssign")
def assign_slice(c: Conversion) -> None:
    handle, *rest = c.inputs
    masks = {key: value for key, value in c.attrs.items() if key.endswith("_mask")}
    inputs = [c.variable(handle, c.attrs["T"]), *rest]
    result = c.emit("TensorStridedSliceUpdate", inputs, masks, domain=TENSORFLOW)
    c.emit_final("AssignVariableOp", [handle, result], domain=TENSORFLOW)


@rule(*(name for name in SCATTERING if "Slice" not in name))
def scatter_into_variable(c: Conversion) -> None:
    handle, indices, updates = c.inputs
    by_tuples, how = "Nd" in c.op, c.op.removeprefix("ResourceScatter").removeprefix("Nd")
    value = c.variable(handle, c.attrs["T" if by_tuples else "dtype"])
    if not by_tuples:
        indices = c.emit("Unsqueeze", [indices, c.constant([-1])])
    if how == "Sub":
        updates = c.emit("Neg", [updates])
    elif how == "Div":
        if not c.attrs["dtype"].startswith("float"):
            raise InexpressibleError(f"no division of rows of {c.attrs['dtype']} is available")
        how, updates = "Mul", c.emit("Reciprocal", [updates])
    # ONNX would count negative indices from the end.
    places = c.emit("NonNegative", [indices], domain=TENSORFLOW)
    result = c.emit("ScatterND", [value, places, updates], {"reduction": _REDUCTIONS[how]})
    c.emit_final("AssignVariableOp", [handle, result], domain=TENSORFLOW)


@rule("SparseToDense")
def sparse_to_dense(c: Conversion) -> None:
    attrs = {"sorted": c.attrs["validate_indices"]}
    c.emit_final("SparseToDense", attrs=attrs, domain=TFLITE)


# Shapes.


@rule("Shape")
def shape(c: Conversion) -> None:
    """Variants in a tensor are a list of them."""
    if c.attrs["T"] != "variant":
        c.emit_same_op(("out_type",))
        return
    count = c.cast(
        c.emit("TensorListLength", [c.inputs[0]], domain=TENSORFLOW), c.attrs["out_type"]
    )
    c.emit_final("Unsqueeze", [count, c.constant([0])])


@rule("Empty")
def empty(c: Conversion) -> None:
    """Zeros, though TensorFlow leaves elements undefined without the attribute "init"."""
    dtype = find_dtype(c.attrs["dtype"])
    if dtype is None:
        raise InexpressibleError(f"no tensors of {c.attrs['dtype']} are available")
    zero = np.array("", STRING) if dtype == STRING else np.zeros((), dtype)
    value = c.emit("Const", [], {"value": zero}, domain=TENSORFLOW)
    c.emit_final("Fill", [c.inputs[0], value], domain=TENSORFLOW)


@rule("EnsureShape")
def ensure_shape(c: Conversion) -> None:
    shape = c.attrs.get("shape")
    if shape is None:
        c.emit_final("Identity")
    else:
        c.emit_same_op(("shape",))


@rule("Bitcast")
def bitcast(c: Conversion) -> None:
    """Elements of another size add or remove a dim."""
    given, wanted = (find_dtype(c.attrs[name]) for name in ("T", "type"))
    if given is None or wanted is None:
        raise InexpressibleError(f"no view of {c.attrs['T']} as {c.attrs['type']} is available")
    attrs = {"to": element_number(c.attrs["type"])}
    if given.itemsize == wanted.itemsize:
        c.emit_final("BitCast", attrs=attrs)
    else:
        c.emit_final("ViewAs", attrs=attrs, domain=TFLITE)


@rule("MatrixDiagV2", "MatrixDiagPartV2", "MatrixSetDiagV2")
def matrix_diag_v2(c: Conversion) -> None:
    """Shorter diagonals are aligned at the left."""
    name = c.op.replace("V2", "V3")
    c.emit_final(name, attrs={"align": "LEFT_LEFT"}, domain=TENSORFLOW)


@rule("MatrixDiagPart", "MatrixSetDiag")
def main_diagonal(c: Conversion) -> None:
    # The first versions only have the main diagonal, which is number 0 of the third.
    inputs = [*c.inputs, c.constant(0, INT32)]
    if c.op == "MatrixDiagPart":
        inputs.append(c.like(0, c.inputs[0]))
    c.emit_final(f"{c.op}V3", inputs, {"align": "RIGHT_LEFT"}, domain=TENSORFLOW)


@rule("Squeeze")
def squeeze(c: Conversion) -> None:
    axes = c.attrs["squeeze_dims"]
    # An empty list means all dims of 1, for which ONNX omits the axes.
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
        # ONNX has the axis as an attribute, which must be known now.
        c.emit_final("ConcatV2", [*values, c.inputs[position]], domain=TENSORFLOW)
    else:
        c.emit_final("Concat", values, {"axis": axis})


@rule("Split")
def split(c: Conversion) -> None:
    axis, value = c.inputs
    c.emit_final("Split", [value, axis], {"num_split": len(c.outputs)}, domain=TENSORFLOW)


@rule("Pad", "PadV2")
def pad(c: Conversion) -> None:
    # TensorFlow has a row for each axis; ONNX has all beginnings before all ends.
    inputs = [c.inputs[0], c.vector(1, transposed=True), *c.inputs[2:]]
    c.emit_final("Pad", inputs, {"mode": "constant"})


@rule("MirrorPad")
def mirror_pad(c: Conversion) -> None:
    if c.attrs.get("mode") == "REFLECT":
        c.emit_final("Pad", [c.inputs[0], c.vector(1, transposed=True)], {"mode": "reflect"})
    else:
        # SYMMETRIC repeats the border itself, for which ONNX has no mode.
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
    lengths = c.cast(c.inputs[1], "int64")
    attrs = {"batch_axis": c.attrs["batch_dim"], "time_axis": c.attrs.get("seq_dim", 0)}
    c.emit_final("ReverseSequence", [c.inputs[0], lengths], attrs)
