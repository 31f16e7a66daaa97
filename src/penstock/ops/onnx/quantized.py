"""Matrix products of 8-bit integers: MatMulInteger, QLinearMatMul, QGemm.

BLAS has no integer products, and NumPy's are a hundred times slower than BLAS. The products are
therefore computed in float32, exactly: float32 represents all integers up to 2**24, so that a sum
of products within this bound is exact in any order. Longer sums are split along K into pieces,
whose results accumulate in int32, wrapping as the specification allows. A piece has at least 258
terms, as |a - zero| <= 255 and 255 * 255 * 258 < 2**24; if one operand is constant, the sums of its
absolute values allow longer pieces, mostly all of K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import FLOAT32, RunValue, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Infer, Types
from penstock.ops.common import fixed_point
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.constant_cache import Shared, shared
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.common.products import product_in_parts, product_work
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape
from penstock.ops.onnx import quantization
from penstock.ops.onnx.matmul import matmul_shape
from penstock.ops.registry import MICROSOFT, operator

EXACT = 1 << 24  # float32 represents all integers up to this one exactly


def constant_or_left_out(node: Node, index: int) -> tuple[bool, np.ndarray | None]:
    """Whether input ``index`` is known when the node is compiled, and its value."""
    value = node.inputs[index] if rules.given(node.inputs, index) else None
    return (True, None) if value is None else (value.const is not None, value.const)


def reach(node: Node, types: Types, x: int, zero: int) -> int:
    """An upper bound of ``|x - zero|`` for two inputs; 0 for floats, whose sums are not exact."""
    dtype = rules.tensor(types, x).dtype or UINT8
    if dtype not in (INT8, UINT8):
        return 0
    low, high = quantization.bounds(dtype)
    is_known, point = constant_or_left_out(node, zero)
    if not is_known:
        # An unknown zero point may be at either end of the range.
        return int(high - low)
    if point is None or not point.size:
        return int(max(high, -low))
    return int(max(high - int(point.min()), int(point.max()) - low))


def accumulate(piece: int, values: np.ndarray, total: np.ndarray) -> None:
    """Accumulate the sums of a piece in the int32 ``total``; piece 0 initializes it."""
    if piece == 0:
        np.copyto(total, values, casting="unsafe")
    else:
        np.add(total, values, out=total, dtype=np.int32, casting="unsafe")


def pieces(length: int, a_reach: int, b_reach: int, b: np.ndarray | None) -> list[slice]:
    """Split ``length`` terms into pieces with exact sums; ``b`` [..., length, n] if known."""
    if not a_reach or not b_reach:
        return [slice(None)]
    safe = EXACT // (a_reach * b_reach)
    if length <= safe:
        return [slice(None)]
    step = safe
    if b is not None and b.size:
        sizes = np.abs(b)
        # Try growing numbers of equal pieces; a few trials find nearly the smallest number.
        count = 1
        while -(-length // count) > safe:
            size = -(-length // count)
            starts = range(0, length, size)
            # Not in float32, which would round the sums that are to be bounded.
            sums = np.add.reduceat(sizes, starts, axis=-2, dtype=np.float64)
            if a_reach * float(sums.max()) <= EXACT:
                step = size
                break
            count += max(1, count // 4)
    return [slice(k, k + step) for k in range(0, length, step)]


class _Product:
    """``(a - a_zero) @ (b - b_zero)`` of a node's inputs, and its scratch memory in ``layout``.

    ``a`` and ``b`` are each the input indices of an operand and its zero point. If ``integer``, the
    result must be int32. A constant right operand is converted once.
    """

    def __init__(
        self,
        node: Node,
        inputs: Tensors,
        a: tuple[int, int],
        b: tuple[int, int],
        transposed: tuple[bool, bool] = (False, False),
        integer: bool = False,
    ) -> None:
        self.transpose_a, self.transpose_b = transposed
        reach_a, reach_b = reach(node, inputs, *a), reach(node, inputs, *b)
        a_dims, b_type = rules.tensor(inputs, a[0]).dims, rules.tensor(inputs, b[0])
        b_dims = b_type.dims
        if self.transpose_a:
            a_dims = a_dims[::-1]
        if self.transpose_b:
            b_dims = (*b_dims[:-2], b_dims[-1], b_dims[-2])
        self.spans = pieces(a_dims[-1], reach_a, reach_b, None)
        self._fixed: Shared[tuple[np.ndarray, list[slice]]] | None = None
        """a constant right operand in float32, and its pieces along K"""
        _, weights = constant_or_left_out(node, b[0])
        zero_known, b_zero = constant_or_left_out(node, b[1])
        if weights is not None and weights.ndim > 1 and zero_known:

            def prepared() -> tuple[np.ndarray, list[slice]]:
                side = self._right_side(weights, b_zero, np.empty(weights.shape, FLOAT32))
                side = np.ascontiguousarray(side)
                return side, pieces(side.shape[-2], reach_a, reach_b, side)

            # The pieces depend on the bounds of both operands, and so on the zero points.
            name = "right side", self.transpose_b, reach_a, reach_b
            self._fixed = shared(name, prepared, weights, b_zero)
            self.spans = self._fixed.value[1]
        assert b_type.dtype is not None
        if b_type.dtype.kind not in "iu":  # products of 8-bit floats need not be exact
            self.spans = [slice(None)]
        layout, shape = Scratch(), matmul_shape(a_dims, b_dims)
        dims = rules.all_known(shape) or ()
        self.layout = layout
        self._right = None if self._fixed is not None else layout.field(b_type.dims, FLOAT32)
        self.left = layout.field(a_dims, FLOAT32)
        """a - a_zero, which the caller fills"""
        self.values = layout.field(dims, FLOAT32)
        """scratch that the caller may use after the product"""
        self.total = layout.field(dims, INT32) if len(self.spans) > 1 or integer else None
        # One matrix product instead of one per batch.
        self._flat = len(b_dims) == 2 and len(a_dims) > 2

    def _right_side(self, b: np.ndarray, zero: np.ndarray | None, out: np.ndarray) -> np.ndarray:
        """Compute ``b - zero`` in ``out``, of the shape of ``b``; return it transposed if
        necessary.
        """
        if self.transpose_b:
            b, out = b.swapaxes(-1, -2), out.swapaxes(-1, -2)
        quantization.subtract_zero_point(
            b, None if zero is None else quantization.zero_of(_per_column(zero)), out
        )
        return out

    def fill(self, a: np.ndarray, zero: np.ndarray | None, workspace: np.ndarray) -> None:
        """Store the left operand, ``a - zero``."""
        a = a.T if self.transpose_a else a
        zero = None if zero is None else quantization.zero_of(_per_row(zero))
        quantization.subtract_zero_point(a, zero, self.left(workspace))

    def __call__(
        self, b: np.ndarray, zero: np.ndarray | None, out: Any, workspace: np.ndarray
    ) -> np.ndarray:
        """Multiply the stored left operand by ``b - zero``. The result is int32 in ``out``, if
        given, else int32 or float32 in the workspace."""
        left, values, fixed = self.left(workspace), self.values(workspace), self._fixed
        result = values
        if fixed is not None:
            right, _ = fixed.value
        else:
            assert self._right is not None
            right = self._right_side(b, zero, self._right(workspace))
        if self._flat:
            left = left.reshape(math.prod(left.shape[:-1]), left.shape[-1])
            result = values.reshape(left.shape[0], right.shape[1])
        total = out if out is not None or self.total is None else self.total(workspace)
        if len(self.spans) == 1:
            product_in_parts(left, right, result)
            if total is None:
                return values
            np.copyto(total, values, casting="unsafe")
            return total
        for i, span in enumerate(self.spans):
            rows = right[span] if right.ndim == 1 else right[..., span, :]
            product_in_parts(left[..., span], rows, result)
            accumulate(i, values, total)
        return total


def _per_row(parameter: np.ndarray) -> np.ndarray:
    """Reshape a per-tensor or per-row scale or zero point of the left operand to broadcast."""
    if parameter.size == 1:
        return parameter.reshape(())
    return parameter[:, None] if parameter.ndim == 1 else parameter


def _per_column(parameter: np.ndarray) -> np.ndarray:
    """Reshape a per-tensor or per-column scale or zero point of the right operand to broadcast."""
    return parameter.reshape(()) if parameter.size == 1 else parameter


def _check_parameters(types: Types, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Check that scales and zero points match the rows of a and the columns of b. ``a`` and ``b``
    are the input indices of an operand and its parameters."""
    for name, (operand, *parameters) in (("a", a), ("b", b)):
        for i in parameters:
            shape = rules.tensor(types, i).shape
            if name == "a" and shape is not None and len(shape) == 1:
                shape = (*shape, 1)
            full = rules.tensor(types, operand).shape
            _check_parameter(f"a scale or zero point of {name}", shape, full)


