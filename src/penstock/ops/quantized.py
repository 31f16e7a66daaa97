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
from typing import Any, NamedTuple

import numpy as np

from penstock.ir import Node
from penstock.ops.base import Attrs, Consts, Infer, Kernel, Types, operator
from penstock.ops.infer import broadcast_shapes, tensor
from penstock.ops.quantization import (
    INT8,
    UINT8,
    both_forms,
    bounds,
    filled,
    load,
    quantize_to_float,
    scalar,
    store,
    zero_of,
)
from penstock.ops.scratch import Counted, Scratch
from penstock.types import FLOAT32, Dim, Shape, ShapeError, TensorType, Type

INT32 = np.dtype(np.int32)
EXACT = 1 << 24  # float32 holds every integer up to this


# Shapes


def product_shape(a: Shape | None, b: Shape | None) -> Shape | None:
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


def _concrete(a: np.ndarray, b: np.ndarray) -> tuple[int, ...]:
    if a.ndim > 1 and b.ndim == 2 and a.shape[-1] == b.shape[0]:
        return (*a.shape[:-1], b.shape[1])
    return product_shape(a.shape, b.shape)  # type: ignore[return-value]


# Exact products


def reach(dtype: np.dtype, zero: np.ndarray | None, known: bool) -> int:
    """The largest ``|x - zero|`` there can be; 0 for floats, whose sums are not exact anyway."""
    if dtype not in (INT8, UINT8):
        return 0
    low, high = bounds(dtype)
    if not known:
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


class Room(NamedTuple):
    """The scratch of one product, all float32 but for ``total``."""

    left: np.ndarray  # a - a_zero
    right: np.ndarray | None  # b - b_zero, where b is no constant
    product: np.ndarray
    total: np.ndarray | None  # int32, where there are several pieces or ``integer`` asks for it


