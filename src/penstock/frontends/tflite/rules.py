"""Rules of elementwise arithmetic, of matrices, and of element types."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from functools import reduce

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, INT64
from penstock.frontends.common.diagnostics import InexpressibleError
from penstock.frontends.tflite.conversion import (
    BOUNDS,
    CodeLayer,
    OperatorConversion,
    code_layer,
    dequantized,
    emit_quantized,
    is_dynamic_range,
    layer_of_codes,
    operator_rule,
)
from penstock.ir.graph import Value
from penstock.ir.op import AttrDict, Attrs
from penstock.ops.common.dtypes import INT8, INT16, UINT8
from penstock.ops.common.fixed_point import inverse_roots, multiplier, rescaled
from penstock.ops.common.shape_rules import all_known, element_number
from penstock.ops.registry import MICROSOFT, TENSORFLOW, TFLITE


class Plain(NamedTuple):
    """An operator that becomes one operation; ``operators.txt`` explains its fields."""

    op: str
    domain: str
    inputs: int
    any_more: bool
    options: Sequence[str]
    table: str
    outputs: int
    attrs: Attrs
    flags: frozenset[str]


def _read(line: str) -> tuple[str, Plain]:
    operator, name, inputs, *words = line.split()
    domain, _, op = name.rpartition(".")
    flags = frozenset([word for word in words if "=" not in word])
    fields = dict([word.split("=") for word in words if "=" in word])
    options = fields.pop("options", "").split(",")
    table, outputs = fields.pop("table", ""), int(fields.pop("outputs", 1))
    attrs = {key: x if x.isupper() else int(x) for key, x in fields.items()}
    least, dots, _ = inputs.partition("..")
    options = [name for name in options if name]
    return operator, Plain(
        op, domain, int(least), bool(dots), options, table, outputs, attrs, flags
    )


with open(os.path.join(os.path.dirname(__file__), "operators.txt"), encoding="ascii") as _file:
    _PLAIN = dict([_read(line) for line in _file if line[0] not in "#\n"])


def plain(c: OperatorConversion) -> None:
    entry = _PLAIN[c.op]
    inputs = c.take(entry.inputs, -1 if entry.any_more else None)
    if "vector" in entry.flags:
        inputs[1] = c.vector(1)
    attrs = {name: c.option(name, entry.table) for name in entry.options}
    if not entry.domain:  # truth values are integers in ONNX
        attrs = {name: int(x) if isinstance(x, bool) else x for name, x in attrs.items()}
    c.emit_final(entry.op, inputs, {**entry.attrs, **attrs}, domain=entry.domain)


for _operator, _entry in _PLAIN.items():
    _moves, _integers = (flag in _entry.flags for flag in ("moves", "integers"))
    operator_rule(_operator, outputs=_entry.outputs, moves=_moves, integers=_integers)(plain)


def _is_of_codes(c: OperatorConversion, allowed: Collection[np.dtype] = (INT8, UINT8)) -> bool:
    """Whether all tensors are codes of one of the types, each with one scale."""
    given = [*c.quantizations, *c.output_quantizations]
    dtypes = {c.dtype(i) for i in range(len(c.inputs))} | {*c.output_dtypes}
    if len(dtypes) > 1 or not dtypes <= {*allowed}:
        return False
    return all(q is not None and not q.per_channel and q.scales[0] > 0 for q in given)


def _is_pair_of_codes(c: OperatorConversion) -> bool:
    activation = c.option("fused_activation_function", f"{c.op.capitalize()}Options")
    return len(c.inputs) == 2 and _is_of_codes(c) and activation in BOUNDS


@operator_rule("ADD", "SUB", "MUL", integers=_is_pair_of_codes)
def arithmetic(c: OperatorConversion) -> None:
    # Checked late, since types would have to be inferred for other operators.
    dtype = c.dtype(0) if c.op == "MUL" or c.quantizations[0] is not None else None
    if dtype is not None and c.quantizations[0] is not None and _is_pair_of_codes(c):
        activation = c.option("fused_activation_function", f"{c.op.capitalize()}Options")
        attrs = _pair_attrs(c, c.op.capitalize(), activation)
        c.emit_final("IntegerArithmetic", c.take(2), attrs, domain=TFLITE)
        return
    # ONNX's operations have no complex numbers.
    if c.op == "MUL" and dtype is not None and dtype.kind == "c":
        c.emit_final("ComplexMul", c.take(2), domain=TFLITE)
    else:
        c.emit_activated(c.op.capitalize(), c.take(2))


def _pair_attrs(c: OperatorConversion, operation: str, activation: int) -> AttrDict:
    """Return the attributes of the IntegerArithmetic of both inputs, which are codes."""
    given = [q for q in (*c.quantizations, *c.output_quantizations) if q is not None]
    dtype = c.output_dtypes[0]
    assert dtype is not None
    return {
        "operation": operation,
        "scales": [q.scales[0] for q in given],
        "zero_points": [q.zero_points[0] for q in given],
        "code_limits": given[-1].codes_of(BOUNDS[activation], dtype),
    }


def _is_function_of_codes(c: OperatorConversion) -> bool:
    (x, *_), (y, *_) = c.quantizations, c.output_quantizations
    # LiteRT's HARD_SWISH rejects results in finer steps.
    fits = c.op != "HARD_SWISH" or (
        x is not None and y is not None and x.scale[0] < 128 * y.scale[0]
    )
    return len(c.inputs) == 1 and _is_of_codes(c) and bool(fits)


@operator_rule("HARD_SWISH", "LEAKY_RELU", integers=_is_function_of_codes)
def activation_of_codes(c: OperatorConversion) -> None:
    """For 8-bit codes, a table of the reference kernels' results for each code."""
    given, (wanted,), dtype = c.quantizations[0], c.output_quantizations, c.dtype(0)
    if given is None or wanted is None or dtype is None or not _is_function_of_codes(c):
        plain(c)
        return
    codes = np.arange(256).astype(np.uint8).view(dtype).astype(np.int64) - given.zero_points[0]
    scale, result_scale = given.scale[0], wanted.scale[0]
    if c.op == "HARD_SWISH":
        from penstock.ops.common.integer_curves import integer_hard_swish  # most models have none

        y = integer_hard_swish(codes, scale, result_scale)
    else:
        alpha = np.float32(c.option("alpha", "LeakyReluOptions"))
        below = rescaled(codes, multiplier(np.abs(scale * alpha / result_scale)))
        below = below if alpha >= 0 else -below
        y = np.where(codes >= 0, rescaled(codes, multiplier(scale / result_scale)), below)
    _emit_table(c, y + wanted.zero_points[0], dtype)


