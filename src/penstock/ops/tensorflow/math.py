"""TensorFlow's arithmetic where it differs from ONNX, with NumPy's broadcasting.

Integer division by zero raises an error at run time. Gradients of functions take the function's
result (``y``) or argument (``x``), and the incoming gradient (``dy``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from penstock.core.types import BOOL, FLOAT32, RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.elementwise import infer_unary, ufunc
from penstock.ops.tensorflow.common import array_operator, integer, operator

Arithmetic = Callable[..., RunValue]
Numbers: TypeAlias = float | np.ndarray


# Quotients and remainders.


def _whole(function: Arithmetic) -> Arithmetic:
    def divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if x.size and not y.all():
            raise ShapeError("Integer division by zero")
        return function(x, y)

    return divide


def _towards_zero(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    # NumPy's // rounds down. Subtracting fmod, which has the sign of x, makes the quotient exact.
    return np.subtract(x, np.fmod(x, y)) // y


def _quotient(name: str, whole: Arithmetic, real: Arithmetic) -> None:
    """Register a division that is ``whole`` for integers and ``real`` for floats."""
    whole = _whole(whole)

    @operator(name, infer=rules.broadcast_type)
    def compile(node: Node, types: Types) -> Kernel:
        dtype = rules.same_dtype(types, (0, 1))
        if dtype is not None:
            return Kernel(whole if dtype.kind in "iu" else real)
        return Kernel(lambda x, y: whole(x, y) if x.dtype.kind in "iu" else real(x, y))


_quotient("FloorDiv", np.floor_divide, lambda x, y: np.floor(np.true_divide(x, y)))
_quotient("FloorMod", np.mod, np.mod)
_quotient("TruncateDiv", _towards_zero, lambda x, y: np.trunc(np.true_divide(x, y)))
_quotient("TruncateMod", np.fmod, np.fmod)
_quotient("Div", _towards_zero, np.true_divide)


# Two inputs.


def _unless_zero(divisor: np.ndarray, x: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Replace ``result`` by 0, of the dtype of ``x``, where ``divisor`` is 0."""
    return np.where(divisor == 0, np.zeros((), x.dtype), result)


def _squared_difference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    difference = np.subtract(x, y)
    return difference * difference.conj() if x.dtype.kind == "c" else np.square(difference)


# The constants of Selu.
_SELU, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772

_BINARY: dict[str, Arithmetic] = {
    "Atan2": np.arctan2,
    "NextAfter": np.nextafter,
    "DivNoNan": lambda x, y: _unless_zero(y, x, np.true_divide(x, y)),
    "MulNoNan": lambda x, y: _unless_zero(y, x, np.multiply(x, y)),
    "SquaredDifference": _squared_difference,
    "Xdivy": lambda x, y: _unless_zero(x, x, np.true_divide(x, y)),
    "Xlog1py": lambda x, y: _unless_zero(x, x, np.multiply(x, np.log1p(y))),
    "Xlogy": lambda x, y: _unless_zero(x, x, np.multiply(x, np.log(y))),
    # Shifts by more bits than there are, or by less than none, are by the most or by none.
    "LeftShift": lambda x, y: np.left_shift(x, np.clip(y, 0, 8 * x.itemsize - 1)),
    "RightShift": lambda x, y: np.right_shift(x, np.clip(y, 0, 8 * x.itemsize - 1)),
    # Gradients, from y and dy.
    "TanhGrad": lambda y, dy: dy * (1 - y * y),
    "SigmoidGrad": lambda y, dy: dy * y * (1 - y),
    "SqrtGrad": lambda y, dy: _unless_zero(dy, y, dy * y.dtype.type(0.5) / y.conj()),
    "RsqrtGrad": lambda y, dy: _unless_zero(dy, y, dy * y.dtype.type(-0.5) * (y * y * y).conj()),
    "ReciprocalGrad": lambda y, dy: _unless_zero(dy, y, -dy * (y * y).conj()),
    "InvGrad": lambda y, dy: _unless_zero(dy, y, -dy * (y * y).conj()),
    # Gradients, from dy and x.
    "ReluGrad": lambda dy, x: np.where(x > 0, dy, np.zeros((), dy.dtype)),
    "Relu6Grad": lambda dy, x: np.where((x > 0) & (x < 6), dy, np.zeros((), dy.dtype)),
    "SoftplusGrad": lambda dy, x: dy / (np.exp(-x) + 1),
    "SoftsignGrad": lambda dy, x: dy / np.square(1 + np.abs(x)),
    # Gradients, from dy and y.
    "EluGrad": lambda dy, y: np.where(y < 0, dy * (y + 1), dy),
    "SeluGrad": lambda dy, y: dy * np.where(y < 0, y + _SELU * _SELU_ALPHA, y.dtype.type(_SELU)),
}


