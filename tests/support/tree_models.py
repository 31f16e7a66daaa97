"""Random ensembles of trees, in the attributes of the operations."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.numpy_helper import from_array

MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]
FEATURES = 5


def rows(rng: np.random.Generator, count: int = 40, missing: bool = False) -> np.ndarray:
    # Few different values, so that comparisons for equality succeed at times.
    x = (rng.integers(-4, 5, (count, FEATURES)) / 2).astype(np.float32)
    if missing:
        x[rng.random(x.shape) < 0.1] = np.nan
    return x


class Trees:
    """Random trees, in the attributes of the older operations."""

    def __init__(
        self, rng: np.random.Generator, count: int, depth: int, modes: list[str], missing: bool
    ) -> None:
        self.rng, self.modes = rng, modes
        self.lists: dict[str, list[Any]] = {
            f"nodes_{name}": []
            for name in (
                *("treeids", "nodeids", "featureids", "values", "modes"),
                *("truenodeids", "falsenodeids"),
            )
        }
        self.leaves: list[tuple[int, int]] = []
        for tree in range(count):
            self.next = 0
            self.grow(tree, depth)
        if missing:
            size = len(self.lists["nodes_modes"])
            self.lists["nodes_missing_value_tracks_true"] = rng.integers(0, 2, size).tolist()

    def grow(self, tree: int, depth: int) -> int:
        number, self.next = self.next, self.next + 1
        leaf = depth == 0 or (number > 0 and self.rng.random() < 0.2)
        entry: dict[str, Any] = {
            "treeids": tree,
            "nodeids": number,
            "featureids": 0 if leaf else int(self.rng.integers(FEATURES)),
            "values": 0.0 if leaf else float(self.rng.integers(-4, 5) / 2),
            "modes": "LEAF" if leaf else str(self.rng.choice(self.modes)),
            "truenodeids": 0,
            "falsenodeids": 0,
        }
        at = len(self.lists["nodes_modes"])
        for name, value in entry.items():
            self.lists[f"nodes_{name}"].append(value)
        if leaf:
            self.leaves.append((tree, number))
        else:
            self.lists["nodes_truenodeids"][at] = self.grow(tree, depth - 1)
            self.lists["nodes_falsenodeids"][at] = self.grow(tree, depth - 1)
        return number

    def votes(self, prefix: str, ids: list[int], signed: bool, several: bool) -> dict[str, Any]:
        pairs = [pair for pair in self.leaves for _ in range(len(ids) if several else 1)]
        chosen = [ids[i % len(ids)] for i in range(len(pairs))]
        if not several:
            chosen = [int(self.rng.choice(ids)) for _ in pairs]
        weights = self.rng.uniform(-1 if signed else 0, 1, len(pairs)) / 8
        return {
            f"{prefix}_treeids": [pair[0] for pair in pairs],
            f"{prefix}_nodeids": [pair[1] for pair in pairs],
            f"{prefix}_ids": chosen,
            f"{prefix}_weights": weights.astype(np.float32).tolist(),
        }


def ensemble(rng: np.random.Generator, dtype: type, members: bool) -> tuple[dict[str, Any], Any]:
    """Random trees of TreeEnsemble, and a function that walks them for one row."""
    nodes: list[dict[str, Any]] = []
    leaves: list[tuple[float, int]] = []

    def grow(depth: int) -> tuple[int, bool]:
        if depth == 0 or (depth < 4 and rng.random() < 0.2):
            leaves.append((float(rng.normal()), int(rng.integers(2))))
            return len(leaves) - 1, True
        at = len(nodes)
        mode = int(rng.integers(7 if members else 6))
        size = int(rng.integers(0, 4))
        node: dict[str, Any] = {
            "mode": mode,
            "feature": int(rng.integers(FEATURES)),
            "split": float(rng.integers(-4, 5) / 2),
            "missing": int(rng.integers(2)),
            "set": (rng.integers(-4, 5, size) / 2).tolist() if mode == 6 else [],
        }
        nodes.append(node)
        node["true"], node["false"] = grow(depth - 1), grow(depth - 1)
        return at, False

    roots = [grow(4)[0] for _ in range(6)]
    sets = [value for node in nodes if node["mode"] == 6 for value in (*node["set"], np.nan)]
    attrs: dict[str, Any] = {
        "tree_roots": roots,
        "nodes_modes": from_array(np.array([n["mode"] for n in nodes], np.uint8)),
        "nodes_featureids": [n["feature"] for n in nodes],
        "nodes_splits": from_array(np.array([n["split"] for n in nodes], dtype)),
        "nodes_missing_value_tracks_true": [n["missing"] for n in nodes],
        "leaf_weights": from_array(np.array([w for w, _ in leaves], dtype)),
        "leaf_targetids": [t for _, t in leaves],
        "n_targets": 2,
    }
    for side in ("true", "false"):
        attrs[f"nodes_{side}nodeids"] = [n[side][0] for n in nodes]
        attrs[f"nodes_{side}leafs"] = [int(n[side][1]) for n in nodes]
    if sets:
        attrs["membership_values"] = from_array(np.array(sets, dtype))

    def walk(row: np.ndarray) -> list[tuple[float, int]]:
        found = []
        for root in roots:
            at, leaf = root, False
            while not leaf:
                node = nodes[at]
                value, split = float(row[node["feature"]]), node["split"]
                passes = [value <= split, value < split, value >= split, value > split]
                passes += [value == split, value != split, value in node["set"]]
                taken = passes[node["mode"]] or (np.isnan(value) and node["missing"])
                at, leaf = node["true" if taken else "false"]
            found.append(leaves[at])
        return found

    return attrs, walk
