"""Convolutions, products and sums of 8-bit codes: oneDNN against NumPy and onnx.reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import penstock as ps
from penstock.backends.onednn.library import library
from tests.backends.onednn.forced import compile_on_onednn

pytestmark = pytest.mark.skipif(
    library() is None or not library().int8, reason="needs oneDNN and VNNI"
)

rng = np.random.default_rng()
U8, I8, I32, F32 = np.uint8, np.int8, np.int32, np.float32
MICROSOFT = "com.microsoft"


@pytest.fixture(autouse=True)
def _the_same_numbers_whatever_ran_before() -> None:
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


class Net:
    """A model of a few nodes. Constants are named by the builder; what is fed comes with a value of
    its type and shape."""

    def __init__(self, opset: int = 20) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.feeds: dict[str, np.ndarray] = {}
        self.constants: dict[str, np.ndarray] = {}

    def feed(self, x: np.ndarray) -> str:
        name = f"x{len(self.feeds)}"
        self.feeds[name] = x
        return name

    def constant(self, x: Any, dtype: Any = None) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = np.asarray(x, dtype)
        return name

    def add(self, op: str, inputs: Sequence[str], **attrs: Any) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attrs))
        return output

    def dequantize(self, x: str, scale: Any, zero: Any = None, **attrs: Any) -> str:
        return self._converted("DequantizeLinear", x, scale, zero, attrs)

    def quantize(self, x: str, scale: Any, zero: Any = None, **attrs: Any) -> str:
        return self._converted("QuantizeLinear", x, scale, zero, attrs)

    def _converted(self, op: str, x: str, scale: Any, zero: Any, attrs: dict[str, Any]) -> str:
        given = [x, self.constant(scale, F32)]
        return self.add(op, given if zero is None else [*given, self.constant(zero)], **attrs)

    def proto(self, *outputs: str, dims: Mapping[str, Sequence[Any]] | None = None) -> Any:
        made = helper.np_dtype_to_tensor_dtype
        inputs = [
            helper.make_tensor_value_info(n, made(x.dtype), (dims or {}).get(n, x.shape))
            for n, x in self.feeds.items()
        ]
        known = [numpy_helper.from_array(k, name) for name, k in self.constants.items()]
        results = [onnx.ValueInfoProto(name=name) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", inputs, results, known)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def codes(dtype: Any, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def steps(session: ps.Session) -> list[tuple[str, str]]:
    """What runs on which backend: nodes by their operations, fused ones without those of what they
    read, and without copies of what is fed into other layouts."""
    found = [(s.node.attrs.get("ops", s.node.op.name), s.backend) for s in session.plan.walk()]
    named = [(ops.replace("DequantizeLinear ", ""), backend) for ops, backend in found]
    return [each for each in named if each[0] != "Reorder"]


def close(got: np.ndarray, want: np.ndarray, often: float = 0.005) -> None:
    """Codes differ by one step at most, and few of them do; real numbers differ in last bits."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype == F32:
        most = np.abs(want).max(initial=1e-3)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * most)
        return
    apart = np.abs(got.astype(int) - want.astype(int))
    assert apart.max(initial=0) <= 1
    assert (apart > 0).mean() <= often