@operator("NotEqual", infer=rules.broadcast_to(BOOL), strings=True)
def not_equal(node: Node, types: Types) -> Kernel:
    return ufunc(np.not_equal, 2)


@array_operator("LeakyReluGrad", infer=rules.broadcast_type)
def leaky_relu_grad(dy: np.ndarray, x: np.ndarray, *, alpha: float) -> np.ndarray:
    return np.where(x > 0, dy, dy * dy.dtype.type(alpha))


@array_operator("ApproximateEqual", infer=rules.broadcast_to(BOOL))
def approximate_equal(x: np.ndarray, y: np.ndarray, *, tolerance: float) -> np.ndarray:
    return np.abs(x - y) < tolerance


# One input.

_UNARY: dict[str, Arithmetic] = {
    "Expm1": np.expm1,
    "Log1p": np.log1p,
    "Rint": np.rint,
    "Rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
    "OnesLike": np.ones_like,
    "Conj": np.conjugate,
}
for _table, _infer in ((_BINARY, rules.broadcast_type), (_UNARY, rules.same_type)):
    for _name, _function in _table.items():
        array_operator(_name, infer=_infer)(_function)
array_operator(
    "PopulationCount",
    infer=lambda t, a, c: (TensorType(np.dtype(np.uint8), rules.tensor(t, 0).shape),),
)(lambda x: np.bitwise_count(x.view(np.dtype(f"u{x.itemsize}"))))  # NumPy counts those of abs(x)
array_operator("ZerosLike", infer=infer_unary(lambda _: 0))(np.zeros_like)
array_operator("IsFinite", infer=rules.broadcast_to(BOOL))(np.isfinite)


