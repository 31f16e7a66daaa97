"""Compiled features of classical models against NumPy's: bit by bit, but for sums of squares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.backends.native.backend import NativeBackend
from penstock.core.types import STRING, ShapeError
from tests.support.native_kernels import LIBRARIES, check, expected, kernel_of, node_of, pytestmark  # noqa: F401
from tests.support.onnx_text import compile_text

DTYPES = ["float32", "float64", "int32", "int64"]
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 2.0], np.float32)


def node(
    name: str, *inputs: np.ndarray, constants: Any = (), version: int = 4, **attrs: Any
) -> Any:
    return node_of(name, inputs, constants, 1, "ai.onnx.ml", version, **attrs)


def numbers(dims: tuple[int, ...], dtype: str) -> np.ndarray:
    x = np.random.default_rng(7).normal(0, 3, dims)
    return np.rint(x).astype(dtype) if dtype[0] == "i" else x.astype(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "float16", "uint8"])
@pytest.mark.parametrize("dims", [(5,), (3, 5), (2, 3, 5)])
@pytest.mark.parametrize("constant", [False, True])
def test_array_feature_extractor_equals_numpy(constant, dims, dtype):
    x = numbers(dims, "int64" if dtype == "uint8" else "float64")
    inputs = [x.astype(dtype), np.array([[4, 0, 4]])]
    check(node("ArrayFeatureExtractor", *inputs, constants=[1] * constant), inputs)


@pytest.mark.parametrize("place", [-1, 5])
def test_array_feature_extractor_of_absent_features_raises_as_numpy(place):
    x = numbers((3, 5), "float32")
    kernel = kernel_of(node("ArrayFeatureExtractor", x, np.array([0])), LIBRARIES[0])
    with pytest.raises(ShapeError, match=r"must be in \[0, 5\)"):
        kernel.function(x, np.array([place]))


def test_kernel_that_looks_at_nothing_is_left_to_numpy():
    """Without rows there is no item of work, in which indices would be looked at."""
    x = numbers((0, 5), "float32")
    static = NativeBackend().static_kernel
    for rows, is_there in ((0, False), (3, True)):
        made = node("ArrayFeatureExtractor", numbers((rows, 5), "float32"), np.array([0]))
        assert (static(made, [value.type for value in made.inputs]) is not None) is is_there
    text = """g (float[0, 5] x, int64[1] i) => (float[0, 1] y)
        { y = ai.onnx.ml.ArrayFeatureExtractor(x, i) }"""
    session = compile_text(text, domains={"ai.onnx.ml": 3})
    with pytest.raises(ps.RunError, match=r"must be in \[0, 5\)"):
        session.run({"x": x, "i": np.array([5])})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(4,), (9, 4), (2, 3, 4)])
def test_scaler_equals_numpy(dims, dtype):
    x = numbers(dims, dtype)
    check(node("Scaler", x), [x])
    check(node("Scaler", x, offset=[0.5], scale=[3.0]), [x])
    check(node("Scaler", x, offset=[0.5, 1, -2, 0.1], scale=[3.0, 0.1, 0, 1]), [x])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("several", [False, True])
def test_imputer_equals_numpy(several, dtype):
    values = [5, 6, 7][: 3 if several else 1]
    if dtype[0] == "i":
        x, attrs = numbers((20, 3), dtype), {"imputed_value_int64s": values}
        check(node("Imputer", x, replaced_value_int64=1, **attrs), [x])
        return
    x = np.random.default_rng(5).choice(SPECIAL, (20, 3)).astype(dtype)
    for replaced in (np.nan, 0.0, np.inf, 1.0):
        attrs = {"imputed_value_floats": values, "replaced_value_float": replaced}
        check(node("Imputer", x, **attrs), [x])


def test_imputer_of_a_value_out_of_range_replaces_nothing():
    x = numbers((2, 3), "int32")
    imputer = node("Imputer", x, replaced_value_int64=2**62, imputed_value_int64s=[7])
    assert kernel_of(imputer, LIBRARIES[0]) is None
    np.testing.assert_array_equal(expected(imputer, [x])[0], x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(4,), (9, 4), (3, 21), (2, 1)])
@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_normalizer_equals_numpy(norm, dims, dtype):
    x = numbers(dims, dtype)
    x[0] = 0
    check(node("Normalizer", x, norm=norm), [x], {"rtol": 1e-6})


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_normalizer_of_values_that_are_not_finite_equals_numpy(norm):
    x = np.array([[1, np.nan, 2], [np.inf, 1, 2], [-np.inf, 1, 2], [2, 1, np.nan]], np.float32)
    with np.errstate(invalid="ignore"):
        check(node("Normalizer", x, norm=norm), [x], {"rtol": 1e-6})


@pytest.mark.parametrize("key", DTYPES)
@pytest.mark.parametrize("value", [*DTYPES, "strings"])
@pytest.mark.parametrize("count", [1, 7])
def test_label_encoder_equals_numpy(count, value, key):
    # Of equal keys the last counts.
    keys = np.array([5, 1, 3, 5, -2, 1, 0][:count], key)
    if value == "strings":
        values = {"values_strings": [f"label {i}" for i in range(count)], "default_string": "none"}
        default = {}
    else:
        values = {"values_tensor": np.arange(10, 10 + count).astype(value)}
        default = {"default_tensor": np.array([99], value)}
    x = np.arange(-3, 7).reshape(2, 5).astype(key)
    encoder = node("LabelEncoder", x, keys_tensor=keys, **values, **default)
    if value != "strings":
        check(encoder, [x])
        return
    labels = kernel_of(encoder, LIBRARIES[0]).function(x)
    assert labels.dtype == STRING
    assert labels.tolist() == encoder.op.compile(encoder, []).function(x).tolist()


def test_label_encoder_finds_nan_among_its_keys():
    x = np.array([np.nan, 1.0, 2.0, -0.0], np.float32)
    for keys in ([2.0, np.nan, 0.0], [2.0, 0.0]):
        values = list(range(len(keys)))
        check(node("LabelEncoder", x, keys_floats=keys, values_int64s=values), [x])


@pytest.mark.parametrize(("step", "compiled"), [(3, False), (10_000, True)])
def test_encoders_of_many_integers_are_left_to_numpy_if_it_has_a_table(step, compiled):
    x, keys = step * np.arange(600) % 1000, [step * i for i in range(50)]
    many = node("LabelEncoder", x, keys_int64s=keys, values_int64s=keys)
    assert (kernel_of(many, LIBRARIES[0]) is not None) == compiled
    if compiled:
        check(many, [x])
    check(node("OneHotEncoder", x, cats_int64s=keys), [x])
    check(node("LabelEncoder", x[:9], keys_int64s=keys, values_int64s=keys), [x[:9]])


def test_label_encoder_of_version_1_has_no_compiled_kernel():
    x = np.array([0, 1])
    encoder = node("LabelEncoder", x, version=1, classes_strings=["a", "b"])
    assert kernel_of(encoder, LIBRARIES[0]) is None


@pytest.mark.parametrize("cats", [[3], [5, -1, 2, 5]])
def test_one_hot_encoder_equals_numpy(cats):
    x = np.array([[5, 2, 3], [-1, 0, 7]])
    check(node("OneHotEncoder", x, cats_int64s=cats), [x])


def test_one_hot_encoder_of_an_unknown_category_raises_as_numpy():
    x = np.array([5, 6])
    kernel = kernel_of(node("OneHotEncoder", x, cats_int64s=[5, 6], zeros=0), LIBRARIES[0])
    assert kernel.function(x).tolist() == [[1, 0], [0, 1]]
    with pytest.raises(ShapeError, match="is not a category"):
        kernel.function(np.array([5, 8]))
