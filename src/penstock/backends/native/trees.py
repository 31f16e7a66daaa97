"""Ensembles of decision trees, packed into nodes that all test ``x <= threshold``.

=========  ==========================================================================
x < t      x <= the number below t
x > t      x <= t, with the children exchanged; likewise x >= t
x == t     x <= t, and then x <= the number below t, with the children exchanged
x != t     x == t, with the children exchanged
=========  ==========================================================================

A chain of tests x == t, as converters write categories, becomes a search among their thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from penstock.backends.native import family, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor, texts_of
from penstock.core.records import dataclass
from penstock.core.types import STRING, RunValue
from penstock.ops.common.constant_cache import shared
from penstock.ops.common.dtypes import FLOAT64
from penstock.ops.onnx_ml import trees
from penstock.ops.onnx_ml.models import TRANSFORM_NAMES, Labelling

_SCORES = 4096  # of an item at most, as in c/tables/trees.c
_ROWS = 64  # of an item at most: a tree that rows have gone down stays in the first-level cache

_NODE = np.dtype([("threshold", "f8"), ("child", "i4"), ("feature", "i4")])
_VOTE = np.dtype([("weight", "f8"), ("target", "i8")])


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """An ensemble as c/tables/trees.c reads it."""

    ensemble: trees.Ensemble
    labelling: Labelling | None
    nodes: np.ndarray
    roots: np.ndarray
    first_vote: np.ndarray
    votes: np.ndarray
    base: np.ndarray | None


_Test: TypeAlias = tuple[float, int, int, bool]
"""a threshold, the places of the passed and of the failed child, and whether NaN passes"""

_READERS: Mapping[str, Callable[..., RunValue]] = {
    "TreeEnsemble": trees.ensemble,
    "TreeEnsembleClassifier": trees.classifier,
    "TreeEnsembleRegressor": trees.regressor,
}


@family(
    "ai.onnx.ml.TreeEnsemble",
    "ai.onnx.ml.TreeEnsembleClassifier",
    "ai.onnx.ml.TreeEnsembleRegressor",
)
def tree_ensemble(site: Site) -> NativeCall | None:
    """TreeEnsemble, TreeEnsembleClassifier, TreeEnsembleRegressor."""
    x, attrs, name = site.tensor(0), site.node.attrs, site.node.op.name
    if str_(x.dtype) not in ("float32", "float64", "int32", "int64"):
        return None
    read = _READERS[name]
    share = shared((_pack, name, *attrs), lambda: _pack(read(attrs)), *attrs.values())
    packed = share.value
    if packed is None:
        return None
    ensemble, labelling = packed.ensemble, packed.labelling
    forest, targets = ensemble.forest, ensemble.targets
    rows, width = (1, *x.dims)[-2:]
    if width < max(forest.features, 1) or not rows:
        return None
    labels = None if labelling is None else labelling.labels
    rule = labelling or Labelling(np.arange(0))
    texts = labels if labels is not None and labels.dtype == STRING else None
    block = max(1, min(_ROWS, _SCORES // targets))
    scores = len(site.tensors) - len(site.node.inputs) - 1
    result_type = site.tensors[-1]
    walks = min(rows, block) * len(forest.roots)
    return NativeCall(
        f"trees_{x.dtype}",
        (
            *(Tensor(0), None if labels is None else site.result(0), site.result(scores)),
            *(packed.nodes, packed.roots, packed.first_vote, packed.votes, packed.base),
            labels if texts is None else np.arange(len(texts)),
            *(rows, width, len(forest.roots), targets, block),
            trees.AGGREGATES.index(ensemble.aggregate),
            TRANSFORM_NAMES.index(ensemble.transform),
            *(-1 if rule.single is None else rule.single, rule.pair, rule.positive),
            *(result_type is not None and result_type.dtype == FLOAT64, rule.limit),
        ),
        items=math.ceil(rows / block),
        item_ns=rows_ns(20 * walks * forest.depth, rows=0.5 * walks),
        keep=share,
        finish=texts_of(site, texts),
    )


def _pack(read: trees.Ensemble | tuple[trees.Ensemble, Labelling]) -> _Packed | None:
    """None if the ensemble is too large."""
    ensemble, labelling = read if isinstance(read, tuple) else (read, None)
    forest, targets, base = ensemble.forest, ensemble.targets, ensemble.base
    # Scores of an item lie on the stack. Nodes have 32 bits for the place of a child, of which
    # there are more than tests, and for twice a feature.
    if targets > _SCORES or max(len(forest.feature), forest.features) >= 2**28:
        return None
    nodes, roots, place = _in_order(_Tests(forest), forest.roots)
    # Several weights of a leaf for one target add up.
    cells, which = np.unique(ensemble.leaf * targets + ensemble.target, return_inverse=True)
    votes = np.zeros(len(cells), _VOTE)
    np.add.at(votes["weight"], which, ensemble.weight)
    votes["target"] = cells % targets
    at = place[cells // targets]
    reached = (at >= 0) & forest.leaf[cells // targets]
    votes, at = votes[reached], at[reached]
    ends = np.cumsum(np.bincount(at, minlength=len(nodes)))
    return _Packed(
        ensemble,
        labelling,
        nodes,
        roots,
        np.concatenate([[0], ends]).astype(np.int32),
        votes[np.argsort(at, kind="stable")],
        np.broadcast_to(base, targets).copy() if len(base) else None,
    )


class _Tests:
    """Tests ``x[feature] <= threshold``, with the nodes that follow where they pass and where they
    do not, and whether NaN passes. A leaf follows itself."""

    def __init__(self, forest: trees.Forest) -> None:
        mode, leaf = forest.mode, forest.leaf
        false, true = forest.children.reshape(-1, 2).T
        exchanged = mode & trees.GREATER > 0
        threshold = forest.threshold.astype(np.float64)
        with np.errstate(all="ignore"):
            below = np.nextafter(threshold, -np.inf)
        below[np.isneginf(threshold)] = np.nan  # nothing is less
        # Whether the test differs between the numbers below the threshold and the threshold itself.
        strict = (mode == trees.LESS) | (mode == trees.GREATER | trees.EQUAL)
        self.threshold = np.where(strict, below, threshold)
        # Nothing is greater than NaN.
        self.threshold[np.isnan(threshold) & exchanged & (mode & trees.LESS == 0)] = np.inf
        self.passed, self.failed = np.where(exchanged, [false, true], [true, false])
        self.nan_passes = forest.missing != exchanged
        self.feature = np.where(leaf, 0, forest.feature)
        self.threshold[leaf], self.nan_passes[leaf] = np.inf, True
        self.leaf = leaf
        equality = ((mode == trees.EQUAL) | (mode == trees.LESS | trees.GREATER)) & ~leaf
        chains = self._chains(equality, forest.roots)
        self._search_chains(chains, below)
        equality[[node for chain in chains for node in chain]] = False
        first = np.flatnonzero(equality)
        self._extend(
            threshold=below[first],
            passed=self.failed[first],
            failed=self.passed[first],
            nan_passes=np.zeros(len(first), np.bool_),
            feature=self.feature[first],
            leaf=leaf[first],
        )
        self.passed[first] = len(self.leaf) - len(first) + np.arange(len(first))

    def _chains(self, equality: np.ndarray, roots: np.ndarray) -> list[list[int]]:
        """Return lists of two or more nodes that compare one feature with numbers for one passed
        child, each the failed child of the node before it and of no other."""
        tests = np.flatnonzero(equality & ~np.isnan(self.threshold))
        if not len(tests):
            return []
        inner, after = ~self.leaf, self.failed[tests]
        reached = np.concatenate([roots, self.passed[inner], self.failed[inner]])
        follows = np.zeros(len(self.leaf), np.bool_)
        follows[tests] = np.bincount(reached, minlength=len(self.leaf))[tests] == 1
        linked = follows[after] & (self.feature[after] == self.feature[tests])
        linked &= self.passed[after] == self.passed[tests]
        successors = dict(zip(tests[linked].tolist(), after[linked].tolist(), strict=True))
        chains = []
        for first in successors.keys() - {*successors.values()}:
            chain = [first]
            while chain[-1] in successors:
                chain.append(successors[chain[-1]])
            chains.append(chain)
        return chains

    def _search_chains(self, chains: Sequence[Sequence[int]], below: np.ndarray) -> None:
        """Let the first node of each chain begin a search among the thresholds of the chain.
        ``below``: the numbers before all thresholds."""
        places: list[int] = []
        tests: list[_Test] = []
        features: list[int] = []
        for chain in chains:
            nodes = np.array(chain)
            values, order = np.unique(self.threshold[nodes], return_index=True)
            thresholds = np.stack([below[nodes[order]], values], axis=1).ravel()
            ends = int(self.failed[chain[-1]]), int(self.passed[chain[0]])
            start = len(self.leaf) + len(tests) - len(places)
            search = _search(thresholds, ends, bool(self.nan_passes[nodes].any()), chain[0], start)
            places.append(len(tests))
            tests += search
            features += [int(self.feature[chain[0]])] * len(search)
        if not tests:
            return
        threshold, passed, failed, nan_passes = map(np.array, zip(*tests, strict=True))
        firsts = [chain[0] for chain in chains]
        self.threshold[firsts], self.nan_passes[firsts] = threshold[places], nan_passes[places]
        self.passed[firsts], self.failed[firsts] = passed[places], failed[places]
        self._extend(
            threshold=np.delete(threshold, places),
            passed=np.delete(passed, places),
            failed=np.delete(failed, places),
            nan_passes=np.delete(nan_passes, places),
            feature=np.delete(np.array(features), places),
            leaf=np.zeros(len(tests) - len(places), np.bool_),
        )

    def _extend(self, **more: np.ndarray) -> None:
        for name, array in more.items():
            setattr(self, name, np.concatenate([getattr(self, name), array]))


def _search(
    thresholds: np.ndarray, ends: tuple[int, int], nan_passes: bool, first: int, more: int
) -> list[_Test]:
    """Return a balanced tree of tests ``x <= threshold``. The intervals between the sorted
    thresholds lead to ``ends`` in turn, those of failed and of passed tests for equality, and so
    does NaN. The root has the place ``first``, the others those from ``more`` on."""
    of_nan = 1 if nan_passes else len(thresholds)
    tests: list[_Test] = []

    def place(low: int, high: int) -> int:
        if low == high:
            return ends[low % 2]
        own, middle = len(tests), (low + high) // 2
        tests.append((0.0, 0, 0, False))
        passed, failed = place(low, middle), place(middle + 1, high)
        tests[own] = float(thresholds[middle]), passed, failed, low <= of_nan <= middle
        return more + own - 1 if own else first

    place(0, len(thresholds))
    return tests


def _in_order(tests: _Tests, roots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The nodes one tree after the other, each a level after the other; the places of the roots,
    and the place of each of ``tests``, -1 if no root leads there.

    A node that is the child of several has a place beside the sibling in each, and its own children
    once. A leaf that is, has its votes once: its other places lead on to that one.
    """
    place = np.full(len(tests.leaf), -1)
    level, tree, count = roots, np.arange(len(roots)), 0
    levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    inner = ~tests.leaf
    reached = np.concatenate([roots, tests.passed[inner], tests.failed[inner]])
    shares = np.bincount(reached).max() > 1
    while len(level):
        here = np.ones(len(level), np.bool_)
        if shares:
            here[:] = False
            here[np.unique(level, return_index=True)[1]] = True
            here &= place[level] < 0
        place[level[here]] = count + np.flatnonzero(here)
        count += len(level)
        inner = here & ~tests.leaf[level]
        child = np.full(len(level), -1)
        child[inner] = count + 2 * np.arange(inner.sum())
        levels.append((level, tree, child))
        parents, tree = level[inner], np.repeat(tree[inner], 2)
        level = np.empty(2 * len(parents), np.intp)
        level[::2], level[1::2] = tests.passed[parents], tests.failed[parents]
    tests_in_order, tree, child = map(np.concatenate, zip(*levels, strict=True))
    order = np.argsort(tree, kind="stable")
    moved = np.argsort(order)
    child = child[place[tests_in_order]]  # a node with several places has its children once
    nodes = np.empty(count, _NODE)
    nodes["threshold"] = tests.threshold[tests_in_order][order]
    nodes["child"] = moved[np.where(child < 0, place[tests_in_order], child)][order]
    nodes["feature"] = (2 * tests.feature + tests.nan_passes)[tests_in_order][order]
    return nodes, moved[: len(roots)].astype(np.int32), np.where(place < 0, -1, moved[place])