def _emit_table(
    c: OperatorConversion, codes: np.ndarray, dtype: np.dtype, limits: Sequence[int] = ()
) -> None:
    """Emit a table of ``codes`` within ``limits``, by default those of the dtype."""
    attrs: AttrDict = {"table": _within(codes, dtype, limits)}
    if dtype != c.dtype(0):
        attrs["to"] = element_number(dtype.name)
    c.emit_final("CodeTable", c.take(1), attrs, domain=TFLITE)


def _within(codes: np.ndarray, dtype: np.dtype, limits: Sequence[int] = ()) -> list[int]:
    low, high = limits or (np.iinfo(dtype).min, np.iinfo(dtype).max)
    codes_within: list[int] = np.clip(codes, low, high).tolist()
    return codes_within


def _requantized(c: OperatorConversion, ratio: float) -> np.ndarray:
    """Return the results' codes for each of 8 bits, without bounds; ``ratio`` is that of scales."""
    given, (wanted,), dtype = c.quantizations[0], c.output_quantizations, c.dtype(0)
    assert given is not None and wanted is not None and dtype is not None
    codes = np.arange(256).astype(np.uint8).view(dtype).astype(np.int64) - given.zero_points[0]
    return rescaled(codes, multiplier(ratio)) + wanted.zero_points[0]


