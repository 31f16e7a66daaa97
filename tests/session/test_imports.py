"""The modules that a process imports to compile and run a model, since each delays its start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import penstock as ps

MOST_MODULES = 329
"""without those that Python starts with: 140 of NumPy and what it imports, 155 of Penstock"""
MOST_MODULES_OF_OPEN = 271
"""the same of a session that was saved, 113 of Penstock: four of them check its plans"""

ACCIDENTAL = {
    *(
        "asyncio",
        "concurrent.futures",
        "click",
        "csv",
        "ctypes.util",
        "dataclasses",
        "difflib",
        "email",
        "hashlib",
    ),
    *(
        "html",
        "http",
        "importlib.metadata",
        "logging",
        "ml_dtypes",
        "multiprocessing",
        "onnx",
        "pathlib",
        "platformdirs",
        "random",
    ),
    *("rich", "sqlite3", "subprocess", "tarfile", "tempfile", "urllib.request", "xml", "zipfile"),
    *("google.protobuf.descriptor_pool", "google.protobuf.text_format"),
}
OF_OTHER_MODELS = {
    "penstock.backends.native.trees",
    *("penstock.executors.frames", "penstock.executors.parallel", "penstock.frontends.tensorflow"),
    *("penstock.frontends.tflite", "penstock.inspect", "penstock.observers.trace"),
    *("penstock.ops.microsoft", "penstock.ops.onnx.convolution", "penstock.ops.onnx_ml"),
    *("penstock.ops.tensorflow", "penstock.ops.tflite", "penstock.passes.structure.loops"),
    *("penstock.compiler.frames", "penstock.session.stream"),
}

OF_COMPILING = {
    *("pathlib", "penstock.algorithms.arena_planner", "penstock.algorithms.heft"),
    *("penstock.algorithms.ordering", "penstock.artifact.encode", "penstock.executors.errors"),
    *(
        "penstock.frontends.onnx",
        "penstock.passes",
        "penstock.plan.arrangement",
        "penstock.plan.grouping",
    ),
    *("penstock.executors.feeds", "penstock.session.run", "penstock.compiler.varying_shapes"),
    *("penstock.compiler.lowering", "penstock.compiler.scheduling", "penstock.tuning.cost_table"),
    *("penstock.tuning.measure", "penstock.tuning.placement", "random", "shutil"),
    # Of saving, and of nodes whose shapes are known only during a run.
    *("penstock.artifact.writer", "penstock.backends.dynamic_shapes", "penstock.session.saving"),
}

PROGRAM = """
import sys
before = set(sys.modules)
import penstock
import numpy as np
session = {}
session.run({})
print(*sorted(set(sys.modules) - before))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a product with a bias and a Relu."""
    w, b = np.ones((16, 8), np.float32), np.ones(8, np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8])
    weights = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    opsets = [helper.make_opsetid("", 17)]
    path = tmp_path_factory.mktemp("imports") / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def modules(
    session: str, folder: Path, feeds: str = '{"x": np.ones((1, 16), np.float32)}'
) -> set[str]:
    """Return the modules that a process imports to create a session and run it."""
    command = [sys.executable, "-c", PROGRAM.format(session, feeds)]
    environment = {**os.environ, "HOME": str(folder)}  # without measured costs
    for name in ("PENSTOCK_CACHE", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def imported(model: Path) -> set[str]:
    """Return what compiling the model imports."""
    return modules(f"penstock.compile({str(model)!r})", model.parent)


@pytest.fixture(scope="module")
def imported_by_open(model: Path) -> set[str]:
    """Return what opening the model imports after it was compiled and saved."""
    session, saved = ps.compile(model, threads=1), model.with_suffix(".penstock")
    session.run({"x": np.ones((1, 16), np.float32)})
    session.save(saved)
    return modules(f"penstock.open({str(saved)!r})", model.parent)


def test_compile_and_run_imports_few_modules(imported: set[str]) -> None:
    assert len(imported) <= MOST_MODULES


def test_compile_and_run_imports_nothing_by_accident(imported: set[str]) -> None:
    assert imported & ACCIDENTAL == set()


def test_compile_and_run_imports_nothing_of_other_models(imported: set[str]) -> None:
    assert imported & OF_OTHER_MODELS == set()


def test_convolution_and_cast_import_nothing_of_8_bit_models(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["f", "shape"], ["r"]),
        helper.make_node("Conv", ["r", "w"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.ones((1, 1, 2, 2), np.float32), "w"),
        numpy_helper.from_array(np.array([1, 1, 4, 4]), "shape"),
    ]
    ports = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 3, 3]),
    ]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], weights)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    names = modules(f"penstock.compile({str(path)!r})", tmp_path)
    of_8_bits = {"penstock.ops.onnx.quantized", "penstock.passes.lowering.quantize"}
    assert names & (ACCIDENTAL | of_8_bits) == set()


@pytest.mark.parametrize(
    ("name", "feeds"),
    [
        ("mobilenet_v2_int8", '{"x": np.ones((1, 32, 32, 3), np.int8)}'),
        ("lstm_fused", '{"ids": np.ones((1, 10), np.int32)}'),
    ],
)
def test_tflite_models_import_nothing_by_accident(name: str, feeds: str, tmp_path: Path) -> None:
    file = Path(__file__).parents[1] / "models/tflite/net" / f"mini_{name}.tflite"
    names = modules(f"penstock.compile({str(file)!r})", tmp_path, feeds)
    assert names & ACCIDENTAL == set()
    # Most models have no control flow, no variables and no curves of 16-bit codes.
    of_few = {"penstock.frontends.tflite.rules_control", "penstock.ops.tensorflow.state"}
    of_few |= {"penstock.frontends.tflite.rules_recurrent", "penstock.ops.tensorflow.windows"}
    of_few |= {"penstock.ops.common.integer_curves", "penstock.ops.internal.case"}
    assert name == "lstm_fused" or names & of_few == set()


def test_one_thread_needs_no_schedules_by_costs(model: Path) -> None:
    names = modules(f"penstock.compile({str(model)!r}, threads=1)", model.parent)
    assert names & {"penstock.compiler.scheduling", "penstock.plan.grouping"} == set()


def test_torch_backend_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; import penstock; from penstock import *\n"
        "try: penstock.TorchBackend\n"
        "except ImportError as error: print(error)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (
        done.stdout == "penstock.TorchBackend needs torch: pip install 'penstock-runtime[torch]'\n"
    )


def test_open_and_run_imports_few_modules(imported_by_open: set[str]) -> None:
    assert len(imported_by_open) <= MOST_MODULES_OF_OPEN


def test_open_and_run_imports_nothing_of_compiling(imported_by_open: set[str]) -> None:
    assert imported_by_open & (ACCIDENTAL | OF_OTHER_MODELS | OF_COMPILING) == set()


def test_compile_of_what_is_kept_imports_nothing_of_compiling(tmp_path: Path) -> None:
    w = numpy_helper.from_array(np.ones((256, 256), np.float32), "w")
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 256]) for n in "xy"]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], [w])
    opsets = [helper.make_opsetid("", 17)]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    session = f"penstock.compile({str(path)!r}, cache={str(tmp_path / 'kept')!r})"
    compiled = session, tmp_path, '{"x": np.ones((1, 256), np.float32)}'
    first, again = modules(*compiled), modules(*compiled)
    assert "penstock.passes" in first
    # The digest of a file that no longer changes is kept.
    assert again & (ACCIDENTAL | OF_OTHER_MODELS | OF_COMPILING) <= {"pathlib"}
