"""Linear models and support vector machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from penstock.backends.native import family, rows_ns, str_
from penstock.backends.native.kernel import Finish, NativeCall, Site, Tensor, texts_of
from penstock.core.checkpoints import checkpoint
from penstock.core.records import dataclass, replace
from penstock.core.types import FLOAT32, STRING, TensorType
from penstock.ir.graph import Node, Value
from penstock.ir.op import Attrs
from penstock.ops.common.constant_cache import shared
from penstock.ops.onnx_ml import models
from penstock.ops.onnx_ml.models import KERNELS, TRANSFORM_NAMES, VectorMachine
from penstock.ops.registry import standard

# As in c/tables/models.c.
_ROWS, _WIDTH, _DECISIONS, _CLASSES = 4, 16, 256, 32
_DEGREE = 64
_NO_LABEL, _HIGHEST, _SINGLE, _EITHER, _VOTES = range(5)

_MANY = 2**13
"""elements of support vectors from which on products with float32 features are of float32"""
_LARGE = 2**14
"""coefficients of a linear model from which on a product of matrices is faster"""
_MANY_PRODUCTS, _MANY_BEFORE_NUMPY = 2**9, 2**16
"""products of a linear model with float32 features from which on a dense layer is faster"""


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    """A machine, by which rule its labels follow, and what becomes of its scores."""

    machine: VectorMachine
    labels: np.ndarray | None = None
    rule: int = _NO_LABEL
    limit: float = 0.0
    pair: bool = False
    complement: bool = False
    probabilities: tuple[np.ndarray, np.ndarray] | None = None


@family(
    "ai.onnx.ml.LinearClassifier",
    "ai.onnx.ml.LinearRegressor",
    "ai.onnx.ml.SVMClassifier",
    "ai.onnx.ml.SVMRegressor",
)
def vector_model(site: Site) -> NativeCall | None:
    """LinearClassifier, LinearRegressor, SVMClassifier, SVMRegressor."""
    x, attrs, name = site.tensor(0), site.node.attrs, site.node.op.name
    if str_(x.dtype) not in ("float32", "float64", "int32", "int64"):
        return None
    layer = _layer(site, x) if name.startswith("Linear") else None
    if layer is not None:
        return layer
    narrow = x.dtype == FLOAT32
    words = partial(_words, name, attrs, narrow)
    share = shared((_words, narrow, name, *attrs), words, *attrs.values())
    rows, width = (1, *x.dims)[-2:]
    if share.value is None or share.value[1] != width or not rows or not width:
        return None
    labels, _, count, decisions, arrays, numbers = share.value
    texts = labels if labels is not None and labels.dtype == STRING else None
    scores = len(site.tensors) - len(site.node.inputs) - 1
    read = (Tensor(0), None if labels is None else site.result(0), site.result(scores))
    together, terms = min(rows, _ROWS), count * (2 * width + 2 * decisions + 20)
    return NativeCall(
        f"models_{x.dtype}",
        (*read, *arrays, rows, *numbers),
        items=math.ceil(rows / _ROWS),
        item_ns=rows_ns(together * terms, rows=2 * together),
        keep=share,
        finish=texts_of(site, texts),
    )


def _layer(site: Site, x: TensorType) -> NativeCall | None:
    """A linear model as a dense layer, behind which NumPy labels and transforms; None for one that
    is small or not of float32."""
    attrs, regresses = site.node.attrs, site.node.op.name == "LinearRegressor"
    if x.dtype != FLOAT32 or len(x.dims) != 2 or None in site.tensors:
        return None
    read = models.linear_regression if regresses else models.linear_classes
    share = shared((read, *attrs), lambda: read(attrs), *attrs.values())
    weights, bias, function = share.value
    plain = regresses and models.transform_of(attrs) == "NONE"
    least = _MANY_PRODUCTS if plain else _MANY_BEFORE_NUMPY
    if len(weights) != x.dims[1] or x.elements * len(bias) < least:
        return None
    from penstock.backends.native.dense import dense_call  # which small models do without

    scores = TensorType(FLOAT32, (x.dims[0], len(bias)))
    inputs = [Value("", x), Value("", const=weights), Value("", const=bias)]
    gemm = Node(standard("Gemm"), inputs, [Value("", scores)])
    tensors = (x, *[TensorType(array.dtype, array.shape) for array in (weights, bias)], scores)
    call = dense_call(Site(site.library, gemm, tensors, inputs))
    if not regresses:
        softmax = partial(site.library.functions.softmax, models.softmax_of_rows, checkpoint, False)
        function = partial(function, softmax=lambda scores, _: softmax(scores))
    # It reads the features, and writes scores.
    return call and replace(
        call,
        words=tuple([Tensor(min(w.index, 1)) if isinstance(w, Tensor) else w for w in call.words]),
        keep=(share, call.reordered),
        reordered={},
        finish=None if plain else Finish((scores,), function),
    )


def _words(name: str, attrs: Attrs, narrow: bool) -> Any:
    """Labels, features, vectors, decisions, and the arguments behind the tensors; None for a model
    that c/tables/models.c has no kernel for. ``narrow``: features are of float32."""
    model = _READERS[name](attrs)
    machine = model.machine
    (used, width), labels, weights = machine.vectors.shape, model.labels, machine.weights
    count, decisions = math.ceil(used / _WIDTH) * _WIDTH, len(machine.offsets)
    classes = 0 if labels is None else len(labels)
    many = model.rule == _VOTES and classes > _CLASSES
    large = weights is None and used * width > _LARGE
    if decisions > _DECISIONS or many or large or not 0 <= machine.degree <= _DEGREE:
        return None
    vectors = np.zeros((width, count))
    vectors[:, :used] = machine.vectors.T
    padded = None if weights is None else np.zeros((decisions, count))
    if padded is not None:
        padded[:, :used] = weights
    one_class = bool(name == "SVMRegressor" and attrs.get("one_class", 0))
    places = labels if labels is None or labels.dtype != STRING else np.arange(classes)
    coupled = model.probabilities is not None
    outputs = classes if coupled or model.pair else decisions
    # Distances are small differences of large products.
    narrow &= weights is not None and machine.kernel != "RBF" and used * width >= _MANY
    arrays = (
        *((None, vectors.astype(np.float32)) if narrow else (vectors, None)),
        *(np.square(vectors).sum(0), padded, machine.offsets.astype(np.float64), places),
        *(model.probabilities or (None, None)),
    )
    numbers = (
        *(width, count, used, decisions, classes, outputs),
        *(KERNELS.index(machine.kernel), machine.degree, model.rule),
        *(TRANSFORM_NAMES.index(models.transform_of(attrs)), one_class),
        *(model.pair, model.complement, machine.gamma, machine.coef0, float(model.limit)),
    )
    return labels, width, count, decisions, arrays, numbers


def _linear(weights: np.ndarray, bias: np.ndarray) -> VectorMachine:
    return VectorMachine(weights.T, None, bias)


def _linear_classifier(attrs: Attrs) -> _Model:
    weights, bias, labelling = models.linear_classification(attrs)
    rule = _HIGHEST if labelling.single is None else _SINGLE
    machine, pair = _linear(weights, bias), labelling.pair
    return _Model(machine, labelling.labels, rule, 0.0, pair, labelling.positive)


def _svm_classifier(attrs: Attrs) -> _Model:
    labels = models.class_labels(attrs, "classlabels_ints")
    two = len(labels) == 2
    if not attrs.get("vectors_per_class"):
        machine, limit = models.linear_svm(attrs)
        return _Model(machine, labels, _EITHER if two else _HIGHEST, limit)
    machine = models.svm_classification(attrs)
    probabilities = models.pair_probabilities(attrs, len(machine.offsets))
    pair = two and probabilities is None
    complement = models.transform_of(attrs) != "NONE"
    return _Model(machine, labels, _VOTES, 0.0, pair, complement, probabilities)


_READERS: Mapping[str, Callable[[Attrs], _Model]] = {
    "LinearClassifier": _linear_classifier,
    "LinearRegressor": lambda attrs: _Model(
        _linear(*models.coefficients(attrs, attrs.get("targets", 1)))
    ),
    "SVMClassifier": _svm_classifier,
    "SVMRegressor": lambda attrs: _Model(models.svm_regression(attrs)),
}
