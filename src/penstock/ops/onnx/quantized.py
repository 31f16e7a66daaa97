"""Matrix products of 8-bit integers: MatMulInteger, QLinearMatMul, and those of com.microsoft.

BLAS has no integers, and NumPy's own integer product is a hundred times slower than BLAS. So they
are computed in float32, exactly: it holds every integer up to 2**24, hence a sum of products that
cannot grow beyond that is exact whatever the order of its terms. Longer sums are cut along K into
pieces that are short enough, whose results are added as int32, wrapping as the specification
allows. A piece has at least 258 terms, as |a - zero| <= 255 and 255 * 255 * 258 < 2**24; where one
side is constant, the sums of its own absolute values tell how long, which mostly is all of K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Infer, Kernel, Types
from penstock.ops.common.constant_cache import Shared, shared
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.common.shape_rules import (
    broadcast_shapes,
    check_broadcasts,
    given,
    pad_with_none,
    tensor,
)
from penstock.ops.common.specialize import Routine, ScratchLayout, Tensors, specialized
from penstock.ops.common.work import product_work
from penstock.ops.onnx.quantization import (
    bounds,
    quantize_to_float,
    store,
    subtract_zero_point,
    zero_of,
)
from penstock.ops.registry import MICROSOFT, operator
from penstock.types import FLOAT32, Dim, Shape, ShapeError, TensorType, Type

EXACT = 1 << 24  # float32 holds every integer up to this


# Shapes


def _product_shape(a: Shape | None, b: Shape | None) -> Shape | None:
    """The shape of ``np.matmul(a, b)``, as far as known."""
    if a is None or b is None:
        return None
    if not a or not b:
        raise ShapeError("a matrix product needs operands of rank 1 or more, not scalars")
    inner = b[-2] if len(b) > 1 else b[0]
    if isinstance(a[-1], int) and isinstance(inner, int) and a[-1] != inner:
        raise ShapeError(f"shapes {a} and {b} do not multiply: {a[-1]} and {inner} differ")
    ends: tuple[Dim, ...] = (*a[-2:-1], *(b[-1:] if len(b) > 1 else ()))
    if len(b) <= 2:
        return (*a[:-2], *ends)
    batch = broadcast_shapes([a[:-2], b[:-2]])
    return None if batch is None else (*batch, *ends)


# Exact products


def reach(dtype: np.dtype, zero: np.ndarray | None, constant: bool) -> int:
    """The largest ``|x - zero|`` there can be; 0 for floats, whose sums are not exact anyway."""
    if dtype not in (INT8, UINT8):
        return 0
    low, high = bounds(dtype)
    if not constant:
        return int(high - low)
    if zero is None or not zero.size:
        return int(max(high, -low))
    return int(max(high - int(zero.min()), int(zero.max()) - low))


def pieces(length: int, a_reach: int, b_reach: int, b: np.ndarray | None) -> list[slice]:
    """Cut ``length`` terms so that each piece sums up exactly; ``b[..., length, n]`` if known."""
    if not a_reach or not b_reach:
        return [slice(None)]
    safe = EXACT // (a_reach * b_reach)
    if length <= safe:
        return [slice(None)]
    step = safe
    if b is not None and b.size:
        sizes = np.abs(b)
        count = 1
        while -(-length // count) > safe:
            size = -(-length // count)
            starts = range(0, length, size)
            sums = np.add.reduceat(sizes, starts, axis=-2, dtype=np.float64)
            if a_reach * float(sums.max()) <= EXACT:
                step = size
                break
            count += max(1, count // 4)
    return [slice(k, k + step) for k in range(0, length, step)]


class _Product:
    """``(a - a_zero) @ (b - b_zero)`` of what a node's inputs ``a`` and ``b`` are.

    Constant right sides are converted once, when the node is compiled. ``dynamic``: a is a float
    tensor that is quantised to uint8 as it comes. ``integer``: the result must be int32.
    """

    def __init__(
        self,
        node: Node,
        types: Types,
        a: tuple[int, int],  # where the inputs of a node have a and its zero point
        b: tuple[int, int],
        *,
        transpose_b: bool = False,
        dynamic: bool = False,
        integer: bool = False,
    ) -> None:
        self.b = b
        self.transpose_b = transpose_b
        self.integer = integer
        consts = [None if v is None else v.const for v in node.inputs]

        def constant(i: int) -> tuple[bool, np.ndarray | None]:
            """Whether input i is known, and what it is."""
            if not given(node.inputs, i):
                return True, None
            return consts[i] is not None, consts[i]

        b_known, b_zero = constant(b[1])
        a_known, a_zero = (False, None) if dynamic else constant(a[1])
        a_dtype = UINT8 if dynamic else tensor(types, a[0]).dtype
        self.a_reach = reach(a_dtype or UINT8, a_zero, a_known)
        self.b_reach = reach(tensor(types, b[0]).dtype or UINT8, b_zero, b_known)
        self.fixed: Shared[tuple[np.ndarray, list[slice]]] | None = None
        """a constant right side, and how it is cut"""
        weights = consts[b[0]]
        if weights is not None and weights.ndim > 1 and b_known:

            def prepared() -> tuple[np.ndarray, list[slice]]:
                side = self.right_side(weights, b_zero, np.empty(weights.shape, FLOAT32))
                side = np.ascontiguousarray(side)
                return side, pieces(side.shape[-2], self.a_reach, self.b_reach, side)

            name = "right side", transpose_b, self.a_reach, self.b_reach
            self.fixed = shared(name, prepared, weights, b_zero)

    def right_side(self, b: np.ndarray, zero: np.ndarray | None, out: np.ndarray) -> np.ndarray:
        """``b - zero`` in ``out``, which has the shape of ``b``; then transposed, if need be."""
        if self.transpose_b:
            b, out = b.swapaxes(-1, -2), out.swapaxes(-1, -2)
        subtract_zero_point(b, None if zero is None else zero_of(_per_column(zero)), out)
        return out


class _Multiply:
    """A product for operands of known shapes; ``b`` is the shape as given, untransposed."""

    def __init__(
        self, product: _Product, a: TensorType, b: TensorType, layout: ScratchLayout
    ) -> None:
        a_dims, b_dims = a.dims, b.dims
        self.given = product
        self._right = None if product.fixed is not None else layout.field(b_dims, FLOAT32)
        if product.transpose_b:
            b_dims = (*b_dims[:-2], b_dims[-1], b_dims[-2])
        shape: Any = _product_shape(a_dims, b_dims)
        assert b.dtype is not None
        if b.dtype.kind not in "iu":  # floats of 8 bits have no exactness to keep
            self.spans = [slice(None)]
        elif product.fixed is not None:
            self.spans = product.fixed.value[1]
        else:
            self.spans = pieces(a_dims[-1], product.a_reach, product.b_reach, None)
        several = len(self.spans) > 1
        self.left = layout.field(a_dims, FLOAT32)
        """a - a_zero, for the caller to fill"""
        self.values = layout.field(shape, FLOAT32)
        """free for the caller once the product is there"""
        self.total = layout.field(shape, INT32) if several or product.integer else None
        # One product of matrices instead of one for each batch.
        self._flat = len(b_dims) == 2 and len(a_dims) > 2

    def fill(self, a: np.ndarray, zero: np.ndarray | None, workspace: np.ndarray) -> None:
        """Take in the left side."""
        subtract_zero_point(
            a, None if zero is None else zero_of(_per_row(zero)), self.left(workspace)
        )

    def __call__(self, inputs: Sequence[Any], out: Any, workspace: np.ndarray) -> np.ndarray:
        """The product with the right side among a node's inputs, when the left side is in place.

        The result is int32 in ``out``, if given; else int32 or float32 in the workspace.
        """
        left, values, fixed = self.left(workspace), self.values(workspace), self.given.fixed
        product = values
        if fixed is not None:
            right, _ = fixed.value
        else:
            b, zero = self.given.b
            assert self._right is not None
            minus = inputs[zero] if zero < len(inputs) else None
            right = self.given.right_side(inputs[b], minus, self._right(workspace))
        if self._flat:
            left = left.reshape(-1, left.shape[-1])
            product = values.reshape(left.shape[0], right.shape[1])
        if len(self.spans) == 1:
            np.matmul(left, right, product)
            if out is None and not self.given.integer:
                return values
        total: np.ndarray = out if out is not None else self.total(workspace)  # type: ignore[misc]
        if len(self.spans) == 1:
            np.copyto(total, values, casting="unsafe")
            return total
        for span in self.spans:
            part = right[..., span, :] if right.ndim > 1 else right[span]
            np.matmul(left[..., span], part, product)
            if span.start == 0:
                np.copyto(total, values, casting="unsafe")
            else:
                np.add(total, values, out=total, dtype=np.int32, casting="unsafe")
        return total


def _per_row(parameter: np.ndarray) -> np.ndarray:
    """A scale or zero point of the left side: one, one a row, or ready to broadcast."""
    if parameter.size == 1:
        return parameter.reshape(())
    return parameter[:, None] if parameter.ndim == 1 else parameter


def _per_column(parameter: np.ndarray) -> np.ndarray:
    """A scale or zero point of the right side: one, one a column, or ready to broadcast."""
    return parameter.reshape(()) if parameter.size == 1 else parameter


def _rows(types: Types, index: int) -> Shape | None:
    """The shape in which a parameter of the left side broadcasts."""
    shape = tensor(types, index).shape
    return (*shape, 1) if shape is not None and len(shape) == 1 else shape


def _check_parameters(types: Types, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Whether scales and zero points fit the rows of a, the columns of b.

    ``a`` and ``b`` are the indices of an operand and its parameters.
    """
    left, right = tensor(types, a[0]).shape, tensor(types, b[0]).shape
    for i in a[1:]:
        _check_parameter("a scale or zero point of a", _rows(types, i), left)
    for i in b[1:]:
        _check_parameter("a scale or zero point of b", tensor(types, i).shape, right)