@operator_rule("PRELU", integers=_is_of_codes)
def prelu(c: OperatorConversion) -> None:
    """Of 8-bit codes, products where they stand for negative numbers, or else codes of the result's
    steps, as the reference kernels compute both."""
    x, slope = c.take(2)
    given, (wanted,), (dtype,) = c.quantizations, c.output_quantizations, c.output_dtypes
    if given[0] is None or wanted is None or dtype is None or not _is_of_codes(c):
        c.emit_final("PRelu", [x, slope])
        return
    codes = _requantized(c, float(given[0].scale[0] / wanted.scale[0]))
    above = c.emit("CodeTable", [x], {"table": _within(codes, dtype)}, domain=TFLITE)
    below = c.emit("IntegerArithmetic", [x, slope], _pair_attrs(c, "Mul", 0), domain=TFLITE)
    is_below = c.emit("Less", [x, c.constant(given[0].zero_points[0], dtype)])
    c.emit_final("Where", [is_below, below, above])


def _is_curve_of_codes(c: OperatorConversion) -> bool:
    """Whether codes have 16 bits and no zero points; those of the logistic function, the tangent
    and a softmax are fractions of 15 bits."""
    (x, *others), (y, *_) = c.quantizations, c.output_quantizations
    if others or x is None or y is None:
        return False
    if c.op in ("LOGISTIC", "SOFTMAX", "TANH") and y.scales[0] != 2**-15:
        return False
    # Types are checked last, since they may have to be inferred.
    return x.zero_points[0] == y.zero_points[0] == 0 and _is_of_codes(c, (INT16,))


@operator_rule("EXP", "LOG", "LOGISTIC", "TANH", integers=_is_curve_of_codes)
def curve_of_codes(c: OperatorConversion) -> None:
    """For 16-bit codes, a table of the reference kernels' results for each code."""
    if c.quantizations[0] is None or not _is_curve_of_codes(c):
        plain(c)
        return
    _emit_curve(c)


def _emit_curve(c: OperatorConversion, approximate: bool = False) -> None:
    from penstock.ops.common.code_curves import curve_codes  # most models have no such codes

    given, (wanted,) = c.quantizations[0], c.output_quantizations
    assert given is not None and wanted is not None
    scale, step = given.scales[0], wanted.scales[0]
    table = curve_codes(c.op, scale, step, approximate=approximate)
    c.emit_final("CodeTable", c.take(1), {"table": table}, domain=TFLITE)


def _codes_of_bytes() -> np.ndarray:
    """Return the int8 codes with the bits of 0 to 255."""
    return np.arange(256).astype(np.uint8).view(INT8).astype(np.int64)


def _is_root_of_codes(c: OperatorConversion) -> bool:
    return _is_of_codes(c, (INT8,))


@operator_rule("SQRT", integers=_is_root_of_codes)
def root(c: OperatorConversion) -> None:
    """LiteRT rounds roots of 8-bit codes down, where other functions are rounded to the nearest."""
    given, (wanted,) = c.quantizations[0], c.output_quantizations
    if given is None or wanted is None or not _is_root_of_codes(c):
        plain(c)
        return
    numbers = _codes_of_bytes() - given.zero_points[0]
    roots = np.sqrt(np.maximum(numbers, 0).astype(np.float32) * np.float32(given.scales[0]))
    steps = np.floor(roots * (np.float32(1) / np.float32(wanted.scales[0]))).astype(np.int64)
    _emit_table(c, steps + wanted.zero_points[0], INT8)


def _is_symmetric(c: OperatorConversion) -> bool:
    """Whether all tensors are signed codes without zero points and with one scale: of 16 bits, or
    of 8 for NEG. Kernels look up others of 8 bits in a table, as fast."""
    x = c.quantizations[0]
    if x is None or x.zero_points[0] or not c.moved_as_integers:
        return False
    return _is_of_codes(c, (INT8, INT16) if c.op == "NEG" else (INT16,))


@operator_rule("ABS", "NEG", integers=_is_symmetric)
def of_symmetric_codes(c: OperatorConversion) -> None:
    """The reference kernels negate codes without saturation, and take absolute values with it."""
    if c.op == "ABS" and _is_symmetric(c):
        (x,) = c.take(1)
        c.emit_final("Abs", [c.emit("Max", [x, c.like(-np.iinfo(np.int16).max, x)])])
    else:
        plain(c)


