"""Rules of reductions, and of operations on shapes and positions of elements."""

from __future__ import annotations

import numpy as np

from penstock.core.types import INT64
from penstock.frontends.common.builder import Operand
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tflite.conversion import OperatorConversion, image_of_codes, operator_rule
from penstock.ir.graph import Value
from penstock.ir.op import AttrDict
from penstock.ops.common.dtypes import INT8, INT16, INT32
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW, TFLITE

_REDUCTIONS = {
    "MEAN": "ReduceMean",
    "REDUCE_MAX": "ReduceMax",
    "REDUCE_MIN": "ReduceMin",
    "REDUCE_PROD": "ReduceProd",
    "SUM": "ReduceSum",
}


_SPARSE, _DENSE = 1, 2  # kinds of LSH_PROJECTION


@operator_rule("MEAN", "SUM", codes=image_of_codes)
def mean(c: OperatorConversion) -> None:
    """The mean of codes, and the sum of rows and columns of images of them, in integers."""
    if c.codes is None:
        reduction(c)
        return
    given, (wanted,), axes = c.quantizations[0], c.output_quantizations, c.integers(1) or []
    is_image = {*axes} in ({1, 2}, {-3, -2}) and len(c.declared_shape(0)) == 4
    rank = 4 if is_image else c.rank(0) or 0
    places = sorted({axis % rank for axis in axes if -rank <= axis < rank})
    fits = len(places) == len({*axes}) > 0 and (c.op == "MEAN" or (rank, *places) == (4, 1, 2))
    if not fits or given is None or wanted is None:
        c.apply_to_reals(reduction)
        return
    attrs: AttrDict = {
        "axes": places,
        "keepdims": int(c.option("keep_dims", "ReducerOptions")),
        "scales": [given.scales[0], wanted.scales[0]],
        "zero_points": [q.zero_points[0] for q in (given, wanted)],
        "form": "fixed point" if c.op == "MEAN" else "sum",
    }
    c.emit_final("IntegerMean", c.take(2)[:1], attrs, domain=TFLITE)


@operator_rule("REDUCE_MAX", "REDUCE_MIN", moves=True)
def reduction(c: OperatorConversion) -> None:
    x, _ = c.take(2)
    # Without axes TFLite reduces nothing, but ONNX by default reduces all.
    attrs = {"keepdims": int(c.option("keep_dims", "ReducerOptions")), "noop_with_empty_axes": 1}
    (dtype,) = c.output_dtypes
    # ONNX's sums, means and products take no integers of 8 or 16 bits, and extremes none of 16.
    size = dtype.itemsize if dtype is not None and dtype.kind in "iu" else 0
    if size == 2 and c.op in ("REDUCE_MAX", "REDUCE_MIN"):
        c.emit_final(_REDUCTIONS[c.op], [x, c.vector(1)], attrs, domain=TFLITE)
    elif dtype is not None and size in (1, 2) and c.op not in ("REDUCE_MAX", "REDUCE_MIN"):
        wide = c.emit(_REDUCTIONS[c.op], [c.cast(x, "int32"), c.vector(1)], attrs)
        c.cast_final(wide, dtype)
    else:
        c.emit_final(_REDUCTIONS[c.op], [x, c.vector(1)], attrs)


def _is_product_of_codes(c: OperatorConversion) -> bool:
    """Whether the operands are signed codes with one scale, over axes that are known."""
    given = [c.quantizations[0], *c.output_quantizations]
    if c.dtype(0) not in (INT8, INT16) or {*c.output_dtypes} != {c.dtype(0)}:
        return False
    if any(q is None or q.per_channel or q.scales[0] <= 0 for q in given):
        return False
    return bool(c.integers(1)) and c.rank(0) is not None