def agree(
    proto: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    expected: Sequence[tuple[str, str]] | None,
    *,
    reference: bool = True,
    executor: str = "linear",
) -> ps.Session:
    """The steps that run are those ``expected``, in any order, and all is as on NumPy."""
    session = compile_on_onednn(proto, executor=executor)
    want = ps.compile(proto, backends=["numpy"]).run(feeds)
    for _ in range(2):
        got = session.run(feeds)
        for name, each in want.items():
            close(got[name], each)
    if reference:
        names = [output.name for output in proto.graph.output]
        for name, each in zip(names, ReferenceEvaluator(proto).run(None, feeds), strict=True):
            close(got[name], each)
    if expected is not None:
        assert sorted(steps(session)) == sorted(expected)
    return session


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((1, 16, 7, 7), (32, 16, 3, 3), {}),
    "of a point": ((1, 32, 6, 5), (16, 32, 1, 1), {}),
    "strided": ((2, 16, 9, 8), (24, 16, 3, 3), {"strides": [2, 2]}),
    "padded": ((1, 16, 6, 6), (16, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    "padded more before": ((1, 8, 6, 6), (16, 8, 4, 4), {"pads": [3, 2, 0, 1]}),
    "same": ((1, 8, 7, 7), (16, 8, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "dilated": ((1, 16, 9, 9), (16, 16, 3, 3), {"dilations": [2, 2]}),
    "grouped": ((1, 32, 6, 6), (32, 16, 3, 3), {"group": 2}),
    "depthwise": ((1, 32, 8, 8), (32, 1, 3, 3), {"group": 32, "pads": [1, 1, 1, 1]}),
    "depthwise, strided": ((2, 32, 9, 9), (32, 1, 3, 3), {"group": 32, "strides": [2, 2]}),
    "of an image": ((1, 3, 20, 20), (16, 3, 7, 7), {"strides": [2, 2], "pads": [3, 3, 3, 3]}),
    "of odd channels": ((1, 5, 6, 6), (7, 5, 3, 3), {}),
    "of one row": ((1, 16, 1, 9), (16, 16, 1, 3), {"pads": [0, 1, 0, 1]}),
    "one axis": ((2, 16, 12), (16, 16, 3), {"pads": [1, 1]}),
    "three axes": ((1, 16, 4, 5, 6), (16, 16, 2, 3, 3), {}),
}
ZEROS = {
    "uint8": (U8, 113, U8, 131),
    "uint8, zero at the end": (U8, 0, U8, 255),
    "int8": (I8, -7, I8, 5),
}


def convolution(
    name: str,
    x: tuple[Any, int] = (U8, 113),
    y: tuple[Any, int] = (U8, 131),
    *,
    bias: bool = True,
    per_channel: bool = True,
    tail: str = "",
) -> tuple[Net, str]:
    shape, w, attrs = CONVOLUTIONS[name]
    net = Net()
    filters = w[0]
    scales = rng.uniform(0.001, 0.01, filters) if per_channel else 0.004
    axis = {"axis": 0} if per_channel else {}
    weights = net.dequantize(net.constant(codes(I8, *w)), scales, np.zeros_like(scales, I8), **axis)
    given = [net.dequantize(net.feed(codes(x[0], *shape)), 0.03, x[0](x[1])), weights]
    if bias:
        term = net.constant(rng.integers(-9000, 9000, filters), I32)
        given.append(net.dequantize(term, scales * 0.03, np.zeros_like(scales, I32), **axis))
    made = net.add("Conv", given, **attrs)
    if tail:
        made = net.add(tail, [made])
    return net, net.quantize(made, 0.11, y[0](y[1]))


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, zeros):
    x, x_zero, y, y_zero = ZEROS[zeros]
    net, result = convolution(name, (x, x_zero), (y, y_zero))
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["plain", "depthwise", "grouped"])
def test_conv_with_scales_and_biases_for_each_filter(name, bias, per_channel):
    net, result = convolution(name, bias=bias, per_channel=per_channel)
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])


@pytest.mark.parametrize("zero", [0, 40])
def test_relu_before_quantize_bounds_the_codes(zero):
    net, result = convolution("padded", y=(U8, zero), tail="Relu")
    session = agree(net.proto(result), net.feeds, [("Conv Relu QuantizeLinear", "onednn")])
    (got,) = session.run(net.feeds).values()
    assert got.min() == zero  # some sums are negative


def test_clip_with_bounds_inside_the_range():
    net, _ = convolution("plain", bias=False)
    net.nodes.pop()
    inside = net.add("Clip", ["v2", net.constant(-2.5, F32), net.constant(3.1, F32)])
    result = net.quantize(inside, 0.11, U8(77))
    session = agree(net.proto(result), net.feeds, [("Conv Clip QuantizeLinear", "onednn")])
    (got,) = session.run(net.feeds).values()
    assert (got.min(), got.max()) == (77 - 23, 77 + 28)