@operator_rule("DIV")
def divide(c: OperatorConversion) -> None:
    inputs = c.take(2)
    dtype = c.dtype(0)
    if dtype is None or dtype.kind in "iu":
        c.emit_tensorflow("Div", inputs)
    else:
        c.emit_activated("Div", inputs)


@operator_rule("ADD_N")
def add_n(c: OperatorConversion) -> None:
    *others, last = c.take(1, -1)
    if others:
        c.emit_final("Add", [reduce(lambda a, b: c.emit("Add", [a, b]), others), last])
    else:
        c.emit_final("Identity")


@operator_rule("SQUARE")
def square(c: OperatorConversion) -> None:
    c.emit_final("Mul", c.take(1) * 2)


@operator_rule("RSQRT", integers=lambda c: _is_curve_of_codes(c) or _is_root_of_codes(c))
def reciprocal_root(c: OperatorConversion) -> None:
    """Two operations that passes recognize and kernels fuse, or a table of codes."""
    given, (wanted,) = c.quantizations[0], c.output_quantizations
    if given is not None and _is_curve_of_codes(c):
        _emit_curve(c)
    elif given is not None and wanted is not None and _is_root_of_codes(c):
        numbers = _codes_of_bytes() - given.zero_points[0]
        by = inverse_roots(np.maximum(numbers, 1))
        parts = rescaled(np.ones(256, np.int64), by._replace(shifts=by.shifts - 20))
        step = np.sqrt(np.float64(given.scale[0])) * np.float64(wanted.scale[0])
        of_result = multiplier(1 / step)
        codes = rescaled(parts, of_result._replace(shifts=of_result.shifts + 20))
        # Of what has no root, the largest code.
        codes = np.where(numbers > 0, codes + wanted.zero_points[0], 127)
        _emit_table(c, codes, INT8)
    else:
        c.emit_final("Reciprocal", [c.emit("Sqrt", c.take(1))])


@operator_rule("SQUARED_DIFFERENCE", integers=lambda c: _is_of_codes(c, (INT8,)))
def squared_difference(c: OperatorConversion) -> None:
    if c.quantizations[0] is not None and _is_of_codes(c, (INT8,)):
        attrs = _pair_attrs(c, "SquaredDifference", 0)
        c.emit_final("IntegerArithmetic", c.take(2), attrs, domain=TFLITE)
    else:
        c.emit_final("Mul", [c.emit("Sub", c.take(2))] * 2)


def _is_clip_of_codes(c: OperatorConversion) -> bool:
    """Whether codes of 16 bits are clipped, or those of 8 come to others."""
    return _is_symmetric(c) or (not c.moved_as_integers and _is_of_codes(c))


@operator_rule("RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1", integers=_is_clip_of_codes)
def clip(c: OperatorConversion) -> None:
    (x,), given = c.take(1), c.quantizations[0]
    bounds = {"RELU": BOUNDS[1], "RELU6": BOUNDS[3], "RELU_N1_TO_1": BOUNDS[2]}.get(c.op, (0, 1))
    low, high = bounds
    if given is not None and _is_symmetric(c):
        low, high = given.codes_of(bounds, INT16)
    elif given is not None and _is_clip_of_codes(c):
        (wanted,), (dtype,) = c.output_quantizations, c.output_dtypes
        assert wanted is not None and dtype is not None
        codes = _requantized(c, float(given.scale[0] / wanted.scale[0]))
        _emit_table(c, codes, dtype, wanted.codes_of(bounds, dtype))
        return
    elif c.op == "RELU":
        plain(c)
        return
    c.emit_final("Clip", [x, c.like(low, x), c.like(high, x)])


@operator_rule("GELU", integers=_is_curve_of_codes)
def gelu(c: OperatorConversion) -> None:
    approximate = c.option("approximate", "GeluOptions")
    if c.quantizations[0] is not None and _is_curve_of_codes(c):
        _emit_curve(c, bool(approximate))
        return
    c.emit_final("Gelu", c.take(1), {"approximate": "tanh" if approximate else "none"})


