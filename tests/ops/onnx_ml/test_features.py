"""ai.onnx.ml: features, categories, maps; against ONNX Runtime wherever it has the operation."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array

from penstock.core.types import (
    FLOAT32,
    INT64,
    STRING,
    MapType,
    SequenceType,
    ShapeError,
    TensorType,
)
from penstock.ops import find
from tests.ops.harness import check_node

ML: dict[str, Any] = {"domain": "ai.onnx.ml", "opset": 1, "expected": "ort"}
X = np.array([[1, -2, 3], [0, 0, 0], [-1, -5, -2], [7, 0, -0.5]], np.float32)


def text(*values: str) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def own(expected: Any, opset: int = 1) -> dict[str, Any]:
    return {"domain": "ai.onnx.ml", "opset": opset, "expected": expected}


def fails(op: str, inputs: list[Any], attrs: dict[str, Any], opset: int = 1, n: int = 1) -> None:
    with pytest.raises(ShapeError):
        check_node(op, inputs, attrs, outputs=n, **own([None] * n, opset))


# Numbers


def test_binarizer_matches_the_reference() -> None:
    check_node("Binarizer", [X], {"threshold": 0.5}, **ML)
    check_node("Binarizer", [X[0]], **ML)
    ints = np.array([-1, 0, 1, 2], np.int64)
    check_node("Binarizer", [ints], {"threshold": 0.5}, **own([np.array([0, 0, 1, 1])]))
    check_node("Binarizer", [np.array(3.0)], **own([np.array(1.0)]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32])
@pytest.mark.parametrize("rows", [slice(None), 0])
def test_scaler_matches_the_reference(dtype: type, rows: Any) -> None:
    x = X[rows].astype(dtype)
    check_node("Scaler", [x], {"scale": [2.0], "offset": [1.0]}, **ML)
    check_node("Scaler", [x], {"scale": [2.0, 3.0, 0.5], "offset": [1.0, 2.0, -3.0]}, **ML)


def test_scaler_without_attributes_and_with_wrong_ones() -> None:
    check_node("Scaler", [X], **own([X]))
    fails("Scaler", [X], {"scale": [1.0, 2.0], "offset": [1.0, 2.0]})


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32])
def test_normalizer_matches_the_reference(norm: str, dtype: type) -> None:
    check_node("Normalizer", [X.astype(dtype)], {"norm": norm}, **ML)
    check_node("Normalizer", [X[0].astype(dtype)], {"norm": norm}, **ML)


def test_normalizer_of_wrong_shapes_is_refused() -> None:
    fails("Normalizer", [X[None]], {})
    fails("Normalizer", [X], {"norm": "L3"})


def test_imputer_matches_the_reference() -> None:
    x = X.copy()
    x[0, 0] = x[2, 1] = np.nan
    nan = float("nan")
    attrs = {"imputed_value_floats": [9.0], "replaced_value_float": nan}
    check_node("Imputer", [x], attrs, **ML)
    check_node("Imputer", [x[0]], attrs, **ML)
    attrs = {"imputed_value_floats": [9.0, 8.0, 7.0], "replaced_value_float": 0.0}
    check_node("Imputer", [x], attrs, **ML)
    ints = {"imputed_value_int64s": [9, 8, 7], "replaced_value_int64": 0}
    check_node("Imputer", [X.astype(np.int64)], ints, **ML)
    whole = X.astype(np.int32)
    want = np.where(whole == 0, [9, 8, 7], whole)
    check_node("Imputer", [whole], ints, **own([want.astype(np.int32)]))
    want = np.where(X == 0, [9, 8, 7], X)
    check_node("Imputer", [X.astype(np.float64)], attrs, **own([want.astype(np.float64)]))
    fails("Imputer", [X], {"imputed_value_floats": [1.0, 2.0]})
    fails("Imputer", [X], ints)
    fails("Imputer", [X], {})


# Choosing and joining features


@pytest.mark.parametrize("y", [[2, 0, 0], [[1]], [[2], [0]]])
def test_array_feature_extractor_matches_the_reference(y: list[Any]) -> None:
    indices = np.array(y, np.int64)
    for x in (X, X[0], X.astype(np.int64), X.reshape(2, 2, 3), text("a", "b", "c")):
        check_node("ArrayFeatureExtractor", [x, indices], **ML)


def test_array_feature_extractor_out_of_range() -> None:
    for bad in ([3], [-1]):
        fails("ArrayFeatureExtractor", [X, np.array(bad)], {})
    fails("ArrayFeatureExtractor", [np.array(1.0), np.array([0])], {})


def test_feature_vectorizer_matches_the_reference() -> None:
    check_node("FeatureVectorizer", [X, X[:, :2]], {"inputdimensions": [3, 2]}, **ML)
    check_node("FeatureVectorizer", [X, X[:, :2]], {"inputdimensions": [2, 3]}, **ML)
    check_node("FeatureVectorizer", [X[0], X[2]], {"inputdimensions": [3, 3]}, **ML)
    for dtype in (np.int32, np.int64, np.float64):
        x = X.astype(dtype)
        check_node("FeatureVectorizer", [x, x], {"inputdimensions": [3, 3]}, **ML)
    check_node("FeatureVectorizer", [X, X], **own([np.hstack([X, X])]))
    check_node("FeatureVectorizer", [X[:0], X[:0]], **own([np.hstack([X[:0], X[:0]])]))
    fails("FeatureVectorizer", [X, X[:2]], {"inputdimensions": [3, 3]})
    fails("FeatureVectorizer", [X, X], {"inputdimensions": [3]})


# Categories


def test_one_hot_encoder_matches_the_reference() -> None:
    ints = {"cats_int64s": [1, 2, 3]}
    check_node("OneHotEncoder", [np.array([1, 5, 2])], ints, **ML)
    check_node("OneHotEncoder", [np.array([[1, 5], [3, 2]])], ints, **ML)
    check_node("OneHotEncoder", [text("b", "z", "a")], {"cats_strings": ["a", "b"]}, **ML)
    rows = np.eye(3, dtype=np.float32)
    for dtype in (np.float32, np.float64, np.int32):
        x = np.array([2.9, 1.0]).astype(dtype)
        check_node("OneHotEncoder", [x], ints, **own([rows[[1, 0]]]))
    strict = {**ints, "zeros": 0}
    check_node("OneHotEncoder", [np.array([1, 2])], strict, **ML)
    fails("OneHotEncoder", [np.array([1, 5])], strict)
    fails("OneHotEncoder", [np.array([1, 2] * 500 + [5])], strict)
    fails("OneHotEncoder", [text("a")], ints)
    fails("OneHotEncoder", [np.array([1])], {})


def test_category_mapper_matches_the_reference() -> None:
    attrs = {"cats_int64s": [3, 4], "cats_strings": ["a", "b"]}
    check_node("CategoryMapper", [text("a", "z")], {**attrs, "default_int64": -7}, **ML)
    check_node("CategoryMapper", [np.array([[3, 9]])], {**attrs, "default_string": "?"}, **ML)
    fails("CategoryMapper", [text("a")], {"cats_int64s": [3], "cats_strings": ["a", "b"]})


def test_label_encoder_1_matches_the_reference() -> None:
    attrs = {"classes_strings": ["b", "a"]}
    check_node("LabelEncoder", [text("a", "z", "b")], {**attrs, "default_int64": -7}, **ML)
    check_node("LabelEncoder", [np.array([0, 9, -1])], {**attrs, "default_string": "?"}, **ML)


KEYS = {"strings": ["x", "y", "z"], "int64s": [5, -1, 3], "floats": [0.5, -2.0, 7.0]}
INPUTS = {
    "strings": text("y", "?", "x", "z"),
    "int64s": np.array([-1, 8, 5, 3]),
    "floats": np.array([-2, 8, 0.5, 7], np.float32),
}


@pytest.mark.parametrize("opset", [2, 4])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("values", KEYS)
def test_label_encoder_matches_the_reference(opset: int, keys: str, values: str) -> None:
    if keys == values == "strings" and opset == 2:
        pytest.skip("not in ONNX Runtime")
    attrs = {f"keys_{keys}": KEYS[keys], f"values_{values}": KEYS[values][::-1]}
    options = {**ML, "opset": opset}
    check_node("LabelEncoder", [INPUTS[keys]], attrs, **options)
    default = {"strings": "none", "int64s": 99, "floats": 1.5}[values]
    attrs["default_" + {"strings": "string", "int64s": "int64", "floats": "float"}[values]] = (
        default
    )
    check_node("LabelEncoder", [INPUTS[keys].reshape(2, 2)], attrs, **options)


def test_label_encoder_with_tensors_and_nan() -> None:
    attrs: dict[str, Any] = {
        "keys_tensor": from_array(np.array([1, 3], np.int16)),
        "values_tensor": from_array(np.array([1.5, 3.5])),
    }
    x = np.array([3, 2, 1], np.int16)
    check_node("LabelEncoder", [x], attrs, **own([np.array([3.5, -0.0, 1.5])], 4))
    attrs["default_tensor"] = from_array(np.array([9.0]))
    check_node("LabelEncoder", [x], attrs, **own([np.array([3.5, 9, 1.5])], 4))
    names = onnx.helper.make_tensor("s", onnx.TensorProto.STRING, [2], [b"a", b"b"])
    attrs = {"keys_tensor": names, "values_int64s": [1, 2]}
    check_node("LabelEncoder", [text("b", "c")], attrs, **own([np.array([2, -1])], 4))
    nan = float("nan")
    attrs = {"keys_floats": [nan, 1.0, 0.0], "values_int64s": [5, 6, 7]}
    x = np.array([nan, 1, 2, 0, -0.0], np.float32)
    check_node("LabelEncoder", [x], attrs, **{**ML, "opset": 4})
    attrs = {"keys_floats": [1.0, 1.0], "values_int64s": [5, 6]}
    check_node("LabelEncoder", [x], attrs, **own([np.array([-1, 6, -1, -1, -1])], 4))


@pytest.mark.parametrize("keys", [[-3, 0, 4, 0, 9], [5], [2**63 - 2, 2**63 - 5], [1 - 2**63]])
@pytest.mark.parametrize("edge", [[], [2**63 - 1], [-(2**63)]])
def test_label_encoder_of_integers_finds_only_its_keys(keys: list[int], edge: list[int]) -> None:
    """Keys that are close to one another are in a table; an ``edge`` has no room behind it."""
    keys = [*keys, *edge]
    limits = np.array([-(2**63), 1 - 2**63, -1, 0, 1, 2**62, 2**63 - 2, 2**63 - 1])
    near = np.array(keys)[:, None] + np.arange(-2, 3)
    x = np.concatenate([limits, near.reshape(-1)])  # some wrap around
    value_of = {key: i for i, key in enumerate(keys)}
    wanted = np.array([value_of.get(key, -1) for key in x.tolist()])
    attrs = {"keys_int64s": keys, "values_int64s": [*range(len(keys))]}
    check_node("LabelEncoder", [x], attrs, **own([wanted], 4))
    check_node("LabelEncoder", [x[8]], attrs, **own([wanted[8]], 4))
    check_node("LabelEncoder", [x[:0]], attrs, **own([wanted[:0]], 4))


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("count", [3, 70])
def test_integer_encoders_of_many_elements_match_the_reference(count: int, step: int) -> None:
    cats = [step * (i - 2) for i in range(count)]
    x = step * np.random.default_rng(1).integers(-4, count + 2, (30, 20))
    check_node("OneHotEncoder", [x], {"cats_int64s": cats}, **ML)
    for values in ({"floats": [0.5 * i for i in cats]}, {"strings": [str(i) for i in cats]}):
        attrs = {"keys_int64s": cats} | {f"values_{key}": value for key, value in values.items()}
        check_node("LabelEncoder", [x], attrs, **{**ML, "opset": 4})
    names = {"cats_int64s": cats, "cats_strings": [f"category {i}" for i in cats]}
    check_node("CategoryMapper", [x], names, **ML)


def test_label_encoder_of_wrong_attributes_is_refused() -> None:
    fails("LabelEncoder", [text("a")], {"keys_int64s": [1], "values_int64s": [1]}, 4)
    fails("LabelEncoder", [text("a")], {"keys_strings": ["a"], "values_int64s": [1, 2]}, 4)
    fails("LabelEncoder", [text("a")], {"keys_strings": ["a"]}, 4)
    numbers, empty = {"keys_int64s": [1], "values_int64s": [1]}, from_array(np.zeros(0, np.int64))
    fails("LabelEncoder", [np.array([1])], {**numbers, "default_tensor": empty}, 4)
    both = {"keys_strings": ["a"], "keys_int64s": [1], "values_int64s": [1]}
    fails("LabelEncoder", [text("a")], both, 4)


# Maps


def test_dict_vectorizer_matches_the_reference() -> None:
    ints = {"int64_vocabulary": [7, 1, 2]}
    names = {"string_vocabulary": ["a", "c", "b"]}
    value = np.float32(1.5)
    check_node("DictVectorizer", [{1: value, 7: value * 2}], ints, **ML)
    check_node("DictVectorizer", [{"b": value, "a": value * 2}], names, **ML)
    # The other maps ONNX Runtime takes from no Python.
    check_node("DictVectorizer", [{"b": np.int64(3)}], names, **own([np.array([[0, 0, 3]])]))
    half = [np.array([[0, -2.0, 1.5]], np.float32)]
    check_node("DictVectorizer", [{2: 1.5, 1: np.array(-2.0, np.float32)}], ints, **own(half))
    wide = {1: np.float64(2.5)}
    check_node("DictVectorizer", [wide], ints, **own([np.array([[0, 2.5, 0]])]))
    want = [text("", "y", "x").reshape(1, 3)]
    check_node("DictVectorizer", [{2: "x", 1: "y"}], ints, **own(want))
    fails("DictVectorizer", [{1: np.float32(1)}], {})


@pytest.mark.parametrize("cast", ["TO_FLOAT", "TO_INT64", "TO_STRING"])
@pytest.mark.parametrize("form", [{"map_form": "DENSE"}, {"map_form": "SPARSE", "max_map": 5}])
def test_cast_map_matches_the_reference(cast: str, form: dict[str, Any]) -> None:
    attrs = {**form, "cast_to": cast}
    check_node("CastMap", [{3: np.float32(1.5), 0: np.float32(-2.25)}], attrs, **ML)
    numbers = {3: "12", 0: "-3"}
    wanted = [text("-3", "12")] if form["map_form"] == "DENSE" else None
    if cast != "TO_STRING":
        dtype = np.float32 if cast == "TO_FLOAT" else np.int64
        wanted = [np.array([-3, 12] if wanted else [-3, 0, 0, 12, 0], dtype)]
    elif wanted is None:
        wanted = [text("-3", "0.f", "0.f", "12", "0.f")]
    check_node("CastMap", [numbers], attrs, **own([w[None] for w in wanted]))


def test_cast_map_of_wrong_keys_is_refused() -> None:
    fails("CastMap", [{3: np.float32(1)}], {"map_form": "SPARSE", "max_map": 3})
    with pytest.raises(ValueError, match="three"):
        check_node("CastMap", [{3: "three"}], {"cast_to": "TO_FLOAT"}, **own([None]))
    fails("CastMap", [{3: np.float32(1)}], {"cast_to": "TO_DOUBLE"})


def test_zip_map_matches_the_reference() -> None:
    (rows,) = check_node("ZipMap", [X], {"classlabels_int64s": [4, 5, 6]}, **ML)
    assert rows[0] == {4: 1.0, 5: -2.0, 6: 3.0}
    check_node("ZipMap", [X], {"classlabels_strings": ["a", "b", "c"]}, **ML)
    check_node("ZipMap", [X[0]], {"classlabels_strings": ["a", "b", "c"]}, **ML)
    fails("ZipMap", [X], {"classlabels_int64s": [4, 5]})
    fails("ZipMap", [X], {})


# Types


def test_feature_operations_infer_their_types() -> None:
    def inferred(name: str, types: list[Any], attrs: dict[str, Any]) -> Any:
        op = find(name, "ai.onnx.ml")
        assert op is not None
        return op.infer(types, attrs, [None] * len(types))

    x = TensorType(FLOAT32, ("n", 3))
    assert inferred("Scaler", [TensorType(INT64, ("n", 3))], {}) == (x,)
    indices = TensorType(INT64, (1, 2))
    (kind,) = inferred("ArrayFeatureExtractor", [x, indices], {})
    assert kind == TensorType(FLOAT32, ("n", 2))
    (kind,) = inferred("FeatureVectorizer", [x, x], {"inputdimensions": [3, 3]})
    assert kind == TensorType(FLOAT32, ("n", 6))
    (kind,) = inferred("OneHotEncoder", [TensorType(STRING, ("n",))], {"cats_strings": ["a", "b"]})
    assert kind == TensorType(FLOAT32, ("n", 2))
    (kind,) = inferred("CategoryMapper", [TensorType(STRING, ("n",))], {})
    assert kind == TensorType(INT64, ("n",))
    (kind,) = inferred("ZipMap", [x], {"classlabels_strings": ["a"]})
    assert kind == SequenceType(MapType(STRING, TensorType(FLOAT32, ())))
    pairs = MapType(INT64, TensorType(FLOAT32, ()))
    (kind,) = inferred("DictVectorizer", [pairs], {"int64_vocabulary": [1, 2]})
    assert kind == TensorType(FLOAT32, (1, 2))
    (kind,) = inferred("CastMap", [pairs], {"map_form": "SPARSE", "max_map": 4})
    assert kind == TensorType(FLOAT32, (1, 4))
