"""ConstantRef that compiled kernels hold in an order of their own: plans for more shapes take them from
there, and read no contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import penstock as ps
from penstock.core.types import TensorType
from penstock.ir.graph import Value
from penstock.observers.base import ObservedRun, Observer
from penstock.ops.common.constant_cache import ConstantRef, reordered
from tests.support.native_kernels import pytestmark  # noqa: F401
from tests.support.released import constants_read

RNG = np.random.default_rng(3)


def normal(*dims: int) -> np.ndarray:
    return RNG.normal(size=dims).astype(np.float32)


def codes(*dims: int) -> np.ndarray:
    return RNG.integers(0, 256, dims, np.uint8)


BITS = {"domain": "com.microsoft", "K": 256, "N": 512, "block_size": 32}


# An operation, the dims of x but for the first, the weights, further constants, and attributes.
CASES: Mapping[str, tuple[str, tuple[int, ...], np.ndarray, list[np.ndarray], dict[str, Any]]] = {
    "product": ("MatMul", (200,), normal(200, 300), [], {}),
    "flipped product": ("Gemm", (200,), normal(300, 200), [normal(300)], {"transB": 1}),
    "4 bits": ("MatMulNBits", (256,), codes(512, 8, 16), [normal(512 * 8)], BITS | {"bits": 4}),
    "8 bits": ("MatMulNBits", (256,), codes(512, 8, 32), [normal(512 * 8)], BITS | {"bits": 8}),
    "convolution": ("Conv", (32, 9, 9), normal(48, 32, 3, 3), [], {"pads": [1] * 4}),
}


def model_of(case: str) -> onnx.ModelProto:
    op, dims, w, others, attrs = CASES[case]
    names = [f"c{i}" for i in range(len(others))]
    held = [numpy_helper.from_array(a, n) for n, a in zip(["w", *names], [w, *others], strict=True)]
    nodes = [
        helper.make_node("Neg", ["x"], ["n"]),
        helper.make_node(op, ["n", "w", *names], ["p"], **attrs),
        helper.make_node("Relu", ["p"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", *dims])]
    results = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", ends, results, held)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return constants_read(monkeypatch)


@pytest.mark.parametrize("executor", ["linear", "dataflow"])
@pytest.mark.parametrize("case", CASES)
def test_plans_for_more_shapes_give_no_weights_back(case, executor, given_back):
    model, dims = ps.load(model_of(case)), CASES[case][1]
    (value,) = {v for node in model.graph.nodes for v in node.inputs if v and v.name == "w"}
    session = ps.compile(model, threads=1, executor=executor)
    reference = ps.compile(model_of(case), backends=["numpy"])
    for n in (3, 1, 17, 40, 2):
        x = normal(n, *dims)
        y, expected = session.run({"x": x})["y"], reference.run({"x": x})["y"]
        np.testing.assert_allclose(y, expected, atol=1e-4 * np.abs(expected).max())
        assert not value.is_held
    assert given_back == []


class _Inputs(Observer):
    """Keeps the second input of the steps that have one."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def step_begin(self, run: ObservedRun, step: Any, inputs: Sequence[Any]) -> None:
        self.seen += inputs[1:2]


def test_observers_read_weights_only_if_they_look_at_them(given_back):
    model = ps.load(model_of("product"))
    session, x = ps.compile(model, threads=1), {"x": normal(3, 200)}
    session.run(x)
    session.run(x, observers=[ps.Profile()])
    assert given_back == []
    observer = _Inputs()
    session.run(x, observers=[observer])
    (seen,) = observer.seen
    np.testing.assert_array_equal(seen, CASES["product"][2])
    assert given_back == ["w"]


def test_reordered_arrays_begin_with_a_line_of_the_cache():
    """Vectors in two lines are read half as fast: an LSTM of 256 units took 1.6 times as long."""
    kept = []
    for count in (64, 1000, 70_000):
        types = [TensorType(np.dtype(np.float32), (count,))] * 3
        memory = np.zeros(count + 16, np.float32)
        arrays = tuple(memory[at : at + count] for at in (1, 4, 15))
        entry = reordered("as it is", np.ones(count), lambda w, made=arrays: made, None, types)
        assert [array.ctypes.data % 64 for array in entry.arrays] == [0, 0, 0]
        kept.append(entry)


def test_reordered_takes_the_arrays_that_hold_a_constant_in_the_same_order_alone():
    array = normal(3, 4)
    value = Value("w", const=array)
    weights = ConstantRef(value, (3, 4), np.dtype(np.float32))
    types = [TensorType(np.dtype(np.float32), (4, 3))]
    made: list[Any] = []

    def make(w: np.ndarray) -> tuple[np.ndarray]:
        made.append(w)
        return (np.ascontiguousarray(w.T),)

    def asked(name: str) -> Any:
        return reordered(name, weights, make, lambda w: np.ascontiguousarray(w.T), types)

    assert (weights.ndim, weights.size) == (2, 12)
    first = asked("turned")
    value.release(first.release())
    del array, made[:]
    assert asked("turned") is first
    assert made == []
    assert value.resident_in is first
    assert asked("turned otherwise") is not first  # the contents are read
    assert len(made) == 1
    assert value.is_held
    assert value.resident_in is None