def _check_parameter(name: str, parameter: Shape | None, full: Shape | None) -> None:
    """That it broadcasts, or is a single element in however many dims."""
    if parameter is not None and any(dim != 1 for dim in parameter):
        check_broadcasts(name, parameter, full)


# MatMulInteger, QLinearMatMul


def _infer_product(
    a: tuple[int, ...], b: tuple[int, ...], dtype: np.dtype | None, like: int = -1, bias: int = -1
) -> Infer:
    """A product of a given dtype, or that of input ``like``.

    ``a`` and ``b`` are the indices of an operand and its parameters.
    """

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        shape = _product_shape(tensor(types, a[0]).shape, tensor(types, b[0]).shape)
        _check_parameters(types, a, b)
        if bias >= 0:
            _check_parameter("a bias", tensor(types, bias).shape, shape)
        return (TensorType(dtype or tensor(types, like).dtype, shape),)

    return infer


def _operands(inputs: Tensors, a: int, b: int) -> tuple[TensorType, TensorType]:
    left, right = inputs[a], inputs[b]
    assert left is not None
    assert right is not None
    return left, right


@operator("MatMulInteger", since=10, infer=_infer_product((0, 2), (1, 3), INT32), work=product_work)
def matmul_integer(node: Node, types: Types) -> Kernel:
    product = _Product(node, types, (0, 2), (1, 3))

    def make(inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
        layout = ScratchLayout()
        multiply = _Multiply(product, *_operands(inputs, 0, 1), layout)

        def into(*args: Any) -> None:
            *values, out, workspace = args
            multiply.fill(values[0], pad_with_none(values, 3)[2], workspace)
            multiply(values, out, workspace)

        return Routine(into, layout.size)

    return specialized(node, types, make)


@operator(
    "QLinearMatMul",
    since=10,
    infer=_infer_product((0, 1, 2), (3, 4, 5), None, like=7),
    work=product_work,
)
def qlinear_matmul(node: Node, types: Types) -> Kernel:
    product = _Product(node, types, (0, 2), (3, 5))

    def factor_of(a_scale: np.ndarray, b_scale: np.ndarray, y_scale: np.ndarray) -> np.ndarray:
        factor = _per_row(a_scale) * _per_column(b_scale) / _per_row(y_scale)
        return np.asarray(factor, FLOAT32)

    def make(inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
        layout = ScratchLayout()
        multiply = _Multiply(product, *_operands(inputs, 0, 3), layout)
        scales = [consts[i] for i in (1, 4, 6)]
        constant_factor = None if any(s is None for s in scales) else factor_of(*scales)  # type: ignore[arg-type]

        def into(*args: Any) -> None:
            *values, out, workspace = args
            multiply.fill(values[0], values[2], workspace)
            total, real = multiply(values, None, workspace), multiply.values(workspace)
            factor = (
                factor_of(values[1], values[4], values[6])
                if constant_factor is None
                else constant_factor
            )
            np.multiply(total, factor, out=real, dtype=np.float32, casting="unsafe")
            store(real, zero_of(_per_row(values[7])), out, True)

        return Routine(into, layout.size)

    return specialized(node, types, make, widen=False)


# com.microsoft: products of integers with a float result


def _finish(
    total: np.ndarray, factor: Any, bias: np.ndarray | None, out: np.ndarray, real: np.ndarray
) -> None:
    """``total * factor + bias`` into ``out`` of any float type, by way of ``real``, float32."""
    values = out if out.dtype == FLOAT32 else real
    np.multiply(total, factor, out=values, dtype=np.float32, casting="unsafe")
    if bias is not None:
        np.add(values, bias, values)
    if values is not out:
        np.copyto(out, values, casting="unsafe")


@operator(
    "MatMulIntegerToFloat",
    domain=MICROSOFT,
    infer=_infer_product((0, 2, 4), (1, 3, 5), None, like=2, bias=6),
    work=product_work,
)
def matmul_integer_to_float(node: Node, types: Types) -> Kernel:
    product = _Product(node, types, (0, 4), (1, 5))

    def make(inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
        layout = ScratchLayout()
        multiply = _Multiply(product, *_operands(inputs, 0, 1), layout)

        def into(*args: Any) -> None:
            *values, out, workspace = args
            a, _, a_scale, b_scale, a_zero, _, bias = pad_with_none(values, 7)
            multiply.fill(a, a_zero, workspace)
            total = multiply(values, None, workspace)
            factor = _per_row(a_scale.astype(FLOAT32)) * _per_column(b_scale.astype(FLOAT32))
            _finish(total, factor, bias, out, multiply.values(workspace))

        return Routine(into, layout.size)

    return specialized(node, types, make, widen=False)


@operator(
    "DynamicQuantizeMatMul",
    domain=MICROSOFT,
    infer=_infer_product((0,), (1, 2, 3), FLOAT32, bias=4),
    work=product_work,
)
def dynamic_quantize_matmul(node: Node, types: Types) -> Kernel:
    product = _Product(node, types, (0, -1), (1, 3), dynamic=True)

    def make(inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
        layout = ScratchLayout()
        multiply = _Multiply(product, *_operands(inputs, 0, 1), layout)

        def into(*args: Any) -> None:
            *values, out, workspace = args
            a, _, b_scale, _, bias = pad_with_none(values, 5)
            scale = quantize_to_float(a, multiply.left(workspace))
            total = multiply(values, None, workspace)
            _finish(total, _per_column(b_scale) * scale, bias, out, multiply.values(workspace))

        return Routine(into, layout.size)

    return specialized(node, types, make)


# com.microsoft.QGemm


def _transposed(type_: TensorType, transpose: object) -> TensorType:
    if type_.shape is not None and len(type_.shape) != 2:
        raise ShapeError(f"QGemm multiplies matrices, not a tensor of shape {type_.shape}")
    return (
        type_
        if not transpose or type_.shape is None
        else TensorType(type_.dtype, type_.shape[::-1])
    )


def _infer_qgemm(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    a = _transposed(tensor(types, 0), attrs.get("transA"))
    b = _transposed(tensor(types, 3), attrs.get("transB"))
    shape = _product_shape(a.shape, b.shape)
    _check_parameters(
        [*pad_with_none(types, 9)[:3], b, *pad_with_none(types, 9)[4:]], (0, 1, 2), (3, 4, 5)
    )
    for i in (1, 2, 7, 8):
        parameter = tensor(types, i).shape
        if parameter is not None and any(dim not in (1, None) for dim in parameter):
            raise ShapeError(f"input {i} of QGemm must be a scalar, its shape is {parameter}")
    _check_parameter("C", tensor(types, 6).shape, shape)
    quantized = given(types, 8)
    return (TensorType(tensor(types, 8).dtype if quantized else FLOAT32, shape),)


@operator("QGemm", domain=MICROSOFT, infer=_infer_qgemm, work=product_work)
def qgemm(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    trans_a, trans_b = attrs.get("transA", 0), attrs.get("transB", 0)
    alpha = np.float32(attrs.get("alpha", 1.0))
    # The bias is added to integers: the sum may be beyond what float32 holds.
    has_c = pad_with_none(node.inputs, 7)[6] is not None
    product = _Product(node, types, (0, 2), (3, 5), transpose_b=bool(trans_b), integer=has_c)

    def make(inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
        layout = ScratchLayout()
        a_type, b_type = _operands(inputs, 0, 3)
        multiply = _Multiply(product, _transposed(a_type, trans_a), b_type, layout)

        def into(*args: Any) -> None:
            *values, out, workspace = args
            a, a_scale, a_zero, _, b_scale, _, c, y_scale, y_zero = pad_with_none(values, 9)
            multiply.fill(a.T if trans_a else a, a_zero, workspace)
            total, real = multiply(values, None, workspace), multiply.values(workspace)
            if c is not None:
                np.add(total, c, total)
            factor = alpha * a_scale.reshape(()) * _per_column(b_scale)
            if y_scale is None:
                _finish(total, factor, None, out, real)
                return
            factor = factor / y_scale.reshape(())
            np.multiply(total, factor, out=real, dtype=np.float32, casting="unsafe")
            store(real, None if y_zero is None else zero_of(y_zero.reshape(())), out, True)

        return Routine(into, layout.size)

    return specialized(node, types, make)
