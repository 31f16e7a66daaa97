"""Ensembles of decision trees (domain ai.onnx.ml): TreeEnsemble and the operations it replaced.

All rows descend all trees at once: an array holds the current node of each row in each tree, and a
level takes a few operations on whole arrays, for the rows that have not reached a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, TypeVar

import numpy as np

from penstock.core.records import NamedTuple, dataclass, field
from penstock.core.types import FLOAT32, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.constant_cache import by_attributes
from penstock.ops.common.dtypes import FLOAT64
from penstock.ops.common.shape_rules import choice, tensor
from penstock.ops.onnx_ml import models
from penstock.ops.onnx_ml.features import operator
from penstock.ops.registry import ArrayFunction

CHUNK = 2**16
"""(row, tree) pairs processed together, which fit into a second-level cache"""
_TIDY = 4
"""number of levels between compactions, which drop rows that have reached a leaf"""

# The results of the comparison with the threshold for which a mode takes the true branch.
LESS, EQUAL, GREATER = 1, 2, 4
_MODES: Mapping[str, int] = {
    "BRANCH_LEQ": LESS | EQUAL,
    "BRANCH_LT": LESS,
    "BRANCH_GTE": GREATER | EQUAL,
    "BRANCH_GT": GREATER,
    "BRANCH_EQ": EQUAL,
    "BRANCH_NEQ": LESS | GREATER,
}
_BY_NUMBER = (*_MODES.values(), EQUAL)  # in TreeEnsemble; the last is BRANCH_MEMBER
_MEMBER = 6
AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


class TreeNodes(NamedTuple):
    """The nodes of all trees as parallel arrays: the feature that is compared with the threshold,
    the mode of the comparison, whether a missing value takes the true branch, and the children.
    Both children of a leaf are the leaf itself.
    """

    feature: np.ndarray
    threshold: np.ndarray
    mode: np.ndarray
    missing: np.ndarray
    true: np.ndarray
    false: np.ndarray


class Forest:
    """The nodes of several trees, and their roots."""

    def __init__(self, roots: Sequence[int] | np.ndarray, nodes: TreeNodes) -> None:
        """Check that indices are in range, and that the nodes have no cycles."""
        feature, threshold, mode, missing, true, false = nodes
        count = len(feature)
        inner = true != np.arange(count)
        if not len(roots):
            raise ShapeError("the ensemble has no trees")
        for array, what in ((true, "child"), (false, "child"), (np.asarray(roots), "root")):
            if array.size and (array.min() < 0 or array.max() >= count):
                raise ShapeError(f"a {what} refers to a tree node that does not exist")
        if (feature[inner] < 0).any():
            raise ShapeError("the feature indices of tree nodes must not be negative")
        self.roots, self.feature = np.asarray(roots, np.intp), feature.astype(np.intp)
        self.threshold, self.mode, self.leaf = threshold, mode, ~inner
        # Whether NaN takes the true branch: only the comparison "not equal" is true for NaN.
        self.missing = missing.astype(np.bool_) | (mode == LESS | GREATER)
        # The false child of node i is at 2 * i, the true one at 2 * i + 1.
        self.children = np.stack([false, true], 1).astype(np.intp).reshape(-1)
        # The minimum number of features of an input.
        self.features = int(feature[inner].max(initial=-1)) + 1
        self.depth = _depth(true, false, inner)  # upper bound of the steps from a root to a leaf

    def leaves(self, x: np.ndarray) -> np.ndarray:
        """The leaf [trees, N] that each row of ``x`` reaches in each tree."""
        rows, width = x.shape
        nodes = np.repeat(self.roots, rows)
        first = np.tile(np.arange(rows) * width, len(self.roots))  # where a row begins in flat
        flat = np.ascontiguousarray(x).reshape(-1)
        only = self.mode[0] if (self.mode == self.mode[0]).all() else None
        has_nan = x.dtype.kind == "f" and bool(np.isnan(x).any())
        reached, going = nodes, None
        for level in range(1, self.depth + 1):
            # np.take without bounds checks is faster than indexing.
            values = np.take(flat, first + np.take(self.feature, nodes, mode="clip"), mode="clip")
            thresholds = np.take(self.threshold, nodes, mode="clip")
            passes = self._passes(values, thresholds, nodes, only)
            # For NaN, the node's flag decides instead of the comparison.
            if has_nan:
                passes |= (values != values) & self.missing[nodes]
            nodes = np.take(self.children, 2 * nodes + passes, mode="clip")
            if level % _TIDY == 0:
                # Rows that have reached a leaf need no further steps.
                on = np.flatnonzero(~self.leaf[nodes])
                if going is None:
                    reached, going = nodes, on
                else:
                    reached[going] = nodes
                    going = going[on]
                nodes, first = nodes[on], first[on]
        if going is None:
            reached = nodes
        else:
            reached[going] = nodes
        return reached.reshape(len(self.roots), rows)

    def _passes(
        self, values: np.ndarray, thresholds: np.ndarray, nodes: np.ndarray, only: int | None
    ) -> np.ndarray:
        if only is not None:
            return _COMPARE[only](values, thresholds)
        mode = self.mode[nodes]
        passes = (values < thresholds) & (mode & LESS > 0)
        passes |= (values == thresholds) & (mode & EQUAL > 0)
        passes |= (values > thresholds) & (mode & GREATER > 0)
        return passes


def _depth(true: np.ndarray, false: np.ndarray, inner: np.ndarray) -> int:
    """The length of the longest path. Raises ``ShapeError`` for cycles. Kahn's algorithm
    (Communications of the ACM 5, 1962), one level at a time."""
    parents = np.bincount(np.concatenate([true[inner], false[inner]]), minlength=len(true))
    shares = parents.max(initial=0) > 1  # some nodes have several parents
    level, done, depth = np.flatnonzero(parents == 0), 0, -1
    while len(level):
        done += len(level)
        depth += 1
        level = level[inner[level]]
        level = np.concatenate([true[level], false[level]])
        if shares:
            np.subtract.at(parents, level, 1)
            level = np.unique(level[parents[level] == 0])
    if done < len(true):
        raise ShapeError("the tree nodes form a cycle: a node is among its own descendants")
    return depth


_COMPARE: Mapping[int, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    LESS: np.less,
    LESS | EQUAL: np.less_equal,
    EQUAL: np.equal,
    GREATER: np.greater,
    GREATER | EQUAL: np.greater_equal,
    LESS | GREATER: np.not_equal,
}


@dataclass(frozen=True, slots=True, eq=False)
class Ensemble:
    """Trees, the weights of their leaves, and the aggregation of weights.

    ``leaf``, ``target`` and ``weight`` are parallel: a leaf may have weights for some of the
    ``targets``; several weights for the same target are summed. ``base`` has one entry per target,
    one for all, or none.
    """

    forest: Forest
    targets: int
    leaf: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    aggregate: str = "SUM"
    transform: str = "NONE"
    base: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if len(self.leaf) != len(self.target) or len(self.leaf) != len(self.weight):
            raise ShapeError("the attributes that describe leaf weights must have the same length")
        if len(self.target) and (self.target.min() < 0 or self.target.max() >= self.targets):
            raise ShapeError(
                f"leaf weights refer to target {self.target.max()}, but targets must be in [0, "
                f"{self.targets})"
            )
        if len(self.base) not in (0, 1, self.targets):
            raise ShapeError(
                f"base_values has {len(self.base)} entries: it must have 0, 1 or {self.targets}"
            )


class _Votes:
    """The weights of the leaves, and their aggregation."""

    def __init__(self, ensemble: Ensemble) -> None:
        leaf, target, aggregate = ensemble.leaf, ensemble.target, ensemble.aggregate
        targets = self.targets = ensemble.targets
        self.aggregate = aggregate
        self.table: np.ndarray | None = None
        nodes = len(ensemble.forest.feature)
        sums = aggregate in ("SUM", "AVERAGE")
        # The identity element of each aggregate.
        neutral = {"MIN": np.inf, "MAX": -np.inf}.get(aggregate, 0.0)
        # Each leaf has one weight: a vector replaces the table of leaves and targets.
        if len(np.unique(leaf)) == len(leaf) and (targets == 1 or sums):
            self.weight, self.target = np.full(nodes, neutral), np.zeros(nodes, np.intp)
            self.weight[leaf], self.target[leaf] = ensemble.weight, target
            return
        self.table = np.zeros((nodes, targets))
        np.add.at(self.table, (leaf, target), ensemble.weight)
        if not sums:
            voted = np.zeros((nodes, targets), np.bool_)
            voted[leaf, target] = True
            self.table[~voted] = neutral

    def __call__(self, leaves: np.ndarray) -> np.ndarray:
        """Scores [N, targets] of rows from their leaves [trees, N]; 0 if no leaf has a weight."""
        trees, rows = leaves.shape
        combine: Any = {"MIN": np.minimum, "MAX": np.maximum}.get(self.aggregate, np.add)
        if self.table is not None:
            scores = combine.reduce(self.table[leaves], axis=0)
        elif self.targets == 1:
            scores = combine.reduce(np.take(self.weight, leaves, mode="clip"), axis=0)[:, None]
        else:
            cells = self.target[leaves] + np.arange(rows) * self.targets
            weights = self.weight[leaves].reshape(-1)
            size = rows * self.targets
            scores = np.bincount(cells.reshape(-1), weights, size).reshape(rows, self.targets)
        if self.aggregate == "AVERAGE":
            return scores / trees
        return np.where(np.isinf(scores), 0, scores) if combine is not np.add else scores


def _scorer(ensemble: Ensemble) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that computes scores [N, targets] in chunks of rows."""
    forest, votes, base = ensemble.forest, _Votes(ensemble), ensemble.base

    def scores(x: np.ndarray) -> np.ndarray:
        # float64 represents more integers exactly than float32.
        x = models.matrix(x.astype(np.float64) if x.dtype.kind in "iu" else x)
        if x.shape[1] < forest.features:
            raise ShapeError(
                f"the trees use {forest.features} features, but the input has {x.shape[1]}"
            )
        width = 1 if votes.table is None else votes.targets
        step = max(1, CHUNK // (len(forest.roots) * width))
        result = np.empty((len(x), votes.targets))
        for low in range(0, len(x), step):
            result[low : low + step] = votes(forest.leaves(x[low : low + step]))
        return result + base if len(base) else result

    return scores


_Values = TypeVar("_Values", bound=Sized)


def _counted(name: str, values: _Values, count: int) -> _Values:
    if len(values) != count:
        raise ShapeError(f"{name} has {len(values)} entries, but {count} are expected")
    return values


def _ints(attrs: Attrs, name: str, count: int | None = None) -> np.ndarray:
    """A list of integers of a known length; zeros if it is omitted."""
    value = attrs.get(name)
    if not value:
        return np.zeros(count or 0, np.int64)
    return np.fromiter(value if count is None else _counted(name, value, count), np.int64)


def _floats(attrs: Attrs, name: str) -> np.ndarray:
    """A list of floats, or the attribute ``*_as_tensor`` that may replace it."""
    array = attrs.get(f"{name}_as_tensor")
    if array is not None and array.size:
        return np.asarray(array).reshape(-1)
    return np.array(attrs.get(name) or [], np.float32)


class _Places:
    """The positions of (tree id, node id) pairs in the lists that describe nodes. ``trees`` are the
    sorted tree ids, ``tree`` has the rank of each node's tree among them."""

    def __init__(self, trees: np.ndarray, numbers: np.ndarray) -> None:
        self.trees, self.tree = np.unique(trees, return_inverse=True)
        self.numbers, number = np.unique(numbers, return_inverse=True)
        pairs = self.tree * len(self.numbers) + number
        self.pairs, self.places = np.unique(pairs, return_index=True)
        if len(self.pairs) != len(pairs):
            raise ShapeError("nodes_nodeids must be unique within a tree")

    def find(self, tree: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The position of each node, given its id and the rank of its tree among ``trees`` (-1: no
        such tree); -1 for nodes that do not exist."""
        number = _ranks(self.numbers, numbers)
        pairs = np.where((tree < 0) | (number < 0), -1, tree * len(self.numbers) + number)
        pair = _ranks(self.pairs, pairs)
        return np.where(pair < 0, -1, self.places[pair])


def _ranks(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The indices of ``values`` in the sorted array ``ordered``, -1 for missing ones."""
    ranks = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.where(ordered[ranks] == values, ranks, -1)


def _forest(attrs: Attrs) -> tuple[Forest, _Places]:
    """The trees of the older operations, and the positions of (tree id, node id) pairs."""
    trees = _ints(attrs, "nodes_treeids")
    count = len(trees)
    places = _Places(trees, _counted("nodes_nodeids", _ints(attrs, "nodes_nodeids"), count))
    modes = _counted("nodes_modes", attrs.get("nodes_modes") or [], count)
    unknown = set(modes) - {*_MODES, "LEAF"}
    if unknown:
        raise ShapeError(
            f"unknown nodes_modes {', '.join(sorted(unknown))}; supported are "
            f"{', '.join(_MODES)} and LEAF"
        )
    threshold = _counted("nodes_values", _floats(attrs, "nodes_values"), count)
    mode = np.fromiter(map({**_MODES, "LEAF": 0}.__getitem__, modes), np.int8, count)
    inner, itself = mode != 0, np.arange(count)

    def children(name: str) -> np.ndarray:
        return np.where(inner, places.find(places.tree, _ints(attrs, name, count)), itself)

    true, false = children("nodes_truenodeids"), children("nodes_falsenodeids")
    if (true[inner] == itself[inner]).any():
        raise ShapeError("a tree node refers to itself as its child")
    parented = np.zeros(count, np.bool_)
    parented[true[inner]] = parented[false[inner]] = True
    # The root of a tree is the first of its nodes without a parent.
    orphans = np.flatnonzero(~parented)
    roots = orphans[np.sort(np.unique(trees[orphans], return_index=True)[1])]
    if len(roots) != len(places.trees):
        raise ShapeError("a tree has no root: each of its nodes is the child of another node")
    # Leaves take the mode of another node, so that trees of one mode need a single comparison.
    usual = mode[inner][:1] if inner.any() else np.array([LESS | EQUAL], np.int8)
    nodes = TreeNodes(
        np.where(inner, _ints(attrs, "nodes_featureids", count), 0),
        threshold,
        np.where(inner, mode, usual),
        _ints(attrs, "nodes_missing_value_tracks_true", count),
        true,
        false,
    )
    return Forest(roots, nodes), places


def _votes(
    attrs: Attrs, prefix: str, places: _Places, targets: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The leaves, targets and weights as parallel arrays.

    With a single target, only the first weight of a leaf is used, as in ONNX Runtime: models that
    output the leaf index (skl2onnx's ``decision_leaf``) repeat it for each class.
    """
    trees = _ints(attrs, f"{prefix}_treeids")
    nodes = _counted(f"{prefix}_nodeids", _ints(attrs, f"{prefix}_nodeids"), len(trees))
    ids, weights = _ints(attrs, f"{prefix}_ids", len(trees)), _floats(attrs, f"{prefix}_weights")
    leaf = places.find(_ranks(places.trees, trees), nodes)
    if (leaf < 0).any():
        tree, node = trees[leaf < 0][0], nodes[leaf < 0][0]
        raise ShapeError(
            f"{prefix}_treeids and {prefix}_nodeids refer to node {node} of tree {tree}, which "
            "does not exist"
        )
    if targets == 1 and len(weights) == len(leaf):
        first = np.unique(leaf, return_index=True)[1]
        leaf, ids, weights = leaf[first], ids[first], weights[first]
    return leaf.astype(np.intp), ids, weights


def _base(attrs: Attrs) -> np.ndarray:
    return _floats(attrs, "base_values").astype(np.float64)


def regressor(attrs: Attrs) -> Ensemble:
    """The ensemble of a TreeEnsembleRegressor."""
    forest, places = _forest(attrs)
    targets = attrs.get("n_targets") or 1
    return Ensemble(
        forest,
        targets,
        *_votes(attrs, "target", places, targets),
        choice(attrs, "aggregate_function", "SUM", AGGREGATES),
        models.transform_of(attrs),
        _base(attrs),
    )


def classifier(attrs: Attrs) -> tuple[Ensemble, models.Labelling]:
    """The ensemble of a TreeEnsembleClassifier.

    With two labels and weights for one class only, the scores are those of the second class: if no
    weight is negative they are probabilities, compared with 0.5, else decision values, compared
    with 0. If the weights have class id 0, as in most models, the score of the first class is
    derived; if they have id 1, it is 0. A single label means 1, its absence 0.
    """
    labels = models.class_labels(attrs, "classlabels_int64s")
    classes = len(labels)
    if classes == 1 and labels.dtype.kind == "O":
        raise ShapeError("a single class label must be an integer")
    forest, places = _forest(attrs)
    leaf, ids, weights = _votes(attrs, "class", places, classes)
    base, transform = _base(attrs), models.transform_of(attrs)
    single = int(ids[0]) if classes == 2 and len(np.unique(ids)) == 1 else None
    positive = bool((weights >= 0).all())
    if single is not None and len(base) == 1:
        base = np.eye(2)[single] * base[0]
    ensemble = Ensemble(forest, classes, leaf, ids, weights, "SUM", transform, base)
    if classes == 1:
        return ensemble, models.Labelling(np.arange(2), 0, 0.0, False, positive)
    return ensemble, models.Labelling(labels, single, 0.5 * positive, single == 0, positive)


@operator("TreeEnsembleRegressor", infer=models.infer_regressor("n_targets"))
@by_attributes
def tree_ensemble_regressor(attrs: Attrs) -> ArrayFunction:
    ensemble = regressor(attrs)
    scores = _scorer(ensemble)
    return lambda x: models.transformed(scores(x), ensemble.transform).astype(np.float32)


@operator("TreeEnsembleClassifier", infer=models.infer_classifier("classlabels_int64s"))
@by_attributes
def tree_ensemble_classifier(attrs: Attrs) -> ArrayFunction:
    ensemble, labelling = classifier(attrs)
    scores_of, single, limit = _scorer(ensemble), labelling.single, labelling.limit

    def run(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores = scores_of(x)
        score = scores[:, single or 0]
        places = scores.argmax(1) if single is None else (score > limit).astype(np.int64)
        if labelling.pair:
            scores = models.two_scores(score, ensemble.transform, labelling.positive)
        else:
            scores = models.transformed(scores, ensemble.transform)
        return labelling.labels[places], scores.astype(np.float32)

    return run


def _infer_ensemble(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    return (TensorType(x.dtype, (models.row_count(x), attrs.get("n_targets") or 1)),)


def ensemble(attrs: Attrs) -> Ensemble:
    """The ensemble of a TreeEnsemble."""
    aggregate, transform = attrs.get("aggregate_function", 1), attrs.get("post_transform", 0)
    if not 0 <= aggregate < len(AGGREGATES) or not 0 <= transform < len(models.TRANSFORM_NAMES):
        raise ShapeError(
            f"aggregate_function {aggregate} or post_transform {transform} is out of range"
        )
    forest = _ensemble_forest(attrs)
    weights = attrs["leaf_weights"].reshape(-1).astype(np.float64)
    nodes = len(forest.feature)
    return Ensemble(
        forest,
        attrs.get("n_targets") or 1,
        np.arange(nodes - len(weights), nodes),
        _ints(attrs, "leaf_targetids"),
        weights,
        AGGREGATES[aggregate],
        models.TRANSFORM_NAMES[transform],
    )


@operator("TreeEnsemble", since=5, infer=_infer_ensemble)
@by_attributes
def tree_ensemble(attrs: Attrs) -> ArrayFunction:
    trees = ensemble(attrs)
    scores = _scorer(trees)
    return lambda x: models.transformed(scores(x), trees.transform).astype(x.dtype)


def _ensemble_forest(attrs: Attrs) -> Forest:
    """The trees of TreeEnsemble: inner nodes, nodes added for membership tests, then leaves."""
    modes = np.asarray(attrs["nodes_modes"]).reshape(-1).astype(np.int64)
    count, leaves = len(modes), len(attrs["leaf_targetids"])
    if len(modes) and (modes.min() < 0 or modes.max() > _MEMBER):
        raise ShapeError(f"nodes_modes must be from 0 to {_MEMBER}")
    _counted("leaf_weights", attrs["leaf_weights"].reshape(-1), leaves)
    threshold = _counted("nodes_splits", np.asarray(attrs["nodes_splits"]).reshape(-1), count)
    threshold = threshold.astype(FLOAT64 if threshold.dtype == FLOAT64 else FLOAT32)
    sets = _member_sets(attrs, int((modes == _MEMBER).sum()))
    added = sum(max(len(members) - 1, 0) for members in sets)
    first_leaf = count + added

    def children(side: str) -> np.ndarray:
        ids = _ints(attrs, f"nodes_{side}nodeids", count)
        at_leaf = _ints(attrs, f"nodes_{side}leafs", count) != 0
        limit = np.where(at_leaf, leaves, count)
        if ((ids < 0) | (ids >= limit)).any():
            raise ShapeError(f"nodes_{side}nodeids refers to a node or leaf that does not exist")
        return np.where(at_leaf, ids + first_leaf, ids)

    true, false = children("true"), children("false")
    if (true == np.arange(count)).any():
        raise ShapeError("a tree node refers to itself as its child")
    total = first_leaf + leaves

    def extended(array: np.ndarray, fill: Any = 0) -> np.ndarray:
        return np.concatenate([array, np.full(total - count, fill, array.dtype)])

    itself = np.arange(total)
    mode = np.array(_BY_NUMBER, np.int8)[modes]
    # As in ``_forest``, a single mode for all nodes saves comparisons.
    mode = extended(mode, mode[0] if count else LESS)
    feature, threshold = extended(_ints(attrs, "nodes_featureids", count)), extended(threshold)
    missing = extended(_ints(attrs, "nodes_missing_value_tracks_true", count))
    true, false = extended(true), extended(false)
    true[first_leaf:] = false[first_leaf:] = itself[first_leaf:]
    # A membership test becomes a chain of equality tests.
    at = count
    for node, members in zip(np.flatnonzero(modes == _MEMBER).tolist(), sets, strict=True):
        if not len(members):
            # An empty set: nothing equals NaN.
            mode[node], threshold[node] = EQUAL, np.nan
            continue
        threshold[node] = members[0]
        last = false[node]
        for member in members[1:]:
            false[node] = at
            feature[at], mode[at], true[at] = feature[node], EQUAL, true[node]
            threshold[at], false[at] = member, last
            node, at = at, at + 1
    nodes = TreeNodes(feature, threshold, mode, missing, true, false)
    return Forest(_ints(attrs, "tree_roots"), nodes)


def _member_sets(attrs: Attrs, count: int) -> list[np.ndarray]:
    """The sets of BRANCH_MEMBER nodes, in node order, which NaN separates or terminates."""
    values = attrs.get("membership_values")
    flat = np.empty(0) if values is None else np.asarray(values).reshape(-1).astype(np.float64)
    ends = np.flatnonzero(np.isnan(flat))
    sets = [part[part == part] for part in np.split(flat, ends + 1)]
    if len(flat) == 0 or np.isnan(flat[-1]):
        sets.pop()
    if len(sets) != count:
        raise ShapeError(
            f"membership_values has {len(sets)} sets, but there are {count} BRANCH_MEMBER nodes"
        )
    return sets