def test_results_beyond_the_range_saturate():
    net, _ = convolution("plain", bias=False)
    net.nodes.pop()
    result = net.quantize("v2", 0.0003, I8(-3))
    session = agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])
    (got,) = session.run(net.feeds).values()
    assert (got.min(), got.max()) == (-128, 127)


def test_largest_sums_do_not_saturate_early():
    net = Net()
    w = net.dequantize(net.constant(np.full((16, 64, 3, 3), 127, I8)), 1.0, I8(0))
    x = net.dequantize(net.feed(np.full((1, 64, 5, 5), 255, U8)), 1.0, U8(0))
    result = net.quantize(net.add("Conv", [x, w]), 255.0 * 127 * 576 / 250, U8(0))
    session = agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])
    (got,) = session.run(net.feeds).values()
    assert np.all(got == 250)


def test_biases_of_another_scale():
    """In units of their own they are no int32 of a QLinearConv: they are real numbers here."""
    net = Net()
    w = net.dequantize(net.constant(codes(I8, 16, 8, 3, 3)), 0.01, I8(0))
    b = net.dequantize(net.constant(rng.integers(-90, 90, 16), I32), 0.37, I32(0))
    x = net.dequantize(net.feed(codes(U8, 1, 8, 6, 6)), 0.02, U8(120))
    result = net.quantize(net.add("Conv", [x, w, b]), 0.2, U8(90))
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])


def test_biases_of_float32():
    net = Net()
    w = net.dequantize(net.constant(codes(I8, 16, 8, 3, 3)), 0.01, I8(0))
    b = net.constant(rng.standard_normal(16) * 9, F32)
    x = net.dequantize(net.feed(codes(U8, 1, 8, 6, 6)), 0.02, U8(120))
    result = net.quantize(net.add("Conv", [x, w, b]), 0.2, U8(90))
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])


@pytest.mark.parametrize(
    ("low", "high", "zero", "fits"),
    [(0, 256, 128, True), (100, 200, 150, True), (0, 256, 100, False), (0, 100, 0, True)],
)
def test_weights_of_uint8(low, high, zero, fits):
    """Less their zero points they are int8, or NumPy's business; they are not dequantised in runs
    in either case."""
    net = Net()
    weights = rng.integers(low, high, (16, 8, 3, 3)).astype(U8)
    weights.reshape(-1)[:2] = low, high - 1
    w = net.dequantize(net.constant(weights), 0.01, U8(zero))
    x = net.dequantize(net.feed(codes(U8, 1, 8, 6, 6)), 0.02, U8(120))
    result = net.quantize(net.add("Conv", [x, w]), 0.2, U8(90))
    taken = [("Conv QuantizeLinear", "onednn")]
    apart = [("DequantizeLinear", "onednn"), ("Conv", "onednn"), ("QuantizeLinear", "onednn")]
    agree(net.proto(result), net.feeds, taken if fits else apart)


def test_weights_with_a_zero_point_for_each_filter():
    net = Net()
    scales, zeros = rng.uniform(0.001, 0.01, 16), rng.integers(120, 136, 16).astype(U8)
    weights = rng.integers(10, 240, (16, 8, 3, 3)).astype(U8)
    w = net.dequantize(net.constant(weights), scales, zeros, axis=0)
    x = net.dequantize(net.feed(codes(U8, 1, 8, 6, 6)), 0.02, U8(120))
    result = net.quantize(net.add("Conv", [x, w]), 0.1, U8(90))
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])


def test_weights_with_scales_along_another_axis():
    net = Net()
    w = net.dequantize(
        net.constant(codes(I8, 16, 8, 3, 3)), rng.uniform(0.001, 0.01, 8), np.zeros(8, I8), axis=1
    )
    x = net.dequantize(net.feed(codes(U8, 1, 8, 6, 6)), 0.02, U8(120))
    result = net.quantize(net.add("Conv", [x, w]), 0.1, U8(90))
    apart = [("DequantizeLinear", "onednn"), ("Conv", "onednn"), ("QuantizeLinear", "onednn")]
    agree(net.proto(result), net.feeds, apart)