def _part_type(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = rules.tensor(types, 0)
    dtype = None if type_.dtype is None else np.empty(0, type_.dtype).real.dtype
    return (TensorType(dtype, type_.shape),)


array_operator("ComplexAbs", infer=_part_type)(np.abs)
array_operator("Angle", infer=_part_type)(np.angle)
array_operator("Real", infer=_part_type)(lambda x: np.array(x.real))
array_operator("Imag", infer=_part_type)(lambda x: np.array(x.imag))


@array_operator("CheckNumerics", infer=rules.same_type, pure=False)
def check_numerics(x: np.ndarray, *, message: str = "") -> np.ndarray:
    if not np.isfinite(x).all():
        raise ShapeError(f"{message}: the tensor has Inf or NaN values")
    return x.copy()


@array_operator("L2Loss", infer=lambda t, a, c: (TensorType(rules.tensor(t, 0).dtype, ()),))
def l2_loss(x: np.ndarray) -> np.ndarray:
    return np.square(x).sum(dtype=x.dtype) * x.dtype.type(0.5)


# Losses, each with its gradient for the scores.


def _infer_cross_entropy(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    scores = rules.tensor(types, 0)
    rows = None if scores.shape is None else scores.shape[:1]
    return TensorType(scores.dtype, rows), TensorType(scores.dtype, scores.shape)


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    """Return the log-softmax of each row, in float32 or wider."""
    wide = scores.astype(np.result_type(scores.dtype, np.float32), copy=False)
    # Subtracting the row maximum keeps exp from overflowing.
    shifted = wide - wide.max(1, keepdims=True, initial=-np.inf)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


@array_operator(
    "SoftmaxCrossEntropyWithLogits",
    infer=lambda types, attrs, consts: _infer_cross_entropy(
        [TensorType(rules.same_dtype(types, (0, 1)), rules.broadcast_type(types, {}, ())[0].shape)],
        attrs,
        consts,
    ),
)
def cross_entropy(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return loss and gradient for scores and probabilities [N, C]; either may have one row."""
    if scores.ndim != 2 or labels.ndim != 2:
        raise ShapeError(
            f"features of shape {scores.shape} and labels of shape {labels.shape} must be [N, C]"
        )
    scores, labels = np.broadcast_arrays(scores, labels)
    logs = _log_softmax(scores)
    # A label of 0 contributes 0, even where the log-probability is infinite.
    loss = -np.where(labels == 0, np.float32(0), labels * logs).sum(1)
    return loss.astype(scores.dtype), (np.exp(logs) - labels).astype(scores.dtype)


@array_operator("SparseSoftmaxCrossEntropyWithLogits", infer=_infer_cross_entropy)
def sparse_cross_entropy(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return loss and gradient for scores [N, C] and class indices [N]."""
    if scores.ndim != 2 or labels.shape != scores.shape[:1]:
        raise ShapeError(
            f"features of shape {scores.shape} and labels of shape {labels.shape} must be [N, C] "
            "and [N]"
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < scores.shape[1]:
        raise ShapeError(
            f"labels {labels.min()} to {labels.max()} must be in [0, {scores.shape[1]})"
        )
    logs, rows = _log_softmax(scores), np.arange(len(labels))
    gradient = np.exp(logs)
    gradient[rows, labels] -= 1
    return (-logs[rows, labels]).astype(scores.dtype), gradient.astype(scores.dtype)


def _infer_cross(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    a, b = rules.tensor(types, 0).shape, rules.tensor(types, 1).shape
    shape = a if a is not None else b
    if not rules.fits(a, b) or not rules.fits(shape and shape[-1:], (3,)):
        raise ShapeError(f"the inputs of Cross must have the same shape [..., 3], not {a} and {b}")
    return (TensorType(rules.same_dtype(types, (0, 1)), shape),)


@array_operator("Cross", infer=_infer_cross)
def cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.shape != b.shape or a.shape[-1:] != (3,):
        raise ShapeError(
            f"the inputs of Cross must have the same shape [..., 3], not {a.shape} and {b.shape}"
        )
    return np.cross(a, b)


# Biases.


def _infer_bias_grad(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = rules.tensor(types, 0)
    if type_.shape is None:
        return (TensorType(type_.dtype),)
    channels = _channels(attrs.get("data_format"), len(type_.shape))
    return (TensorType(type_.dtype, (type_.shape[channels],)),)


def _channels(data_format: object, rank: int) -> int:
    if rank < 2:
        raise ShapeError(f"the input of BiasAdd must have rank 2 or more, not {rank}")
    return 1 if data_format == "NCHW" else rank - 1


@array_operator("BiasAddGrad", infer=_infer_bias_grad)
def bias_grad(x: np.ndarray, *, data_format: str = "NHWC") -> np.ndarray:
    channels = _channels(data_format, x.ndim)
    return x.sum(axis=tuple([i for i in range(x.ndim) if i != channels]), dtype=x.dtype)


# Booleans.


@array_operator("ToBool", infer=rules.always(TensorType(BOOL, ())), strings=True)
def to_bool(x: np.ndarray) -> np.bool_:
    """The condition of an If: whether a scalar is not 0 or "", or another tensor is not empty."""
    return np.bool_(x[()] if x.ndim == 0 else x.size)


@array_operator("BranchIndex", infer=rules.always(TensorType(INT32, ())))
def branch_index(x: np.ndarray, *, branches: int) -> np.int32:
    """The branch of a Case; an index out of range selects the last branch."""
    index = int(rules.one_element(x, "the index of a branch"))
    return np.int32(index if 0 <= index < branches - 1 else branches - 1)


@array_operator("Assert", pure=False, strings=True)
def assert_true(condition: np.ndarray, *data: np.ndarray, summarize: int = 3) -> None:
    if not rules.one_element(condition, "a condition")[()]:
        values = " ".join(f"[{_summary(x, summarize)}]" for x in data)
        raise ShapeError(f"assertion failed: {values}")


def _summary(x: np.ndarray, shown: int) -> str:
    flat = x.reshape(-1)
    count = flat.size if shown < 0 else shown
    return " ".join(map(str, flat[:count].tolist())) + ("..." if flat.size > count else "")


# Fake quantization.


def nudged(
    low: Numbers, high: Numbers, bits: int, narrow: bool
) -> tuple[Numbers, Numbers, Numbers]:
    """Adjust range and scale so that 0 is represented exactly."""
    # narrow_range omits the lowest code.
    first, last = np.float32(int(narrow)), np.float32(2**bits - 1)
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    step = (high - low) / (last - first)
    zero = np.clip(np.floor(first - low / step + np.float32(0.5)), first, last)
    return (first - zero) * step, (last - zero) * step, step


@array_operator(
    "FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel", infer=rules.same_shape(FLOAT32)
)
def fake_quant(
    x: np.ndarray, low: Numbers, high: Numbers, *, num_bits: int, narrow_range: bool
) -> np.ndarray:
    low, high, step = nudged(low, high, num_bits, narrow_range)
    shifted = np.clip(x, low, high) - low
    return (np.floor(shifted / step + np.float32(0.5)) * step + low).astype(np.float32)


@array_operator("FakeQuantWithMinMaxArgs", infer=rules.same_shape(FLOAT32))
def fake_quant_args(
    x: np.ndarray, *, min: float, max: float, num_bits: int, narrow_range: bool
) -> np.ndarray:
    return fake_quant(x, min, max, num_bits=num_bits, narrow_range=narrow_range)


# Gradients of broadcasting.


@array_operator("BroadcastGradientArgs")
def broadcast_gradient(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The axes over which to sum the gradients of two broadcast operands."""
    rank = max(a.size, b.size)
    left, right = ([1] * (rank - x.size) + x.tolist() for x in (a, b))
    if any(x != y and 1 not in (x, y) for x, y in zip(left, right, strict=True)):
        raise ShapeError(f"shapes {a.tolist()} and {b.tolist()} do not broadcast")
    # Operands of equal shape and rank are not broadcast, even along dims of 1.
    equal = a.tolist() == b.tolist()
    ones = ([i for i, dim in enumerate(x) if dim == 1 and not equal] for x in (left, right))
    first, second = (np.array(axes, a.dtype) for axes in ones)
    return first, second


# Running sums.


@array_operator("CumulativeLogsumexp", infer=rules.same_type)
def cumulative_log_sum_exp(
    x: np.ndarray, axis: np.ndarray, *, exclusive: bool = False, reverse: bool = False
) -> np.ndarray:
    """The logarithm of the running sum of exp(x)."""
    out = np.empty_like(x)
    place = rules.normalize_axis(integer(axis, "the axis"), x.ndim)
    source, target = np.moveaxis(x, place, 0), np.moveaxis(out, place, 0)
    if reverse:
        source, target = source[::-1], target[::-1]
    if exclusive:
        target[:1] = -np.inf
        source, target = source[:-1], target[1:]
    target[...] = np.logaddexp.accumulate(source, 0) if len(source) else source
    return out
