"""Convolutions and products between conversions: native kernels against NumPy and onnx.reference."""

from __future__ import annotations

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
    U8,
    Net,
    agree,
    close,
    codes,
    convolution,
    restart_rng,
    rng,
    steps,
)
from tests.support.native_kernels import pytestmark  # noqa: F401


@pytest.fixture(autouse=True)
def _restart_rng() -> None:
    restart_rng()


ZEROS = {
    "uint8": (U8, 113, U8, 131),
    "uint8, zero at the end": (U8, 0, U8, 255),
    "int8": (I8, -7, I8, 5),
}


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_quantized_convolutions_equal_numpy(name, zeros):
    x, x_zero, y, y_zero = ZEROS[zeros]
    net, result = convolution(name, (x, x_zero), (y, y_zero))
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "native")])


def test_quantized_largest_sums_do_not_saturate_early():
    net = Net()
    w = net.dequantize(net.constant(np.full((16, 64, 3, 3), 127, I8)), 1.0, I8(0))
    x = net.dequantize(net.feed(np.full((1, 64, 5, 5), 255, U8)), 1.0, U8(0))
    result = net.quantize(net.add("Conv", [x, w]), 255.0 * 127 * 576 / 250, U8(0))
    session = agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "native")])
    (got,) = session.run(net.feeds).values()
    assert np.all(got == 250)


@pytest.mark.parametrize(("dtype", "groups"), [(I8, 8), (U8, 33)])
def test_quantized_depthwise_convolution_over_three_axes_equals_numpy(dtype, groups):
    net = Net()
    w = net.dequantize(net.constant(codes(I8, groups, 1, 2, 2, 2)), 0.01, I8(0))
    x = net.dequantize(net.feed(codes(dtype, 1, groups, 4, 5, 6)), 0.02, dtype(12))
    result = net.quantize(net.add("Conv", [x, w], group=groups), 0.03, dtype(9))
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "native")])


@pytest.mark.parametrize("name", ["padded", "grouped", "three axes"])
def test_quantized_convolution_that_is_not_quantized_again_equals_numpy(name):
    net, _ = convolution(name)
    (conv, _) = net.nodes[-2:]
    del net.nodes[-1]
    agree(net.proto(conv.output[0]), net.feeds, [("Conv", "native")])


@pytest.mark.parametrize("branch", [True, False])
def test_quantized_convolutions_in_branches_equal_numpy(branch):
    """What is dequantized stands outside of the branch that the convolution is in."""
    net, result = convolution("padded")
    then = net.nodes[-2:]  # Conv and QuantizeLinear
    del net.nodes[-2:]
    otherwise = [helper.make_node("Identity", ["x0"], ["same"])]
    graphs = [
        helper.make_graph(nodes, name, [], [onnx.ValueInfoProto(name=output)])
        for name, nodes, output in (("then", then, result), ("else", otherwise, "same"))
    ]
    condition = net.feed(np.array(branch))
    attrs = {"then_branch": graphs[0], "else_branch": graphs[1]}
    net.nodes.append(helper.make_node("If", [condition], ["either"], **attrs))
    session = agree(net.proto("either"), net.feeds, None)
    assert ("Conv QuantizeLinear", "native") in steps(session)


@pytest.mark.parametrize("dims", [("n", 16, "h", "w"), ("n", "c", "h", "w")])
def test_quantized_conv_of_dynamic_shapes_equals_numpy(dims):
    net, result = convolution("padded")
    session = compile_on_native(net.proto(result, dims={"x0": dims}))
    for shape in ((1, 16, 6, 6), (3, 16, 5, 9)):
        feeds = {"x0": codes(U8, *shape)}
        want = ps.compile(net.proto(result, dims={"x0": dims}), backends=["numpy"]).run(feeds)
        close(session.run(feeds)[result], want[result])
        assert steps(session) == [("Conv QuantizeLinear", "native")]


def test_quantized_conv_of_an_empty_batch_is_empty():
    net, result = convolution("plain")
    proto = net.proto(result, dims={"x0": ("n", 16, 7, 7)})
    feeds = {"x0": np.zeros((0, 16, 7, 7), U8)}
    got = compile_on_native(proto).run(feeds)[result]
    assert got.shape == (0, 32, 5, 5)
    assert got.dtype == U8


