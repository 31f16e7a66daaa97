"""Compiled programs of integers of 8 and 16 bits against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends.native.codes import CodePair
from penstock.ops.common.shape_rules import element_number
from tests.support.native_kernels import check, node_of, pytestmark  # noqa: F401
from tests.support.onnx_text import model_from_text

RANDOM = np.random.default_rng(17)
QUANTIZED_KINDS = ["uint8", "int8", "uint16", "int16"]


def reals(dims, dtype):
    """Numbers around the bounds of ``dtype``, with ties, infinities and NaN."""
    bounds = np.iinfo(dtype)
    x = RANDOM.uniform(bounds.min * 0.6, bounds.max * 0.6, dims).astype(np.float32)
    edges = [np.inf, -np.inf, np.nan, 0, -0.0, 1e-40, 3e38, -3e38, *np.arange(-4, 4, 0.5)]
    x.reshape(-1)[: len(edges)] = np.float32(edges) * np.float32(0.5)
    return x


def codes(dims, dtype):
    bounds = np.iinfo(dtype)
    return RANDOM.integers(bounds.min, bounds.max + 1, dims).astype(dtype)


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("scale", [0.5, 0.3, 1e-38, np.inf, 1e-45])
@pytest.mark.parametrize("zero", [None, 0, 3])
@pytest.mark.parametrize("dtype", QUANTIZED_KINDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_quantize_and_dequantize_equal_numpy(dtype, zero, scale, domain):
    scale = np.float32(scale)
    given = [] if zero is None else [np.array(zero, dtype)]
    constants = [1, 2][: 1 + len(given)]
    version = 1 if domain else 26
    if given:
        inputs = [reals((3, 700), dtype), scale, *given]
        for c in (constants, []):
            check(node_of("QuantizeLinear", inputs, c, 1, domain, version), inputs)
    inputs = [codes((3, 700), dtype), scale, *given]
    for c in (constants, []):
        check(node_of("DequantizeLinear", inputs, c, 1, domain, version), inputs)


def test_quotients_near_ties_are_rounded_as_by_a_division():
    for scale in np.exp(RANDOM.uniform(-12, 4, 40)).astype(np.float32):
        ties = ((np.arange(255) + 0.5) * scale.astype(np.float64)).astype(np.float32)
        near = ties.view(np.int32)[:, None] + np.arange(-6, 7, dtype=np.int32)
        inputs = [near.view(np.float32), scale, np.uint8(0)]
        check(node_of("QuantizeLinear", inputs, [1, 2]), inputs)


@pytest.mark.parametrize(
    "dims, axis", [((2, 5, 7, 9), 1), ((4, 600), -1), ((5, 300), 0), ((7,), 0)]
)
@pytest.mark.parametrize("constants", [[], [1, 2]])
@pytest.mark.parametrize("dtype", ["uint8", "int16"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scales_along_an_axis_equal_numpy(dtype, constants, dims, axis):
    n = dims[axis]
    scale = RANDOM.uniform(0.1, 2, n).astype(np.float32)
    zero = RANDOM.integers(0, 5, n).astype(dtype)
    inputs = [np.nan_to_num(np.resize(reals((3, 40), dtype), dims)), scale, zero]
    check(node_of("QuantizeLinear", inputs, constants, axis=axis), inputs)
    inputs = [codes(dims, dtype), scale, zero]
    check(node_of("DequantizeLinear", inputs, constants, axis=axis), inputs)


def test_int32_is_dequantized_as_numpy_does():
    inputs = [RANDOM.integers(-(2**31), 2**31, (3, 99)).astype(np.int32), np.float32(1e-3)]
    check(node_of("DequantizeLinear", inputs, [1]), inputs)


def test_float16_scale_is_rounded_once():
    inputs = [codes((3, 200), "uint8"), np.float16(0.37), np.uint8(7)]
    check(node_of("DequantizeLinear", inputs), inputs)


TYPES = {"uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9}
TYPES |= {"float32": 1, "float64": 11, "float16": 10}


@pytest.mark.parametrize("narrow", QUANTIZED_KINDS)
@pytest.mark.parametrize("other", TYPES)
def test_cast_of_codes_equals_numpy(narrow, other):
    if narrow != other:
        x = codes((3, 700), narrow)
        check(node_of("Cast", [x], to=TYPES[other]), [x])
        x = np.tile([0, 1, 3.7, 100, 126], 99).astype(other)
        check(node_of("Cast", [x], to=TYPES[narrow]), [x])


@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Max", "Less", "Where"])
@pytest.mark.parametrize("dtype", QUANTIZED_KINDS)
def test_arithmetic_of_codes_wraps_as_numpy(dtype, name):
    inputs = [codes((4, 300), dtype), codes((300,), dtype)]
    if name == "Where":
        inputs.insert(0, RANDOM.random((4, 1)) < 0.5)
    check(node_of(name, inputs), inputs)


SHAPES = [((2, 16, 5, 5), (2, 16, 5, 5)), ((2, 16, 5, 5), (1, 16, 1, 1)), ((3, 4), (1,))]


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("dtype", QUANTIZED_KINDS)
@pytest.mark.parametrize("op", ["Add", "Mul"])
@pytest.mark.parametrize("bound", [False, True])
def test_sum_or_product_of_codes_is_one_step_and_equals_numpy(bound, op, dtype, dims):
    shapes = [list(d) for d in dims]
    model = model_from_text(
        f"""g ({dtype}{shapes[0]} x, {dtype}{shapes[1]} v) => ({dtype}{shapes[0]} y)
        <float s = {{0.03137}}, float t = {{0.01719}}, float u = {{0.05077}}, {dtype} zero = {{7}}> {{
            a = DequantizeLinear(x, s, zero) b = DequantizeLinear(v, t, zero)
            c = {op}(a, b) d = {"Relu" if bound else "Identity"}(c)
            y = QuantizeLinear(d, u, zero) }}""",
        opset=21,
    )
    feeds = {"x": codes(dims[0], dtype), "v": codes(dims[1], dtype)}
    session = ps.compile(model, backends=["native", "numpy"])
    want = ps.compile(model, backends=["numpy"]).run(feeds)["y"]
    np.testing.assert_array_equal(session.run(feeds)["y"], want, strict=True)
    (step,) = session.inspect.plan.steps
    pair = f"{op.lower()}_codes_{dtype[0].replace('i', 's')}"
    repeated = dims[1] == (1,) and dtype in ("int8", "uint8")
    kernel = pair if dims[0] == dims[1] or repeated else "elementwise:"
    assert step.kernel.binder.implementation.startswith(kernel)


@pytest.mark.parametrize("function", ["Sigmoid", "HardSwish", "LeakyRelu", "Gelu", "Sqrt"])
def test_function_of_codes_is_one_step_and_equals_numpy(function):
    model = model_from_text(
        f"""g (int8[256] x) => (int8[256] y, int8[256] z)
        <float s = {{0.05}}, float t = {{0.01}}, int8 zero = {{-3}}> {{
            a = DequantizeLinear(x, s, zero) b = {function}(a) y = QuantizeLinear(b, t, zero)
            c = DequantizeLinear(y, t, zero) d = Mul(a, c) z = QuantizeLinear(d, t, zero) }}""",
        opset=21,
    )
    feeds = {"x": np.arange(-128, 128).astype(np.int8)}
    session = ps.compile(model, backends=["native", "numpy"])
    want = ps.compile(model, backends=["numpy"]).run(feeds)
    for name, got in session.run(feeds).items():
        np.testing.assert_array_equal(got, want[name], strict=True)
    assert [step.backend for step in session.inspect.plan.steps] == ["native"] * 2


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("size", [256, 257, 40_001])
def test_long_function_of_bytes_is_a_table_and_equals_numpy(size, dtype):
    model = model_from_text(
        f"""g ({dtype}[2, n, 3] x) => ({dtype}[2, n, 3] y)
        <float s = {{0.05}}, float t = {{0.01}}, {dtype} zero = {{3}}> {{
            a = DequantizeLinear(x, s, zero) b = Sigmoid(a) c = Mul(a, b)
            y = QuantizeLinear(c, t, zero) }}""",
        opset=21,
    )
    feeds = {"x": codes((2, size, 3), dtype)}
    session = ps.compile(model, backends=["native", "numpy"])
    want = ps.compile(model, backends=["numpy"]).run(feeds)["y"]
    np.testing.assert_array_equal(session.run(feeds)["y"], want, strict=True)
    (step,) = session.inspect.plan.steps
    assert step.kernel.binder.implementation.startswith("table:")
    with_gaps = np.moveaxis(codes((3, 2, size), dtype), 0, -1)
    want = ps.compile(model, backends=["numpy"]).run({"x": with_gaps})["y"]
    np.testing.assert_array_equal(session.run({"x": with_gaps})["y"], want, strict=True)


PAIRS = [
    ((2, 16, 5, 5), (2, 16, 5, 5)),
    ((700,), (700,)),
    ((3, 4, 70), (70,)),
    ((3, 1), (3, 90)),
    ((1,), (333,)),
    ((5, 4, 1), (1, 4, 6)),
    ((2, 5000), (5000,)),
]
"""Shapes of two tensors: alike, repeated, one element for each row, alone, and in other ways."""


@pytest.mark.parametrize("dims", PAIRS)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("operation", ["Add", "Mul", "Sub"])
def test_integer_arithmetic_equals_numpy(operation, dtype, dims):
    ends = np.iinfo(dtype)
    inputs = [codes(shape, dtype) for shape in dims]
    # Of scales that are powers of two, many results are ties; of others, few; and sums of large
    # scales differ by what terms are rounded to.
    for scales in ([0.25, 0.5, 1.0], [0.0213, 0.0171, 0.0331], [1.0, 0.003, 2.0], [3.0, 2.0, 0.01]):
        for limits in ([ends.min, ends.max], [ends.min + 60, ends.max - 60]):
            zeros = RANDOM.integers(ends.min, ends.max + 1, 3).tolist()
            attrs = {"scales": scales, "zero_points": zeros, "code_limits": limits}
            attrs["operation"] = operation
            check(node_of("IntegerArithmetic", inputs, [], 1, "tflite", 1, **attrs), inputs)
            inputs.reverse()
            check(node_of("IntegerArithmetic", inputs, [], 1, "tflite", 1, **attrs), inputs)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("operation", ["Add", "Sub"])
@pytest.mark.parametrize(
    "scales",
    [
        [0.05, 0.035, 0.08],
        [0.0235, 0.0235, 0.047],
        [0.1, 0.05, 0.1],
        [0.3, 0.1, 0.2],
        [0.2, 0.3, 7],
    ],
)
def test_sum_of_all_pairs_of_codes_equals_numpy(scales, operation, dtype):
    ends = np.iinfo(dtype)
    every = np.arange(ends.min, ends.max + 1).astype(dtype)
    inputs = [np.repeat(every, 256), np.tile(every, 256)]
    limits, middle = [ends.min, ends.max], ends.max - 127
    for zeros in ([middle] * 3, [ends.min] * 3, [ends.max, ends.min, middle]):
        attrs = {"scales": scales, "zero_points": zeros, "code_limits": limits}
        attrs["operation"] = operation
        check(node_of("IntegerArithmetic", inputs, [], 1, "tflite", 1, **attrs), inputs)


@pytest.mark.parametrize("scales, expected", [([0.1, 0.1, 0.2], 2), ([0.0213, 0.0171, 0.0331], 0)])
def test_ties_of_sums_are_away_from_zero_where_many_are(scales, expected):
    pair = CodePair("integer_add_s1", "Add", scales, [-5, 3, 0], [-128, 127])
    assert pair.numbers([0, 1, 2])[1][5] == expected


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_code_table_equals_numpy(dtype):
    ends = np.iinfo(dtype)
    table = RANDOM.integers(ends.min, ends.max + 1, 256).tolist()
    for dims in ((3, 700), (1,), (2, 3, 4, 5)):
        x = codes(dims, dtype)
        check(node_of("CodeTable", [x], [], 1, "tflite", 1, table=table), [x])
        # Codes of the other dtype, which are 128 more or less.
        other, change = ("uint8", 128) if dtype == "int8" else ("int8", -128)
        others = {"table": [code + change for code in table], "to": element_number(other)}
        check(node_of("CodeTable", [x], [], 1, "tflite", 1, **others), [x])


@pytest.mark.parametrize("dtype", ["int16", "uint16"])
def test_table_of_16_bit_codes_equals_numpy(dtype):
    table = RANDOM.integers(0, 1 << 16, 1 << 16).astype(dtype)
    for dims in ((3, 700), (1,), (2, 3, 4, 5)):
        x = RANDOM.integers(0, 1 << 16, dims).astype(dtype)
        check(node_of("CodeTable", [x], [], 1, "tflite", 1, table=table), [x])
