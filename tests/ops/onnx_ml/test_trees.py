"""Ensembles of trees, against ONNX Runtime and against trees walked one row at a time."""

from typing import Any

import numpy as np
import pytest
from onnx.numpy_helper import from_array

from penstock.core.types import FLOAT32, STRING, ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node
from tests.support.tree_models import MODES, Trees, ensemble, rows

TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"]


def ml(opset: int = 1, expected: Any = "ort") -> dict[str, Any]:
    return {"domain": "ai.onnx.ml", "opset": opset, "expected": expected}


# TreeEnsembleRegressor


@pytest.mark.parametrize("modes", [[m] for m in MODES] + [MODES])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("trees, depth", [(1, 1), (1, 6), (7, 4), (60, 5)])
def test_tree_modes_and_missing_values(
    modes: list[str], missing: bool, trees: int, depth: int
) -> None:
    rng = np.random.default_rng(depth + trees)
    forest = Trees(rng, trees, depth, modes, missing)
    attrs = {**forest.lists, **forest.votes("target", [0], True, False), "n_targets": 1}
    check_node("TreeEnsembleRegressor", [rows(rng, missing=missing)], attrs, **ml())


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("base", [False, True])
def test_tree_aggregates_matches_the_reference(
    aggregate: str, targets: int, several: bool, base: bool
) -> None:
    rng = np.random.default_rng(targets)
    forest = Trees(rng, 40, 4, ["BRANCH_LEQ"], False)
    votes = forest.votes("target", list(range(targets)), True, several)
    attrs: dict[str, Any] = {
        **forest.lists,
        **votes,
        "n_targets": targets,
        "aggregate_function": aggregate,
    }
    if base:
        attrs["base_values"] = [10.0 * (i + 1) for i in range(targets)]
    x = rows(rng)
    options = {"rtol": 1e-4, "atol": 1e-5}
    check_node("TreeEnsembleRegressor", [x], attrs, **ml(), **options)
    check_node("TreeEnsembleRegressor", [x.astype(np.float64)], attrs, **ml(), **options)
    check_node("TreeEnsembleRegressor", [x[:1]], attrs, **ml(), **options)
    check_node("TreeEnsembleRegressor", [x], attrs, **ml(3), **options)


@pytest.mark.parametrize("transform", [*TRANSFORMS, "PROBIT"])
@pytest.mark.parametrize("targets", [1, 3])
def test_tree_transforms_of_regressions(transform: str, targets: int) -> None:
    rng = np.random.default_rng(3)
    forest = Trees(rng, 9, 4, ["BRANCH_LT"], False)
    attrs = {
        **forest.lists,
        **forest.votes("target", list(range(targets)), False, True),
        "n_targets": targets,
        "post_transform": transform,
    }
    tolerance = 1e-3 if transform == "PROBIT" else 1e-4  # itself approximate
    options: dict[str, Any] = {**ml(), "rtol": tolerance, "atol": tolerance}
    check_node("TreeEnsembleRegressor", [rows(rng)], attrs, **options)


def test_tree_double_thresholds_matches_the_reference() -> None:
    rng = np.random.default_rng(4)
    forest = Trees(rng, 5, 4, ["BRANCH_LEQ"], False)
    attrs = {**forest.lists, **forest.votes("target", [0], True, False), "n_targets": 1}
    nudged = np.array(attrs.pop("nodes_values")) + 1e-12
    attrs["nodes_values_as_tensor"] = from_array(nudged)
    attrs["target_weights_as_tensor"] = from_array(np.array(attrs.pop("target_weights"), float))
    x = rows(rng).astype(np.float64)
    check_node("TreeEnsembleRegressor", [x], attrs, **ml(3))
    check_node("TreeEnsembleRegressor", [x + 1e-11], attrs, **ml(3))


def test_tree_integers_and_single_rows() -> None:
    rng = np.random.default_rng(5)
    forest = Trees(rng, 5, 4, ["BRANCH_LEQ"], False)
    attrs = {**forest.lists, **forest.votes("target", [0], True, False), "n_targets": 1}
    x = np.rint(rows(rng))
    (y,) = check_node("TreeEnsembleRegressor", [x], attrs, **ml())
    for dtype in (np.int32, np.int64):
        check_node("TreeEnsembleRegressor", [x.astype(dtype)], attrs, **ml(expected=[y]))
    check_node("TreeEnsembleRegressor", [x[0]], attrs, **ml(expected=[y[:1]]))
    check_node("TreeEnsembleRegressor", [x[:0]], attrs, **ml(expected=[y[:0]]))


