"""Products of rows that become int8 with weights in blocks, where the model allows it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import penstock as ps
from penstock.host.native import library
from tests.support.native_kernels import needs_reproducible

pytestmark = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")
RNG = np.random.default_rng(5)


def model_of(
    bits: int, block: int, k: int, n: int, level: int, zeros: bool = False
) -> onnx.ModelProto:
    count = -(-k // block)
    codes = RNG.integers(0, 256, (n, count, block * bits // 8), np.uint8)
    scales = (RNG.uniform(0.5, 1.5, (n, count)) / 64).astype(np.float32)
    weights = [numpy_helper.from_array(codes, "w"), numpy_helper.from_array(scales, "s")]
    names = ["x", "w", "s"]
    if zeros:
        points = RNG.integers(0, 256, (n, -(-count * bits // 8)), np.uint8)
        bias = RNG.standard_normal(n).astype(np.float32)
        weights += [numpy_helper.from_array(points, "z"), numpy_helper.from_array(bias, "b")]
        names += ["z", "", "b"]
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", **attrs)
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width])
        for name, width in (("x", k), ("y", n))
    ]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], weights)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


SHAPES = [
    *[(4, 32, 128, 70), (8, 16, 96, 33), (4, 128, 256, 64), (4, 16, 40, 33), (4, 64, 72, 32)],
    *[(8, 64, 576, 40), (4, 256, 512, 32), (8, 512, 512, 32)],
]
"""bits, block, k, n: blocks of less than a tile of AMX, of one and of several, incomplete ones, and
more than what is unpacked at once"""


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 40, 270])
@pytest.mark.parametrize("bits, block, k, n", SHAPES[:-1])  # the peer has no blocks of 512
def test_rows_of_codes_are_as_near_as_those_of_onnx_runtime(
    bits: int, block: int, k: int, n: int, rows: int
) -> None:
    model, x = model_of(bits, block, k, n, 4), RNG.standard_normal((rows, k)).astype(np.float32)
    got = ps.compile(model)(x)
    exact = ps.compile(model, precision="strict")(x)
    error = np.sqrt(np.mean((got - exact) ** 2)) / exact.std()
    assert 1e-4 < error < 0.02
    peer = pytest.importorskip("onnxruntime")  # which tools/aarch64.py has not
    other = peer.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    assert error < 1.3 * np.sqrt(np.mean((other - exact) ** 2)) / exact.std()


def test_exact_product_is_taken_unless_the_model_allows_codes() -> None:
    model, x = model_of(4, 32, 64, 32, 0), RNG.standard_normal((3, 64)).astype(np.float32)
    np.testing.assert_array_equal(ps.compile(model)(x), ps.compile(model, precision="strict")(x))


@needs_reproducible
def test_reproducible_sessions_round_no_rows() -> None:
    model, x = model_of(4, 32, 64, 32, 4), RNG.standard_normal((3, 64)).astype(np.float32)
    exact = ps.compile(model, precision="strict")(x)
    got = ps.compile(model, reproducible=True)(x)
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [9, 33, 259])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits, block, k, n", SHAPES)
def test_rows_do_not_depend_on_others(
    bits: int, block: int, k: int, n: int, zeros: bool, rows: int
) -> None:
    model = model_of(bits, block, k, n, 4, zeros)
    x = RNG.standard_normal((rows, k)).astype(np.float32)
    session = ps.compile(model)
    places = [0, rows // 2, rows - 1]
    alone = np.concatenate([session(x[[i]]) for i in places])
    largest = np.abs(alone).max()
    np.testing.assert_allclose(session(x)[places], alone, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [3, 20])
def test_block_with_a_number_that_is_not_finite_spoils_its_row_alone(
    number: float, rows: int
) -> None:
    model, x = model_of(4, 32, 64, 32, 4), np.ones((rows, 64), np.float32)
    x[1, 40] = number
    y = ps.compile(model)(x)
    assert np.isnan(y[1]).all()
    assert np.isfinite(np.delete(y, 1, 0)).all()


def test_rows_of_zeros_and_of_tiny_numbers_are_zeros() -> None:
    model, x = model_of(8, 32, 64, 32, 4), np.zeros((2, 64), np.float32)
    x[1] = 1e-44
    assert np.abs(ps.compile(model)(x)).max() < 1e-40


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("bits, block", [(4, 32), (4, 256), (8, 32)])
def test_sums_of_the_largest_codes_are_exact(bits: int, block: int, rows: int) -> None:
    model, x = model_of(bits, block, 512, 40, 4), np.full((rows, 512), -3, np.float32)
    (codes,) = (w for w in model.graph.initializer if w.name == "w")
    shape = numpy_helper.to_array(codes).shape
    codes.CopyFrom(numpy_helper.from_array(np.full(shape, 255, np.uint8), "w"))
    exact = ps.compile(model, precision="strict")(x)
    np.testing.assert_allclose(ps.compile(model)(x), exact, rtol=1e-5)
