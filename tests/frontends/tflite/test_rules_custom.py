"""Custom operators become operations of their names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flatbuffers import flexbuffers

import penstock as ps
from penstock.ops.registry import TFLITE, operator
from tests.frontends.tflite.test_importer import ONE, X, run
from tests.support.tflite_models import model, subgraph


@pytest.mark.parametrize("name", ["TestScaled", "test.scaled", "2 x-\u00b2'\n()"])
def test_custom_operator_is_an_operation_of_its_name(name: str) -> None:
    @operator(name, domain=TFLITE)
    def scaled(node: Any, types: Any) -> ps.ops.Kernel:
        return ps.ops.Kernel(lambda x: x * np.float32(node.attrs["scale"]))

    custom = (f"CUSTOM:{name}", ["x"], ["y"], bytes(flexbuffers.Dumps({"scale": 3.0})))
    np.testing.assert_array_equal(run(model([subgraph(X, [custom], ["y"])])), 3 * ONE)
    unknown = ("CUSTOM:TestUnknown", ["x"], ["y"], b"")
    with pytest.raises(
        ps.Unsupported, match=r"TestUnknown.*register one with penstock.ops.operator"
    ):
        ps.load(model([subgraph(X, [unknown], ["y"])]))


def test_options_of_a_custom_operator_may_be_outside_of_the_flatbuffer(tmp_path: Path) -> None:
    @operator("TestOutside", domain=TFLITE)
    def outside(node: Any, types: Any) -> ps.ops.Kernel:
        return ps.ops.Kernel(lambda x: x * np.float32(node.attrs["scale"]))

    options = bytes(flexbuffers.Dumps({"scale": 3.0}))
    place = {"large_custom_options_offset": 2**40, "large_custom_options_size": len(options)}
    graph = subgraph(X, [("CUSTOM:TestOutside", ["x"], ["y"], place)], ["y"])
    place["large_custom_options_offset"] = len(model([graph]))
    file = model([graph])
    np.testing.assert_array_equal(run(file + options), 3 * ONE)
    with pytest.raises(ps.InvalidModel, match="it was cut short"):
        ps.load(file)


@pytest.mark.parametrize(("padding", "size"), [(1, (6, 8)), (2, (7, 9))])
def test_transposed_convolution_of_mediapipe_is_one_of_onnx(padding: int, size: tuple) -> None:
    rng = np.random.default_rng(0)
    x, kernel, bias = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((1, 3, 4, 2), (5, 3, 3, 2), 5)
    )
    options = np.array([padding, 2, 2], np.int32).tobytes()
    custom = ("CUSTOM:Convolution2DTransposeBias", ["x", "k", "b"], ["y"], options)
    graph = subgraph({"x": ("float32", x.shape)}, [custom], ["y"], {"k": kernel, "b": bias})
    want = np.zeros((9, 11, 5), np.float32)  # all that windows reach
    for i, j in np.ndindex(3, 4):
        want[2 * i : 2 * i + 3, 2 * j : 2 * j + 3] += np.moveaxis(kernel @ x[0, i, j], 0, -1)
    got = run(model([graph]), x)
    assert got.shape == (1, *size, 5)
    np.testing.assert_allclose(got[0], want[: size[0], : size[1]] + bias, rtol=1e-5, atol=1e-5)


def test_operation_of_tensorflow_in_a_file_is_refused_with_what_to_load_instead() -> None:
    graph = subgraph({"x": ("float32", (2, 2))}, [("CUSTOM:FlexInv", ["x"], ["y"], b"")], ["y"])
    with pytest.raises(ps.Unsupported, match=r"TensorFlow's Inv, .*SELECT_TF_OPS.*the SavedModel"):
        ps.compile(model([graph]))


def test_custom_operator_of_images_is_known_in_a_process_that_read_no_other(tmp_path: Path) -> None:
    options = np.array([1, 2, 2], np.int32).tobytes()
    custom = ("CUSTOM:Convolution2DTransposeBias", ["x", "k", "b"], ["y"], options)
    constants = {"k": np.ones((5, 3, 3, 2), np.float32), "b": np.zeros(5, np.float32)}
    graph = subgraph({"x": ("float32", (1, 3, 4, 2))}, [custom], ["y"], constants)
    path = tmp_path / "model.tflite"
    path.write_bytes(model([graph]))
    program = f"import penstock; print(penstock.load({str(path)!r}).graph.nodes[-1].op.name)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == "Transpose", done.stderr
