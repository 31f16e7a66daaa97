"""The QLinear operations of ONNX Runtime, written as those of ONNX, against ONNX Runtime."""

import numpy as np
import pytest

import penstock as ps
from tests.ops.harness import run_ort
from tests.support.contrib import check_contrib, contrib_model

I8, U8 = np.dtype(np.int8), np.dtype(np.uint8)
BOTH = pytest.mark.parametrize("dtype", [I8, U8])
rng = np.random.default_rng(11)


def codes(dtype: np.dtype, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.asarray(rng.integers(info.min, info.max, shape, endpoint=True), dtype)


def scale(low: float = 0.01) -> np.ndarray:
    return np.asarray(rng.uniform(low, 3 * low), np.float32)


@BOTH
@pytest.mark.parametrize(
    "op, attrs", [("QLinearSigmoid", {}), ("QLinearLeakyRelu", {"alpha": 0.3})]
)
def test_functions_of_one_input(dtype: np.dtype, op: str, attrs: dict[str, float]) -> None:
    every = np.arange(256, dtype=np.uint8).view(dtype).reshape(2, 128)
    low = 0.004 if op == "QLinearSigmoid" else 0.01
    inputs = [every, scale(0.03), codes(dtype), scale(low), codes(dtype)]
    check_contrib(op, inputs, attrs)
    check_contrib(op, inputs, attrs, constants=[1, 2, 3, 4])
    inputs[2] = inputs[4] = None
    check_contrib(op, inputs, attrs, constants=[1, 3])
    # ONNX Runtime aborts when the last input is not even named.
    check_contrib(op, inputs[:4], attrs, expected=run_ort(contrib_model(op, inputs, attrs), inputs))


@BOTH
@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize(
    "a, b", [((3, 4), (3, 4)), ((3, 4), (4,)), ((1, 4), (3, 1)), ((), (3,)), ((0, 2), (2,))]
)
def test_qlinear_functions_of_two_inputs_match_onnx_runtime(
    dtype: np.dtype, op: str, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    inputs = [
        *(codes(dtype, *a), scale(), codes(dtype)),
        *(codes(dtype, *b), scale(), codes(dtype)),
        *(scale(0.02), codes(dtype)),
    ]
    check_contrib(op, inputs)
    inputs[2] = inputs[5] = inputs[7] = np.array(0, dtype)
    wanted = run_ort(contrib_model(op, inputs), inputs)
    inputs[2] = inputs[5] = inputs[7] = None
    check_contrib(op, inputs, expected=wanted)


@BOTH
@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("b", [(5, 70, 101), (70, 1), (5, 1, 101), ()])
def test_operands_of_many_blocks(dtype: np.dtype, op: str, b: tuple[int, ...]) -> None:
    inputs = [
        *(codes(dtype, 5, 70, 101), scale(), codes(dtype)),
        *(codes(dtype, *b), scale(), codes(dtype)),
        *(scale(0.02), codes(dtype)),
    ]
    # Where a sum lies in the middle between two codes, rounding errors decide.
    check_contrib(op, inputs, atol=1)
    check_contrib(op, [*inputs[3:6], *inputs[:3], *inputs[6:]], atol=1)


def test_operands_that_do_not_broadcast() -> None:
    one = np.array(1, np.float32)
    inputs = [codes(U8, 3), one, None, codes(U8, 4), one, None, one]
    with pytest.raises(ps.InvalidModel, match="broadcast"):
        ps.compile(contrib_model("QLinearAdd", inputs))


@BOTH
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat_matches_the_reference(dtype: np.dtype, axis: int) -> None:
    shapes = [[2, 3, 4], [2, 3, 4], [2, 3, 4]]
    shapes[1][axis] = 1
    y = [scale(0.02), codes(dtype)]
    inputs = list(y)
    for i, shape in enumerate(shapes):
        inputs += [codes(dtype, *shape), *(y if i == 2 else (scale(), codes(dtype)))]
    check_contrib("QLinearConcat", inputs, {"axis": axis})
    parameters = [0, 1, 3, 4, 6, 7, 9, 10]
    check_contrib("QLinearConcat", inputs, {"axis": axis}, constants=parameters)


@pytest.mark.parametrize("count", [3, 6])
def test_concat_of_incomplete_triples_is_refused(count: int) -> None:
    inputs = [scale(), codes(U8), codes(U8, 2), scale(), codes(U8), codes(U8, 2)][:count]
    with pytest.raises(ps.InvalidModel, match="triples"):
        ps.compile(contrib_model("QLinearConcat", inputs, {"axis": 0}))


@BOTH
def test_where_matches_the_reference(dtype: np.dtype) -> None:
    condition = rng.integers(0, 2, (3, 4)).astype(bool)
    y = [scale(), codes(dtype)]
    inputs = [*(condition, codes(dtype, 3, 1), scale(), codes(dtype)), *(codes(dtype, 4), *y, *y)]
    check_contrib("QLinearWhere", inputs)
    check_contrib("QLinearWhere", inputs, constants=[2, 3, 5, 6, 7, 8])


@BOTH
@pytest.mark.parametrize("opset", [12, 13])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_matches_the_reference(dtype: np.dtype, opset: int, axis: int) -> None:
    zero = np.array(0 if dtype == U8 else -128, dtype)
    inputs = [codes(dtype, 3, 4, 5), scale(0.02), codes(dtype), np.array(1 / 256, np.float32), zero]
    attrs = {"axis": axis, "opset": opset}
    check_contrib("QLinearSoftmax", inputs, attrs)


@BOTH
@pytest.mark.parametrize("channels_last", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 2, 3, 4, 2)])
def test_global_average_pool_matches_the_reference(
    dtype: np.dtype, channels_last: int, shape: tuple[int, ...]
) -> None:
    inputs = [codes(dtype, *shape), scale(0.02), codes(dtype), scale(0.02), codes(dtype)]
    attrs = {"channels_last": channels_last}
    for constants in ([], [1, 2, 3, 4]):
        check_contrib("QLinearGlobalAveragePool", inputs, attrs, constants=constants)


