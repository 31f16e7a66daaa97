"""Linear models and support vector machines, against ONNX Runtime."""

from typing import Any

import numpy as np
import pytest

from penstock.core.types import FLOAT32, INT64, STRING, ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node

ML: dict[str, Any] = {"domain": "ai.onnx.ml", "opset": 1, "expected": "ort"}
TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]
rng = np.random.default_rng(17)
X = np.concatenate([rng.normal(size=(6, 3)), np.zeros((1, 3))]).astype(np.float32)


def fails(op: str, attrs: dict[str, Any], x: np.ndarray = X, outputs: int = 2) -> None:
    with pytest.raises(ShapeError):
        check_node(
            op, [x], attrs, outputs=outputs, domain="ai.onnx.ml", opset=1, expected=[None] * outputs
        )


def floats(*shape: int) -> list[float]:
    return [float(v) for v in np.float32(rng.normal(size=shape)).reshape(-1)]


# Linear models


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("targets", [1, 2, 4])
def test_linear_regressor_matches_the_reference(transform: str, targets: int) -> None:
    attrs = {"coefficients": floats(targets, 3), "targets": targets, "post_transform": transform}
    # A row of zeros only is not a number to SOFTMAX_ZERO of ONNX Runtime; here it stays as it is.
    x = X[:-1] if transform == "SOFTMAX_ZERO" else X
    check_node("LinearRegressor", [x], attrs, **ML, rtol=1e-4, atol=1e-4)
    attrs["intercepts"] = [0.0 if i == 1 else v for i, v in enumerate(floats(targets))]
    check_node("LinearRegressor", [X], attrs, **ML, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32])