@operator_rule("REDUCE_PROD", integers=_is_product_of_codes)
def product(c: OperatorConversion) -> None:
    """The product of codes is computed in integers."""
    given, (wanted,), axes, rank = c.quantizations[0], c.output_quantizations, c.integers(1), 0
    if given is None or wanted is None or not axes or not _is_product_of_codes(c):
        reduction(c)
        return
    rank = c.rank(0) or 0
    attrs: AttrDict = {
        "axes": sorted({axis % rank if -rank <= axis < rank else rank for axis in axes}),
        "keepdims": int(c.option("keep_dims", "ReducerOptions")),
        "scales": [q.scales[0] for q in (given, wanted)],
        "zero_points": [q.zero_points[0] for q in (given, wanted)],
    }
    if attrs["axes"][-1] >= rank:
        raise NodeError(f"reduces over axes {[*axes]} of an input of {rank} dims")
    c.emit_final("IntegerProduct", c.take(2)[:1], attrs, domain=TFLITE)


@operator_rule("ARG_MAX", "ARG_MIN", moves=True)
def arg(c: OperatorConversion) -> None:
    x, _ = c.take(2)
    (axis,) = c.constant_integers(1, "axis")
    op = "ArgMax" if c.op == "ARG_MAX" else "ArgMin"
    (dtype,) = c.output_dtypes
    attrs = {"axis": axis, "keepdims": 0}
    # ONNX's operations only return int64.
    if dtype == INT32:
        c.emit_final(op, [x], attrs, domain=TFLITE)
    elif dtype == INT64:
        c.emit_final(op, [x], attrs)
    else:
        c.cast_final(c.emit(op, [x], attrs), dtype)


@operator_rule("TOPK_V2", moves=True, outputs=2)
def top_k(c: OperatorConversion) -> None:
    c.take(2)
    values, indices = c.outputs
    raw = Value(c.fresh("indices"))
    inputs = [c.inputs[0], c.emit("Reshape", [c.vector(1), [1]])]
    c.emit_final("TopK", inputs, {"axis": -1, "largest": 1, "sorted": 1}, outputs=[values, raw])
    c.append_cast(raw, indices, c.output_dtypes[1])


# Shapes.


@operator_rule("RESHAPE", moves=True)
def reshape(c: OperatorConversion) -> None:
    """The shape is an input, or an option in old files, where [0] means a scalar's."""
    x, shape = c.take(1, 2)
    if shape is None:
        dims = c.option("new_shape")
        shape = c.constant([] if dims == [0] else dims)
    else:
        shape = c.vector(1)
    c.emit_final("Reshape", [x, shape], {"allowzero": 1})


@operator_rule("SQUEEZE", moves=True)
def squeeze(c: OperatorConversion) -> None:
    axes = [] if c.options is None else c.option("squeeze_dims")
    c.emit_final("Squeeze", [*c.take(1), *([c.constant(axes)] if axes else [])])


@operator_rule("TRANSPOSE", moves=True)
def transpose(c: OperatorConversion) -> None:
    x, order = c.take(2)
    perm = c.integers(1)
    if perm is None:
        c.emit_tensorflow("Transpose", [x, order])
    else:
        c.emit_final("Transpose", [x], {"perm": perm})


# Splitting and joining.


@operator_rule("CONCATENATION", moves=True)
def concatenation(c: OperatorConversion) -> None:
    attrs = {"axis": c.option("axis")}
    c.emit_activated("Concat", c.take(1, -1), attrs, kind="ConcatenationOptions")


@operator_rule("UNPACK", moves=True, outputs=None)
def unpack(c: OperatorConversion) -> None:
    c.emit_tensorflow("Unpack", c.take(1), axis=c.option("axis"), num=len(c.outputs))


@operator_rule("SPLIT", moves=True, outputs=None)
def split(c: OperatorConversion) -> None:
    axis, x = c.take(2)
    places, dims, count = c.integers(0), c.shape(1), len(c.outputs)
    dim = dims[places[0]] if places and dims and -len(dims) <= places[0] < len(dims) else None
    if places and isinstance(dim, int) and dim % count == 0:
        c.emit_final("Split", [x], {"axis": places[0], "num_outputs": count})
    else:
        c.emit_tensorflow("Split", [x, axis], num_split=count)


