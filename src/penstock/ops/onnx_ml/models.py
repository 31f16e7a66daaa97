"""Linear models and support vector machines (domain ai.onnx.ml), and transforms of their scores.

Where the specification is silent, results follow ONNX Runtime: for the scores of two classes when a
model computes only one, and for regressions with one target, to which only PROBIT is applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

import numpy as np

from penstock.core.records import dataclass
from penstock.core.types import FLOAT32, Dim, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Infer, Types
from penstock.ops.common.constant_cache import by_attributes
from penstock.ops.common.dtypes import FLOAT64
from penstock.ops.common.row_reduce import maxima
from penstock.ops.common.shape_rules import choice, tensor
from penstock.ops.onnx.text import strings
from penstock.ops.onnx_ml.features import one_of, operator
from penstock.ops.registry import ArrayFunction


def softmax_of_rows(scores: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
    # Subtract the maximum, whose exponential might overflow.
    powers = scores - maxima(np.ascontiguousarray(scores), places=places)
    np.exp(powers, powers)
    powers /= np.einsum("ij->i", powers)[:, None]  # on short rows faster than sum()
    return powers


def _logistic(scores: np.ndarray) -> np.ndarray:
    return np.reciprocal(1 + np.exp(-scores))


def _softmax_zero(scores: np.ndarray) -> np.ndarray:
    """Softmax over the nonzero scores; zeros stay 0."""
    powers = np.exp(scores - maxima(np.ascontiguousarray(scores)))
    # ONNX Runtime treats smaller scores as 0.
    powers = np.where(np.abs(scores) > 1e-7, powers, 0)
    total = powers.sum(1, keepdims=True)
    return powers / np.where(total == 0, 1, total)


def _probit(scores: np.ndarray) -> np.ndarray:
    """Winitzki's approximation of the inverse error function, accurate to about three digits. All
    runtimes of this domain use it, so that the exact function would deviate."""
    x = 2 * scores - 1
    log = np.log((1 - x) * (1 + x))
    a = 2 / (np.pi * 0.147) + log / 2
    return np.copysign(np.sqrt(np.sqrt(a * a - log / 0.147) - a), x) * np.sqrt(2)


TRANSFORMS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "NONE": lambda scores: scores,
    "SOFTMAX": softmax_of_rows,
    "LOGISTIC": _logistic,
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": _probit,
}
TRANSFORM_NAMES = tuple(TRANSFORMS)


def transform_of(attrs: Attrs) -> str:
    return choice(attrs, "post_transform", "NONE", TRANSFORMS)


def transformed(scores: np.ndarray, transform: str) -> np.ndarray:
    """Apply a transform to scores [N, E]; for E = 1, only PROBIT is applied."""
    if scores.shape[1] == 1 and transform != "PROBIT":
        return scores
    return TRANSFORMS[transform](scores)


def two_scores(score: np.ndarray, transform: str, complement: bool) -> np.ndarray:
    """The scores [N, 2] of two classes, given the score [N] of the second class.

    The score of the first class is 1 minus the score if ``complement`` (the scores are
    probabilities), else the negated score.
    """
    if transform == "LOGISTIC":
        return _logistic(np.stack([-score, score], 1))
    pair = np.stack([1 - score if complement else -score, score], 1)
    return _probit(pair) if transform == "PROBIT" else pair


@dataclass(frozen=True, slots=True, eq=False)
class Labelling:
    """The rule that maps the scores of a row to one of ``labels``.

    ``single``: the index of a score that decides alone, by whether it exceeds ``limit``; otherwise
    the first maximum decides. ``pair``: the scores of two classes are derived from the single one;
    ``positive``: it is a probability (``two_scores``).
    """

    labels: np.ndarray
    single: int | None = None
    limit: float = 0.0
    pair: bool = False
    positive: bool = False


def class_labels(attrs: Attrs, ints: str) -> np.ndarray:
    """The class labels of a classifier; ``ints`` is the name of the attribute with integer
    labels.
    """
    name, labels = one_of(attrs, ints, "classlabels_strings")
    return np.array(labels, np.int64) if name == ints else strings(labels, (len(labels),))


def infer_classifier(
    ints: str, width: Callable[[Attrs, int], Dim] = lambda attrs, labels: labels
) -> Infer:
    """``infer`` for labels [N] and scores [N, E]; ``width(attrs, number of labels)`` returns E."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        labels, rows = class_labels(attrs, ints), row_count(tensor(types, 0))
        scores = TensorType(FLOAT32, (rows, width(attrs, len(labels))))
        return TensorType(labels.dtype, (rows,)), scores

    return infer