def test_tree_more_rows_than_a_chunk() -> None:
    rng = np.random.default_rng(6)
    forest = Trees(rng, 100, 3, ["BRANCH_LEQ"], False)
    attrs = {**forest.lists, **forest.votes("target", [0, 1], True, True), "n_targets": 2}
    x = rows(rng, 1000)
    check_node("TreeEnsembleRegressor", [x], attrs, **ml(), rtol=1e-4, atol=1e-5)


# TreeEnsembleClassifier


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("ids", [[0], [1]])
@pytest.mark.parametrize("names", [False, True])
def test_tree_classifier_of_two_classes_with_one_score(
    transform: str, signed: bool, ids: list[int], names: bool
) -> None:
    rng = np.random.default_rng(7)
    forest = Trees(rng, 9, 4, ["BRANCH_LEQ"], False)
    attrs = {**forest.lists, **forest.votes("class", ids, signed, False)}
    attrs["post_transform"] = transform
    attrs.update({"classlabels_strings": ["a", "b"]} if names else {"classlabels_int64s": [4, 9]})
    options: dict[str, Any] = {**ml(), "outputs": 2, "rtol": 1e-4, "atol": 1e-5}
    x = rows(rng)
    check_node("TreeEnsembleClassifier", [x], attrs, **options)
    check_node("TreeEnsembleClassifier", [x.astype(np.float64)], attrs, **options)
    check_node("TreeEnsembleClassifier", [np.rint(x).astype(np.int64)], attrs, **options)
    check_node("TreeEnsembleClassifier", [np.rint(x).astype(np.int32)], attrs, **options)
    if ids == [0]:
        attrs["base_values"] = [0.125]
        check_node("TreeEnsembleClassifier", [x], attrs, **options)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("base", [False, True])
def test_tree_classifier_of_many_classes(transform: str, several: bool, base: bool) -> None:
    rng = np.random.default_rng(8)
    forest = Trees(rng, 30, 4, ["BRANCH_LEQ"], True)
    attrs = {**forest.lists, **forest.votes("class", [0, 1, 2, 3], True, several)}
    attrs |= {"post_transform": transform, "classlabels_int64s": [7, 5, 3, 1]}
    if base:
        attrs["base_values"] = [0.1, 0.2, 0.3, 0.0]
    options: dict[str, Any] = {**ml(), "outputs": 2, "rtol": 1e-4, "atol": 1e-5}
    check_node("TreeEnsembleClassifier", [rows(rng, missing=True)], attrs, **options)


def test_tree_classifier_of_two_scores_labels_the_higher() -> None:
    rng = np.random.default_rng(9)
    forest = Trees(rng, 9, 4, ["BRANCH_LEQ"], False)
    attrs = {**forest.lists, **forest.votes("class", [0, 1], False, True)}
    regressor = {name.replace("class_", "target_"): value for name, value in attrs.items()}
    x = rows(rng)
    (scores,) = check_node("TreeEnsembleRegressor", [x], {**regressor, "n_targets": 2}, **ml())
    # The labels of ONNX Runtime are none of those given.
    want = [np.array([4, 9])[scores.argmax(1)], scores]
    attrs["classlabels_int64s"] = [4, 9]
    check_node("TreeEnsembleClassifier", [x], attrs, outputs=2, **ml(expected=want))


def test_tree_classifier_of_a_single_class() -> None:
    rng = np.random.default_rng(10)
    forest = Trees(rng, 9, 4, ["BRANCH_LEQ"], False)
    attrs = {**forest.lists, **forest.votes("class", [0], True, False)}
    attrs["classlabels_int64s"] = [1]
    check_node("TreeEnsembleClassifier", [rows(rng)], attrs, outputs=2, **ml())


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_tree_with_several_weights_of_a_leaf_for_its_only_target_counts_the_first(
    aggregate: str,
) -> None:
    rng = np.random.default_rng(11)
    forest = Trees(rng, 3, 4, ["BRANCH_LEQ"], False)
    attrs = {**forest.lists, **forest.votes("target", [0, 0, 0], True, True)}
    attrs |= {"n_targets": 1, "aggregate_function": aggregate, "base_values": [0.5]}
    check_node("TreeEnsembleRegressor", [rows(rng)], attrs, **ml(3))


# TreeEnsemble