@operator_rule("SOFTMAX", integers=_is_curve_of_codes)
def softmax(c: OperatorConversion) -> None:
    (x,) = c.take(1)
    beta = c.option("beta")
    given = c.quantizations[0]
    if given is not None and _is_curve_of_codes(c):
        attrs: AttrDict = {"scale": given.scales[0], "beta": beta}
        c.emit_final("IntegerSoftmax", [x], attrs, domain=TFLITE)
        return
    scaled = x if beta == 1 else c.emit("Mul", [x, c.like(beta, x)])
    c.emit_final("Softmax", [scaled], {"axis": -1})


@operator_rule("L2_NORMALIZATION")
def l2_normalization(c: OperatorConversion) -> None:
    (x,) = c.take(1)
    norm = c.emit("ReduceL2", [x, [-1]], keepdims=1)
    # TFLite's kernel divides by at least 1e-6, so that zeros stay zeros.
    c.emit_activated("Div", [x, c.emit("Max", [norm, c.like(1e-6, x)])], kind="L2NormOptions")


# Matrices.


def _emit_dynamic_range(
    c: OperatorConversion, inputs: Sequence[Value | None], kind: str, attrs: AttrDict
) -> None:
    """Emit rows times weights, with a bias or none, as ``is_dynamic_range`` says."""
    (x, weights, *bias), w = inputs, c.quantizations[1]
    assert w is not None
    attrs = {"asymmetric": int(c.option("asymmetric_quantize_inputs", kind)), **attrs}
    operands = [x, weights, c.constant(w.scale, FLOAT32), *bias]
    c.emit_final("DynamicRangeDense", operands, attrs, domain=TFLITE)


@operator_rule("FULLY_CONNECTED", codes=layer_of_codes, integers=is_dynamic_range)
def fully_connected(c: OperatorConversion) -> None:
    """Weights have a row for each output. An image of more dims is flattened to rows of the
    weights' length, unless all of its dims but the last are kept."""
    x, weights, bias = c.take(2, 3)
    if c.option("weights_format", "FullyConnectedOptions"):
        raise InexpressibleError("its weights are shuffled for processors of one kind")
    last = (c.shape(1) or ())[-1:]
    matrix = len(last) == 1 and (
        tuple(c.declared_shape(0)[1:]) == last or (c.shape(0) or ())[1:] == last
    )
    if not matrix and not c.option("keep_num_dims", "FullyConnectedOptions"):
        width = c.emit("Shape", [weights], start=1)
        flat = c.emit("Concat", [[-1], width], axis=0)
        x, matrix = c.reshaped(x, flat), True
    if c.codes is None and weights is c.inputs[1] and is_dynamic_range(c):
        limits = BOUNDS[c.option("fused_activation_function", "FullyConnectedOptions")]
        _emit_dynamic_range(c, [x, weights, bias], "FullyConnectedOptions", {"limits": [*limits]})
        return
    kept = [] if matrix or c.codes is None else _kept_dims(c)
    if c.codes is not None and (matrix or kept):
        rows = x if matrix else c.emit("Reshape", [x, [-1, weights.type.dims[1]]])
        inputs = [rows, *c.codes.x, weights, *c.codes.w, bias, *c.codes.y]
        # LiteRT's kernels round in real numbers here.
        attrs: AttrDict = {"transB": 1, "code_limits": c.codes.limits}
        if matrix:
            c.emit_final("QGemm", inputs, attrs, domain=MICROSOFT)
        else:
            codes = c.emit("QGemm", inputs, domain=MICROSOFT, **attrs)
            c.emit_final("Reshape", [codes, kept])
        return
    if matrix:
        c.emit_activated("Gemm", [x, weights, bias], {"transB": 1}, kind="FullyConnectedOptions")
        return
    if c.codes is not None:
        c.apply_to_reals(fully_connected)
        return
    # ONNX's Gemm only takes matrices.
    columns = c.transposed(weights, [1, 0])
    op, inputs = "MatMul", [x, columns]
    if bias is not None:
        op, inputs = "Add", [c.emit("MatMul", inputs), bias]
    c.emit_activated(op, inputs, kind="FullyConnectedOptions")


def _kept_dims(c: OperatorConversion) -> list[int]:
    """Return the dims of the result of a dense layer that has as many as its rows, at most one of
    them unknown, -1; none if they are not known so far."""
    dims = (*(c.shape(0) or ())[:-1], *(c.shape(1) or ())[:1])
    kept = [n if isinstance(n, int) else -1 for n in dims]
    return kept if len(kept) > 1 and 0 not in kept and kept.count(-1) < 2 else []


