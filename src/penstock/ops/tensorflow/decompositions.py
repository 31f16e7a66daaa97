"""Decompositions, inverses, determinants, roots and logarithms of matrices, in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.common import array_operator


def _matrices(x: np.ndarray, *, square: bool = True) -> np.ndarray:
    if x.ndim < 2 or (square and x.shape[-1] != x.shape[-2]):
        raise ShapeError(f"matrices{', square ones,' if square else ''} are needed, not {x.shape}")
    return x


def _solved(function: Callable[..., common.Outputs], *arguments: np.ndarray) -> common.Outputs:
    """Raise ``ShapeError`` if there is no result."""
    try:
        return function(*arguments)
    except np.linalg.LinAlgError as error:
        raise ShapeError(f"no result for the matrices: {error}") from error


def _adjoint(x: np.ndarray) -> np.ndarray:
    return x.conj().swapaxes(-1, -2)


@array_operator("Cholesky", infer=rules.same_type)
def cholesky(x: np.ndarray) -> common.Outputs:
    """The lower triangle is read, as it is of SelfAdjointEigV2."""
    return _solved(np.linalg.cholesky, _matrices(x))


@array_operator("MatrixInverse", infer=rules.same_type)
def inverse(x: np.ndarray, *, adjoint: bool = False) -> common.Outputs:
    return _solved(np.linalg.inv, _adjoint(_matrices(x)) if adjoint else _matrices(x))


def _infer_determinant(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    return (TensorType(x.dtype, None if x.shape is None else x.shape[:-2]),)


@array_operator("MatrixDeterminant", infer=_infer_determinant)
def determinant(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.det(_matrices(x)))


@array_operator("LogMatrixDeterminant", infer=lambda *given: [*_infer_determinant(*given)] * 2)
def log_determinant(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """The sign, and the logarithm of the absolute value."""
    sign, logarithm = np.linalg.slogdet(_matrices(x))
    return np.asarray(sign), np.asarray(logarithm, x.dtype)


def _infer_solution(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, y = rules.tensor(types, 0).shape, rules.tensor(types, 1)
    if x is None or y.shape is None or len(x) < 2 or len(y.shape) < 2:
        return (TensorType(y.dtype),)
    batch = rules.broadcast_shapes([x[:-2], y.shape[:-2]])
    return (TensorType(y.dtype, None if batch is None else (*batch, *y.shape[-2:])),)


@array_operator("MatrixSolve", infer=_infer_solution)
def solve(x: np.ndarray, y: np.ndarray, *, adjoint: bool = False) -> common.Outputs:
    _check_sides(x, y)
    return _solved(np.linalg.solve, _adjoint(x) if adjoint else x, y)


@array_operator("MatrixTriangularSolve", infer=_infer_solution)
def triangular_solve(
    x: np.ndarray, y: np.ndarray, *, lower: bool = True, adjoint: bool = False
) -> common.Outputs:
    """Of ``x``, only the lower or the upper triangle is read."""
    _check_sides(x, y)
    # What is beyond the triangle may be anything, such as the other factor of an LU.
    triangle = np.tril(x) if lower else np.triu(x)
    return _solved(np.linalg.solve, _adjoint(triangle) if adjoint else triangle, y)


def _check_sides(x: np.ndarray, y: np.ndarray) -> None:
    if _matrices(x).shape[-1] != _matrices(y, square=False).shape[-2]:
        raise ShapeError(f"right-hand sides {y.shape} do not fit matrices {x.shape}")


def _infer_parts(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return [TensorType(rules.tensor(types, 0).dtype)] * 3


@array_operator("SelfAdjointEigV2", infer=lambda *given: _infer_parts(*given)[:2])
def self_adjoint_eigenvalues(x: np.ndarray, *, compute_v: bool = True) -> tuple[np.ndarray, ...]:
    """Ascending eigenvalues and, as columns, vectors of the matrices."""
    if not compute_v:
        values = _solved(np.linalg.eigvalsh, _matrices(x))
        return np.asarray(values, x.dtype), np.empty(0, x.dtype)
    values, vectors = _solved(np.linalg.eigh, _matrices(x))
    return values.astype(x.dtype, copy=False), vectors


@array_operator("Qr", infer=lambda *given: _infer_parts(*given)[:2])
def qr(x: np.ndarray, *, full_matrices: bool = False) -> tuple[np.ndarray, ...]:
    q, r = np.linalg.qr(_matrices(x, square=False), "complete" if full_matrices else "reduced")
    return q, r


def _infer_singular(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    sides = rules.all_known(x.shape[-2:]) if x.shape is not None else None
    shape = (*x.shape[:-2], min(sides)) if x.shape and sides else None
    return TensorType(x.dtype, shape), TensorType(x.dtype), TensorType(x.dtype)


@array_operator("Svd", infer=_infer_singular)
def svd(
    x: np.ndarray, *, compute_uv: bool = True, full_matrices: bool = False
) -> tuple[np.ndarray, ...]:
    """Descending singular values, and the left and right vectors as columns."""
    _matrices(x, square=False)
    if not compute_uv:
        values = _solved(lambda x: np.linalg.svd(x, compute_uv=False), x)
        return np.asarray(values, x.dtype), np.empty(0, x.dtype), np.empty(0, x.dtype)
    u, s, v = _solved(lambda x: np.linalg.svd(x, full_matrices), x)
    # NumPy gives the adjoint of the right vectors.
    return s.astype(x.dtype, copy=False), u, _adjoint(v)


def _infer_lu(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    rows = None if x.shape is None else x.shape[:-1]
    index = common.named_dtype(attrs, "output_idx_type", "int32", "iu")
    return TensorType(x.dtype, x.shape), TensorType(index, rows)


@array_operator(
    "Lu",
    infer=_infer_lu,
    prepared={"dtype": lambda n: common.named_dtype(n.attrs, "output_idx_type", "int32", "iu")},
)
def lu(x: np.ndarray, *, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """Both triangles in one matrix, without the diagonal of ones of the lower one, and the row of
    the input that each row comes from. The pivot is the greatest element by its absolute value."""
    side = _matrices(x).shape[-1]
    out = x.reshape(-1, side, side).copy()
    order = np.broadcast_to(np.arange(side, dtype=dtype), out.shape[:2]).copy()
    each = np.arange(len(out))
    for i in with_checkpoints(range(side)):
        pivot = i + np.abs(out[:, i:, i]).argmax(1)
        for rows in (out, order):
            rows[each, pivot], rows[:, i] = rows[:, i].copy(), rows[each, pivot]
        if (out[:, i, i] == 0).any():
            raise ShapeError("the input is not invertible: a pivot of its LU decomposition is 0")
        out[:, i + 1 :, i] /= out[:, i, i, np.newaxis]
        out[:, i + 1 :, i + 1 :] -= out[:, i + 1 :, i, np.newaxis] * out[:, i, np.newaxis, i + 1 :]
    return out.reshape(x.shape), order.reshape(x.shape[:-1])


# Tridiagonal matrices.


@array_operator("TridiagonalSolve", infer=lambda t, a, c: rules.same_type(t[1:], a, c))
def tridiagonal_solve(
    diagonals: np.ndarray, y: np.ndarray, *, partial_pivoting: bool, perturb_singular: bool
) -> np.ndarray:
    """Of ``diagonals`` [..., 3, size], the rows are the diagonal above the main one, whose last
    element is not read, the main one, and that below it, whose first is not read. A singular
    matrix has NaN as the result."""
    if perturb_singular:
        raise ShapeError("perturb_singular is not available; TensorFlow has it on GPUs only")
    wanted = (*y.shape[:-2], 3, *y.shape[-2:-1])
    if y.ndim < 2 or diagonals.shape != wanted:
        raise ShapeError(f"diagonals {diagonals.shape} [..., 3, size] do not fit {y.shape}")
    size, width = y.shape[-2:]
    bands = diagonals.reshape(-1, 3, size)
    # A row of what is left, after elimination: two or, after a swap, three elements and the result.
    rows = np.zeros((len(bands), size + 2, 3 + width), y.dtype)
    rows[:, :size, 0], rows[:, : size - 1, 1] = bands[:, 1], bands[:, 0, : size - 1]
    rows[:, :size, 3:] = y.reshape(-1, size, width)
    solution = np.zeros((len(bands), size + 2, width), y.dtype)
    singular = np.zeros(len(bands), bool)
    for i in with_checkpoints(range(size)):
        here, following = rows[:, i], rows[:, i + 1]
        below = bands[:, 2, i + 1] if i + 1 < size else np.zeros(len(bands), y.dtype)
        # The next row, from the column of the pivot on.
        after = np.concatenate([below[:, np.newaxis], following[:, :2], following[:, 3:]], 1)
        if partial_pivoting:
            swapped = (np.abs(below) > np.abs(here[:, 0]))[:, np.newaxis]
            here[...], after = np.where(swapped, after, here), np.where(swapped, here, after)
        singular |= here[:, 0] == 0
        factor = after[:, :1] / np.where(here[:, :1] == 0, 1, here[:, :1])
        after = after - factor * here
        following[:, :2], following[:, 3:] = after[:, 1:3], after[:, 3:]
    for i in with_checkpoints(range(size - 1, -1, -1)):
        known = rows[:, i, 1:3, np.newaxis] * solution[:, i + 1 : i + 3]
        pivot = np.where(singular, 1, rows[:, i, 0])[:, np.newaxis]
        solution[:, i] = (rows[:, i, 3:] - known.sum(1)) / pivot
    solution[singular] = np.nan
    return solution[:, :size].reshape(y.shape)


@array_operator("TridiagonalMatMul", infer=lambda t, a, c: rules.same_type(t[3:], a, c))
def tridiagonal_multiply(
    above: np.ndarray, main: np.ndarray, below: np.ndarray, y: np.ndarray
) -> np.ndarray:
    """The product of matrices of these diagonals [..., 1, size], as in TridiagonalSolve."""
    wanted = (*y.shape[:-2], 1, *y.shape[-2:-1])
    if y.ndim < 2 or any(x.shape != wanted for x in (above, main, below)):
        raise ShapeError(f"three diagonals must have shape {wanted}, to fit {y.shape}")
    above, main, below = (x.swapaxes(-1, -2) for x in (above, main, below))
    out = main * y
    out[..., :-1, :] += above[..., :-1, :] * y[..., 1:, :]
    out[..., 1:, :] += below[..., 1:, :] * y[..., :-1, :]
    return out


# Functions of matrices.

_ROOT_STEPS = 60
_DEPENDENT = 1e5  # the condition of eigenvectors from which results have few digits left


def _square_root(x: np.ndarray) -> np.ndarray:
    """The principal root of complex128 or float64 matrices, by the iteration of Denman and Beavers
    in the form of products, whose error falls quadratically. NaN where it does not converge."""
    one = np.eye(x.shape[-1])
    product, root = x, x
    with np.errstate(all="ignore"):
        for _ in with_checkpoints(range(_ROOT_STEPS)):
            inverse = np.linalg.inv(product)
            root = root @ (one + inverse) / 2
            product = (one + (product + inverse) / 2) / 2
            error = np.abs(product - one).max(initial=0)
            if not error > 1e-15 * max(1, x.shape[-1]):
                break
        wrong = np.abs(root @ root - x).max((-1, -2), initial=0)
        size = np.abs(root).max((-1, -2), initial=0) ** 2 * x.shape[-1]
    return np.where((wrong <= 1e-9 * size)[..., np.newaxis, np.newaxis], root, np.nan)


@array_operator("MatrixSquareRoot", infer=rules.same_type)
def matrix_square_root(x: np.ndarray) -> np.ndarray:
    """NaN for a matrix without a root of its type, and for a singular one, as in TensorFlow."""
    return _of_each(np.sqrt, _square_root, x)


def _of_each(
    scalar: Callable[[np.ndarray], np.ndarray],
    function: Callable[[np.ndarray], np.ndarray],
    x: np.ndarray,
) -> np.ndarray:
    """The function of each matrix of the batch, in 64 bits: of its eigenvalues (``scalar``) if it
    is complex, so that they may be negative, and the vectors are far from dependent. A singular
    matrix has NaN as the result."""
    out = np.full(_matrices(x).shape, np.nan, x.dtype)
    for place in with_checkpoints(np.ndindex(x.shape[:-2])):
        matrix = x[place].astype(np.complex128 if x.dtype.kind == "c" else np.float64)
        with suppress(np.linalg.LinAlgError):
            if matrix.dtype.kind == "c" and matrix.size:
                values, vectors = np.linalg.eig(matrix)
                if values.all() and np.linalg.cond(vectors) < _DEPENDENT:
                    out[place] = vectors * scalar(values) @ np.linalg.inv(vectors)
                    continue
            out[place] = function(matrix)
    return out


def _logarithm(x: np.ndarray) -> np.ndarray:
    """Of roots near 1, by the integral of (x - 1) / (1 + t (x - 1)) over t from 0 to 1."""
    one, roots = np.eye(len(x)), 0
    while np.abs(x - one).sum(0).max(initial=0) > 0.25 and roots < _ROOT_STEPS:
        x, roots = _square_root(x), roots + 1
    nodes, weights = np.polynomial.legendre.leggauss(10)
    away = x - one
    total = np.zeros_like(x)
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        total += weight * np.linalg.solve(one + node * away, away)
    return total * 2.0**roots


@array_operator("MatrixLogarithm", infer=rules.same_type)
def matrix_logarithm(x: np.ndarray) -> np.ndarray:
    """The principal logarithm; NaN for a singular matrix."""
    return _of_each(np.log, _logarithm, x)