@pytest.mark.parametrize("aggregate", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("members", [False, True])
def test_tree_ensemble_equals_walking_its_trees(aggregate: int, dtype: type, members: bool) -> None:
    rng = np.random.default_rng(11)
    attrs, walk = ensemble(rng, dtype, members)
    attrs["aggregate_function"] = aggregate
    x = rows(rng, missing=True).astype(dtype)
    want = np.zeros((len(x), 2))
    for result, row in zip(want, x, strict=True):
        found = walk(row)
        for target in range(2):
            weights = [w for w, t in found if t == target] or [0.0]
            total = [sum(weights) / 6, sum(weights), min(weights), max(weights)]
            result[target] = total[aggregate]
    check_node("TreeEnsemble", [x], attrs, **ml(5, [want.astype(dtype)]))
    if not members:
        check_node("TreeEnsemble", [x], attrs, **ml(5), rtol=1e-4, atol=1e-5)


def test_tree_transforms_of_ensembles() -> None:
    rng = np.random.default_rng(12)
    attrs, _ = ensemble(rng, np.float32, False)
    x = rows(rng)
    (scores,) = check_node("TreeEnsemble", [x], attrs, **ml(5), rtol=1e-4, atol=1e-5)
    # ONNX Runtime has the numbers of these two the other way round.
    powers = np.exp(scores)
    wanted = {1: powers / powers.sum(1, keepdims=True), 2: 1 / (1 + 1 / powers)}
    for transform, want in wanted.items():
        attrs["post_transform"] = transform
        check_node("TreeEnsemble", [x], attrs, **ml(5, [want]))
    attrs["post_transform"] = 3
    check_node("TreeEnsemble", [x], attrs, **ml(5), rtol=1e-4, atol=1e-5)


def test_tree_ensemble_of_float16() -> None:
    rng = np.random.default_rng(13)
    attrs, _ = ensemble(rng, np.float16, True)
    x = rows(rng)
    (y,) = check_node(
        "TreeEnsemble", [x.astype(np.float16)], attrs, **ml(5, "reference"), rtol=0.01
    )
    assert y.dtype == np.float16


def test_tree_of_a_single_leaf() -> None:
    attrs = {
        "tree_roots": [0],
        "nodes_modes": from_array(np.array([0], np.uint8)),
        "nodes_featureids": [0],
        "nodes_splits": from_array(np.array([0.0], np.float32)),
        "nodes_truenodeids": [0],
        "nodes_falsenodeids": [0],
        "nodes_trueleafs": [1],
        "nodes_falseleafs": [1],
        "leaf_weights": from_array(np.array([2.5], np.float32)),
        "leaf_targetids": [0],
        "n_targets": 1,
    }
    check_node("TreeEnsemble", [np.ones((3, 1), np.float32)], attrs, **ml(5))


# What does not fit

SMALL: dict[str, Any] = {
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [1, 0, 0],
    "nodes_values": [0.5, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
    "target_treeids": [0, 0],
    "target_nodeids": [1, 2],
    "target_ids": [0, 0],
    "target_weights": [1.0, 2.0],
    "n_targets": 1,
}


@pytest.mark.parametrize(
    "bad, says",
    [
        ({"nodes_truenodeids": [7, 0, 0]}, "a child refers to a tree"),
        ({"nodes_truenodeids": [0, 0, 0]}, "a tree node refers to itself"),
        ({"nodes_falsenodeids": [0, 0, 0]}, "descendants"),
        ({"nodes_featureids": [-1, 0, 0]}, "negative"),
        ({"nodes_featureids": [2, 0, 0]}, "but the input has"),
        ({"nodes_modes": ["BRANCH_IN", "LEAF", "LEAF"]}, "BRANCH_IN"),
        ({"nodes_nodeids": [0, 1, 1]}, "nodes_nodeids must be unique within a"),
        ({"nodes_values": [0.5]}, "nodes_values"),
        ({"nodes_modes": ["BRANCH_LEQ"]}, "nodes_modes"),
        ({"target_nodeids": [1, 3]}, "does not exist"),
        ({"target_ids": [0, 1]}, "target 1"),
        ({"target_weights": [1.0]}, "length"),
        ({"base_values": [1.0, 2.0]}, "base_values"),
        ({"aggregate_function": "MEDIAN"}, "aggregate_function"),
        ({"post_transform": "TANH"}, "post_transform"),
        (
            {
                "nodes_modes": ["BRANCH_LEQ"] * 2 + ["LEAF"],
                "nodes_truenodeids": [1, 0, 0],
                "nodes_falsenodeids": [2, 2, 0],
            },
            "root|descendants",
        ),
    ],
)
def test_tree_ensemble_of_wrong_attributes_is_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        x = np.ones((3, 2), np.float32)
        check_node("TreeEnsembleRegressor", [x], {**SMALL, **bad}, **ml(expected=[None]))


def test_tree_infers_its_types() -> None:
    x = TensorType(FLOAT32, ("n", 3))
    regressor, classifier = (
        find(f"TreeEnsemble{kind}", "ai.onnx.ml") for kind in ("Regressor", "Classifier")
    )
    assert regressor is not None
    assert classifier is not None
    assert regressor.infer([x], {"n_targets": 2}, []) == (TensorType(FLOAT32, ("n", 2)),)
    assert classifier.infer([x], {"classlabels_strings": ["a", "b", "c"]}, []) == (
        TensorType(STRING, ("n",)),
        TensorType(FLOAT32, ("n", 3)),
    )