def product(op: str, a: tuple[int, ...], b: tuple[int, ...], x: tuple[Any, int], **attrs: Any):
    net = Net()
    columns = b[0] if attrs.get("transB") else b[1]
    scales = rng.uniform(0.001, 0.01, columns)
    axis = 0 if attrs.get("transB") else 1
    w = net.dequantize(net.constant(codes(I8, *b)), scales, np.zeros(columns, I8), axis=axis)
    given = [net.dequantize(net.feed(codes(x[0], *a)), 0.03, x[0](x[1])), w]
    if op == "Gemm":
        term = net.constant(rng.integers(-9000, 9000, columns), I32)
        given.append(net.dequantize(term, scales * 0.03, np.zeros(columns, I32), axis=0))
    return net, net.quantize(net.add(op, given, **attrs), 0.07, U8(127))


PRODUCTS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "matrices": ("MatMul", (6, 32), (32, 48), {}),
    "a batch of matrices": ("MatMul", (2, 3, 5, 32), (32, 16), {}),
    "one row": ("MatMul", (1, 64), (64, 10), {}),
    "odd": ("MatMul", (7, 13), (13, 11), {}),
    "gemm": ("Gemm", (6, 32), (32, 48), {}),
    "gemm, turned": ("Gemm", (6, 32), (48, 32), {"transB": 1}),
    "gemm with factors": ("Gemm", (6, 32), (48, 32), {"transB": 1, "alpha": 0.5, "beta": 2.0}),
}


