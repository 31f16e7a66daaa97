"""Engines: each runs the model of a job on feeds in the order of Penstock's inputs."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.peers.engines import ENGINES, PEERS, PENSTOCK, EngineJob
from tests.support.tflite_models import model, subgraph

FEEDS = {"x": np.ones((4, 3), np.float32), "shift": np.float32([0, 1])}


@pytest.mark.parametrize("engine", [PENSTOCK, "onnxruntime"])
def test_engine_runs_an_onnx_file(engine: str, dense: str) -> None:
    made = ENGINES[engine]()
    run = made.load(EngineJob(engine, dense, FEEDS, threads=1))
    (y,) = run(FEEDS)
    np.testing.assert_array_equal(y, [[2, 3]] * 4)
    assert made.version[0].isdigit()


def test_litert_takes_inputs_by_position_and_of_other_dims(tmp_path) -> None:
    pytest.importorskip("ai_edge_litert.interpreter")
    inputs = {"a": ("float32", [1, 2]), "b": ("float32", [1, 2])}
    path = tmp_path / "m.tflite"
    path.write_bytes(
        model([subgraph(inputs, [("SUB", ["a", "b"], ["y"], ("SubOptions", {}))], ["y"])])
    )
    feeds = {"first": np.full((3, 2), 5, np.float32), "second": np.ones((3, 2), np.float32)}
    run = ENGINES["litert"]().load(EngineJob("litert", str(path), feeds, threads=1))
    np.testing.assert_array_equal(run(feeds)[0], np.full((3, 2), 4, np.float32))
    np.testing.assert_array_equal(run({**feeds, "first": feeds["second"]})[0], np.zeros((3, 2)))


def test_penstock_says_which_executor_ran(dense: str) -> None:
    engine = ENGINES[PENSTOCK]()
    engine.load(EngineJob(PENSTOCK, dense, FEEDS, options={"executor": "dataflow"}))(FEEDS)
    assert engine.describe() == "dataflow"
    assert ENGINES["onnxruntime"]().describe() is None


def test_other_number_of_inputs_is_an_error(dense: str) -> None:
    with pytest.raises(ValueError, match="onnxruntime has 2 inputs, Penstock 1"):
        ENGINES["onnxruntime"]().load(EngineJob("onnxruntime", dense, {"x": FEEDS["x"]}))


def test_peers_are_what_is_not_penstock() -> None:
    assert PEERS == ("onnxruntime", "openvino", "litert")
    assert ps.__version__ == ENGINES[PENSTOCK]().version