def test_results_without_quantize_linear():
    net, _ = convolution("plain")
    net.nodes.pop()
    agree(net.proto("v3"), net.feeds, [("Conv", "onednn")])


def test_results_of_many_scales():
    net, _ = convolution("plain")
    net.nodes.pop()
    scales = rng.uniform(0.05, 0.2, 32)
    result = net.quantize("v3", scales, np.full(32, 99, U8), axis=1)
    agree(net.proto(result), net.feeds, [("Conv", "onednn"), ("QuantizeLinear", "numpy")])


@pytest.mark.parametrize(("dtype", "groups"), [(I8, 8), (U8, 33)])
def test_depthwise_conv_over_three_axes_runs_in_float32(dtype, groups):
    """oneDNN's integers are wrong there, for some numbers of channels and threads."""
    net = Net()
    w = net.dequantize(net.constant(codes(I8, groups, 1, 2, 2, 2)), 0.01, I8(0))
    x = net.dequantize(net.feed(codes(dtype, 1, groups, 4, 5, 6)), 0.02, dtype(12))
    result = net.quantize(net.add("Conv", [x, w], group=groups), 0.03, dtype(9))
    agree(net.proto(result), net.feeds, None)


@pytest.mark.parametrize("branch", [True, False])
def test_convolutions_in_branches(branch):
    """What is dequantised stands outside of the branch that the convolution is in."""
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
    assert ("Conv QuantizeLinear", "onednn") in steps(session)


@pytest.mark.parametrize("dims", [("n", 16, "h", "w"), ("n", "c", "h", "w")])
def test_shapes_known_at_run_time(dims):
    net, result = convolution("padded")
    session = compile_on_onednn(net.proto(result, dims={"x0": dims}))
    for shape in ((1, 16, 6, 6), (3, 16, 5, 9)):
        feeds = {"x0": codes(U8, *shape)}
        want = ps.compile(net.proto(result, dims={"x0": dims}), backends=["numpy"]).run(feeds)
        close(session.run(feeds)[result], want[result])
        assert steps(session) == [("Conv QuantizeLinear", "onednn")]


def test_empty_batch_is_fed():
    net, result = convolution("plain")
    proto = net.proto(result, dims={"x0": ("n", 16, 7, 7)})
    feeds = {"x0": np.zeros((0, 16, 7, 7), U8)}
    got = compile_on_onednn(proto).run(feeds)[result]
    assert got.shape == (0, 32, 5, 5)
    assert got.dtype == U8


# Products


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
def test_products(name, x):
    op, a, b, attrs = PRODUCTS[name]
    net, result = product(op, a, b, x, **attrs)
    agree(net.proto(result), net.feeds, [(f"{op} QuantizeLinear", "onednn")])


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("b", [U8, I8])
@pytest.mark.parametrize(
    "dims", [((2, 3, 6, 32), (2, 3, 32, 9)), ((5, 7), (7, 4)), ((3, 5, 7), (7, 4))]
)
def test_products_of_two_computed_matrices(dims, b, turned, quantized):
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
    fused = [s for s in session.plan.walk() if s.node.op.name == "Fused"]
    assert [ops for ops in steps(session) if "MatMul" in ops[0]] == [(expected, "onednn")]
    assert len(fused) == 1


@pytest.mark.parametrize("dtype", [U8, I8])
def test_squares_of_matrices(dtype):
    net = Net()
    x = net.dequantize(net.feed(codes(dtype, 9, 9)), 0.03, dtype(119))
    result = net.quantize(net.add("MatMul", [x, x]), 0.35, U8(127))
    agree(net.proto(result), net.feeds, None)


def test_product_with_a_term_for_each_row():
    net = Net()
    w = net.dequantize(net.constant(codes(I8, 8, 8)), 0.01, I8(0))
    x = net.dequantize(net.feed(codes(U8, 8, 8)), 0.02, U8(120))
    term = net.constant(rng.standard_normal((8, 1)), F32)
    result = net.quantize(net.add("Gemm", [x, w, term]), 0.05, U8(90))
    apart = [("DequantizeLinear", "onednn"), ("Gemm", "numpy"), ("QuantizeLinear", "onednn")]
    agree(net.proto(result), net.feeds, apart)


