"""Compiled ensembles of trees against NumPy's: to the rounding of exp, and of sums in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx.numpy_helper import to_array

import penstock as ps
from penstock.backends.native import trees
from penstock.backends.native.backend import NativeBackend
from penstock.core.types import FLOAT32, STRING, TensorType
from penstock.ops.onnx_ml.trees import regressor
from tests.support.contrib import contrib_model
from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401
from tests.support.tree_models import FEATURES, MODES, Trees, ensemble, rows

ROUNDING = {"rtol": 1e-6, "atol": 1e-7}
TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]


def check_trees(name: str, x: np.ndarray, outputs: int = 1, **attrs: Any) -> None:
    arrays = {n: to_array(v) if hasattr(v, "raw_data") else v for n, v in attrs.items()}
    version = 5 if name == "TreeEnsemble" else 3
    node = node_of(name, [x], (), outputs, "ai.onnx.ml", version, **arrays)
    with np.errstate(all="ignore"):  # PROBIT of what is no probability
        check(node, [x], ROUNDING)


@pytest.mark.parametrize("modes", [[mode] for mode in MODES] + [MODES])
@pytest.mark.parametrize("count", [1, 7, 8, 150])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_trees_of_all_modes_equal_numpy(modes, count, dtype):
    rng = np.random.default_rng(count)
    forest = Trees(rng, 11, 5, modes, True)
    votes = forest.votes("target", [0], True, False)
    x = rows(rng, count, missing=dtype[0] == "f")
    if dtype[0] == "i":
        x = np.nan_to_num(x)
    check_trees("TreeEnsembleRegressor", x.astype(dtype), **forest.lists, **votes)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -0.0, np.finfo(np.float32).max])
@pytest.mark.parametrize("mode", MODES)
def test_trees_with_special_thresholds_equal_numpy(mode, value):
    forest = Trees(np.random.default_rng(1), 3, 3, [mode], True)
    values = [value if v else -value for v in forest.lists["nodes_values"]]
    lists = {**forest.lists, "nodes_values": values}
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, value, 1], np.float32)
    x = np.random.default_rng(2).choice(special, (60, FEATURES))
    check_trees("TreeEnsembleRegressor", x, **lists, **forest.votes("target", [0], True, False))


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("several", [False, True])
def test_tree_regressor_aggregates_and_transforms_as_numpy(aggregate, transform, targets, several):
    rng = np.random.default_rng(targets)
    forest = Trees(rng, 5, 4, ["BRANCH_LEQ"], False)
    attrs = {
        **forest.lists,
        **forest.votes("target", list(range(targets)), False, several),
        "n_targets": targets,
        "aggregate_function": aggregate,
        "post_transform": transform,
        "base_values": [0.125] * targets,
    }
    check_trees("TreeEnsembleRegressor", rows(rng), **attrs)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    ("ids", "labels"),
    [([0], [4, 9]), ([1], [4, 9]), ([0, 1], ["no", "yes"]), ([0], [1]), ([0, 1, 2], list("abc"))],
)
def test_tree_classifier_equals_numpy(ids, labels, signed, transform):
    rng = np.random.default_rng(7)
    forest = Trees(rng, 9, 4, ["BRANCH_LEQ"], False)
    texts = isinstance(labels[0], str)
    attrs = {
        **forest.lists,
        **forest.votes("class", ids, signed, len(ids) > 1),
        "post_transform": transform,
        "classlabels_strings" if texts else "classlabels_int64s": labels,
    }
    for count in (1, 40):
        check_trees("TreeEnsembleClassifier", rows(rng, count), 2, **attrs)


@pytest.mark.parametrize("aggregate", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tree_ensemble_with_members_equals_numpy(aggregate, dtype):
    rng = np.random.default_rng(11)
    attrs, _ = ensemble(rng, dtype, True)
    x = rows(rng, missing=True).astype(dtype)
    check_trees("TreeEnsemble", x, **attrs, aggregate_function=aggregate, post_transform=2)


def test_tree_ensemble_with_shared_nodes_and_roots_equals_numpy():
    attrs = {
        "tree_roots": [0, 1, 0],
        "nodes_modes": np.array([0, 0, 4], np.uint8),
        "nodes_featureids": [0, 1, 2],
        "nodes_splits": np.array([0, 0.5, 1], np.float32),
        "nodes_truenodeids": [1, 0, 2],
        "nodes_trueleafs": [0, 1, 1],
        "nodes_falsenodeids": [2, 2, 1],
        "nodes_falseleafs": [0, 0, 1],
        "leaf_weights": np.array([1, 2, 4], np.float32),
        "leaf_targetids": [0, 0, 0],
    }
    check_trees("TreeEnsemble", rows(np.random.default_rng(3)), **attrs)


@pytest.mark.parametrize("targets", [100, 3000])
def test_tree_regressor_of_many_targets_equals_numpy(targets):
    rng = np.random.default_rng(5)
    forest = Trees(rng, 3, 5, ["BRANCH_LT"], False)
    attrs = {**forest.lists, **forest.votes("target", list(range(targets)), True, True)}
    check_trees("TreeEnsembleRegressor", rows(rng, 9), **attrs, n_targets=targets)


def chain_of_equalities(values: Sequence[float], missing: Sequence[int], mode: str) -> dict:
    """A tree whose leaf of weight 1 is reached where a feature has one of the values, the other one
    elsewhere. Converters of categories write such trees, with one leaf, or subtree, for all."""
    k = len(values)
    ends, nexts = [k] * k, [*range(1, k), k + 1]
    true, false = (ends, nexts) if mode == "BRANCH_EQ" else (nexts, ends)
    return {
        "nodes_treeids": [0] * (k + 2),
        "nodes_nodeids": [*range(k + 2)],
        "nodes_featureids": [1] * k + [0, 0],
        "nodes_values": [*values, 0.0, 0.0],
        "nodes_modes": [mode] * k + ["LEAF"] * 2,
        "nodes_truenodeids": [*true, 0, 0],
        "nodes_falsenodeids": [*false, 0, 0],
        "nodes_missing_value_tracks_true": [*missing, 0, 0],
        "target_treeids": [0, 0],
        "target_nodeids": [k, k + 1],
        "target_ids": [0, 0],
        "target_weights": [1.0, -1.0],
    }


def session_of(attrs: dict, x: np.ndarray) -> ps.Session:
    model = contrib_model("TreeEnsembleRegressor", [x], attrs, domain="ai.onnx.ml")
    return ps.compile(model, backends=["native", "numpy"], cache=False)


@pytest.mark.parametrize("mode", ["BRANCH_EQ", "BRANCH_NEQ"])
@pytest.mark.parametrize(
    "values", [[7, 3, 8, 4], [5], [2, 2, 1], [np.inf, -np.inf, 0], [1, np.nan]]
)
@pytest.mark.parametrize("tracks", [False, True])
def test_chain_of_equalities_finds_the_values(mode, values, tracks):
    attrs = chain_of_equalities(values, [int(tracks)] * len(values), mode)
    special = [np.inf, -np.inf, np.nan, np.nextafter(np.float32(3), np.float32(0)), 3.5]
    x = np.zeros((16, 2), np.float32)
    x[:, 1] = [*range(-1, 10), *special]
    session = session_of(attrs, x)
    found = np.isin(x[:, 1], np.array(values, np.float32))
    if mode == "BRANCH_EQ" and tracks:  # NaN differs from all numbers
        found |= np.isnan(x[:, 1])
    np.testing.assert_array_equal(session.run({"x0": x})["y0"][:, 0], np.where(found, 1, -1))
    assert [step.backend for step in session.inspect.plan.steps] == ["native"]


def test_chain_of_equalities_is_searched_in_logarithmic_depth():
    attrs = chain_of_equalities([*range(31)], [0] * 31, "BRANCH_EQ")
    x = np.zeros((8, 2), np.float32)
    session = session_of(attrs, x)
    session.run({"x0": x})
    packed = trees._pack(regressor(session.inspect.plan.steps[0].node.attrs))
    assert packed is not None
    level, depth = packed.roots, 0
    while (below := np.setdiff1d(packed.nodes["child"][level], level)).size:
        level, depth = np.union1d(below, below + 1), depth + 1
    assert depth <= 7  # 63 intervals, and a leaf that several tests lead to


def test_trees_that_look_at_absent_features_have_no_compiled_kernel():
    forest = Trees(np.random.default_rng(1), 3, 3, ["BRANCH_LEQ"], False)
    x = np.zeros((2, FEATURES), np.float32)
    attrs = {**forest.lists, **forest.votes("target", [0], True, False)}
    node = node_of("TreeEnsembleRegressor", [x], (), 1, "ai.onnx.ml", 3, **attrs)
    assert kernel_of(node, LIBRARIES[0]) is not None
    few = NativeBackend(LIBRARIES[0]).kernel(node, [TensorType(FLOAT32, (2, 1))])
    assert few is None


def test_tree_classifier_of_strings_returns_python_strings():
    forest = Trees(np.random.default_rng(1), 3, 3, ["BRANCH_LEQ"], False)
    attrs = {**forest.lists, **forest.votes("class", [0, 1], True, True)}
    x = rows(np.random.default_rng(2), 3)
    node = node_of(
        *("TreeEnsembleClassifier", [x], (), 2, "ai.onnx.ml", 3),
        **{**attrs, "classlabels_strings": ["no", "yes"]},
    )
    labels, _ = kernel_of(node, LIBRARIES[0]).function(x)
    assert labels.dtype == STRING
    assert {type(label) for label in labels} == {str}