@pytest.mark.parametrize("x", [(U8, 119), (I8, 0), (I8, -11)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_quantized_products_equal_numpy(name, x):
    op, a, b, attrs = PRODUCTS[name]
    net, result = product(op, a, b, x, **attrs)
    agree(net.proto(result), net.feeds, [(f"{op} QuantizeLinear", "native")])


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("b", [U8, I8])
@pytest.mark.parametrize(
    "dims", [((2, 3, 6, 32), (2, 3, 32, 9)), ((5, 7), (7, 4)), ((3, 5, 7), (7, 4))]
)
def test_quantized_products_of_two_computed_matrices_equal_numpy(dims, b, turned, quantized):
    net = Net()
    other = codes(b, *dims[1])
    if turned:
        back = [*range(other.ndim - 2), other.ndim - 1, other.ndim - 2]
        name = net.add(
            "Transpose", [net.feed(np.ascontiguousarray(other.swapaxes(-1, -2)))], perm=back
        )
    else:
        name = net.feed(other)
    one = net.dequantize(net.feed(codes(U8, *dims[0])), 0.03, U8(119))
    result = net.add("MatMul", [one, net.dequantize(name, 0.02, b(99))])
    if quantized:
        result = net.quantize(result, 0.35, U8(127))
    session = agree(net.proto(result), net.feeds, None)
    expected = "MatMul QuantizeLinear" if quantized else "MatMul"
    fused = [s for s in session.inspect.plan.walk() if s.node.op.name == "Fused"]
    assert [ops for ops in steps(session) if "MatMul" in ops[0]] == [(expected, "native")]
    assert len(fused) == 1


@pytest.mark.parametrize("dtype", [U8, I8])
def test_quantized_square_of_a_matrix_equals_numpy(dtype):
    net = Net()
    x = net.dequantize(net.feed(codes(dtype, 9, 9)), 0.03, dtype(119))
    result = net.quantize(net.add("MatMul", [x, x]), 0.35, U8(127))
    agree(net.proto(result), net.feeds, None)


def test_quantized_gemm_reads_the_scales_of_a_vector_along_its_only_axis():
    net = Net()
    x = net.dequantize(net.feed(codes(U8, 6, 32)), 0.03, U8(120))
    w = net.dequantize(net.constant(codes(I8, 32, 8)), 0.01, I8(0))
    term = net.constant(rng.integers(-900, 900, 8), I32)
    scales = rng.uniform(1e-4, 1e-3, 8).astype(F32)
    bias = net.dequantize(term, scales, np.zeros(8, I32))  # by default along axis 1
    proto = net.proto(net.quantize(net.add("Gemm", [x, w, bias]), 0.07, U8(127)))
    session = compile_on_native(proto, executor="linear")
    (found,), (wanted,) = (
        s.run(net.feeds).values() for s in (session, ps.compile(proto, backends=["numpy"]))
    )
    assert np.abs(found.astype(I32) - wanted).max() <= 1
    assert ("Gemm QuantizeLinear", "native") in steps(session)


def test_quantized_gemm_with_a_term_for_each_row_runs_on_numpy():
    net = Net()
    w = net.dequantize(net.constant(codes(I8, 8, 8)), 0.01, I8(0))
    x = net.dequantize(net.feed(codes(U8, 8, 8)), 0.02, U8(120))
    term = net.constant(rng.standard_normal((8, 1)), F32)
    result = net.quantize(net.add("Gemm", [x, w, term]), 0.05, U8(90))
    apart = [("DequantizeLinear", "numpy"), ("Gemm", "numpy"), ("QuantizeLinear", "numpy")]
    agree(net.proto(result), net.feeds, apart)


@pytest.mark.parametrize("axis", [0, 1])
def test_conversions_with_scales_along_an_axis_run_on_numpy(axis):
    net = Net()
    x = net.feed((rng.standard_normal((6, 6)) * 9).astype(F32))
    scales = rng.uniform(0.05, 0.2, 6)
    back = net.dequantize(
        net.quantize(x, scales, np.full(6, 9, U8), axis=axis), scales, np.full(6, 9, U8), axis=axis
    )
    expected = [("QuantizeLinear", "numpy"), ("DequantizeLinear", "numpy")]
    agree(net.proto(back), net.feeds, expected)


def test_conversions_with_fed_scales_run_on_numpy():
    net = Net()
    scale = net.feed(np.array(0.03, F32))
    x = net.add("DequantizeLinear", [net.feed(codes(U8, 1, 8, 6, 6)), scale])
    w = net.dequantize(net.constant(codes(I8, 16, 8, 3, 3)), 0.01, I8(0))
    result = net.quantize(net.add("Conv", [x, w]), 0.1, U8(90))
    apart = [("DequantizeLinear", "numpy"), ("Conv", "native"), ("QuantizeLinear", "numpy")]
    agree(net.proto(result), net.feeds, apart)


_NARROW_TYPES = ["int4", "uint4", "float8e4m3fn"]
_APART = [("QuantizeLinear", "numpy"), ("DequantizeLinear", "numpy")]
_TOGETHER = [("QuantizeLinear DequantizeLinear", "native")]


@pytest.mark.parametrize(
    ("target", "conversions"),
    [("int16", _TOGETHER), ("uint16", _TOGETHER), *((n, _APART) for n in _NARROW_TYPES)],
)
def test_convolution_to_codes_of_other_types_is_converted_apart(target, conversions):
    kind = getattr(onnx.TensorProto, target.upper())
    net = Net(opset=21)
    zero = helper.make_tensor("zero", kind, [], [0])
    w = net.dequantize(net.constant(codes(I8, 16, 8, 3, 3)), 0.01, I8(0))
    x = net.dequantize(net.feed(codes(U8, 1, 8, 6, 6)), 0.02, U8(120))
    scale = net.constant(0.5, F32)
    made = net.add("QuantizeLinear", [net.add("Conv", [x, w]), scale, "zero"])
    back = net.add("DequantizeLinear", [made, scale, "zero"])
    proto = net.proto(back)
    proto.graph.initializer.append(zero)
    session = compile_on_native(proto)
    want = ps.compile(proto, backends=["numpy"]).run(net.feeds)[back]
    got = session.run(net.feeds)[back]
    # Sums differ in their last bits, so that what is between two codes may become either.
    assert np.mean(got != want) < 0.01
    assert steps(session) == [("Conv", "native"), *conversions]


def test_blocked_quantization_runs_on_numpy():
    net = Net(opset=21)
    scales = rng.uniform(0.001, 0.01, (4, 16))
    w = net.dequantize(
        net.constant(codes(I8, 16, 16)), scales, np.zeros((4, 16), I8), axis=0, block_size=4
    )
    x = net.dequantize(net.feed(codes(U8, 5, 16)), 0.02, U8(120))
    result = net.quantize(net.add("MatMul", [x, w]), 0.05, U8(90))
    apart = [("DequantizeLinear", "numpy"), ("MatMul", "native"), ("QuantizeLinear", "numpy")]
    agree(net.proto(result), net.feeds, apart)
