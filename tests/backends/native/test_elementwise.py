"""Compiled elementwise programs against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from penstock.core.types import ShapeError
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    check_threads,
    check_within,
    kernel_of,
    node_of,
    pytestmark,
)

RANDOM = np.random.default_rng(11)
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 88.8, -104.5, 3e38]
UNARY = """
    Abs Neg Sqrt Floor Ceil Sign Exp Log Tanh Sigmoid Erf Sin Cos Round Reciprocal IsNaN Relu
    LeakyRelu Elu Celu Selu HardSigmoid HardSwish Softplus Softsign ThresholdedRelu Shrink Swish
    Mish Gelu
""".split()  # noqa: SIM905 - names are easier to read without quotes
LOOSE = {"rtol": 2e-6, "atol": 1e-6}


def values(dims=(3, 700), dtype="float32"):
    x = RANDOM.normal(0, 4, dims).astype(dtype)
    x.reshape(-1)[: len(EDGES)] = np.array(EDGES).astype(dtype)
    return x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", UNARY)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_unary_operation_equals_numpy(name, dtype):
    inputs = [values(dtype=dtype)]
    check(node_of(name, inputs), inputs, LOOSE)


BROADCASTS = [
    ((4, 300), (300,)),
    ((4, 3, 50), (3, 1)),
    ((2, 5, 7, 9), (5, 1, 9)),
    ((600, 1), (1, 7)),
    ((3, 1, 2, 1, 5), (4, 1, 6, 1)),
    ((1,), (2, 2)),
    ((), (5,)),
    ((9, 1030), (1,)),
]


@pytest.mark.parametrize("dims", BROADCASTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Less", "Equal", "GreaterOrEqual"])
def test_binary_operation_broadcasts_as_numpy(name, dtype, dims):
    inputs = [RANDOM.integers(-3, 4, d).astype(dtype) for d in dims]
    check(node_of(name, inputs), inputs)


QUANTIZED_KINDS = ["int8", "uint8", "int16", "uint16"]


@pytest.mark.parametrize("dims", BROADCASTS)
@pytest.mark.parametrize("dtype", QUANTIZED_KINDS)
@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Max", "Min", "Less", "Equal"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_binary_operation_of_codes_equals_numpy(name, dtype, dims):
    info = np.iinfo(dtype)
    inputs = [RANDOM.integers(info.min, info.max, d, dtype, endpoint=True) for d in dims]
    check(node_of(name, inputs), inputs)


@pytest.mark.parametrize("dtype", [*QUANTIZED_KINDS, "int32", "int64"])
@pytest.mark.parametrize("name", ["Abs", "Neg", "Sign", "Relu", "Shrink", "Clip"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_unary_operation_of_integers_equals_numpy(name, dtype):
    if (name in ("Neg", "Relu") and dtype[0] == "u") or (name == "Relu" and dtype == "int16"):
        pytest.skip("no operation of ONNX")
    info = np.iinfo(dtype)
    x = RANDOM.integers(info.min, info.max, (5, 700), dtype, endpoint=True)
    bounds = [np.array(3, dtype), np.array(90, dtype)] if name == "Clip" else []
    attrs = {"lambd": 40.5, "bias": 2.25} if name == "Shrink" else {}
    if dtype == "int64":
        x //= 2**20
    check(node_of(name, [x, *bounds], [1, 2][: len(bounds)], **attrs), [x, *bounds])


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_power_of_integers_by_a_constant_equals_numpy(power, dtype):
    inputs = [RANDOM.integers(0, 99, (3, 700)).astype(dtype), np.array(power, dtype)]
    check(node_of("Pow", inputs, [1]), inputs)


QUOTIENTS = ["Div", "Mod", "tensorflow.Div", "tensorflow.FloorDiv", "tensorflow.FloorMod"]


@pytest.mark.parametrize("name", [*QUOTIENTS, "tensorflow.TruncateMod"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_quotients_and_remainders_of_integers_equal_numpy(dtype, name):
    info = np.iinfo(dtype)
    edges = np.array([info.min, info.max, 0, 1, 7, info.max // 2, info.min // 3], dtype)
    x = np.concatenate([edges, RANDOM.integers(info.min, info.max, 600, dtype)])
    divisors = np.array([0, 1, 2, 3, 7, info.max, info.min], dtype)
    if info.min:
        divisors = np.concatenate([divisors, np.array([-1, -2, -3, -7], dtype)])
    domain, _, name = name.rpartition(".")
    options = {"domain": domain, "version": 1 if domain else 26}
    inputs = [x, divisors[divisors != 0 if domain else ...][:, None]]
    check(node_of(name, inputs, **options), inputs)
    if name == "Mod":
        check(node_of(name, inputs, fmod=1), inputs)


@pytest.mark.parametrize("name", ["FloorDiv", "FloorMod"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_quotients_and_remainders_of_floats_are_rounded_down(name):
    x, divisors = values(), np.float32([*EDGES, 0.3, -2.5, 7])[:, None, None]
    check(node_of(name, [x, divisors], domain="tensorflow", version=1), [x, divisors])


@pytest.mark.parametrize("name", ["Div", "FloorDiv", "FloorMod", "TruncateMod"])
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
@pytest.mark.parametrize("dims", [(5000,), (5000, 1)])
def test_divisor_of_zero_is_an_error(name, dtype, dims):
    x, divisors = np.ones(dims, dtype), np.ones(5000, dtype)
    divisors[4321] = 0
    for library in LIBRARIES:
        kernel = kernel_of(node_of(name, [x, divisors], domain="tensorflow", version=1), library)
        with pytest.raises(ShapeError, match="Integer division by zero"):
            kernel.function(x, divisors)
        assert not kernel.inplace


@pytest.mark.parametrize("name", ["Max", "Min", "Sum", "Mean"])
@pytest.mark.parametrize("constants", [[], [1]])
def test_operation_of_three_inputs_equals_numpy(name, constants):
    inputs = [values((4, 600)), np.float32([[2.5]]), values((600,))]
    check(node_of(name, inputs, constants), inputs, LOOSE)


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "int32", "int64", "bool", *QUANTIZED_KINDS]
)
def test_where_chooses_as_numpy(dtype):
    inputs = [
        RANDOM.random((5, 1, 40)) < 0.5,
        RANDOM.integers(0, 2, (3, 40)).astype(dtype),
        RANDOM.integers(0, 2, (5, 3, 1)).astype(dtype),
    ]
    check(node_of("Where", inputs), inputs)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("divisors", [[-3.0, 0.7, 1e-4, -1e4], [0.0, 1.0], [np.inf, 2.0], [1e-30]])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mod_of_floats_equals_numpy(divisors, dtype):
    x = values((4, 600), dtype)
    x[1], x[2] = np.arange(600) - 300, np.linspace(-3, 3, 600)
    if np.inf not in divisors:
        x = x[1:]  # usual numbers alone
    inputs = [x, np.resize(divisors, 600).astype(dtype)]
    check(node_of("Mod", inputs, fmod=1), inputs)


@pytest.mark.parametrize("name", ["And", "Or", "Xor", "Not", "Equal"])
def test_logic_equals_numpy(name):
    inputs = [RANDOM.random((3, 700)) < 0.5 for _ in range(1 if name == "Not" else 2)]
    check(node_of(name, inputs), inputs)


KINDS = ["float32", "float64", "int32", "int64", "bool"]


@pytest.mark.parametrize("target", [*KINDS, "float16"])
@pytest.mark.parametrize("source", [*KINDS, "float16"])
def test_cast_equals_numpy(source, target):
    if source == target:
        pytest.skip("a Cast to the same dtype is removed before it is compiled")
    if (source, target) == ("float64", "float16"):
        pytest.skip("NumPy rounds once: test_float64_becomes_float16_by_one_rounding")
    numbers = [0, 1, -1, 3.7, -2.2, 1000.5, 65000, 6e4, 1e-7, 0.1]
    x = np.array(numbers * 99).astype(source)
    types = {"float32": 1, "float64": 11, "int32": 6, "int64": 7, "bool": 9, "float16": 10}
    check(node_of("Cast", [x], to=types[target]), [x])


def test_float16_is_converted_exactly_both_ways():
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    check(node_of("Cast", [every], to=1), [every])
    with np.errstate(all="ignore"):
        between = every.astype(np.float32)
        after = np.nextafter(between, np.float32(np.inf))
        steps = np.concatenate([between, after, between * np.float32(1.0003)])
    check(node_of("Cast", [steps], to=10), [steps])


@pytest.mark.parametrize("name", ["Sigmoid", "Add", "Gelu", "Exp"])
def test_float16_operation_is_rounded_once(name):
    inputs = [RANDOM.normal(0, 2, (3, 333)).astype(np.float16) for _ in range(1 + (name == "Add"))]
    check(node_of(name, inputs), inputs, {"rtol": 2e-3, "atol": 1e-6})


@pytest.mark.parametrize("dims", [(300,), ("n",)])
def test_float64_becomes_float16_by_one_rounding(dims):
    """Which float32 in between would round to a tie."""
    b = GraphBuilder()
    b.output("y", b.op("Cast", b.op("Neg", b.input("x", np.float64, dims)), to=10))
    x = np.full(300, -1.657714836606256)
    np.testing.assert_array_equal(ps.compile(b.model())(x), np.full(300, 1.657, np.float16))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
def test_constant_of_one_element_may_have_any_rank(dtype, shape):
    inputs = [np.arange(-5, 5).astype(dtype), np.full(shape, 3, dtype)]
    check(node_of("Add", inputs, [1]), inputs)


@pytest.mark.parametrize("power", [0.5, 0.25, 1, 1.5, 2, 3, 4, -1, -2, -0.5, 0.3, 0])
def test_power_by_a_constant_equals_numpy(power):
    inputs = [np.abs(values((2, 300))) + np.float32(0.01), np.array(power, np.float32)]
    check(node_of("Pow", inputs, [1]), inputs, LOOSE)


def _powers(kind: str) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    if kind == "special":
        numbers = [0.0, 1.0, np.inf, 2.0, 3.0, 0.5, 2.5, 1e-45, 1e-40, 3e38, 2**24, 2**24 + 2]
        pairs = np.meshgrid([*numbers, *(-x for x in numbers), 1.0000001, np.nan], numbers)
        return [x.astype(np.float32).reshape(-1) for x in (*pairs,)]
    if kind == "whole":
        return [-np.exp(rng.normal(0, 3, 5000)), rng.integers(-9, 9, 5000)]
    if kind == "near one":
        return [1 + rng.normal(0, 1e-4, 5000), rng.normal(0, 1e5, 5000)]
    return [np.exp(rng.normal(0, 9, 5000)), rng.normal(0, 3, 5000)]


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("kind", ["usual", "near one", "whole", "special"])
def test_powers_are_those_of_float64_rounded(kind, negative):
    """To one step of float32, as those of the C library are; signs, infinities and NaNs as well."""
    x, y = (array.astype(np.float32) for array in _powers(kind))
    y = -y if negative else y
    with np.errstate(all="ignore"):
        wanted = np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
    bound = np.spacing(np.abs(wanted))  # NaN where nothing has to be close
    check_within(node_of("Pow", [x, y]), [x, y], wanted, np.where(np.isfinite(bound), bound, 0))
    for library in LIBRARIES:
        kernel = kernel_of(node_of("Pow", [x, y]), library)
        got = kernel.function(x, y)
        numbers = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(wanted)[numbers])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("row", [1, 255, 512, 513, 784, 1300, 3 * 512 + 1])
@pytest.mark.parametrize("others", [[(5, 1)], [(3, 1, 1)], [(1, 5, 1), ("row",)], [(1,)]])
def test_operands_of_a_number_for_each_row_equal_numpy(others, row, dtype):
    """Parts of a long row share the copies of its numbers, whichever thread begins within a row."""
    rng = np.random.default_rng(row)
    shapes = [(3, 5, row), *[tuple(row if n == "row" else n for n in dims) for dims in others]]
    inputs = [rng.integers(-99, 99, dims).astype(dtype) for dims in shapes]
    name = "Mul" if len(inputs) == 2 else "Where"
    if name == "Where":
        inputs = [inputs[0] > 0, *inputs[1:]]
    check(node_of(name, inputs), inputs)
    check_threads(node_of(name, inputs), inputs)


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@pytest.mark.parametrize(
    ("name", "function", "units"),
    [
        *[("Exp", np.exp, 2), ("Log", np.log, 2), ("Tanh", np.tanh, 3)],
        # Of powers rounded to 2 units, whose logarithm is rounded to 3, and the sum to a half.
        ("Softplus", _softplus, 6),
        ("Elu", lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), 3),
    ],
)
def test_functions_of_float64_are_within_a_few_units_of_the_last_place(name, function, units):
    rng, info = np.random.default_rng(8), np.finfo(np.float64)
    special = [0.0, 1.0, np.inf, np.nan, 5e-324, info.tiny, info.max]
    sizes = np.exp(rng.uniform(-40, 6.5, 4000)) * rng.choice([-1, 1], 4000)
    edges = np.log(2) * (np.arange(-1020, 1022, 7) + 0.5)  # where powers of 2 change
    wide = np.exp(rng.uniform(-700, 700, 500))
    x = np.concatenate(
        [special, np.negative(special), sizes, 1 + rng.normal(0, 1e-4, 500), edges, wide]
    )
    with np.errstate(all="ignore"):
        exact = function(x.astype(np.longdouble)).astype(np.float64)
        # Those below the least normal number may be 0; the wanted ones are rounded once.
        bound = (units + 0.5) * np.spacing(np.abs(exact)) + 2 * info.tiny
    check_within(node_of(name, [x]), [x], exact, np.where(np.isfinite(bound), bound, 0))


@pytest.mark.parametrize("bounds", [(-1.0, 2.0), (None, 2.0), (-1.0, None), (3.0, 1.0)])
@pytest.mark.parametrize("constant", [False, True])
def test_clip_equals_numpy(bounds, constant):
    inputs = [values((2, 300)), *[None if b is None else np.float32(b) for b in bounds]]
    check(node_of("Clip", inputs, [1, 2] if constant else []), inputs)


CHAIN = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[N, 3, 40] x, float[3, 1] a, float[40] b) => (float[N, 3, 40] y)
<float half = {0.5}> {
    s = Add(x, a)
    t = Mul(s, b)
    u = Tanh(t)
    v = Greater(u, half)
    w = Where(v, x, a)
    z = Exp(w)
    y = Div(z, b)
}
"""