def _check_parameter(name: str, parameter: Shape | None, full: Shape | None) -> None:
    """Check that a parameter broadcasts to ``full``, or has one element, of any rank."""
    if parameter is not None and any(dim != 1 for dim in parameter):
        rules.check_broadcasts(name, parameter, full)


def _infer_product(
    a: tuple[int, ...], b: tuple[int, ...], dtype: np.dtype | None, like: int = -1
) -> Infer:
    """The type of a product, of ``dtype`` or the dtype of input ``like``; ``a``, ``b`` as above."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        shape = matmul_shape(rules.tensor(types, a[0]).shape, rules.tensor(types, b[0]).shape)
        _check_parameters(types, a, b)
        return (TensorType(dtype or rules.tensor(types, like).dtype, shape),)

    return infer


def requantize(
    total: np.ndarray,
    factor: np.ndarray,
    zero: np.ndarray | None,
    real: np.ndarray,
    out: np.ndarray,
) -> None:
    """Scale ``total`` by ``factor`` in the scratch ``real``, and store codes in ``out``."""
    np.multiply(total, factor, out=real, dtype=np.float32, casting="unsafe")
    quantization.store(real, quantization.zero_of(zero), out, True)


def bound_codes(codes: np.ndarray, limits: Sequence[int] | None) -> None:
    """Clamp codes in place to the range of an activation."""
    if limits is not None:
        low, high = limits
        np.clip(codes, low, high, out=codes)


@operator(
    "MatMulInteger",
    since=10,
    infer=_infer_product((0, 2), (1, 3), INT32),
    work=product_work,
    traits={"heavy"},
)
@by_shape(arity=(4, 1))
def matmul_integer(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    product = _Product(node, inputs, (0, 2), (1, 3))

    def into(*arguments: RunValue) -> None:
        a, b, a_zero, b_zero, out, workspace = arguments
        product.fill(a, a_zero, workspace)
        product(b, b_zero, out, workspace)

    return Routine(into, product.layout.size)


@operator(
    "QLinearMatMul",
    since=10,
    infer=_infer_product((0, 1, 2), (3, 4, 5), None, like=7),
    work=product_work,
)
@by_shape(arity=(8, 1), widen=False)
def qlinear_matmul(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    product = _Product(node, inputs, (0, 2), (3, 5))

    def factor_of(a_scale: np.ndarray, b_scale: np.ndarray, y_scale: np.ndarray) -> np.ndarray:
        factor = _per_row(a_scale) * _per_column(b_scale) / _per_row(y_scale)
        return np.asarray(factor, FLOAT32)

    is_fixed, rounded = bool(node.attrs.get("fixed_point")), rules.tensor(outputs, 0).dtype == UINT8
    scales: Any = [constant_or_left_out(node, i)[1] for i in (1, 4, 6)]
    constant_factor = None if any(s is None for s in scales) else factor_of(*scales)

    def into(*arguments: RunValue) -> None:
        a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero, out, workspace = arguments
        product.fill(a, a_zero, workspace)
        total, real = product(b, b_zero, None, workspace), product.values(workspace)
        if is_fixed:
            exact = fixed_point.of_products(a_scale, b_scale, y_scale, rounded=rounded)
            fixed_point.store_rescaled(total, exact, y_zero, out)
            return
        factor = constant_factor
        if factor is None:
            factor = factor_of(a_scale, b_scale, y_scale)
        requantize(total, factor, _per_row(y_zero), real, out)

    return Routine(into, product.layout.size)


def _infer_qgemm(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    operands = rules.pad_with_none(types, 9)
    for i, name in ((0, "transA"), (3, "transB")):
        x = rules.tensor(types, i)
        rules.check_shape(f"input {i}", x.shape, (None, None))
        if attrs.get(name) and x.shape is not None:
            operands[i] = TensorType(x.dtype, x.shape[::-1])
    shape = matmul_shape(rules.tensor(operands, 0).shape, rules.tensor(operands, 3).shape)
    _check_parameters(operands, (0, 1, 2), (3, 4, 5))
    for i in (1, 2, 7, 8):
        parameter = rules.tensor(types, i).shape
        if parameter is not None and any(dim not in (1, None) for dim in parameter):
            raise ShapeError(f"input {i} of QGemm must be a scalar, but has shape {parameter}")
    _check_parameter("C", rules.tensor(types, 6).shape, shape)
    return (TensorType(rules.tensor(types, 8).dtype if rules.given(types, 8) else FLOAT32, shape),)


@operator("QGemm", domain=MICROSOFT, infer=_infer_qgemm, work=product_work)
@by_shape(arity=(9, 1))
def qgemm(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    transposed = bool(node.attrs.get("transA")), bool(node.attrs.get("transB"))
    alpha = np.float32(node.attrs.get("alpha", 1.0))
    limits = node.attrs.get("code_limits")
    # The bias is added in int32: float32 may not represent the sum exactly.
    product = _Product(node, inputs, (0, 2), (3, 5), transposed, rules.given(inputs, 6))

    def into(*arguments: RunValue) -> None:
        a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero, out, workspace = arguments
        product.fill(a, a_zero, workspace)
        total, real = product(b, b_zero, None, workspace), product.values(workspace)
        if c is not None:
            np.add(total, c, total)
        factor = alpha * a_scale.reshape(()) * _per_column(b_scale)
        if y_scale is None:
            np.multiply(total, factor, out=out, dtype=np.float32, casting="unsafe")
            return
        zero = None if y_zero is None else y_zero.reshape(())
        requantize(total, factor / y_scale.reshape(()), zero, real, out)
        bound_codes(out, limits)

    return Routine(into, product.layout.size)