def _product_of_codes(c: OperatorConversion) -> CodeLayer | None:
    """Return the codes of two operands with one scale each, or None."""
    x, w = c.quantizations[:2]
    if x is None or w is None or w.per_channel or c.dtype(0) != c.dtype(1):
        return None
    ranks = c.rank(0) or 0, c.rank(1) or 0
    return code_layer(c, x, w, c.dtype(0)) if min(ranks) > 1 else None


def _is_one_matrix(c: OperatorConversion) -> bool:
    """Whether rows of known dims are multiplied by one constant matrix, as a layer's."""
    x, w = all_known(c.shape(0)), all_known(c.shape(1))
    fits = x is not None and w is not None and math.prod(w[:-2]) == 1 and 0 not in x
    plain = not c.option("adjoint_lhs", "BatchMatMulOptions")
    return fits and plain and layer_of_codes(c) is not None


def _is_dynamic_product(c: OperatorConversion) -> bool:
    """Whether rows of real numbers are multiplied by one constant int8 matrix with one scale."""
    w, dims = c.quantizations[1], all_known(c.shape(1)) or ()
    if w is None or w.scale.size > 1 or len(dims) < 2 or math.prod(dims[:-2]) > 1:
        return False
    return not c.option("adjoint_lhs", "BatchMatMulOptions") and is_dynamic_range(c)


@operator_rule("BATCH_MATMUL", codes=_product_of_codes, integers=_is_dynamic_product)
def batch_matmul(c: OperatorConversion) -> None:
    operands = c.take(2)
    if c.codes is None and _is_dynamic_product(c):
        matrix = operands[1].const.reshape(operands[1].const.shape[-2:])
        if not c.option("adjoint_rhs", "BatchMatMulOptions"):
            matrix = np.ascontiguousarray(matrix.T)
        inputs = [operands[0], c.constant(matrix, matrix.dtype)]
        _emit_dynamic_range(c, inputs, "BatchMatMulOptions", {})
        return
    if c.codes is not None and _is_one_matrix(c):
        x, w = c.static_shape(0, "the rows"), operands[1].const
        matrix = w.reshape(w.shape[-2:])
        matrix = matrix.T if c.option("adjoint_rhs", "BatchMatMulOptions") else matrix
        rows, weights = operands[0], c.constant(np.ascontiguousarray(matrix), w.dtype)
        if w.ndim > len(x):
            rows = c.emit("Unsqueeze", [rows, [*range(w.ndim - len(x))]])
        inputs = [rows, *c.codes.x, weights, *c.codes.w, *c.codes.y]
        c.emit_final("QLinearMatMul", inputs, {"fixed_point": 1})
        return
    for i, name in enumerate(("adjoint_lhs", "adjoint_rhs")):
        if c.option(name, "BatchMatMulOptions"):
            rank = c.rank(i)
            if rank is None or rank < 2:
                raise InexpressibleError("it transposes a matrix whose rank is not known")
            perm = [*range(rank - 2), rank - 1, rank - 2]
            operands[i] = c.transposed(operands[i], perm)
    if c.codes is None:
        c.emit_final("MatMul", operands)
    else:
        a, b = operands
        inputs = [a, *c.codes.x, b, *c.codes.w, *c.codes.y]
        c.emit_final("QLinearMatMul", inputs, {"fixed_point": 1})


# Circle's own operators.


@operator_rule("RMS_NORM")
def rms_norm(c: OperatorConversion) -> None:
    x, gamma, beta = c.take(2, 3)
    attrs = {"axis": -1, "epsilon": c.option("epsilon", "RmsNormOptions")}
    if beta is None:
        c.emit_final("RMSNormalization", [x, gamma], attrs)
    else:
        c.emit_final("Add", [c.emit("RMSNormalization", [x, gamma], attrs), beta])