def test_linear_regressor_of_other_types(dtype: type) -> None:
    attrs = {"coefficients": [0.5, -1.0, 2.0], "intercepts": [0.25]}
    x = (X * 10).astype(dtype)
    want = (x.astype(np.float64) @ [0.5, -1.0, 2.0] + 0.25).astype(np.float32)[:, None]
    options = {**ML, "expected": [want]}
    check_node("LinearRegressor", [x], attrs, **options)
    check_node("LinearRegressor", [x[0]], attrs, **{**ML, "expected": [want[:1]]})


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_linear_classifier_matches_the_reference(transform: str, classes: int) -> None:
    attrs: dict[str, Any] = {
        "coefficients": floats(classes, 3),
        "intercepts": floats(classes),
        "classlabels_ints": list(range(10, 10 + classes)),
        "post_transform": transform,
    }
    check_node("LinearClassifier", [X], attrs, outputs=2, **ML, rtol=1e-4, atol=1e-4)
    del attrs["classlabels_ints"]
    attrs["classlabels_strings"] = [f"c{i}" for i in range(classes)]
    check_node("LinearClassifier", [X], attrs, outputs=2, **ML, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transform", TRANSFORMS[:4])
@pytest.mark.parametrize("scale", [1, 10, 100])
def test_linear_models_of_many_rows_match_the_reference(transform: str, scale: int) -> None:
    x = np.random.default_rng(scale).normal(size=(700, 20)).astype(np.float32)
    attrs: dict[str, Any]
    attrs = {"coefficients": [scale * v for v in floats(6, 20)], "post_transform": transform}
    attrs["intercepts"] = floats(6)
    close = {"rtol": 1e-3, "atol": 1e-4 * scale}
    check_node("LinearRegressor", [x], {**attrs, "targets": 6}, **ML, **close)
    attrs["classlabels_ints"] = [*range(6)]
    check_node("LinearClassifier", [x], attrs, outputs=2, **ML, **close)


def test_softmax_of_large_scores_is_finite() -> None:
    x = np.array([[1000, -1000], [-1000, -1000], [50, 49]], np.float32)
    attrs = {"coefficients": [1.0, 0, 0, 1], "targets": 2, "post_transform": "SOFTMAX"}
    one = 1 / (1 + np.exp(-1))
    wanted = np.array([[1, 0], [0.5, 0.5], [one, 1 - one]], np.float32)
    check_node("LinearRegressor", [x], attrs, **{**ML, "expected": [wanted]})


@pytest.mark.parametrize("transform", TRANSFORMS[:4])  # ONNX Runtime's PROBIT reads garbage here
def test_linear_classifier_with_one_row_for_two_classes(transform: str) -> None:
    attrs = {
        "coefficients": floats(3),
        "intercepts": floats(1),
        "classlabels_ints": [10, 20],
        "post_transform": transform,
    }
    check_node("LinearClassifier", [X], attrs, outputs=2, **ML)
    for dtype in (np.float64, np.int64, np.int32):
        x = (X * 10).astype(dtype)
        check_node("LinearClassifier", [x], attrs, outputs=2, **ML, rtol=1e-4, atol=1e-4)
    check_node("LinearClassifier", [X[0]], attrs, outputs=2, **ML)


def test_linear_models_of_wrong_attributes_are_refused() -> None:
    good = {"coefficients": floats(3, 3), "classlabels_ints": [1, 2, 3]}
    fails("LinearClassifier", {**good, "classlabels_ints": [1]})
    fails("LinearClassifier", {**good, "intercepts": [1.0, 2.0]})
    fails("LinearClassifier", {**good, "post_transform": "TANH"})
    fails("LinearClassifier", {"coefficients": floats(3, 3)})
    fails("LinearClassifier", good, X[:, :2])
    fails("LinearClassifier", good, X[None])
    fails("LinearRegressor", {"coefficients": floats(4), "targets": 3}, outputs=1)
    fails("LinearRegressor", {}, outputs=1)


# Support vector machines

KERNELS = ["LINEAR", "POLY", "RBF", "SIGMOID"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("one_class", [0, 1])
def test_svm_regressor_matches_the_reference(kernel: str, one_class: int) -> None:
    attrs: dict[str, Any] = {
        "kernel_type": kernel,
        "kernel_params": [0.5, 0.25, 2.0],
        "support_vectors": floats(5, 3),
        "coefficients": floats(5),
        "n_supports": 5,
        "rho": [0.125],
        "one_class": one_class,
    }
    check_node("SVMRegressor", [X], attrs, **ML, rtol=1e-4, atol=1e-4)


def test_svm_regressor_without_vectors() -> None:
    attrs = {"kernel_params": [0.0, 0.0, 0.0], "coefficients": floats(3), "rho": [0.5]}
    check_node("SVMRegressor", [X], attrs, **ML)
    fails("SVMRegressor", {"coefficients": floats(3)}, outputs=1)
    fails("SVMRegressor", {**attrs, "n_supports": 2}, outputs=1)
    fails("SVMRegressor", {**attrs, "kernel_params": [0.0, 0.0, np.inf]}, outputs=1)
    fails("SVMRegressor", attrs, X[:, :2], outputs=1)


def classifier(classes: int, kernel: str, transform: str) -> dict[str, Any]:
    counts = [2, 3, 1, 2][:classes]
    return {
        "kernel_type": kernel,
        "kernel_params": [0.5, 0.25, 2.0],
        "support_vectors": floats(sum(counts), 3),
        "vectors_per_class": counts,
        "coefficients": floats(classes - 1, sum(counts)),
        "rho": floats(classes * (classes - 1) // 2),
        "classlabels_ints": list(range(10, 10 + classes)),
        "post_transform": transform,
    }


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize("transform", TRANSFORMS[:4])
def test_support_vector_classifier_matches_the_reference(
    kernel: str, classes: int, transform: str
) -> None:
    attrs = classifier(classes, kernel, transform)
    loose: dict[str, Any] = {**ML, "outputs": 2, "rtol": 1e-4, "atol": 1e-4}
    check_node("SVMClassifier", [X], attrs, **loose)
    pairs = len(attrs["rho"])
    attrs["prob_a"], attrs["prob_b"] = floats(pairs), floats(pairs)
    check_node("SVMClassifier", [X], attrs, **loose)
    del attrs["classlabels_ints"]
    attrs["classlabels_strings"] = [f"c{i}" for i in range(classes)]
    check_node("SVMClassifier", [X], attrs, **loose)


def test_svm_probabilities_of_many_rows() -> None:
    attrs = classifier(4, "RBF", "NONE")
    attrs["prob_a"], attrs["prob_b"] = floats(6), floats(6)
    x = rng.normal(size=(500, 3)).astype(np.float32) * 3
    _, z = check_node("SVMClassifier", [x], attrs, outputs=2, **ML, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(z.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("transform", TRANSFORMS[:4])
@pytest.mark.parametrize("classes", [1, 2, 3])
@pytest.mark.parametrize("positive", [False, True])
def test_linear_svm_classifier_matches_the_reference(
    transform: str, classes: int, positive: bool
) -> None:
    weights = floats(classes, 3)
    attrs = {
        "kernel_params": [0.0, 0.0, 0.0],
        "coefficients": [abs(w) for w in weights] if positive else weights,
        "rho": [0.25],
        "classlabels_ints": list(range(10, 10 + classes)),
        "post_transform": transform,
    }
    check_node("SVMClassifier", [X], attrs, outputs=2, **ML, rtol=1e-4, atol=1e-4)


def test_svm_classifiers_of_wrong_attributes_are_refused() -> None:
    good = classifier(3, "RBF", "NONE")
    fails("SVMClassifier", {**good, "vectors_per_class": [2, 3]})
    fails("SVMClassifier", {**good, "rho": [1.0]})
    fails("SVMClassifier", {**good, "coefficients": floats(5)})
    fails("SVMClassifier", {**good, "kernel_type": "COSINE"})
    fails("SVMClassifier", {**good, "prob_a": [1.0], "prob_b": [1.0]})
    fails("SVMClassifier", good, X[:, :2])


def test_models_infer_their_types() -> None:
    x = TensorType(FLOAT32, ("n", 3))
    linear, vectors = find("LinearClassifier", "ai.onnx.ml"), find("SVMClassifier", "ai.onnx.ml")
    assert linear is not None
    assert vectors is not None
    assert linear.infer([x], {"classlabels_strings": ["a", "b"]}, []) == (
        TensorType(STRING, ("n",)),
        TensorType(FLOAT32, ("n", 2)),
    )
    attrs = classifier(4, "RBF", "NONE")
    assert vectors.infer([x], attrs, [])[1] == TensorType(FLOAT32, ("n", 6))
    assert vectors.infer([x], {**attrs, "prob_a": [1.0]}, []) == (
        TensorType(INT64, ("n",)),
        TensorType(FLOAT32, ("n", 4)),
    )
    with pytest.raises(ShapeError):
        linear.infer([TensorType(FLOAT32, (1, 2, 3))], {"classlabels_ints": [1, 2]}, [])