@operator_rule("SPLIT_V", moves=True, outputs=None)
def split_v(c: OperatorConversion) -> None:
    """One of the sizes may be -1: it takes what the others leave."""
    x, sizes, axis = c.take(3)
    places, known = c.integers(2), c.integers(1)
    if not places or not known:
        c.emit_tensorflow("SplitV", [x, sizes, axis])
        return
    parts: Operand = known
    if -1 in known:  # what is left depends on the shape that is fed, not on the declared one
        whole = c.emit("Gather", [c.emit("Shape", [x]), places[:1]])
        left = c.emit("Mul", [whole, [int(size == -1) for size in known]])
        rest = -sum(known) - 1
        parts = c.emit("Add", [left, [rest if size == -1 else size for size in known]])
    c.emit_final("Split", [x, parts], {"axis": places[0]})


_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


@operator_rule("STRIDED_SLICE", moves=True)
def strided_slice(c: OperatorConversion) -> None:
    x, begin, end, strides = c.take(4)
    masks: AttrDict = {name: c.option(name, "StridedSliceOptions") for name in _MASKS}
    if c.option("offset", "StridedSliceOptions"):
        end = c.emit("Add", [_first_taken(c, x, begin, masks), end])
        masks["end_mask"] = 0  # as in LiteRT's kernel
    c.emit_tensorflow("StridedSlice", [x, begin, end, strides], **masks)


def _first_taken(c: OperatorConversion, x: Value, begin: Value, masks: AttrDict) -> Value:
    """Return the first index of each axis, from which an ``offset`` counts: not negative and
    within the dim. If axes are inserted, ``begin``."""
    dtype, (count, *_) = c.dtype(1), c.shape(1) or (None,)
    inserts = masks["ellipsis_mask"] or masks["new_axis_mask"]
    if dtype is None or not isinstance(count, int) or inserts:
        return begin
    dims, zero = c.cast(c.emit("Shape", [x], end=count), dtype.name), c.constant(0, dtype)
    is_from_end = c.emit("Less", [begin, zero])
    first = c.emit("Where", [is_from_end, c.emit("Add", [begin, dims]), begin])
    first = c.emit("Min", [c.emit("Max", [first, zero]), dims])
    if not masks["begin_mask"]:
        return first
    kept = [~masks["begin_mask"] >> axis & 1 for axis in range(count)]
    return c.emit("Mul", [first, c.constant(kept, dtype)])


# Positions of elements.


@operator_rule("GATHER", moves=True)
def gather(c: OperatorConversion) -> None:
    x, indices = c.take(2)
    if c.dtype(1) == np.int16:
        indices = c.cast(indices, "int32")
    axis, batch = c.option("axis", "GatherOptions"), c.option("batch_dims", "GatherOptions")
    if batch:
        c.emit_tensorflow("GatherV2", [x, indices, [axis]], batch_dims=batch)
    else:
        c.emit_final("Gather", [x, indices], {"axis": axis})


def _gives_codes(c: OperatorConversion) -> bool:
    """Whether results are codes as those of the table; of codes, real numbers may be asked for."""
    return c.output_quantizations[0] is not None and c.moved_as_integers


@operator_rule("EMBEDDING_LOOKUP", integers=_gives_codes)
def embedding_lookup(c: OperatorConversion) -> None:
    indices, table = c.take(2)
    c.emit_final("Gather", [table, indices], {"axis": 0})