def test_reduce_mean_matches_the_reference() -> None:
    inputs = [codes(U8, 2, 3, 4), scale(), codes(U8), scale(0.02), codes(U8)]
    real = (inputs[0].astype(np.float64) - inputs[2]) * inputs[1]
    for axes, keepdims in (([1], 1), ([0, -1], 0), ([], 1)):
        mean = real.mean(tuple(axes) or None, keepdims=bool(keepdims))
        want = np.clip(np.rint(mean / inputs[3]) + inputs[4], 0, 255).astype(np.uint8)
        attrs = {"axes": axes, "keepdims": keepdims} if axes else {"keepdims": keepdims}
        for constants in ([], [1, 2, 3, 4]):
            check_contrib("QLinearReduceMean", inputs, attrs, expected=[want], constants=constants)


@BOTH
@pytest.mark.parametrize("channels_last", [0, 1])
@pytest.mark.parametrize(
    "attrs",
    [
        {"kernel_shape": [2, 2]},
        {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]},
        {"kernel_shape": [3, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1},
        {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
        {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    ],
)
def test_average_pool_matches_the_reference(
    dtype: np.dtype, channels_last: int, attrs: dict[str, object]
) -> None:
    inputs = [codes(dtype, 2, 5, 6, 3), scale(0.02), codes(dtype), scale(0.02), codes(dtype)]
    check_contrib("QLinearAveragePool", inputs, {**attrs, "channels_last": channels_last})


@BOTH
@pytest.mark.parametrize("pool", ["QLinearAveragePool", "QLinearGlobalAveragePool"])
def test_means_halfway_between_codes_are_rounded_to_even(dtype: np.dtype, pool: str) -> None:
    n = np.arange(-100, 100) % 120
    x = np.stack([n, n + 1], axis=-1).astype(dtype)[None, :, None]
    for factor in (0.02, 0.1, 1 / 3, 7e-5):
        parameters = [np.array(factor, np.float32), np.zeros((), dtype)]
        inputs = [x, *parameters, *parameters]
        attrs = {"kernel_shape": [1, 2]} if pool == "QLinearAveragePool" else {}
        for constants in ([], [1, 2, 3, 4]):
            model = contrib_model(pool, inputs, attrs, constants=constants)
            fed = [x for i, x in enumerate(inputs) if i not in constants]
            got = ps.compile(model)(*fed)
            np.testing.assert_array_equal(got.reshape(-1), np.rint(n + 0.5).astype(dtype))
        np.testing.assert_array_equal(got, run_ort(model, fed)[0])