# Sums


@pytest.mark.parametrize("tail", ["", "Relu"])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 16, 5, 5), (2, 16, 5, 5)),
        ((2, 16, 5, 5), (1, 16, 1, 1)),
        ((1, 1, 5), (4, 3, 5)),
        ((7,), (7,)),
        ((3, 4), (1,)),
    ],
)
def test_sums(a, b, tail):
    net = Net()
    one = net.dequantize(net.feed(codes(U8, *a)), 0.03137, U8(119))
    other = net.dequantize(net.feed(codes(U8, *b)), 0.01719, U8(7))
    made = net.add("Add", [one, other])
    if tail:
        made = net.add(tail, [made])
    result = net.quantize(made, 0.05077, U8(101))
    ops = "Add Relu QuantizeLinear" if tail else "Add QuantizeLinear"
    agree(net.proto(result), net.feeds, [(ops, "onednn")])


def test_sums_of_int8_and_uint8():
    net = Net()
    one = net.dequantize(net.feed(codes(I8, 4, 33)), 0.03137, I8(-5))
    other = net.dequantize(net.feed(codes(U8, 4, 33)), 0.01719, U8(7))
    result = net.quantize(net.add("Add", [one, other]), 0.05077, I8(3))
    agree(net.proto(result), net.feeds, [("Add QuantizeLinear", "onednn")])


def test_sum_of_a_tensor_with_itself():
    net = Net()
    x = net.dequantize(net.feed(codes(U8, 4, 33)), 0.03137, U8(100))
    result = net.quantize(net.add("Add", [x, x]), 0.05077, U8(3))
    agree(net.proto(result), net.feeds, [("Add QuantizeLinear", "onednn")])


def test_sums_with_constants():
    net = Net()
    known = net.dequantize(net.constant(codes(U8, 33)), 0.01719, U8(7))
    x = net.dequantize(net.feed(codes(U8, 4, 33)), 0.03137, U8(5))
    result = net.quantize(net.add("Add", [known, x]), 0.05077, U8(3))
    agree(net.proto(result), net.feeds, [("Add QuantizeLinear", "onednn")])


@pytest.mark.parametrize("zero", [0, 1, 128, 131])
def test_halves_round_to_even_before_the_zero_point_is_added(zero):
    net = Net()
    one = net.dequantize(net.feed(np.arange(256, dtype=U8)), 1.0, U8(100))
    other = net.dequantize(net.feed(np.zeros(256, U8)), 1.0, U8(0))
    result = net.quantize(net.add("Add", [one, other]), 2.0, U8(zero))
    session = agree(net.proto(result), net.feeds, [("Add QuantizeLinear", "onednn")])
    exact = np.clip(np.rint((np.arange(256) - 100) / 2) + zero, 0, 255)
    np.testing.assert_array_equal(session.run(net.feeds)[result], exact)


# Conversions alone


@pytest.mark.parametrize("zero", [U8(0), U8(119), I8(-128), I8(3)])
def test_conversions_are_exact(zero):
    net = Net()
    x = net.feed((rng.standard_normal((3, 5, 41)) * 9).astype(F32))
    x_codes = net.quantize(x, 0.071, zero)
    back = net.dequantize(x_codes, 0.093, zero)
    proto = net.proto(x_codes, back)
    expected = [("QuantizeLinear", "onednn"), ("DequantizeLinear", "onednn")]
    session = agree(proto, net.feeds, expected)
    want = ps.compile(proto, backends=["numpy"]).run(net.feeds)
    for name, each in session.run(net.feeds).items():
        np.testing.assert_array_equal(each, want[name])


