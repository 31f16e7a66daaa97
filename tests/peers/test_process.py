"""Engines in processes of their own."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.peers.engines import PENSTOCK, EngineJob
from penstock.peers.process import EngineProcess, engine_processes

FEEDS = {"x": np.ones((4, 3), np.float32), "shift": np.float32([0, 1])}


def test_process_runs_times_and_describes(dense: str) -> None:
    options = {"executor": "dataflow", "limits": ps.Limits(max_nodes=10)}
    with closing(EngineProcess(EngineJob(PENSTOCK, dense, FEEDS, 1, options))) as process:
        assert process.loaded.version == ps.__version__
        assert process.loaded.load_seconds > 0
        (y,), seconds = process.run()
        np.testing.assert_array_equal(y, [[2, 3]] * 4)
        assert seconds > 0
        times, elapsed = process.time(2, 0)
        assert len(times) == 10 and elapsed >= max(times)
        assert process.describe() == "dataflow"


def test_processes_are_others_and_end_with_the_block(dense: str) -> None:
    jobs = [EngineJob(engine, dense, FEEDS, 1) for engine in (PENSTOCK, "onnxruntime")]
    with engine_processes(jobs) as processes:
        ids = [process._process.pid for process in processes]
        assert len({os.getpid(), *ids}) == 3
    for process in processes:
        assert process._process.returncode is not None


@pytest.mark.usefixtures("openvino")
def test_what_an_engine_prints_does_not_come_between_answers(dense: str) -> None:
    with closing(EngineProcess(EngineJob("openvino", dense, FEEDS, 1))) as process:
        assert process.loaded.version == "1.2"
        np.testing.assert_array_equal(process.run()[0][0], [[2, 3]] * 4)


@pytest.mark.usefixtures("without_peers")
@pytest.mark.parametrize(
    ("engine", "package"),
    [("onnxruntime", "onnxruntime"), ("openvino", "openvino"), ("litert", "ai-edge-litert")],
)
def test_missing_package_says_what_to_install(engine: str, package: str, dense: str) -> None:
    with pytest.raises(ps.PenstockError) as caught:
        EngineProcess(EngineJob(engine, dense, FEEDS))
    assert str(caught.value) == f"{engine} is not installed here: pip install {package}"


def test_error_of_an_engine_is_told(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(ps.PenstockError, match=r"^onnxruntime: InvalidProtobuf: .*Load model from"):
        EngineProcess(EngineJob("onnxruntime", str(path), FEEDS))


def test_process_that_dies_says_how(dense: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "dying.py").write_text(
        "import os, sys\nprint('bye', file=sys.stderr, flush=True)\nos._exit(7)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ps.PenstockError, match="process of penstock ended with status 7: bye"):
        EngineProcess(EngineJob(PENSTOCK, dense, FEEDS, modules=("dying",)))