@operator_rule("ROPE")
def rope(c: OperatorConversion) -> None:
    """With x0 and x1 the halves of the last axis: [x0 cos - x1 sin, x0 sin + x1 cos]."""
    x, sin, cos = c.take(3)
    if c.option("mode", "RoPEOptions") != 0:
        raise InexpressibleError("it is of a mode other than GPT-NeoX")
    halves = [Value(c.fresh("half")), Value(c.fresh("half"))]
    c.append("Split", "", [x], halves, {"axis": -1, "num_outputs": 2}, halves[0].name)
    turned = c.emit("Concat", [c.emit("Neg", halves[1:]), halves[0]], axis=-1)
    c.emit_final("Add", [c.emit("Mul", [x, cos]), c.emit("Mul", [turned, sin])])


@operator_rule("INSTANCE_NORM")
def instance_norm(c: OperatorConversion) -> None:
    x, gamma, beta = c.take(3)
    attrs = {"epsilon": c.option("epsilon")}
    inputs = [c.channels_first(x), gamma, beta]
    activation = c.option("fused_activation_function")
    c.emit_image("InstanceNormalization", inputs, attrs, activation=activation)


# Element types.


@operator_rule("CAST", integers=True)
def cast(c: OperatorConversion) -> None:
    """Operates on quantized values directly."""
    (dtype,), given = c.output_dtypes, c.dtype(0)
    if dtype is None:
        raise InexpressibleError("it casts to a handle")
    (x,) = c.take(1)
    if given is not None and given.kind == "c":
        x = x if dtype.kind == "c" else c.emit("Real", [x], domain=TENSORFLOW)
    if dtype.kind == "c":
        c.emit_final("ToComplex", [x], domain=TFLITE)
        return
    real = given is None or given.kind not in "iub"
    if real and dtype.kind in "iu" and dtype.itemsize < 4:  # saturates beyond the dtype's range
        ends = np.iinfo(dtype)
        x = c.emit("Clip", [x, c.like(ends.min, x), c.like(ends.max, x)])
    c.cast_final(x, dtype)


@operator_rule("BITCAST", integers=True)
def bitcast(c: OperatorConversion) -> None:
    (dtype,), given = c.output_dtypes, c.dtype(0)
    (x,) = c.take(1)
    if dtype is None or (given is not None and given.itemsize == dtype.itemsize):
        c.cast_final(x, dtype, "BitCast")
    else:
        c.emit_final("ViewAs", [x], {"to": element_number(dtype.name)}, domain=TFLITE)


@operator_rule("DEQUANTIZE", integers=True)
def dequantize(c: OperatorConversion) -> None:
    (x,) = c.take(1)
    given = c.quantizations[0]
    if given is None:  # of float16
        c.cast_final(x, FLOAT32)
    else:
        c.emit_final("Identity", [dequantized(c, x, given)])


def _is_of_other_steps(c: OperatorConversion) -> bool:
    """Whether codes of 8 bits become such of another scale, which the reference kernels compute in
    integers."""
    both = [q for q in (c.quantizations[0], c.output_quantizations[0]) if q is not None]
    if len(both) < 2 or any(q.per_channel or q.scales[0] <= 0 for q in both):
        return False
    dtypes = {c.dtype(0), c.output_dtypes[0]}
    return dtypes <= {INT8, UINT8} and both[0].scales != both[1].scales


@operator_rule("QUANTIZE", integers=True)
def quantize(c: OperatorConversion) -> None:
    """Quantizes real numbers, or integers with another quantization."""
    (x,) = c.take(1)
    given, (wanted,), (output,) = c.quantizations[0], c.output_quantizations, c.outputs
    if wanted is None or output is None:
        raise InexpressibleError("its output has no scale")
    (dtype,) = c.output_dtypes
    if given is not None and dtype is not None and _is_of_other_steps(c):
        _emit_table(c, _requantized(c, float(given.scale[0]) / float(wanted.scale[0])), dtype)
        return
    real = x if given is None else dequantized(c, x, given)
    emit_quantized(c, real, wanted, output, c.output_dtypes[0])


@operator_rule("SHAPE")
def shape(c: OperatorConversion) -> None:
    (dtype,) = c.output_dtypes
    x = c.take(1)
    if dtype == INT64:
        c.emit_final("Shape", x)
    else:
        c.cast_final(c.emit("Shape", x), np.dtype(np.int32))