def test_values_next_to_a_half_round_correctly():
    net = Net()
    nearly = np.nextafter(np.float32(0.5), np.float32(0))
    result = net.quantize(net.feed(np.full(64, nearly, F32)), 1.0, U8(129))
    session = agree(net.proto(result), net.feeds, [("QuantizeLinear", "onednn")])
    np.testing.assert_array_equal(session.run(net.feeds)[result], 129)


@pytest.mark.parametrize("zero", [U8(0), U8(119), I8(3)])
def test_conversions_of_infinities_and_nan(zero):
    net = Net()
    x = np.tile(np.array([np.inf, -np.inf, 3e38, -3e38, -0.0], F32), 9)
    if zero.dtype == U8:
        x[2] = np.nan  # as int8, oneDNN gives it the highest code, and NumPy the lowest
    result = net.quantize(net.feed(x), 0.1, zero)
    proto = net.proto(result)
    session = agree(proto, net.feeds, [("QuantizeLinear", "onednn")], reference=False)
    want = ps.compile(proto, backends=["numpy"]).run(net.feeds)[result]
    np.testing.assert_array_equal(session.run(net.feeds)[result], want)


@pytest.mark.parametrize("axis", [0, 1])
def test_conversions_with_scales_along_an_axis(axis):
    net = Net()
    x = net.feed((rng.standard_normal((6, 6)) * 9).astype(F32))
    scales = rng.uniform(0.05, 0.2, 6)
    back = net.dequantize(
        net.quantize(x, scales, np.full(6, 9, U8), axis=axis), scales, np.full(6, 9, U8), axis=axis
    )
    expected = [("QuantizeLinear", "numpy"), ("DequantizeLinear", "numpy")]
    agree(net.proto(back), net.feeds, expected)


def test_scales_that_are_fed():
    net = Net()
    scale = net.feed(np.array(0.03, F32))
    x = net.add("DequantizeLinear", [net.feed(codes(U8, 1, 8, 6, 6)), scale])
    w = net.dequantize(net.constant(codes(I8, 16, 8, 3, 3)), 0.01, I8(0))
    result = net.quantize(net.add("Conv", [x, w]), 0.1, U8(90))
    apart = [("DequantizeLinear", "numpy"), ("Conv", "onednn"), ("QuantizeLinear", "onednn")]
    agree(net.proto(result), net.feeds, apart)


@pytest.mark.parametrize("target", ["int16", "uint16", "int4", "uint4", "float8e4m3fn"])
def test_codes_of_other_types_run_on_numpy(target):
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
    session = compile_on_onednn(proto)
    want = ps.compile(proto, backends=["numpy"]).run(net.feeds)[back]
    got = session.run(net.feeds)[back]
    # Sums differ in their last bits, so that what is between two codes may become either.
    assert np.mean(got != want) < 0.01
    assert ("Conv", "onednn") in steps(session)
    assert ("QuantizeLinear", "numpy") in steps(session)
    assert ("DequantizeLinear", "numpy") in steps(session)


def test_blocked_quantization_runs_on_numpy():
    net = Net(opset=21)
    scales = rng.uniform(0.001, 0.01, (4, 16))
    w = net.dequantize(
        net.constant(codes(I8, 16, 16)), scales, np.zeros((4, 16), I8), axis=0, block_size=4
    )
    x = net.dequantize(net.feed(codes(U8, 5, 16)), 0.02, U8(120))
    result = net.quantize(net.add("MatMul", [x, w]), 0.05, U8(90))
    apart = [("DequantizeLinear", "onednn"), ("MatMul", "onednn"), ("QuantizeLinear", "onednn")]
    agree(net.proto(result), net.feeds, apart)


# Products of integers that are scaled afterwards, as dynamic quantisation has them


