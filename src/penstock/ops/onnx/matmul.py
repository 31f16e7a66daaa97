"""Matrix products: MatMul, Gemm; and determinants."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from penstock.core.types import Dim, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, LayoutHints
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import is_half
from penstock.ops.common.products import is_long, product_in_parts, product_work
from penstock.ops.common.specialize import Routine, Tensors, by_shape, static_type
from penstock.ops.registry import ArrayFunction, operator


def matmul_shape(a: Shape | None, b: Shape | None) -> Shape | None:
    """The shape of ``np.matmul``: vectors are rows on the left and columns on the right."""
    for shape in (a, b):
        if shape is not None and not shape:
            raise ShapeError("MatMul does not accept scalars: both inputs must have rank 1 or more")
    if a is None or b is None:
        return None
    # A right operand of rank 1 is a column.
    rules.same_dim(a[-1], b[-2:][0], "the inner dims of the matrix product")
    batch = rules.broadcast_shapes([a[:-2], b[:-2]])
    assert batch is not None
    return (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def _product_into(a: tuple[int, ...], b: tuple[int, ...], dtype: np.dtype) -> ArrayFunction:
    """The fastest ``function(a, b, out)`` for operands of these dims and a contiguous ``out``.
    ``np.dot`` has half the overhead of ``np.matmul``, which takes batches. Of fed integers it would
    refuse those that C names otherwise, ``np.longlong`` for ``np.int64``."""
    work = 2 * prod(rules.all_known(matmul_shape(a, b)) or ()) * a[-1]
    if min(len(a), len(b)) > 1 and is_long(work, dtype):
        return product_in_parts
    if dtype.kind in "iu":
        return np.matmul
    if len(a) == len(b) == 2:
        return np.dot
    if len(a) < max(len(b), 3) or prod(b[:-2]) != 1 or len(b) < 2 or 0 in a + b:
        return np.matmul
    # One product of a tall matrix instead of one for each matrix of the batch.
    rows, matrix, columns = (-1, a[-1]), b[-2:], b[-1]

    def tall(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        if a.flags.c_contiguous:
            np.dot(a.reshape(rows), b.reshape(matrix), out.reshape(-1, columns))
        else:
            np.matmul(a, b, out)

    return tall


def _infer_matmul(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype = rules.same_dtype(types, range(2))
    a, b = rules.tensor(types, 0).shape, rules.tensor(types, 1).shape
    return (TensorType(dtype, matmul_shape(a, b)),)


@operator("MatMul", infer=_infer_matmul, work=product_work, traits={"heavy", "total once static"})
def matmul(node: Node, types: Types) -> Kernel:
    kernel = _matmul_by_shape(node, types)
    a, b = (rules.tensor(types, i).dtype for i in range(2))
    if a is None or is_half(a) or a != b:
        return kernel
    return Kernel(_matmul, kernel.into, layout=LayoutHints(contiguous=True))


def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if min(a.ndim, b.ndim) > 1 and is_long(2 * a.size * b.shape[-1], a.dtype):
        dims = matmul_shape(a.shape, b.shape)
        out = np.empty(rules.all_known(dims) or (), a.dtype)
        product_in_parts(a, b, out)
        return out
    return np.matmul(a, b)


@by_shape(contiguous=True)
def _matmul_by_shape(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    a, b = (rules.tensor(inputs, i).dims for i in range(2))
    return Routine(_product_into(a, b, static_type(outputs, 0)[1]))


def _infer_gemm(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    def matrix(index: int, transposed: int) -> tuple[Dim, Dim]:
        shape = rules.tensor(types, index).shape
        if shape is not None and len(shape) != 2:
            raise ShapeError(f"input {index} of Gemm must have rank 2, but has shape {shape}")
        rows, columns = shape or (None, None)
        return (columns, rows) if transposed else (rows, columns)

    rows, inner = matrix(0, attrs.get("transA", 0))
    other, columns = matrix(1, attrs.get("transB", 0))
    rules.same_dim(inner, other, "the inner dims of the matrix product")
    rules.check_broadcasts("C", rules.tensor(types, 2).shape, (rows, columns))
    return (TensorType(rules.same_dtype(types, range(3)), (rows, columns)),)


def _repeated(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """A product with one column broadcast with stride 0, as ConstantOfShape produces. BLAS would
    need a copy, and round differently at the edges of its tiles."""
    out[...] = np.dot(a, b[:, :1])


@operator("Gemm", infer=_infer_gemm, work=product_work, traits={"heavy", "total once static"})
@by_shape(contiguous=True)
def gemm(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    attrs = node.attrs
    trans_a, trans_b = attrs.get("transA", 0), attrs.get("transB", 0)
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    (_, columns), dtype = static_type(outputs, 0)
    has_c = rules.given(inputs, 2) and beta != 0
    scale, scale_c = alpha, beta
    integral = dtype.kind in "iu"
    # NumPy does not cast the product of integers and a float back to integers.
    if integral and alpha == int(alpha) and beta == int(beta):
        scale, scale_c, integral = int(alpha), int(beta), False
    weights = consts[1]
    repeated = weights is not None and weights.strides[0 if trans_b else 1] == 0
    multiply = _repeated if repeated and columns > 1 else np.dot
    inner = rules.tensor(inputs, 0).dims[0 if trans_a else 1]
    if is_long(2 * prod(rules.tensor(outputs, 0).dims) * inner, dtype):
        multiply = product_in_parts
    scaled: np.ndarray | None = None
    prepared: tuple[int, ...] = ()
    if has_c and beta != 1 and consts[2] is not None and not integral:
        scaled, prepared = np.multiply(consts[2], scale_c).astype(dtype), (2,)

    def into(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, out: np.ndarray) -> None:
        multiply(a.T if trans_a else a, b.T if trans_b else b, out)
        if scale != 1:
            np.multiply(out, scale, out)
        if scaled is not None:
            np.add(out, scaled, out)
        elif c is not None and has_c:
            np.add(out, c if scale_c == 1 else c * scale_c, out)

    def rounded(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, out: np.ndarray) -> None:
        """A product of integers with non-integer alpha or beta."""
        multiply(a.T if trans_a else a, b.T if trans_b else b, out)
        result = out * np.float64(scale)
        if c is not None and has_c:
            result = result + c * np.float64(scale_c)
        np.copyto(out, result, casting="unsafe")

    run = rounded if integral else into
    if len(inputs) < 3:
        return Routine(lambda a, b, out: run(a, b, None, out))
    return Routine(run, prepared=prepared)


def _infer_det(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    if x.shape is None:
        return (TensorType(x.dtype, None),)
    if len(x.shape) < 2:
        raise ShapeError(f"Det requires square matrices [..., N, N], not shape {x.shape}")
    rows, columns = x.shape[-2:]
    rules.same_dim(rows, columns, "the last two dims, which must be those of square matrices,")
    return (TensorType(x.dtype, x.shape[:-2]),)


@operator("Det", since=11, infer=_infer_det)
@by_shape()
def det(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    return Routine(lambda x, out: np.copyto(out, np.linalg.det(x)))
