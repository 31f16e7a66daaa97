"""Compiled linear models and support vector machines against NumPy's, to the rounding of float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backends.native.kernel import Site
from penstock.backends.native.models import vector_model
from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401

ROUNDING = {"rtol": 2e-6, "atol": 2e-6}
TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]
KERNELS = ["LINEAR", "POLY", "RBF", "SIGMOID"]
DTYPES = ["float32", "float64", "int32", "int64"]


def check_model(name: str, x: np.ndarray, **attrs: Any) -> None:
    if name.startswith("Linear") and x.dtype != np.float64:
        # NumPy's kernel rounds each sum to float32.
        tolerance = {"rtol": 1e-5, "atol": 1e-6 * x.shape[1] * max(1, np.abs(x).max())}
    else:
        tolerance = ROUNDING
    node = node_of(name, [x], (), 2 if "Classifier" in name else 1, "ai.onnx.ml", 1, **attrs)
    with np.errstate(all="ignore"):  # PROBIT of what is no probability
        check(node, [x], tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("vectors", "width"), [(90, 100), (600, 20), (40, 300)])
def test_svm_of_many_vectors_equals_numpy_to_the_rounding_of_its_products(vectors, width, kernel):
    attrs = {
        "coefficients": floats(1, vectors),
        "support_vectors": floats(2, vectors, width),
        "kernel_params": [0.02, 0.5, 3.0],
        "kernel_type": kernel,
        "n_supports": vectors,
        "rho": [0.1],
    }
    for count in (1, 4, 9):
        x = rows(count, width)
        node = node_of("SVMRegressor", [x], (), 1, "ai.onnx.ml", 1, **attrs)
        check(node, [x], {"rtol": 1e-5, "atol": 2e-5})


def rows(count: int, width: int, dtype: str = "float32") -> np.ndarray:
    x = np.random.default_rng(count + width).normal(0, 1, (count, width))
    return (np.rint(3 * x) if dtype[0] == "i" else x).astype(dtype)


def floats(seed: int, *dims: int) -> list[float]:
    return np.random.default_rng(seed).normal(0, 0.3, dims).astype(np.float32).reshape(-1).tolist()


def labels_of(count: int, texts: bool = False) -> dict[str, Any]:
    if texts:
        return {"classlabels_strings": [f"class {i}" for i in range(count)]}
    return {"classlabels_ints": [3 * i + 2 for i in range(count)]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 12), (4, 300), (9, 7)])
@pytest.mark.parametrize("targets", [1, 3, 17])
def test_linear_regressor_equals_numpy(count, width, targets, dtype):
    attrs = {"coefficients": floats(1, targets, width), "intercepts": floats(2, targets)}
    check_model("LinearRegressor", rows(count, width, dtype), **attrs, targets=targets)


@pytest.mark.parametrize(("width", "targets"), [(256, 16), (256, 17), (257, 16), (1, 16), (5, 1)])
def test_linear_regressor_of_few_or_many_targets_equals_numpy(width, targets):
    attrs = {"coefficients": floats(1, targets, width), "intercepts": floats(2, targets)}
    for count in (1, 2, 15, 16, 17, 50):
        check_model("LinearRegressor", rows(count, width, "float64"), **attrs, targets=targets)


def test_linear_classifier_of_scores_that_are_not_finite_equals_numpy():
    attrs = {"coefficients": floats(3, 4, 2), "intercepts": floats(4, 4), **labels_of(4)}
    x = rows(24, 2, "float64")
    x[::3] = np.nan
    x[1::5] = np.inf
    x[2::7, 0] = -np.inf
    check_model("LinearClassifier", x, **attrs)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize(("classes", "scores"), [(2, 1), (2, 2), (5, 5), (1, 1)])
def test_linear_classifier_equals_numpy(classes, scores, texts, transform):
    attrs = {"coefficients": floats(3, scores, 6), "intercepts": floats(4, scores)}
    attrs |= {**labels_of(classes, texts), "post_transform": transform}
    for count in (1, 11):
        check_model("LinearClassifier", rows(count, 6, "float64"), **attrs)


def test_linear_model_with_many_coefficients_is_left_to_products_of_matrices():
    for width, compiled in ((100, True), (10_000, False)):
        x, attrs = rows(2, width, "float64"), {"coefficients": floats(5, 4, width), "targets": 4}
        node = node_of("LinearRegressor", [x], (), 1, "ai.onnx.ml", 1, **attrs)
        assert (kernel_of(node, LIBRARIES[0]) is not None) == compiled


@pytest.mark.parametrize("transform", TRANSFORMS[:4])
@pytest.mark.parametrize(("count", "width", "targets"), [(2000, 40, 1), (700, 33, 5), (65, 64, 90)])
def test_linear_regressor_as_a_dense_layer_equals_numpy(count, width, targets, transform):
    attrs = {"coefficients": floats(1, targets, width), "intercepts": floats(2, targets)}
    attrs |= {"targets": targets, "post_transform": transform}
    x = rows(count, width)
    node = node_of("LinearRegressor", [x], (), 1, "ai.onnx.ml", 1, **attrs)
    assert is_dense(node)
    check(node, [x], {"rtol": 1e-5, "atol": 2e-5})


@pytest.mark.parametrize("transform", TRANSFORMS[:4])
@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize(("classes", "scores", "count"), [(2, 1, 2500), (2, 2, 1200), (9, 9, 300)])
def test_linear_classifier_as_a_dense_layer_equals_numpy(classes, scores, count, texts, transform):
    attrs = {"coefficients": floats(3, scores, 32), "intercepts": floats(4, scores)}
    attrs |= {**labels_of(classes, texts), "post_transform": transform}
    x = rows(count, 32)
    node = node_of("LinearClassifier", [x], (), 2, "ai.onnx.ml", 1, **attrs)
    assert is_dense(node)
    check(node, [x], {"rtol": 1e-5, "atol": 2e-5})


def is_dense(node: Any) -> bool:
    """Whether the product of a linear model is that of a dense layer."""
    types = [None if value is None else value.type for value in (*node.inputs, *node.outputs)]
    call = vector_model(Site(LIBRARIES[0], node, tuple(types), node.inputs))
    assert call is not None
    return call.kernel == "dense"


@pytest.mark.parametrize(
    ("count", "dtype", "both"),
    [(4, "float32", True), (900, "float64", True), (900, "float32", False)],
)
def test_linear_model_that_is_small_or_wide_or_lacks_an_output_is_no_dense_layer(
    count, dtype, both
):
    attrs, x = {"coefficients": floats(3, 4, 32), **labels_of(4)}, rows(count, 32, dtype)
    node = node_of("LinearClassifier", [x], (), 2, "ai.onnx.ml", 1, **attrs)
    node.outputs[0] = node.outputs[0] if both else None
    assert not is_dense(node)


def machine(supports: int, width: int, kernel: str) -> dict[str, Any]:
    return {
        "kernel_type": kernel,
        "kernel_params": [0.25, 0.5, 3.0],
        "support_vectors": floats(6, supports, width),
    }


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("supports", "width"), [(1, 1), (9, 12), (520, 3), (16, 260)])
def test_svm_regressor_equals_numpy(supports, width, dtype, kernel):
    attrs = {**machine(supports, width, kernel), "coefficients": floats(7, supports)}
    x = rows(6, width, dtype)
    for one_class in (0, 1):
        check_model(
            "SVMRegressor", x, **attrs, rho=[0.125], n_supports=supports, one_class=one_class
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_svm_regressor_without_vectors_equals_numpy(kernel):
    attrs = {"kernel_type": kernel, "kernel_params": [0.5, 1.0, 2.0], "rho": [0.5]}
    check_model("SVMRegressor", rows(5, 4), coefficients=floats(8, 4), n_supports=0, **attrs)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("counts", [[3, 2], [4, 1, 5, 2]])
@pytest.mark.parametrize("coupled", [False, True])
def test_svm_classifier_equals_numpy(counts, coupled, transform, kernel):
    classes, total = len(counts), sum(counts)
    pairs = classes * (classes - 1) // 2
    attrs = {
        **machine(total, 5, kernel),
        "coefficients": floats(9, classes - 1, total),
        "vectors_per_class": counts,
        "rho": floats(10, pairs),
        "post_transform": transform,
        **labels_of(classes, coupled),
    }
    if coupled:
        attrs |= {"prob_a": [-2.0] * pairs, "prob_b": floats(11, pairs)}
    for count in (1, 30):
        check_model("SVMClassifier", rows(count, 5), **attrs)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("positive", [False, True])
def test_svm_classifier_without_vectors_equals_numpy(classes, positive):
    weights = floats(12, classes, 5)
    attrs = {"coefficients": np.abs(weights).tolist() if positive else weights, "rho": [0.25]}
    check_model("SVMClassifier", rows(30, 5), **attrs, **labels_of(classes))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kernel", KERNELS)
def test_svm_regressor_of_values_that_are_not_finite_equals_numpy(kernel, value):
    x = rows(3, 4)
    x[1, 2] = value
    attrs = {**machine(5, 4, kernel), "coefficients": floats(13, 5), "rho": [0.0]}
    check_model("SVMRegressor", x, **attrs, n_supports=5)


def test_svm_classifier_of_too_many_classes_has_no_compiled_kernel():
    x = rows(2, 3)
    attrs = {
        **machine(33, 3, "RBF"),
        "coefficients": floats(14, 32, 33),
        "vectors_per_class": [1] * 33,
        "rho": floats(15, 33 * 16),
        **labels_of(33),
    }
    node = node_of("SVMClassifier", [x], (), 2, "ai.onnx.ml", 1, **attrs)
    assert kernel_of(node, LIBRARIES[0]) is None