@pytest.mark.parametrize("zero", ["known", "late", "left out"])
@pytest.mark.parametrize("per_column", [True, False])
def test_products_of_integers(per_column, zero):
    net = Net()
    given = [net.feed(codes(U8, 2, 5, 32)), net.constant(codes(I8, 32, 24))]
    if zero != "left out":
        given.append(net.constant(U8(131)) if zero == "known" else net.feed(np.array(131, U8)))
        given.append(net.constant(np.zeros(24 if per_column else 1, I8)))
    made = net.add("Cast", [net.add("MatMulInteger", given)], to=onnx.TensorProto.FLOAT)
    scale = net.feed(rng.uniform(0.001, 0.01, 24 if per_column else 1).astype(F32))
    made = net.add("Mul", [made, scale])
    made = net.add("Add", [net.constant(rng.standard_normal(24), F32), made])
    session = agree(net.proto(made), net.feeds, [("MatMulInteger Cast Mul Add", "onednn")])
    if zero == "late":
        # Another zero point in the next run.
        feeds = {**net.feeds, "x1": np.array(7, U8)}
        want = ps.compile(net.proto(made), backends=["numpy"]).run(feeds)[made]
        close(session.run(feeds)[made], want)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("dtype", [U8, I8])
def test_matmul_integer_of_two_computed_matrices(dtype, late):
    net = Net()
    given = [net.feed(codes(U8, 2, 5, 32)), net.feed(codes(dtype, 2, 32, 24))]
    given.append(net.feed(np.array([131], U8)) if late else net.constant(U8(131)))
    given.append(net.constant(dtype(17)))
    made = net.add("Cast", [net.add("MatMulInteger", given)], to=onnx.TensorProto.FLOAT)
    made = net.add("Mul", [made, net.feed(np.array(0.003, F32))])
    agree(net.proto(made), net.feeds, [("MatMulInteger Cast Mul", "onednn")])


def test_dynamic_quantisation():
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
    assert ("MatMulInteger Cast Mul Relu", "onednn") in steps(session)


def test_convolutions_of_integers():
    net = Net()
    given = [net.feed(codes(U8, 1, 16, 6, 7)), net.constant(codes(I8, 24, 16, 3, 3))]
    given.append(net.feed(np.array(131, U8)))
    made = net.add("ConvInteger", given, pads=[1, 1, 1, 1])
    made = net.add("Cast", [made], to=onnx.TensorProto.FLOAT)
    made = net.add("Mul", [made, net.constant(0.003, F32)])
    made = net.add("Add", [made, net.constant(rng.standard_normal((24, 1, 1)), F32)])
    agree(net.proto(made), net.feeds, [("ConvInteger Cast Mul Add", "onednn")])


def test_integer_products_without_cast_run_on_numpy():
    net = Net()
    given = [net.feed(codes(U8, 5, 32)), net.constant(codes(I8, 32, 24))]
    made = net.add("MatMulInteger", given)
    other = net.add("Cast", [made], to=onnx.TensorProto.FLOAT)
    expected = [("MatMulInteger", "numpy"), ("Cast", "numpy")]
    agree(net.proto(made, other), net.feeds, expected)


def test_integer_products_cast_to_other_types_run_on_numpy():
    net = Net()
    given = [net.feed(codes(U8, 5, 32)), net.constant(codes(I8, 32, 24))]
    made = net.add("Cast", [net.add("MatMulInteger", given)], to=onnx.TensorProto.DOUBLE)
    agree_exactly(net.proto(made), net.feeds)