@operator_rule("EMBEDDING_LOOKUP_SPARSE")
def embedding_lookup_sparse(c: OperatorConversion) -> None:
    """Rows by ids, weighted, and summed along the last axis of the sparse array that has them at
    ``indices``; divided by the sum of weights, or by the root of that of their squares."""
    ids, indices, shape, weights, table = c.take(5)
    combiner = c.option("combiner", "EmbeddingLookupSparseOptions")
    dims = c.cast(c.emit("Slice", [shape, [0], [-1]]), "int64")
    places = c.cast(c.emit("Slice", [indices, [0], [-1], [1]]), "int64")
    strides = c.emit("CumProd", [dims, 0], exclusive=1, reverse=1)
    places = c.emit("ReduceSum", [c.emit("Mul", [places, strides]), [1]], keepdims=0)
    count = c.emit("ReduceProd", [dims], keepdims=0)

    def summed(x: Value, reduction: str = "sum") -> Value:
        return c.emit("Segment", [x, places, count], reduction=reduction, domain=TFLITE)

    ids = c.emit("NonNegative", [ids], domain=TENSORFLOW)
    ones = c.emit("Sub", [c.emit("Shape", [c.emit("Shape", [table])]), [1]])
    ones = c.emit("Expand", [c.constant(1), ones])
    column = c.emit("Concat", [[-1], ones], axis=0)
    rows = c.emit("Gather", [table, ids], axis=0)
    sums = summed(c.emit("Mul", [rows, c.emit("Reshape", [weights, column])]))
    if combiner:
        total = summed(weights if combiner == 1 else c.emit("Mul", [weights, weights]))
        total = total if combiner == 1 else c.emit("Sqrt", [total])
        # Rows without ids stay 0, and are not 0 / 0.
        used = c.emit("GreaterOrEqual", [summed(places, "max"), 0])
        total = c.emit("Where", [used, total, c.like(1, total)])
        sums = c.emit("Div", [sums, c.emit("Reshape", [total, column])])
    whole = c.emit("Concat", [dims, c.emit("Shape", [table], start=1)], axis=0)
    c.emit_final("Reshape", [sums, whole])


@operator_rule("GATHER_ND", moves=True)
def gather_nd(c: OperatorConversion) -> None:
    x, indices = c.take(2)
    c.emit_final("GatherND", [x, _int64(c, 1, indices)], {"batch_dims": 0})


def _int64(c: OperatorConversion, index: int, value: Value) -> Value:
    return value if c.dtype(index) == INT64 else c.cast(value, "int64")


@operator_rule("UNIQUE", moves=True, outputs=2)
def unique(c: OperatorConversion) -> None:
    places = c.output_dtypes[1]
    c.emit_tensorflow("Unique", c.take(1), out_idx="int32" if places is None else places.name)


@operator_rule("REVERSE_SEQUENCE", moves=True)
def reverse_sequence(c: OperatorConversion) -> None:
    x, lengths = c.take(2)
    time, batch = c.option("seq_dim"), c.option("batch_dim")
    # ONNX's ReverseSequence only supports the first two axes.
    if {time, batch} != {0, 1}:
        raise InexpressibleError(f"its dims of time and batch are {time} and {batch}, not 0 and 1")
    attrs = {"batch_axis": batch, "time_axis": time}
    c.emit_final("ReverseSequence", [x, _int64(c, 1, lengths)], attrs)


# Borders and blocks.


@operator_rule("PAD", "PADV2", moves=True)
def pad(c: OperatorConversion) -> None:
    """Pads with 0, for quantized tensors with the code of 0, or with a given value."""
    x, _, value = c.take(2, 3)
    given = c.quantizations[0]
    if value is None and given is not None and c.dtype(0) is not None and c.moved_as_integers:
        value = c.constant(given.zero_points[0], c.dtype(0))  # type: ignore[arg-type]
    value = None if value is None else c.emit("Reshape", [value, []], allowzero=1)
    c.emit_final("Pad", [x, c.vector(1, transposed=True), value], {"mode": "constant"})


@operator_rule("SPACE_TO_BATCH_ND", moves=True)
def space_to_batch(c: OperatorConversion) -> None:
    (x, block, pads), int32 = c.take(3), np.dtype(np.int32)
    given, rank, sides, dtype = c.quantizations[0], c.rank(0), c.integers(1), c.dtype(0)
    if given is not None and c.moved_as_integers and given.zero_points[0]:
        # The operation itself pads with zeros, which would represent other numbers.
        if rank is None or sides is None or dtype is None:
            c.apply_to_reals(space_to_batch)
            return
        rest = c.constant(np.zeros((rank - 1 - len(sides), 2)), int32)
        every = c.cast(c.emit("Concat", [c.constant([[0, 0]], int32), pads, rest], axis=0), "int64")
        ends = c.emit("Reshape", [c.emit("Transpose", [every], perm=[1, 0]), [-1]])
        x = c.emit("Pad", [x, ends, c.constant(given.zero_points[0], dtype)])
        pads = c.constant(np.zeros((len(sides), 2)), int32)
    c.emit_tensorflow("SpaceToBatchND", [x, block, pads])


