"""``penstock.compat.install``, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.onnx_text import model_from_text

HIDDEN = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name == "onnxruntime" else find_spec(name, *more)
"""


def result(program: str, folder: Path, *, code: int = 0) -> str:
    """What a program prints, or its error."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    model = model_from_text("g (float[N, 64] x) => (float[N, 8] y) { y = MatMul(x, w) }")
    w = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    model.ir_version = 9
    onnx.save(model, tmp_path / "dense.onnx")
    return tmp_path


def test_modules_in_python_of_the_installed_package_run_on_penstock(dense: Path) -> None:
    pytest.importorskip("onnxruntime")
    printed = result(
        """
import json, warnings
import penstock.compat
penstock.compat.install("onnxruntime")
warnings.simplefilter("ignore", DeprecationWarning)
import numpy as np, onnxruntime
from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

class Reader(CalibrationDataReader):
    left = 3
    def get_next(self):
        self.left -= 1
        return {"x": np.linspace(-1, 2, 128, dtype=np.float32).reshape(2, 64)} if self.left >= 0 else None

warnings.simplefilter("ignore", UserWarning)  # of options without effect
quantize_dynamic("dense.onnx", "dynamic.onnx")
quantize_static("dense.onnx", "static.onnx", Reader())
x = np.linspace(-1, 2, 128, dtype=np.float32).reshape(2, 64)
sessions = [onnxruntime.InferenceSession(f"{name}.onnx") for name in ("dense", "dynamic", "static")]
outputs = [session.run(None, {"x": x})[0] for session in sessions]
native = "onnxruntime_pybind11_state.cpython" in open("/proc/self/maps").read()
print(json.dumps([
    onnxruntime.InferenceSession.__module__, InvalidArgument.__module__, native,
    onnxruntime.quantization.__file__, sessions[0]._model_path,
    [float(abs(y - outputs[0]).max() / abs(outputs[0]).max()) for y in outputs],
]))
""",
        dense,
    )
    session, error, native, path, model_path, differences = json.loads(printed.splitlines()[-1])
    assert session.startswith("penstock.compat") and error.startswith("penstock.compat")
    assert not native, "ONNX Runtime's library was loaded"
    assert "site-packages" in path and model_path == "dense.onnx"
    assert 0 < max(differences) < 0.05 and differences[0] == 0


def test_helper_of_transformers_is_the_installed_one_where_there_is_one(dense: Path) -> None:
    pytest.importorskip("torch")
    program = """
import penstock.compat
penstock.compat.install("onnxruntime")
import onnxruntime
from onnxruntime.transformers.io_binding_helper import TypeHelper
print(TypeHelper.ort_type_to_numpy_type("tensor(float)").__name__, TypeHelper.__module__)
session = onnxruntime.InferenceSession("dense.onnx")
print(session._model_path, session.get_outputs()[0].shape)
"""
    text = "float32 onnxruntime.transformers.io_binding_helper\ndense.onnx ['N', 8]\n"
    assert result(program, dense) == text
    text = text.replace("onnxruntime.tr", "penstock.compat.onnxruntime.tr")
    assert result(HIDDEN + program, dense) == text


def test_installing_twice_changes_nothing(dense: Path) -> None:
    program = """
import penstock.compat
for _ in range(2):
    penstock.compat.install("onnxruntime")
import onnxruntime
print(len(onnxruntime.__path__) == len(set(onnxruntime.__path__)), onnxruntime.SessionOptions.__module__)
"""
    assert result(program, dense) == "True penstock.compat.onnxruntime.options\n"