def row_count(x: TensorType) -> Dim:
    """The number of rows of an input [N, F], or [F] (one row)."""
    if x.shape is None:
        return None
    if len(x.shape) not in (1, 2):
        raise ShapeError(f"the input must have shape [N, F] or [F], not {x.shape}")
    return x.shape[0] if len(x.shape) == 2 else 1


def matrix(x: np.ndarray, count: int | None = None) -> np.ndarray:
    """Convert an input to [N, F] in float32, unless it is float64."""
    if x.ndim not in (1, 2):
        raise ShapeError(f"the input must have shape [N, F] or [F], not {x.shape}")
    x = x.reshape(1, -1) if x.ndim == 1 else x
    if count is not None and x.shape[1] != count:
        raise ShapeError(f"the model expects {count} features, but the input has {x.shape[1]}")
    return x if x.dtype == FLOAT64 else x.astype(np.float32, copy=False)


def _rows(flat: Sequence[float] | None, count: int, what: str) -> np.ndarray:
    """Reshape a flat list of parameters to ``count`` rows."""
    array = np.array(flat or [], np.float32)
    if count < 1 or array.size % count or not array.size:
        raise ShapeError(
            f"{what} has {array.size} entries, which must be a positive multiple of {count} rows"
        )
    return array.reshape(count, -1)


