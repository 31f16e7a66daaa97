"""The cost from a model's bytes to its first outputs, in calls of Python functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.cases import chain
from onnx import TensorProto, helper

import penstock as ps
from penstock.compiler import stages
from tests.support import mutants
from tests.support.tflite_cases import FOLDER

MOST_CALLS = 90
"""for each node of a chain"""
MOST_CALLS_OF_SAVED = 56
"""the same of a session that was saved"""
MOST_OF_CHECKING = 0.03
"""the part of the calls of opening a session that may check its plan"""


def calls_of(function: Callable[..., Any], *arguments: Any) -> int:
    """Count calls of Python functions, generators and comprehensions in a call of ``function``."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return calls


def open_model(model: bytes, feeds: dict[str, np.ndarray]) -> None:
    ps.compile(model).run(feeds)


def open_saved(path: Path, feeds: dict[str, np.ndarray]) -> None:
    ps.open(path).run(feeds)


def forest(trees: int) -> bytes:
    """A regressor whose trees have a root and two leaves."""
    ids = [tree for tree in range(trees) for _ in range(3)]
    node = helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_treeids=ids,
        nodes_nodeids=[0, 1, 2] * trees,
        nodes_featureids=[1, 0, 0] * trees,
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"] * trees,
        nodes_values=[0.5, 0.0, 0.0] * trees,
        nodes_truenodeids=[1, 0, 0] * trees,
        nodes_falsenodeids=[2, 0, 0] * trees,
        target_treeids=[tree for tree in range(trees) for _ in range(2)],
        target_nodeids=[1, 2] * trees,
        target_ids=[0, 0] * trees,
        target_weights=[1.0, 2.0] * trees,
    )
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, width])
        for name, width in (("x", 3), ("y", 1))
    ]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def test_calls_do_not_grow_with_the_nodes_of_a_forest() -> None:
    feeds = {"x": np.ones((2, 3), np.float32)}
    few, many = forest(10), forest(1000)
    for model in (few, many):  # what happens once in a process
        open_model(model, feeds)
    assert calls_of(open_model, many, feeds) <= calls_of(open_model, few, feeds) + 10


def test_calls_for_each_node_of_a_saved_chain_are_few(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))  # without measured costs
    monkeypatch.setattr(stages, "ALWAYS_CHECKED", False)  # users' plans are not checked either
    feeds = {"v0": np.ones(16, np.float32)}
    for length in (20, 120):
        session = ps.compile(chain(length).SerializeToString(), threads=1)
        session.run(feeds)
        session.save(tmp_path / f"{length}.penstock")
    counts = [calls_of(open_saved, tmp_path / f"{n}.penstock", feeds) for n in (20, 20, 120)]
    assert counts[2] - counts[1] <= 100 * MOST_CALLS_OF_SAVED


@pytest.mark.parametrize("model", ["chain", "mini_detector", "mini_mobilenet_v2"])
def test_checking_a_plan_takes_few_of_the_calls_of_opening(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(stages, "ALWAYS_CHECKED", False)
    source = chain(120).SerializeToString() if model == "chain" else FOLDER / f"net/{model}.tflite"
    path, rng = tmp_path / "model.penstock", np.random.default_rng(0)
    with ps.compile(source, threads=1) as session:
        feeds = {port.name: mutants.feed(port.type, rng) for port in session.inputs}
        session.run(feeds)
        session.save(path)
    open_saved(path, feeds)
    checked = calls_of(open_saved, path, feeds)
    monkeypatch.setattr("penstock.plan.check.check_saved", lambda *_: None)
    assert checked - calls_of(open_saved, path, feeds) <= MOST_OF_CHECKING * checked


def test_calls_for_each_node_of_a_chain_are_few(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))  # without what other tests have measured
    feeds = {"v0": np.ones(16, np.float32)}
    short, long = chain(1000).SerializeToString(), chain(2000).SerializeToString()
    open_model(short, feeds)
    calls = calls_of(open_model, long, feeds) - calls_of(open_model, short, feeds)
    assert calls <= MOST_CALLS * 1000
