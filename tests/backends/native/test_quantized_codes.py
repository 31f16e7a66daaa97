"""Integer products, operations of codes, and networks: native kernels against NumPy and onnx.reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import penstock as ps
from tests.backends.native.forced import compile_on_native
from tests.backends.native.quantized_nets import (
    CONVOLUTIONS,
    F32,
    I8,
    I32,
    MICROSOFT,
    U8,
    Net,
    agree,
    close,
    codes,
    restart_rng,
    rng,
    steps,
)
from tests.support.native_kernels import pytestmark  # noqa: F401


@pytest.fixture(autouse=True)
def _restart_rng() -> None:
    restart_rng()


# Products of integers that are scaled afterwards, as dynamic quantization has them


@pytest.mark.parametrize("zero", ["known", "late", "left out"])
@pytest.mark.parametrize("per_column", [True, False])
def test_matmul_integer_cast_and_scaled_equals_numpy(per_column, zero):
    net = Net()
    given = [net.feed(codes(U8, 2, 5, 32)), net.constant(codes(I8, 32, 24))]
    if zero != "left out":
        given.append(net.constant(U8(131)) if zero == "known" else net.feed(np.array(131, U8)))
        given.append(net.constant(np.zeros(24 if per_column else 1, I8)))
    made = net.add("Cast", [net.add("MatMulInteger", given)], to=onnx.TensorProto.FLOAT)
    scale = net.feed(rng.uniform(0.001, 0.01, 24 if per_column else 1).astype(F32))
    made = net.add("Mul", [made, scale])
    made = net.add("Add", [net.constant(rng.standard_normal(24), F32), made])
    session = agree(net.proto(made), net.feeds, [("MatMulInteger Cast Mul Add", "native")])
    if zero == "late":
        # Another zero point in the next run.
        feeds = {**net.feeds, "x1": np.array(7, U8)}
        want = ps.compile(net.proto(made), backends=["numpy"]).run(feeds)[made]
        close(session.run(feeds)[made], want)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("dtype", [U8, I8])
def test_matmul_integer_of_two_computed_matrices_equals_numpy(dtype, late):
    net = Net()
    given = [net.feed(codes(U8, 2, 5, 32)), net.feed(codes(dtype, 2, 32, 24))]
    given.append(net.feed(np.array([131], U8)) if late else net.constant(U8(131)))
    given.append(net.constant(dtype(17)))
    made = net.add("Cast", [net.add("MatMulInteger", given)], to=onnx.TensorProto.FLOAT)
    made = net.add("Mul", [made, net.feed(np.array(0.003, F32))])
    agree(net.proto(made), net.feeds, [("MatMulInteger Cast Mul", "native")])


def test_dynamic_quantization_equals_numpy():
    net = Net()
    x = net.feed(rng.standard_normal((3, 16)).astype(F32))
    names = ["q", "q_scale", "q_zero"]
    net.nodes.append(helper.make_node("DynamicQuantizeLinear", [x], names))
    zeros = rng.integers(-3, 4, 8).astype(I8)
    weights = net.constant(rng.integers(-100, 100, (16, 8)).astype(I8))
    made = net.add("MatMulInteger", ["q", weights, "q_zero", net.constant(zeros)])
    made = net.add("Cast", [made], to=onnx.TensorProto.FLOAT)
    scales = net.add("Mul", ["q_scale", net.constant(rng.uniform(0.001, 0.01, 8), F32)])
    made = net.add("Relu", [net.add("Mul", [made, scales])])
    session = agree(net.proto(made), net.feeds, None)
    assert ("MatMulInteger Cast Mul Relu", "native") in steps(session)


def test_conv_integer_cast_and_scaled_equals_numpy():
    net = Net()
    given = [net.feed(codes(U8, 1, 16, 6, 7)), net.constant(codes(I8, 24, 16, 3, 3))]
    given.append(net.feed(np.array(131, U8)))
    made = net.add("ConvInteger", given, pads=[1, 1, 1, 1])
    made = net.add("Cast", [made], to=onnx.TensorProto.FLOAT)
    made = net.add("Mul", [made, net.constant(0.003, F32)])
    made = net.add("Add", [made, net.constant(rng.standard_normal((24, 1, 1)), F32)])
    agree(net.proto(made), net.feeds, [("ConvInteger Cast Mul Add", "native")])


def test_integer_product_that_others_read_is_not_fused_with_its_cast():
    net = Net()
    given = [net.feed(codes(U8, 5, 32)), net.constant(codes(I8, 32, 24))]
    made = net.add("MatMulInteger", given)
    other = net.add("Cast", [made], to=onnx.TensorProto.FLOAT)
    expected = [("MatMulInteger", "native"), ("Cast", "native")]
    agree(net.proto(made, other), net.feeds, expected)


def test_integer_product_cast_to_another_type_equals_numpy():
    net = Net()
    given = [net.feed(codes(U8, 5, 32)), net.constant(codes(I8, 32, 24))]
    made = net.add("Cast", [net.add("MatMulInteger", given)], to=onnx.TensorProto.DOUBLE)
    agree_exactly(net.proto(made), net.feeds)


def agree_exactly(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> None:
    got = compile_on_native(proto).run(feeds)
    for name, want in ps.compile(proto, backends=["numpy"]).run(feeds).items():
        np.testing.assert_array_equal(got[name], want, strict=True)


@pytest.mark.parametrize("dtype", [U8, I8])
@pytest.mark.parametrize("zero", [0, 3])
def test_code_of_nan_is_the_lowest_on_all_backends(dtype: np.dtype, zero: int) -> None:
    net = Net()
    x = np.full((16, 16), np.nan, np.float32)
    x[:, ::2] = np.linspace(-200, 200, 128, dtype=np.float32).reshape(16, 8)
    parameters = net.constant(np.array(1.5, np.float32)), net.constant(np.array(zero, dtype))
    proto = net.proto(net.add("QuantizeLinear", [net.feed(x), *parameters]))
    agree_exactly(proto, net.feeds)
    assert np.all(
        next(iter(ps.compile(proto).run(net.feeds).values()))[:, 1::2] == np.iinfo(dtype).min
    )


# Operations of codes


def qlinear_conv(name: str, x: tuple[Any, int], *, bias: bool, per_channel: bool, **more: Any):
    shape, w, attrs = CONVOLUTIONS[name]
    net = Net()
    scales = rng.uniform(0.001, 0.01, w[0]) if per_channel else np.array(0.004)
    given = [net.feed(codes(x[0], *shape)), net.constant(0.03, F32), net.constant(x[0](x[1]))]
    given += [net.constant(codes(I8, *w)), net.constant(scales, F32)]
    given += [net.constant(np.zeros_like(scales, I8))]
    given += [net.constant(0.11, F32), net.constant(x[0](x[1]))]
    if bias:
        given.append(net.constant(rng.integers(-9000, 9000, w[0]), I32))
    return net, net.add("QLinearConv", given, **attrs, **more)


@pytest.mark.parametrize("x", [(U8, 113), (I8, -7)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["plain", "padded more before", "grouped", "depthwise"])
def test_qlinear_conv_equals_numpy(name, bias, x):
    net, result = qlinear_conv(name, x, bias=bias, per_channel=bias)
    # The reference adds zero points to a type in which they overflow.
    agree(net.proto(result), net.feeds, [("QLinearConv", "native")], reference=False)


@pytest.mark.parametrize("x", [(U8, 113), (I8, -7)])
@pytest.mark.parametrize("per_column", [True, False])
def test_qlinear_matmul_equals_numpy(x, per_column):
    net = Net()
    scales = rng.uniform(0.001, 0.01, 24) if per_column else np.array(0.004)
    given = [net.feed(codes(x[0], 2, 5, 32)), net.constant(0.03, F32), net.constant(x[0](x[1]))]
    given += [net.constant(codes(I8, 32, 24)), net.constant(scales, F32)]
    given += [net.constant(np.zeros_like(scales, I8))]
    given += [net.constant(0.11, F32), net.constant(x[0](x[1]))]
    result = net.add("QLinearMatMul", given)
    agree(net.proto(result), net.feeds, [("QLinearMatMul", "native")], reference=False)


def test_qlinear_matmul_with_a_scale_for_each_row_runs_on_numpy():
    net = Net()
    given = [net.feed(codes(U8, 5, 32)), net.constant(rng.uniform(0.01, 0.1, 5), F32)]
    given += [net.constant(np.full(5, 9, U8)), net.constant(codes(I8, 32, 24))]
    given += [net.constant(0.004, F32), net.constant(I8(0))]
    given += [net.constant(0.11, F32), net.constant(U8(7))]
    result = net.add("QLinearMatMul", given)
    agree(net.proto(result), net.feeds, [("QLinearMatMul", "numpy")], reference=False)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("turned", [0, 1])
def test_qgemm_equals_numpy(turned, quantized):
    net = Net()
    given = [net.feed(codes(U8, 5, 32)), net.constant(0.031, F32), net.constant(U8(119))]
    given += [net.constant(codes(I8, *((24, 32) if turned else (32, 24))))]
    given += [net.constant(rng.uniform(0.001, 0.01, 24), F32), net.constant(np.zeros(24, I8))]
    given += [net.constant(rng.integers(-9000, 9000, 24), I32)]
    if quantized:
        given += [net.constant(0.05, F32), net.constant(U8(101))]
    result = net.add("QGemm", given, domain=MICROSOFT, transB=turned, alpha=0.75)
    agree(net.proto(result), net.feeds, [("QGemm", "native")], reference=False)


def test_channels_last_qlinear_conv_runs_on_native_kernels():
    net, result = qlinear_conv(
        "plain", (U8, 113), bias=True, per_channel=True, domain=MICROSOFT, channels_last=1
    )
    net.feeds["x0"] = np.ascontiguousarray(np.moveaxis(net.feeds["x0"], 1, -1))
    ran = [("Transpose", "numpy"), ("QLinearConv", "native")]
    agree(net.proto(result), net.feeds, ran, reference=False)


# Chains


def block(net: Net, x: str, channels: int, kernel: int, relu: bool, scale: float) -> str:
    """A convolution from codes to codes of zero point 0, with a Relu, or of 128."""
    w = net.dequantize(
        net.constant(codes(I8, channels, channels, kernel, kernel)),
        rng.uniform(0.0005, 0.002, channels),
        np.zeros(channels, I8),
        axis=0,
    )
    made = net.add("Conv", [x, w], pads=[kernel // 2] * 4)
    if relu:
        made = net.add("Relu", [made])
    zero = U8(0 if relu else 128)
    return net.dequantize(net.quantize(made, scale, zero), scale, zero)


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel"])
def test_residual_network_stays_in_codes(executor):
    net = Net()
    x = net.quantize(net.feed(rng.standard_normal((2, 16, 12, 12)).astype(F32)), 0.03, U8(120))
    stem = block(net, net.dequantize(x, 0.03, U8(120)), 16, 3, True, 0.02)
    pooled = net.add("MaxPool", [stem], kernel_shape=[2, 2], strides=[2, 2])
    pooled = net.dequantize(net.quantize(pooled, 0.02, U8(0)), 0.02, U8(0))
    one = block(net, block(net, pooled, 16, 1, True, 0.02), 16, 3, False, 0.02)
    other = block(net, pooled, 16, 1, False, 0.03)
    added = net.add("Relu", [net.add("Add", [one, other])])
    result = net.dequantize(net.quantize(added, 0.04, U8(0)), 0.04, U8(0))
    proto = net.proto(result)
    session = ps.compile(proto, executor=executor, backends=["native", "numpy"])
    want = ps.compile(proto, backends=["numpy"]).run(net.feeds)[result]
    got = session.run(net.feeds)[result]
    # Where a convolution is one step off, a few of the next may be, too.
    assert np.abs(got - want).max() <= 3 * 0.04
    assert np.mean(got != want) < 0.1
    expected = [
        "QuantizeLinear",
        *["Conv QuantizeLinear", "Conv Relu QuantizeLinear"] * 2,
        "MaxPool",
        "Add Relu QuantizeLinear DequantizeLinear",
    ]
    found = steps(session)
    moved = [step for step in session.inspect.plan.walk() if step.node.op.name == "Reorder"]
    assert len(moved) <= 1  # of what is fed
    assert sorted(ops for ops, _ in found) == sorted(expected)
    assert {backend for ops, backend in found if ops != "MaxPool"} == {"native"}