@operator_rule("MIRROR_PAD", moves=True)
def mirror_pad(c: OperatorConversion) -> None:
    x, pads = c.take(2)
    if c.option("mode", "MirrorPadOptions") == 0:
        c.emit_final("Pad", [x, c.vector(1, transposed=True)], {"mode": "reflect"})
    else:
        c.emit_tensorflow("MirrorPad", [x, pads], mode="SYMMETRIC")


# Operations of TFLite that neither ONNX nor TensorFlow has.


@operator_rule("LSH_PROJECTION")
def lsh_projection(c: OperatorConversion) -> None:
    kind = c.option("type")
    if kind not in (_SPARSE, _DENSE):
        raise InexpressibleError(f"its type is {kind}, neither sparse nor dense")
    c.emit_final("LshProjection", c.take(2, 3), {"dense": int(kind == _DENSE)}, domain=TFLITE)


@operator_rule(
    "SEGMENT_SUM", *(f"UNSORTED_SEGMENT_{name}" for name in ("MAX", "MIN", "PROD", "SUM"))
)
def segments(c: OperatorConversion) -> None:
    attrs = {"reduction": c.op.rpartition("_")[2].lower()}
    if c.op != "SEGMENT_SUM":
        c.emit_final("Segment", c.take(3), attrs, domain=TFLITE)
        return
    x, places = c.take(2)
    # The last segment determines the size of the result, which is empty without rows.
    known = c.shape(1) not in (None, (None,), (0,))
    all_places = places if known else c.emit("Concat", [c.like(-1, places), places], axis=0)
    count = c.emit("Add", [c.emit("Gather", [all_places, -1]), c.like(1, places)])
    c.emit_final("Segment", [x, places, count], attrs, domain=TFLITE)


@operator_rule("MATRIX_DIAG", moves=True)
def matrix_diag(c: OperatorConversion) -> None:
    (x,), given = c.take(1), c.quantizations[0]
    zero = given.zero_points[0] if given is not None and c.moved_as_integers else 0
    c.emit_tensorflow("MatrixDiagV3", [x, [0], -1, -1, c.like(zero, x)], align="RIGHT_LEFT")


@operator_rule("MATRIX_SET_DIAG", moves=True)
def matrix_set_diag(c: OperatorConversion) -> None:
    x, diagonal = c.take(2)
    c.emit_tensorflow("MatrixSetDiagV3", [x, diagonal, [0]], align="RIGHT_LEFT")


@operator_rule("NON_MAX_SUPPRESSION_V4", "NON_MAX_SUPPRESSION_V5", outputs=None)
def suppression(c: OperatorConversion) -> None:
    """Outputs have ``max_output_size`` entries, and the last output is the number of valid ones.
    Unlike TensorFlow's, these drop a box whose overlap equals the threshold."""
    soft = c.op.endswith("V5")
    if len(c.outputs) != 2 + soft:
        raise NodeError(f"has {len(c.outputs)} outputs")
    attrs = {"pad_to_max_output_size": True, "inclusive": True, "outputs": len(c.outputs)}
    c.emit_final("NonMaxSuppression", c.take(6 if soft else 5), attrs, domain=TENSORFLOW)


# Rules of the operators of StableHLO that LiteRT runs, and of those added with them.


_WINDOW_REDUCTIONS = ("", "add", "multiply", "minimum", "maximum", "and", "or")
"""reductions by their numbers in REDUCE_WINDOW"""
_SCATTER = """
    update_window_dims inserted_window_dims scatter_dims_to_operand_dims index_vector_dim
"""


@operator_rule("STABLEHLO_AND")
def both(c: OperatorConversion) -> None:
    dtype = c.dtype(0)
    c.emit_final("And" if dtype is not None and dtype.kind == "b" else "BitwiseAnd", c.take(2))


@operator_rule("STABLEHLO_PAD", moves=True)
def pad_between(c: OperatorConversion) -> None:
    x, value = c.take(2)
    steps = c.constant([1 + step for step in c.option("interior_padding")])
    attrs = {"low": c.option("edge_padding_low"), "high": c.option("edge_padding_high")}
    c.emit_final("Spread", [x, steps, value], attrs, domain=TFLITE)


