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

ROOT = Path(__file__).parents[2]
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


@pytest.mark.costly
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


# LiteRT.

DOUBLE = """
from tests.support.tflite_models import model, subgraph
import numpy as np
add = ("ADD", ["x", "x"], ["y"], ("AddOptions", {}))
content = model([subgraph({"x": ("float32", [2])}, [add], ["y"])])

def double(Interpreter):
    interpreter = Interpreter(model_content=content)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], np.float32([1, 2]))
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"]).tolist()

import penstock.compat
"""


def in_tests(program: str, folder: Path, *, code: int = 0) -> str:
    return result(
        f"import sys\nsys.path.append({str(ROOT)!r})\n{DOUBLE}{program}", folder, code=code
    )


def test_tflite_runtime_is_replaced(tmp_path: Path) -> None:
    program = """
penstock.compat.install("tflite_runtime")
import tflite_runtime.interpreter as tflite
print(double(tflite.Interpreter), tflite.Interpreter.__module__)
try:
    tflite.load_delegate("libedgetpu.so.1")
except ValueError as error:
    print(error)
"""
    printed = in_tests(program, tmp_path)
    assert printed.startswith(
        "[2.0, 4.0] penstock.compat.ai_edge_litert.interpreter\nthere is no delegate"
    )


def test_ai_edge_litert_is_replaced_beside_its_modules_in_python(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert.schema_py_generated")
    program = """
penstock.compat.install("ai_edge_litert")
from ai_edge_litert.compiled_model import CompiledModel
from ai_edge_litert.hardware_accelerator import HardwareAccelerator
from ai_edge_litert import schema_py_generated
model = CompiledModel.from_buffer(content, HardwareAccelerator.CPU)
x, y = model.create_input_buffers(0), model.create_output_buffers(0)
x[0].write(np.float32([1, 2]))
model.run_by_index(0, x, y)
print(y[0].read(2, np.float32).tolist(), CompiledModel.__module__, schema_py_generated.__name__)
"""
    want = "[2.0, 4.0] penstock.compat.ai_edge_litert.compiled_model ai_edge_litert.schema_py_generated\n"
    assert in_tests(program, tmp_path) == want


@pytest.fixture
def tensorflow(tmp_path: Path) -> Path:
    """A package with the names of TensorFlow that matter here."""
    lite = "class Interpreter: pass\nclass OpResolverType: pass\ndef load_delegate(x): pass\n"
    files = {
        "__init__.py": "from tensorflow import lite\nversion = '2.20'\n",
        "lite/__init__.py": f"from tensorflow.lite import experimental\n{lite}",
        "lite/experimental.py": lite,
        "lite/python/__init__.py": "",
        "lite/python/interpreter.py": lite,
    }
    for name, text in files.items():
        path = tmp_path / "tensorflow" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_interpreter_of_tensorflow_is_replaced_alone(tensorflow: Path) -> None:
    program = """
penstock.compat.install("tensorflow.lite")
import tensorflow as tf
from tensorflow.lite.python.interpreter import Interpreter
print(double(tf.lite.Interpreter), Interpreter is tf.lite.Interpreter, tf.version)
print(tf.lite.experimental.load_delegate.__module__, tf.lite.experimental.OpResolverType.AUTO)
"""
    want = "[2.0, 4.0] True 2.20\npenstock.compat.ai_edge_litert.interpreter OpResolverType.AUTO\n"
    assert in_tests(program, tensorflow) == want


def test_missing_tensorflow_is_an_error(tmp_path: Path) -> None:
    program = "sys.modules['tensorflow'] = None\npenstock.compat.install('tensorflow.lite')\n"
    error = in_tests(program, tmp_path, code=1)
    assert "TensorFlow is not installed" in error
    assert "import penstock.compat.ai_edge_litert.interpreter instead" in error


def test_unknown_package_is_refused(tmp_path: Path) -> None:
    known = "'onnxruntime', 'ai_edge_litert', 'tflite_runtime', 'tensorflow.lite'"
    assert f"there is {known}" in in_tests("penstock.compat.install('torch')", tmp_path, code=1)