def session(text, backends):
    return ps.compile(onnx.parser.parse_model(text), backends=backends)


def test_chain_is_one_step_and_equals_numpy():
    shapes = {"x": (5, 3, 40), "a": (3, 1), "b": (40,)}
    feeds = {k: RANDOM.uniform(0.5, 2, d).astype(np.float32) for k, d in shapes.items()}
    ours = session(CHAIN, ["native", "numpy"])
    np.testing.assert_allclose(
        ours.run(feeds)["y"], session(CHAIN, ["numpy"]).run(feeds)["y"], rtol=1e-5
    )
    assert [step.backend for step in ours.inspect.plan.steps] == ["native"]


def test_chain_behind_a_transpose_reads_memory_in_its_order():
    text = """
    <ir_version: 9, opset_import: ["" : 20]>
    g (float[2, 6, 5, 7] x, float[2, 5, 7, 6] z, float[6] b) => (float[2, 5, 7, 6] y) {
        n = Neg(x)
        t = Transpose<perm = [0, 2, 3, 1]>(n)
        s = Add(t, b)
        u = Mul(s, z)
        y = Sqrt(u)
    }
    """
    shapes = {"x": (2, 6, 5, 7), "z": (2, 5, 7, 6), "b": (6,)}
    feeds = {k: RANDOM.uniform(2, 3, d).astype(np.float32) for k, d in shapes.items()}
    feeds["b"] += 5
    wanted = session(text, ["numpy"]).run(feeds)["y"]
    np.testing.assert_allclose(session(text, ["native", "numpy"]).run(feeds)["y"], wanted, 1e-6)
    assert np.isfinite(wanted).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("chain", ["x * x => Sqrt", "x * x => Neg => Exp"])
def test_chain_of_16_bit_floats_in_strict_rounds_each_value(dtype, chain):
    """As the interpreter does, which runs one node after the other."""
    b = GraphBuilder()
    x = b.input("x", ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16, [5])
    y = x * x
    for name in chain.split(" => ")[1:]:
        y = b.op(name, y)
    b.output("y", y)
    session = ps.compile(b.model(), precision="strict", backends=["native", "numpy"])
    feeds = {"x": np.array([2, 300, 60000, 0.1, 1.7]).astype(x.type.dtype)}
    want = ps.compile(b.model(), executor="interpret").run(feeds)["y"]
    np.testing.assert_array_equal(
        session.run(feeds)["y"].astype(np.float32), want.astype(np.float32)
    )
    assert len(session.inspect.plan.steps) == 1
