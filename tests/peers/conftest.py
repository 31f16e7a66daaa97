"""Models in files, and packages in place of runtimes that are not installed."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.support.onnx_text import model_from_text

OPENVINO = '''
import numpy as np

__version__ = "1.2"


class Port:
    def __init__(self, name): self.name = name
    def get_names(self): return {self.name}


class Compiled:
    """The model of ``DENSE`` in conftest.py."""
    inputs = [Port("shift"), Port("x")]

    def create_infer_request(self): return self

    def infer(self, feeds):
        x, shift = feeds[1], feeds[0]
        return {"y": x[:, :2] + x[:, 2:] + shift}


class Core:
    def compile_model(self, path, device, config):
        assert device == "CPU"
        print("openvino prints", config)
        return Compiled()
'''

DENSE = """dense (float[N, 3] x, float[2] shift) => (float[N, 2] y)
    <float[3, 2] w = {1, 0, 0, 1, 1, 1}> { a = MatMul(x, w)  y = Add(a, shift) }"""


@pytest.fixture
def dense(tmp_path: Path) -> str:
    path = tmp_path / "dense.onnx"
    onnx.save(model_from_text(DENSE), path)
    return str(path)


@pytest.fixture
def without_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that hides installed packages of other runtimes from processes started now."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in ("onnxruntime", "openvino", "ai_edge_litert"):
        text = f"raise ModuleNotFoundError('hidden', name={name!r})\n"
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def openvino(without_peers: Path) -> None:
    """A package that has as much of OpenVINO as Penstock calls, and inputs in another order."""
    (without_peers / "openvino.py").write_text(OPENVINO)
