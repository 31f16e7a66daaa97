"""Cases of ``bench.operators``: the operations of ai.onnx.ml."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from onnx import numpy_helper
from tests.support.tree_models import Trees, rows

from bench.operator_cases import ML, Draw, Node, operator_case

ml_case = partial(operator_case, domain=ML)

# Features: rows, columns.

TABLE = (1, 8), (500, 64), (8000, 64)


def _words(draw: Draw, count: int, *shape: int) -> tuple[list[str], np.ndarray]:
    """``count`` words, and texts of which nine in ten are among them."""
    words = [f"category {i}" for i in range(count)]
    more = np.array([*words, *(f"other {i}" for i in range(count // 8 + 1))], object)
    return words, more[draw.whole(len(more), *shape)]


@ml_case("ArrayFeatureExtractor", (1, 8), (1000, 64), (20_000, 64))
def array_feature_extractor(draw: Draw, *shape: int) -> Node:
    return Node([draw.real(*shape), draw.whole(shape[1], 1, shape[1] // 2)])


@ml_case("Binarizer", *TABLE)
def binarizer(draw: Draw, *shape: int) -> Node:
    return Node([draw.real(*shape)], {"threshold": 0.5})


@ml_case("FeatureVectorizer", (1, 8), (128, 64), (4096, 64))
def feature_vectorizer(draw: Draw, *shape: int) -> Node:
    return Node([draw.real(*shape) for _ in range(3)], {"inputdimensions": [shape[1]] * 3})


@ml_case("Imputer", *TABLE)
def imputer(draw: Draw, count: int, width: int) -> Node:
    """One in ten elements is missing."""
    x = np.where(draw.rng.random((count, width)) < 0.1, np.nan, draw.real(count, width))
    attrs = {"imputed_value_floats": draw.real(width).tolist(), "replaced_value_float": np.nan}
    return Node([x.astype(np.float32)], attrs)


@ml_case("Normalizer", *TABLE)
def normalizer(draw: Draw, *shape: int) -> Node:
    return Node([draw.real(*shape)], {"norm": "L2"})


@ml_case("Scaler", *TABLE)
def scaler(draw: Draw, count: int, width: int) -> Node:
    attrs = {"offset": draw.real(width).tolist(), "scale": draw.real(width).tolist()}
    return Node([draw.real(count, width)], attrs)


# Categories: values, and how many there are.


@ml_case("CategoryMapper", (4, 8), (500, 100), (20_000, 1000))
def category_mapper(draw: Draw, count: int, categories: int) -> Node:
    words, x = _words(draw, categories, count)
    return Node([x], {"cats_strings": words, "cats_int64s": [*range(categories)]})


@ml_case("LabelEncoder", (4, 8), (500, 100), (20_000, 1000), form="texts", version=4)
def label_encoder_of_texts(draw: Draw, count: int, categories: int) -> Node:
    words, x = _words(draw, categories, count)
    return Node([x], {"keys_strings": words, "values_int64s": [*range(categories)]})


@ml_case("LabelEncoder", (4, 8), (10_000, 100), (200_000, 1000), form="integers", version=4)
def label_encoder_of_integers(draw: Draw, count: int, categories: int) -> Node:
    keys = [7 * i for i in range(categories)]
    attrs = {"keys_int64s": keys, "values_floats": draw.real(categories).tolist()}
    return Node([7 * draw.whole(categories + categories // 8 + 1, count)], attrs)


@ml_case("OneHotEncoder", (4, 8), (4000, 20), (50_000, 100), form="integers")
def one_hot_encoder(draw: Draw, count: int, categories: int) -> Node:
    return Node([draw.whole(categories + 1, count)], {"cats_int64s": [*range(categories)]})


@ml_case("OneHotEncoder", (4, 8), (500, 20), (20_000, 50), form="texts")
def one_hot_encoder_of_texts(draw: Draw, count: int, categories: int) -> Node:
    words, x = _words(draw, categories, count)
    return Node([x], {"cats_strings": words})


# Maps: entries, and for ZipMap rows and classes.


@ml_case("CastMap", (4,), (200,), (10_000,))
def cast_map(draw: Draw, count: int) -> Node:
    values = draw.real(count)
    return Node([dict(enumerate(values))], {"cast_to": "TO_FLOAT", "map_form": "DENSE"})


@ml_case("DictVectorizer", (4, 8), (100, 200), (4000, 10_000))
def dict_vectorizer(draw: Draw, count: int, vocabulary: int) -> Node:
    words, _ = _words(draw, vocabulary)
    chosen = draw.rng.choice(vocabulary, count, replace=False)
    values = {words[i]: value for i, value in zip(chosen, draw.real(count), strict=True)}
    return Node([values], {"string_vocabulary": words})


@ml_case("ZipMap", (1, 3), (32, 10), (1000, 10), form="texts")
def zip_map(draw: Draw, count: int, classes: int) -> Node:
    words, _ = _words(draw, classes)
    return Node([draw.real(count, classes)], {"classlabels_strings": words})


@ml_case("ZipMap", (1, 3), (32, 10), (1000, 10), form="integers")
def zip_map_of_integers(draw: Draw, count: int, classes: int) -> Node:
    return Node([draw.real(count, classes)], {"classlabels_int64s": [*range(classes)]})


# Linear models and support vector machines: rows, features, classes or vectors.


@ml_case("LinearClassifier", (1, 8, 3), (512, 32, 10), (4096, 64, 20))
def linear_classifier(draw: Draw, count: int, width: int, classes: int) -> Node:
    attrs = {
        "coefficients": draw.real(classes * width).tolist(),
        "intercepts": draw.real(classes).tolist(),
        "classlabels_ints": [*range(classes)],
        "post_transform": "SOFTMAX",
    }
    return Node([draw.real(count, width)], attrs, 2)


@ml_case("LinearRegressor", (1, 8, 1), (1000, 64, 4), (20_000, 64, 4))
def linear_regressor(draw: Draw, count: int, width: int, targets: int) -> Node:
    attrs = {
        "coefficients": draw.real(targets * width).tolist(),
        "intercepts": draw.real(targets).tolist(),
        "targets": targets,
    }
    return Node([draw.real(count, width)], attrs)


def _vectors(draw: Draw, count: int, width: int, coefficients: int) -> dict[str, Any]:
    return {
        "kernel_type": "RBF",
        "kernel_params": [1.0 / width, 0.0, 3.0],
        "support_vectors": draw.real(count * width).tolist(),
        "coefficients": draw.real(coefficients).tolist(),
    }


@ml_case("SVMClassifier", (1, 8, 12), (32, 16, 60), (128, 32, 300))
def svm_classifier(draw: Draw, count: int, width: int, vectors: int) -> Node:
    """Of three classes, with probabilities."""
    attrs = _vectors(draw, vectors, width, 2 * vectors)
    attrs |= {"vectors_per_class": [vectors // 3] * 3, "classlabels_ints": [0, 1, 2]}
    attrs |= {key: draw.real(3).tolist() for key in ("rho", "prob_a", "prob_b")}
    return Node([draw.real(count, width)], attrs, 2)


@ml_case("SVMRegressor", (1, 8, 12), (32, 16, 60), (128, 32, 300))
def svm_regressor(draw: Draw, count: int, width: int, vectors: int) -> Node:
    attrs = _vectors(draw, vectors, width, vectors)
    attrs |= {"n_supports": vectors, "rho": draw.real(1).tolist()}
    return Node([draw.real(count, width)], attrs)


# Trees: rows, trees, and their depth.

FORESTS = (1, 4, 3), (64, 50, 6), (1000, 100, 6)


@ml_case("TreeEnsembleRegressor", *FORESTS)
@ml_case("TreeEnsembleRegressor", (1, 10, 4), (1, 100, 6), (1, 1000, 8), form="1 row")
def tree_regressor(draw: Draw, count: int, trees: int, depth: int) -> Node:
    forest = Trees(draw.rng, trees, depth, ["BRANCH_LEQ"], False)
    attrs = {**forest.lists, **forest.votes("target", [0], True, False), "n_targets": 1}
    return Node([rows(draw.rng, count)], attrs)


@ml_case("TreeEnsembleClassifier", *FORESTS)
@ml_case("TreeEnsembleClassifier", (1, 10, 4), (1, 100, 6), (1, 1000, 8), form="1 row")
def tree_classifier(draw: Draw, count: int, trees: int, depth: int) -> Node:
    forest = Trees(draw.rng, trees, depth, ["BRANCH_LEQ"], False)
    attrs = {**forest.lists, **forest.votes("class", [0, 1, 2], False, True)}
    attrs |= {"classlabels_int64s": [0, 1, 2], "post_transform": "SOFTMAX"}
    return Node([rows(draw.rng, count)], attrs, 2)


@ml_case("TreeEnsemble", *FORESTS, version=5)
def tree_ensemble(draw: Draw, count: int, trees: int, depth: int) -> Node:
    forest = Trees(draw.rng, trees, depth, ["BRANCH_LEQ"], False)
    return Node([rows(draw.rng, count)], _joined(forest, draw))


def _joined(forest: Trees, draw: Draw) -> dict[str, Any]:
    """The attributes of TreeEnsemble, which numbers the nodes of all trees, and leaves apart."""
    columns = {name.removeprefix("nodes_"): values for name, values in forest.lists.items()}
    places: dict[tuple[int, int], tuple[int, bool]] = {}
    inner: list[int] = []
    for i, (tree, number) in enumerate(zip(columns["treeids"], columns["nodeids"], strict=True)):
        is_leaf = columns["modes"][i] == "LEAF"
        places[tree, number] = len(places) - len(inner) if is_leaf else len(inner), is_leaf
        inner += [] if is_leaf else [i]
    leaves = len(places) - len(inner)
    splits = np.array([columns["values"][i] for i in inner], np.float32)
    attrs: dict[str, Any] = {
        "tree_roots": [place for (_, number), (place, _) in places.items() if number == 0],
        "nodes_modes": numpy_helper.from_array(np.zeros(len(inner), np.uint8)),
        "nodes_featureids": [columns["featureids"][i] for i in inner],
        "nodes_splits": numpy_helper.from_array(splits),
        "leaf_weights": numpy_helper.from_array(draw.real(leaves)),
        "leaf_targetids": [0] * leaves,
        "n_targets": 1,
        "aggregate_function": 1,
    }
    for side in ("true", "false"):
        children = [places[columns["treeids"][i], columns[f"{side}nodeids"][i]] for i in inner]
        attrs[f"nodes_{side}nodeids"] = [place for place, _ in children]
        attrs[f"nodes_{side}leafs"] = [int(is_leaf) for _, is_leaf in children]
    return attrs
