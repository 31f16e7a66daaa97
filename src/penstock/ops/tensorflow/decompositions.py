"""Decompositions, inverses and determinants of matrices, in batches, by LAPACK."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

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