def coefficients(attrs: Attrs, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients [F, E] and intercepts [E]."""
    weights = _rows(attrs.get("coefficients"), rows, "coefficients")
    bias = np.array(attrs.get("intercepts") or [0.0] * rows, np.float32)
    if len(bias) != rows:
        raise ShapeError(f"intercepts has {len(bias)} entries for {rows} rows of coefficients")
    return np.ascontiguousarray(weights.T), bias


def infer_regressor(targets: str) -> Infer:
    """``infer`` for scores [N, targets]; ``targets`` is the name of an attribute."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        return (TensorType(FLOAT32, (row_count(tensor(types, 0)), attrs.get(targets) or 1)),)

    return infer


LinearModel: TypeAlias = tuple[np.ndarray, np.ndarray, ArrayFunction]
"""coefficients [F, E], intercepts [E], and the function that maps scores to outputs"""


def linear_regression(attrs: Attrs) -> LinearModel:
    """The model of a LinearRegressor."""
    weights, bias = coefficients(attrs, attrs.get("targets", 1))
    transform = transform_of(attrs)
    return weights, bias, lambda x: transformed(x, transform).astype(np.float32, copy=False)


@operator("LinearRegressor", infer=infer_regressor("targets"))
@by_attributes
def linear_regressor(attrs: Attrs) -> ArrayFunction:
    weights, bias, finish = linear_regression(attrs)
    return lambda x: finish(matrix(x, len(weights)) @ weights + bias)


def linear_classification(attrs: Attrs) -> tuple[np.ndarray, np.ndarray, Labelling]:
    """Coefficients [F, E] and intercepts [E] of a LinearClassifier."""
    labels = class_labels(attrs, "classlabels_ints")
    rows = len(attrs.get("intercepts") or range(len(labels)))
    weights, bias = coefficients(attrs, rows)
    if rows == len(labels):
        return weights, bias, Labelling(labels)
    if rows != 1 or len(labels) != 2:
        raise ShapeError(f"{len(labels)} class labels do not match {rows} rows of coefficients")
    return weights, bias, Labelling(labels, 0, 0.0, True, True)


def linear_classes(attrs: Attrs) -> LinearModel:
    """The model of a LinearClassifier."""
    weights, bias, labelling = linear_classification(attrs)
    labels, transform = labelling.labels, transform_of(attrs)

    def finish(
        scores: np.ndarray, softmax: Callable[..., np.ndarray] = softmax_of_rows
    ) -> tuple[np.ndarray, np.ndarray]:
        if labelling.pair:
            score = scores[:, 0]
            places = (score > 0).astype(np.int64)
            scores = two_scores(score, transform, True)
        else:
            places = scores.argmax(1)
            known = transform == "SOFTMAX" and scores.shape[1] > 1
            scores = softmax(scores, places) if known else transformed(scores, transform)
        return labels[places], scores.astype(np.float32, copy=False)

    return weights, bias, finish


@operator("LinearClassifier", infer=infer_classifier("classlabels_ints"))
@by_attributes
def linear_classifier(attrs: Attrs) -> ArrayFunction:
    weights, bias, finish = linear_classes(attrs)
    return lambda x: finish(matrix(x, len(weights)) @ weights + bias)


@dataclass(frozen=True, slots=True, eq=False)
class VectorMachine:
    """Decision values [N, P]: the kernel of each row and each of ``vectors`` [S, F], times
    ``weights`` [P, S], plus ``offsets`` [P], all in float64. Without weights, P = S, and the
    decision values are the products with the vectors plus the offsets."""

    vectors: np.ndarray
    weights: np.ndarray | None
    offsets: np.ndarray
    kernel: str = "LINEAR"
    gamma: float = 0.0
    coef0: float = 0.0
    degree: int = 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        x, s = matrix(x, self.vectors.shape[1]).astype(np.float64, copy=False), self.vectors
        products = x @ s.T
        if self.weights is None:
            return products + self.offsets
        gamma, coef0 = self.gamma, self.coef0
        if self.kernel == "POLY":
            products = (gamma * products + coef0) ** self.degree
        elif self.kernel == "SIGMOID":
            products = np.tanh(gamma * products + coef0)
        elif self.kernel == "RBF":
            # Squared distances, without an array of all differences.
            squares = np.square(x).sum(1)[:, None] + np.square(s).sum(1)
            # Rounding may make a small squared distance negative.
            products = np.exp(-gamma * np.maximum(squares - 2 * products, 0))
        return products @ self.weights.T + self.offsets


def _machine(
    vectors: np.ndarray, weights: np.ndarray, rho: np.ndarray, kernel: tuple[str, float, float, int]
) -> VectorMachine:
    """Return the machine; for a linear kernel, weights and vectors are multiplied in advance."""
    if kernel[0] == "LINEAR":
        return VectorMachine(weights @ vectors, None, rho)
    return VectorMachine(vectors, weights, rho, *kernel)


KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")


def _kernel(attrs: Attrs) -> tuple[str, float, float, int]:
    """The kernel of a ``VectorMachine``: its name, gamma, coef0 and degree."""
    parameters = attrs.get("kernel_params") or (0.0, 0.0, 0.0)
    if len(parameters) != 3:
        raise ShapeError(f"kernel_params must be [gamma, coef0, degree], not {list(parameters)}")
    gamma, coef0, degree = [float(p) for p in parameters]
    if not math.isfinite(degree):
        raise ShapeError(f"the degree in kernel_params must be finite, not {degree}")
    return choice(attrs, "kernel_type", "LINEAR", KERNELS), gamma, coef0, int(degree)


def _first_rho(attrs: Attrs) -> float:
    rho = attrs.get("rho")
    if not rho:
        raise ShapeError("the attribute rho must not be empty")
    return float(rho[0])


def svm_regression(attrs: Attrs) -> VectorMachine:
    """The machine of an SVMRegressor."""
    kernel, rho = _kernel(attrs), np.array([_first_rho(attrs)])
    supports = attrs.get("n_supports", 0)
    coefficients = np.array(attrs.get("coefficients") or [], np.float64)
    if supports <= 0:
        return _machine(coefficients[None], np.ones((1, 1)), rho, kernel)
    vectors = _rows(attrs.get("support_vectors"), supports, "support_vectors").astype(float)
    if len(coefficients) != supports:
        raise ShapeError(f"coefficients has {len(coefficients)} entries for {supports} vectors")
    return _machine(vectors, coefficients[None], rho, kernel)


@operator("SVMRegressor", infer=infer_regressor(""))
@by_attributes
def svm_regressor(attrs: Attrs) -> ArrayFunction:
    machine, transform = svm_regression(attrs), transform_of(attrs)
    one_class = bool(attrs.get("one_class", 0))

    def run(x: np.ndarray) -> np.ndarray:
        scores = machine(x)
        if one_class:
            scores = np.where(scores > 0, 1.0, -1.0)
        return transformed(scores, transform).astype(np.float32)

    return run


def _svm_width(attrs: Attrs, labels: int) -> Dim:
    classes = len(attrs.get("vectors_per_class") or ())
    if not classes or attrs.get("prob_a") or labels <= 2:
        return labels
    return classes * (classes - 1) // 2


@operator("SVMClassifier", infer=infer_classifier("classlabels_ints", _svm_width))
@by_attributes
def svm_classifier(attrs: Attrs) -> ArrayFunction:
    if attrs.get("vectors_per_class"):
        return _support_vector_classifier(attrs)
    return _linear_svm_classifier(attrs)


def linear_svm(attrs: Attrs) -> tuple[VectorMachine, float]:
    """The machine of an SVMClassifier without support vectors, with one row of coefficients per
    class for any kernel, and the score above which the second of two classes is chosen, as in ONNX
    Runtime.
    """
    labels = class_labels(attrs, "classlabels_ints")
    rho = _first_rho(attrs)
    weights = _rows(attrs.get("coefficients"), len(labels), "coefficients").astype(np.float64)
    # A score of exactly 0.5 suffices.
    limit = np.nextafter(0.5, 0) if (weights >= 0).all() else 0.0
    return VectorMachine(weights, None, np.full(len(labels), rho)), limit


def _linear_svm_classifier(attrs: Attrs) -> ArrayFunction:
    labels, transform = class_labels(attrs, "classlabels_ints"), transform_of(attrs)
    machine, limit = linear_svm(attrs)

    def run(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores = machine(x)
        places = scores.argmax(1)
        if len(labels) == 2:
            places = np.where(scores.max(1) > limit, 1, places)
        return labels[places], transformed(scores, transform).astype(np.float32)

    return run


def svm_classification(attrs: Attrs) -> VectorMachine:
    """The machine of an SVMClassifier (one against one): the decision value of each pair of classes
    is a vote for one of the two."""
    labels = class_labels(attrs, "classlabels_ints")
    counts = [int(n) for n in attrs["vectors_per_class"]]
    classes, total = len(counts), sum(counts)
    if classes != len(labels) or min(counts) < 0 or classes < 2:
        raise ShapeError(
            f"vectors_per_class {counts} must have one entry of at least 0 for each of "
            f"{len(labels)} class labels"
        )
    kernel = _kernel(attrs)
    vectors = _rows(attrs.get("support_vectors"), total, "support_vectors").astype(np.float64)
    duals = np.array(attrs.get("coefficients") or [], np.float64)
    pairs = list(combinations(range(classes), 2))
    rho = np.array(attrs.get("rho") or [], np.float64)
    if duals.size != (classes - 1) * total or len(rho) != len(pairs):
        raise ShapeError(
            f"coefficients ({duals.size}) and rho ({len(rho)}) do not match {classes} classes "
            f"and {total} support vectors"
        )
    duals = duals.reshape(classes - 1, total)
    own = [slice(sum(counts[:i]), sum(counts[: i + 1])) for i in range(classes)]
    decisions = np.zeros((len(pairs), total))
    for row, (i, j) in zip(decisions, pairs, strict=True):
        # As in LIBSVM, the vectors of a class have one coefficient per other class, in class order.
        row[own[i]] = duals[j - 1, own[i]]
        row[own[j]] = duals[i, own[j]]
    return _machine(vectors, decisions, rho, kernel)


def _support_vector_classifier(attrs: Attrs) -> ArrayFunction:
    labels, machine = class_labels(attrs, "classlabels_ints"), svm_classification(attrs)
    classes = len(labels)
    pairs = list(combinations(range(classes), 2))
    first, second = (np.eye(classes)[[pair[k] for pair in pairs]] for k in (0, 1))
    transform = transform_of(attrs)
    coupling = _coupling(attrs, pairs, classes)

    def run(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores = machine(x)
        won = scores > 0
        places = (won @ first + ~won @ second).argmax(1)
        if coupling is not None:
            scores = transformed(coupling(scores), transform)
        elif classes == 2:
            scores = two_scores(scores[:, 0], transform, transform != "NONE")
        else:
            scores = transformed(scores, transform)
        return labels[places], scores.astype(np.float32)

    return run


def pair_probabilities(attrs: Attrs, pairs: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The coefficients of Platt's sigmoid for each pair of classes, or None."""
    if not attrs.get("prob_a"):
        return None
    a, b = (np.array(attrs.get(name) or [], np.float64) for name in ("prob_a", "prob_b"))
    if len(a) != pairs or len(b) != pairs:
        raise ShapeError(
            f"prob_a and prob_b have {len(a)} and {len(b)} entries for {pairs} pairs of classes"
        )
    return a, b


def _coupling(
    attrs: Attrs, pairs: Sequence[tuple[int, int]], classes: int
) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the function from decision values [N, pairs] to probabilities [N, classes], or None.

    Platt's sigmoid gives the probability of one class of a pair; the second method of Wu, Lin and
    Weng (JMLR 5, 2004) couples them to class probabilities.
    """
    probabilities = pair_probabilities(attrs, len(pairs))
    if probabilities is None:
        return None
    a, b = probabilities
    left, right = ([pair[k] for pair in pairs] for k in (0, 1))

    def couple(scores: np.ndarray) -> np.ndarray:
        versus = np.zeros((len(scores), classes, classes))
        # As in LIBSVM, pairwise probabilities are clipped away from 0 and 1.
        wins = np.clip(1 - _logistic(scores * a + b), 1e-7, 1 - 1e-7)
        versus[:, left, right] = wins
        versus[:, right, left] = 1 - wins
        q = -versus.transpose(0, 2, 1) * versus
        columns = np.arange(classes)
        q[:, columns, columns] = np.square(versus).sum(1)
        p = np.full((len(scores), classes), 1 / classes)
        todo = np.arange(len(scores))
        # The number of iterations and the error are those of LIBSVM.
        for _ in range(max(100, classes)):
            now, part = q[todo], p[todo]
            qp = np.matmul(now, part[..., None])[..., 0]
            pqp = (part * qp).sum(1)
            open_rows = np.abs(qp - pqp[:, None]).max(1, initial=0) >= 0.005 / classes
            if not open_rows.any():
                break
            # Rows that have converged are not changed.
            todo, now, part = todo[open_rows], now[open_rows], part[open_rows]
            qp, pqp = qp[open_rows], pqp[open_rows]
            for t in range(classes):
                diagonal = now[:, t, t]
                step = (pqp - qp[:, t]) / diagonal
                grown = 1 + step
                pqp = (pqp + step * (step * diagonal + 2 * qp[:, t])) / grown**2
                part[:, t] += step
                part /= grown[:, None]
                qp = (qp + step[:, None] * now[:, t]) / grown[:, None]
            p[todo] = part
        return p

    return couple