def agree_exactly(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> None:
    got = compile_on_onednn(proto).run(feeds)
    for name, want in ps.compile(proto, backends=["numpy"]).run(feeds).items():
        np.testing.assert_array_equal(got[name], want, strict=True)


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
def test_qlinear_conv(name, bias, x):
    net, result = qlinear_conv(name, x, bias=bias, per_channel=bias)
    # The reference adds zero points to a type in which they overflow.
    agree(net.proto(result), net.feeds, [("QLinearConv", "onednn")], reference=False)


@pytest.mark.parametrize("x", [(U8, 113), (I8, -7)])
@pytest.mark.parametrize("per_column", [True, False])
def test_qlinear_matmul(x, per_column):
    net = Net()
    scales = rng.uniform(0.001, 0.01, 24) if per_column else np.array(0.004)
    given = [net.feed(codes(x[0], 2, 5, 32)), net.constant(0.03, F32), net.constant(x[0](x[1]))]
    given += [net.constant(codes(I8, 32, 24)), net.constant(scales, F32)]
    given += [net.constant(np.zeros_like(scales, I8))]
    given += [net.constant(0.11, F32), net.constant(x[0](x[1]))]
    result = net.add("QLinearMatMul", given)
    agree(net.proto(result), net.feeds, [("QLinearMatMul", "onednn")], reference=False)


def test_qlinear_matmul_with_a_scale_for_each_row():
    net = Net()
    given = [net.feed(codes(U8, 5, 32)), net.constant(rng.uniform(0.01, 0.1, 5), F32)]
    given += [net.constant(np.full(5, 9, U8)), net.constant(codes(I8, 32, 24))]
    given += [net.constant(0.004, F32), net.constant(I8(0))]
    given += [net.constant(0.11, F32), net.constant(U8(7))]
    result = net.add("QLinearMatMul", given)
    agree(net.proto(result), net.feeds, [("QLinearMatMul", "numpy")], reference=False)


def test_qlinear_add():
    net = Net()
    given = [net.feed(codes(U8, 2, 16, 5, 5)), net.constant(0.03137, F32), net.constant(U8(119))]
    given += [net.feed(codes(U8, 1, 16, 1, 1)), net.constant(0.01719, F32), net.constant(U8(7))]
    given += [net.constant(0.05077, F32), net.constant(U8(101))]
    result = net.add("QLinearAdd", given, domain=MICROSOFT)
    agree(net.proto(result), net.feeds, [("QLinearAdd", "onednn")], reference=False)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("turned", [0, 1])
def test_qgemm(turned, quantized):
    net = Net()
    given = [net.feed(codes(U8, 5, 32)), net.constant(0.031, F32), net.constant(U8(119))]
    given += [net.constant(codes(I8, *((24, 32) if turned else (32, 24))))]
    given += [net.constant(rng.uniform(0.001, 0.01, 24), F32), net.constant(np.zeros(24, I8))]
    given += [net.constant(rng.integers(-9000, 9000, 24), I32)]
    if quantized:
        given += [net.constant(0.05, F32), net.constant(U8(101))]
    result = net.add("QGemm", given, domain=MICROSOFT, transB=turned, alpha=0.75)
    agree(net.proto(result), net.feeds, [("QGemm", "onednn")], reference=False)


def test_channels_last_qlinear_conv_runs_on_numpy():
    net, result = qlinear_conv(
        "plain", (U8, 113), bias=True, per_channel=True, domain=MICROSOFT, channels_last=1
    )
    net.feeds["x0"] = np.ascontiguousarray(np.moveaxis(net.feeds["x0"], 1, -1))
    agree(net.proto(result), net.feeds, [("QLinearConv", "numpy")], reference=False)


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
    session = compile_on_onednn(proto, executor=executor)
    want = ps.compile(proto, backends=["numpy"]).run(net.feeds)[result]
    got = session.run(net.feeds)[result]
    # Where a convolution is one step off, a few of the next may be, too.
    assert np.abs(got - want).max() <= 3 * 0.04
    assert np.mean(got != want) < 0.1
    expected = [
        "QuantizeLinear",
        *["Conv QuantizeLinear", "Conv Relu QuantizeLinear"] * 2,
        "MaxPool",
        "Add Relu QuantizeLinear",
        "DequantizeLinear",
    ]
    found = steps(session)
    moved = [step for step in session.plan.walk() if step.node.op.name == "Reorder"]
    assert len(moved) <= 1  # of what is fed
    assert sorted(ops for ops, _ in found) == sorted(expected)
    assert {backend for _, backend in found} == {"onednn"}


def test_plans_share_quantized_weights():
    net, result = convolution("plain")
    proto = net.proto(result, dims={"x0": ("n", 16, 7, 7)})
    session = compile_on_onednn(proto)
    found = []
    for n in (1, 2):
        session.run({"x0": codes(U8, n, 16, 7, 7)})
        *_, step = session.plan.walk()
        found.append(step.kernel.binder.spec.desc.scaling.weights)
    assert found[0] is found[1]