@operator_rule("REDUCE_WINDOW")
def reduce_window(c: OperatorConversion) -> None:
    number = c.option("reduce_function")
    if not 0 < number < len(_WINDOW_REDUCTIONS):
        raise InexpressibleError(f"it reduces windows by function {number}")
    c.emit_final(
        "ReduceWindow", c.take(5), {"reduction": _WINDOW_REDUCTIONS[number]}, domain=TFLITE
    )


@operator_rule("STABLEHLO_REDUCE_WINDOW")
def reduce_spread_window(c: OperatorConversion) -> None:
    x, initial = c.take(2)
    rank = len(c.option("window_dimensions"))
    numbers = [
        c.constant(c.option(name) or [1] * rank)
        for name in ("window_dimensions", "window_strides", "window_dilations")
    ]
    borders = np.reshape(c.option("padding") or [0] * 2 * rank, (-1, 2))
    steps = c.option("base_dilations") or [1] * rank
    if borders.any() or max(steps, default=1) > 1:
        attrs = {"low": borders[:, 0].tolist(), "high": borders[:, 1].tolist()}
        x = c.emit("Spread", [x, steps, initial], attrs, domain=TFLITE)
    attrs = {"reduction": _region(c, "body_subgraph_index")}
    c.emit_final("ReduceWindow", [x, initial, *numbers], attrs, domain=TFLITE)


@operator_rule("STABLEHLO_SCATTER")
def scatter(c: OperatorConversion) -> None:
    attrs = {name: c.option(name) for name in _SCATTER.split()}
    attrs["reduction"] = _region(c, "update_computation_subgraph_index")
    c.emit_final("SliceScatter", c.take(3), attrs, domain=TFLITE)


def _region(c: OperatorConversion, option: str) -> str:
    """Return the only operation in a subgraph of two scalars, "" if it returns the second one."""
    scalars = [Value(c.fresh("scalar")), Value(c.fresh("scalar"))]
    scope = c.context.use(c.scope, c.option(option), scalars, f"{c.name}/")
    names = {"Add": "add", "Mul": "multiply", "Min": "minimum", "Max": "maximum", "And": "and"}
    ops = [names.get(node.op.name) for node in scope.nodes]
    if not ops and scope.outputs == scalars[1:]:
        return ""
    if len(ops) != 1 or ops[0] is None or len(scope.outputs) != 1:
        raise InexpressibleError("its subgraph is no single addition, product, extreme or And")
    return ops[0]


@operator_rule("RFFT2D")
def transform(c: OperatorConversion) -> None:
    """The Fourier transform of the last two dims, cut or filled up with zeros to sizes."""
    x, sizes = c.take(2)
    known = c.integers(1)
    if known is not None and len(known) != 2:
        raise NodeError(f"transforms to {len(known)} sizes; it takes those of rows and columns")
    halves = {"axis": 0, "num_outputs": 2}
    rows, columns = known or c.emit_several("Split", [sizes], halves, count=2)
    spectrum = c.emit("DFT", [c.emit("Unsqueeze", [x, [-1]]), columns, -2], onesided=1)
    if rows != 1 or (c.shape(0) or [None])[-2:-1] != (1,):  # one row is its own transform
        spectrum = c.emit("DFT", [spectrum, rows, -3])
    c.emit_final("ViewAs", [spectrum], {"to": element_number("complex64")}, domain=TFLITE)


@operator_rule("STABLEHLO_RNG_BIT_GENERATOR", outputs=2)
def random_bits(c: OperatorConversion) -> None:
    dtype, _, tensor = c.context.declared(c.scope, c.operator.outputs[1])
    shape = tensor.shape
    if dtype is None or dtype.name not in ("int32", "int64", "uint32", "uint64"):
        raise InexpressibleError(f"it gives {dtype}")
    attrs = {"algorithm": c.option("algorithm"), "dtype": dtype.name, "shape": list(shape)}
    c.emit_final("RngBitGenerator", c.take(1), attrs, domain=TFLITE)
