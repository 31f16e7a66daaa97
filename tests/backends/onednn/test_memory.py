"""Memory of sessions that meet many input shapes."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import penstock as ps
from penstock.backends.onednn.library import library
from tests.support.processes import end_of

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


def images_of_any_size() -> onnx.ModelProto:
    """A convolution and a transposed one, each with post-ops."""
    rng = np.random.default_rng(0)
    weights = {"w": (32, 16, 3, 3), "v": (32, 16, 2, 2)}
    info, kind = helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("ConvTranspose", ["b", "v"], ["c"], strides=[2, 2]),
        helper.make_node("Sigmoid", ["c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [info("x", kind, [1, 16, "H", "W"])],
        [info("y", kind, [1, 16, "H2", "W2"])],
        [
            numpy_helper.from_array(rng.standard_normal(dims).astype(np.float32) / 10, name)
            for name, dims in weights.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


GROWTH = """
import numpy as np
import penstock as ps
from tests.backends.onednn.test_memory import images_of_any_size

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

limits = ps.Limits(max_plans_bytes=1 << 20)
session = ps.compile(images_of_any_size(), threads=1, limits=limits)
sizes = np.random.default_rng(0).integers(8, 96, (300, 2))
for i, (height, width) in enumerate(sizes):
    session.run({"x": np.zeros((1, 16, height, width), np.float32)})
    if i == 99:
        before = resident()
print(resident() - before)
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_session_of_many_shapes_stays_within_its_memory():
    assert int(end_of(GROWTH)) < 8 << 20


def test_many_shapes_give_the_answers_of_numpy():
    session = ps.compile(images_of_any_size())
    reference = ps.compile(images_of_any_size(), backends=["numpy"])
    for size in range(8, 28):
        x = np.random.default_rng(size).standard_normal((1, 16, size, size)).astype(np.float32)
        expected = reference.run({"x": x})["y"]
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)


def test_plan_bytes_include_generated_code():
    shapes = {"x": (1, 16, 32, 32)}
    native = ps.compile(images_of_any_size(), shapes=shapes).memory.plans
    assert native > ps.compile(images_of_any_size(), shapes=shapes, backends=["numpy"]).memory.plans