class Product:
    """``(a - a_zero) @ (b - b_zero)`` of what a node's inputs ``a`` and ``b`` are.

    Constant right sides are converted once, when the node is compiled.
    """

    def __init__(
        self,
        node: Node,
        types: Types,
        a: tuple[int, int],  # where the inputs of a node have a and its zero point
        b: tuple[int, int],
        transpose_b: bool = False,
        a_dtype: np.dtype | None = None,
        integer: bool = False,
    ) -> None:
        consts = [None if v is None else v.const for v in node.inputs]
        given = [v is not None for v in node.inputs]

        def constant(i: int) -> tuple[bool, np.ndarray | None]:
            """Whether input i is known, and what it is."""
            if i < 0 or i >= len(given) or not given[i]:
                return True, None
            return consts[i] is not None, consts[i]

        self.transpose_b = transpose_b
        self.integer = integer
        self.right: np.ndarray | None = None
        a_type, b_type = a_dtype or tensor(types, a[0]).dtype, tensor(types, b[0]).dtype
        known, a_zero = (False, None) if a_dtype is not None else constant(a[1])
        self.a_reach = reach(a_type or UINT8, a_zero, known)
        known, b_zero = constant(b[1])
        self.b_reach = reach(b_type or UINT8, b_zero, known)
        weights = consts[b[0]]
        if weights is not None and weights.ndim > 1 and known:
            self.right = self._right(weights, b_zero, np.empty(weights.shape, FLOAT32))
            self.right = np.ascontiguousarray(self.right)
        self.length = -1 if self.right is None else self.right.shape[-2]
        self.fixed = [] if self.right is None else self._pieces(self.length, self.right)

    def _pieces(self, length: int, right: np.ndarray | None = None) -> list[slice]:
        if length == self.length and right is None:
            return self.fixed
        return pieces(length, self.a_reach, self.b_reach, right)

    def _right(self, b: np.ndarray, zero: np.ndarray | None, out: np.ndarray) -> np.ndarray:
        if self.transpose_b:
            b, out = b.swapaxes(-1, -2), out.swapaxes(-1, -2)
        load(b, None if zero is None else zero_of(per_column(zero)), out)
        return out

    def room(self, a: tuple[int, ...], b: tuple[int, ...], scratch: Scratch) -> Room:
        """Scratch for operands of these shapes; that of b as it is given, untransposed."""
        right = None if self.right is not None else scratch.take(b, FLOAT32)
        if self.transpose_b:
            b = (*b[:-2], b[-1], b[-2])
        shape: Any = product_shape(a, b)
        total = self.integer or len(self._pieces(a[-1])) > 1
        return Room(
            scratch.take(a, FLOAT32),
            right,
            scratch.take(shape, FLOAT32),
            scratch.take(shape, INT32) if total else None,
        )

    def __call__(
        self, room: Room, b: np.ndarray, b_zero: np.ndarray | None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """The product of ``room.left``, which is filled already, with ``b - b_zero``.

        The result is int32 in ``out``, if given, else int32 or float32 in one of the room's arrays.
        """
        left, right, product = room.left, self.right, room.product
        if right is None:
            assert room.right is not None
            right = self._right(b, b_zero, room.right)
        if right.ndim == 2 and left.ndim > 2:
            # One product of matrices instead of one for each batch.
            left = left.reshape(-1, left.shape[-1])
            product = product.reshape(left.shape[0], right.shape[1])
        # Floats of 8 bits are of no exactness to be kept.
        spans = self._pieces(left.shape[-1]) if b.dtype.kind in "iu" else [slice(None)]
        if len(spans) == 1:
            np.matmul(left, right, product)
            if out is None:
                return room.product
            np.copyto(out, room.product, casting="unsafe")
            return out
        total = room.total if out is None else out
        assert total is not None
        for span in spans:
            np.matmul(
                left[..., span], right[..., span, :] if right.ndim > 1 else right[span], product
            )
            if span.start == 0:
                np.copyto(total, room.product, casting="unsafe")
            else:
                np.add(total, room.product, out=total, dtype=np.int32, casting="unsafe")
        return total

    def workspace(self, a: TensorType, b: TensorType) -> int:
        """Bytes of scratch, 0 where the shapes are not known."""
        if not a.static or not b.static:
            return 0
        count = Counted()
        self.room(a.dims, b.dims, count)
        return count.nbytes


def per_row(parameter: np.ndarray) -> np.ndarray:
    """A scale or zero point of the left side: one, one a row, or ready to broadcast."""
    if parameter.size == 1:
        return parameter.reshape(())
    return parameter[:, None] if parameter.ndim == 1 else parameter


def per_column(parameter: np.ndarray) -> np.ndarray:
    """A scale or zero point of the right side: one, one a column, or ready to broadcast."""
    return parameter.reshape(()) if parameter.size == 1 else parameter


def fill_left(a: np.ndarray, zero: np.ndarray | None, room: Room) -> None:
    load(a, None if zero is None else zero_of(per_row(zero)), room.left)


def _check_fits(shape: tuple[int, ...], **parameters: np.ndarray | None) -> None:
    for name, parameter in parameters.items():
        if parameter is not None and parameter.size != 1:
            try:
                fits = np.broadcast_shapes(shape, parameter.shape) == shape
            except ValueError:
                fits = False
            if not fits:
                raise ShapeError(f"{name} of shape {parameter.shape} does not fit {shape}")


# MatMulInteger, QLinearMatMul


def _infer_product(a: int, b: int, dtype: np.dtype | None, like: int = -1) -> Infer:
    """The product of inputs a and b, of a given dtype or that of input ``like``."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        shape = product_shape(tensor(types, a).shape, tensor(types, b).shape)
        return (TensorType(dtype or tensor(types, like).dtype, shape),)

    return infer


@operator("MatMulInteger", since=10, infer=_infer_product(0, 1, INT32))
def matmul_integer(node: Node, types: Types) -> Kernel:
    multiply = Product(node, types, (0, 2), (1, 3))

    def run(
        a: np.ndarray,
        b: np.ndarray,
        a_zero: np.ndarray | None,
        b_zero: np.ndarray | None,
        out: np.ndarray | None = None,
        workspace: np.ndarray | None = None,
    ) -> np.ndarray:
        shape = _concrete(a, b)
        _check_zeros(a, a_zero, b, b_zero)
        room = multiply.room(a.shape, b.shape, Scratch(workspace))
        fill_left(a, a_zero, room)
        return multiply(room, b, b_zero, np.empty(shape, np.int32) if out is None else out)

    workspace = multiply.workspace(tensor(types, 0), tensor(types, 1))
    return both_forms(filled(run, node, 4), workspace=workspace)


def _check_zeros(
    a: np.ndarray, a_zero: np.ndarray | None, b: np.ndarray, b_zero: np.ndarray | None
) -> None:
    if a_zero is not None and a_zero.size != 1:
        _check_fits(a.shape, a_zero_point=per_row(a_zero))
    if b_zero is not None and b_zero.size != 1:
        _check_fits(b.shape, b_zero_point=b_zero)


@operator("QLinearMatMul", since=10, infer=_infer_product(0, 3, None, like=7))
def qlinear_matmul(node: Node, types: Types) -> Kernel:
    multiply = Product(node, types, (0, 2), (3, 5))

    def run(
        a: np.ndarray,
        a_scale: np.ndarray,
        a_zero: np.ndarray,
        b: np.ndarray,
        b_scale: np.ndarray,
        b_zero: np.ndarray,
        y_scale: np.ndarray,
        y_zero: np.ndarray,
        out: np.ndarray | None = None,
        workspace: np.ndarray | None = None,
    ) -> np.ndarray:
        shape = _concrete(a, b)
        _check_zeros(a, a_zero, b, b_zero)
        if out is None:
            out = np.empty(shape, y_zero.dtype)
        room = multiply.room(a.shape, b.shape, Scratch(workspace))
        fill_left(a, a_zero, room)
        total = multiply(room, b, b_zero)
        factor = (per_row(a_scale) * per_column(b_scale) / per_row(y_scale)).astype(FLOAT32)
        _check_fits(shape, scale=factor)
        np.multiply(total, factor, out=room.product, dtype=np.float32, casting="unsafe")
        store(room.product, zero_of(per_row(y_zero)), out, True)
        return out

    return both_forms(run, workspace=multiply.workspace(tensor(types, 0), tensor(types, 3)))


# com.microsoft: products of integers with a float result


def _finish(
    total: np.ndarray, factor: Any, bias: np.ndarray | None, out: np.ndarray, room: Room
) -> np.ndarray:
    """``total * factor + bias``, into ``out`` of any float type."""
    _check_fits(out.shape, scale=factor, bias=bias)
    values = out if out.dtype == FLOAT32 else room.product
    np.multiply(total, factor, out=values, dtype=np.float32, casting="unsafe")
    if bias is not None:
        np.add(values, bias, values)
    if values is not out:
        np.copyto(out, values, casting="unsafe")
    return out


@operator("MatMulIntegerToFloat", domain="com.microsoft", infer=_infer_product(0, 1, None, like=2))
def matmul_integer_to_float(node: Node, types: Types) -> Kernel:
    multiply = Product(node, types, (0, 4), (1, 5))

    def run(
        a: np.ndarray,
        b: np.ndarray,
        a_scale: np.ndarray,
        b_scale: np.ndarray,
        a_zero: np.ndarray | None,
        b_zero: np.ndarray | None,
        bias: np.ndarray | None,
        out: np.ndarray | None = None,
        workspace: np.ndarray | None = None,
    ) -> np.ndarray:
        if out is None:
            out = np.empty(_concrete(a, b), a_scale.dtype)
        _check_zeros(a, a_zero, b, b_zero)
        room = multiply.room(a.shape, b.shape, Scratch(workspace))
        fill_left(a, a_zero, room)
        factor = per_row(a_scale.astype(FLOAT32)) * per_column(b_scale.astype(FLOAT32))
        return _finish(multiply(room, b, b_zero), factor, bias, out, room)

    workspace = multiply.workspace(tensor(types, 0), tensor(types, 1))
    return both_forms(filled(run, node, 7), workspace=workspace)


@operator("DynamicQuantizeMatMul", domain="com.microsoft", infer=_infer_product(0, 1, FLOAT32))
def dynamic_quantize_matmul(node: Node, types: Types) -> Kernel:
    multiply = Product(node, types, (0, -1), (1, 3), a_dtype=UINT8)

    def run(
        a: np.ndarray,
        b: np.ndarray,
        b_scale: np.ndarray,
        b_zero: np.ndarray | None,
        bias: np.ndarray | None,
        out: np.ndarray | None = None,
        workspace: np.ndarray | None = None,
    ) -> np.ndarray:
        if out is None:
            out = np.empty(_concrete(a, b), np.float32)
        _check_zeros(a, None, b, b_zero)
        room = multiply.room(a.shape, b.shape, Scratch(workspace))
        scale = quantize_to_float(a, room.left)
        total = multiply(room, b, b_zero)
        return _finish(total, per_column(b_scale) * scale, bias, out, room)

    workspace = multiply.workspace(tensor(types, 0), tensor(types, 1))
    return both_forms(filled(run, node, 5), workspace=workspace)


# com.microsoft.QGemm


def _infer_qgemm(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    a, b = tensor(types, 0).shape, tensor(types, 3).shape
    for name, shape in (("A", a), ("B", b)):
        if shape is not None and len(shape) != 2:
            raise ShapeError(f"{name} of QGemm must be a matrix, its shape is {shape}")
    if a is not None and attrs.get("transA"):
        a = a[::-1]
    if b is not None and attrs.get("transB"):
        b = b[::-1]
    shape = product_shape(a, b)
    quantized = len(types) > 8 and types[8] is not None
    return (TensorType(tensor(types, 8).dtype if quantized else FLOAT32, shape),)


@operator("QGemm", domain="com.microsoft", infer=_infer_qgemm)
def qgemm(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    trans_a, trans_b = bool(attrs.get("transA", 0)), bool(attrs.get("transB", 0))
    # The bias is added to integers: the sum may be beyond what float32 holds.
    has_c = len(node.inputs) > 6 and node.inputs[6] is not None
    alpha = np.float32(attrs.get("alpha", 1.0))
    multiply = Product(node, types, (0, 2), (3, 5), transpose_b=trans_b, integer=has_c)

    def run(
        a: np.ndarray,
        a_scale: np.ndarray,
        a_zero: np.ndarray | None,
        b: np.ndarray,
        b_scale: np.ndarray,
        b_zero: np.ndarray | None,
        c: np.ndarray | None,
        y_scale: np.ndarray | None,
        y_zero: np.ndarray | None,
        out: np.ndarray | None = None,
        workspace: np.ndarray | None = None,
    ) -> np.ndarray:
        if a.ndim != 2 or b.ndim != 2:
            raise ShapeError(f"QGemm multiplies matrices, not {a.shape} and {b.shape}")
        a = a.T if trans_a else a
        shape = _concrete(a, b.T if trans_b else b)
        if out is None:
            out = np.empty(shape, np.float32 if y_zero is None else y_zero.dtype)
        _check_zeros(a, scalar(a_zero, "a_zero_point"), b.T if trans_b else b, b_zero)
        _check_fits(shape, C=c, b_scale=b_scale)
        room = multiply.room(a.shape, b.shape, Scratch(workspace))
        fill_left(a, a_zero, room)
        total = multiply(room, b, b_zero, room.total)
        if c is not None:
            np.add(total, c, total)
        factor = alpha * scalar(a_scale, "a_scale") * per_column(b_scale)  # type: ignore[operator]
        if y_scale is None:
            return _finish(total, factor, None, out, room)
        factor = factor / scalar(y_scale, "y_scale")
        np.multiply(total, factor, out=room.product, dtype=np.float32, casting="unsafe")
        store(room.product, zero_of(scalar(y_zero, "y_zero_point")), out, True)
        return out

    a_type = tensor(types, 0)
    if a_type.static and trans_a:
        a_type = TensorType(a_type.dtype, a_type.dims[::-1])
    workspace = multiply.workspace(a_type, tensor(types, 3))
    return both_forms(filled(run, node, 9), workspace=workspace)
