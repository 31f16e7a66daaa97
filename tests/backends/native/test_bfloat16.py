"""Products and convolutions whose operands are rounded to bfloat16, against exact sums of the rounded
operands."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from penstock.backends.native import backend, convolution, dense, image_weights
from penstock.backends.native.backend import NativeBackend
from penstock.ir.graph import Value
from penstock.ops.common.constant_cache import reordered, weights_of
from penstock.ops.internal.fused import fused
from tests.support.native_kernels import (
    LIBRARIES,
    check_threads,
    check_within,
    expected,
    kernel_of,
    node_of,
)

ROUNDING = [library for library in LIBRARIES if library.multiplies_bfloat16]

pytestmark = pytest.mark.skipif(not ROUNDING, reason="no instructions for bfloat16")

# Rows, inner and columns: of pairs and of odd ones, of parts of panels, and of several blocks.
SIZES = [
    (1, 1, 1),
    (1, 2, 16),
    (4, 3, 8),
    (1, 131, 200),
    (6, 129, 80),
    (13, 64, 97),
    (31, 1035, 112),
    (200, 20, 48),
    (401, 130, 65),
]

# Images and filters, with their attributes.
CONVOLUTIONS = [
    ((1, 64, 9, 7), (70, 64, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 6, 11, 40), (16, 6, 3, 5), {"pads": [1, 2, 1, 2], "strides": [2, 1]}),
    ((1, 48, 33), (24, 48, 1), {}),
    ((1, 34, 3, 4, 5), (5, 34, 2, 2, 2), {"dilations": [1, 2, 1]}),
    ((1, 64, 6, 6), (48, 16, 3, 3), {"group": 4}),
    ((1, 32, 8, 8), (64, 2, 3, 3), {"group": 16, "pads": [1, 1, 1, 1]}),
]


@pytest.fixture(autouse=True)
def rounds_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of any size are worth it, and images with their channels innermost."""
    monkeypatch.setattr(backend, "WORTH_ROUNDING", 0)
    monkeypatch.setattr(backend, "_LEAST_USES", 0)
    monkeypatch.setattr(convolution, "plane_convolution", convolution.image_convolution)


def draw(*dims: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng([seed, *dims]).normal(size=dims).astype(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # of NaN that signals
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def bound_of(x: np.ndarray, w: np.ndarray, more: int = 0) -> np.ndarray:
    """How far from x w, or from that and ``more`` terms, a sum in float32 in any order may be: each
    addition rounds by half a unit in the last place of what the absolute values add up to."""
    return (x.shape[-1] + more) * np.finfo(np.float32).eps * (abs(x) @ abs(w) + more)


def check_rounded(node, arrays, exact, bound) -> None:
    check_within(node, arrays, exact, bound, ROUNDING, "bf16")
    for library in ROUNDING:
        kernel = kernel_of(node, library, "bf16")
        assert kernel is not None and kernel.operand_dtype == "bfloat16"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_product_of_rounded_operands_is_summed_in_float32(sizes):
    rows, inner, columns = sizes
    x, w = draw(rows, inner), draw(inner, columns)
    a, b = rounded(x), rounded(w)
    check_rounded(node_of("MatMul", [x, w], constants=[1]), [x, w], a @ b, bound_of(a, b, 1))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bias_of_transposed_matrix_is_not_rounded(sizes):
    rows, inner, columns = sizes
    x, w, bias = draw(rows, inner), draw(columns, inner), np.clip(draw(columns), -1, 1)
    node = node_of("Gemm", [x, w, bias], constants=[1, 2], transB=1)
    a, b = rounded(x), rounded(w).T
    check_rounded(node, [x, w, bias], a @ b + bias, bound_of(a, b, 2))


def test_what_follows_rounded_product_is_computed_from_float32():
    x, w, bias = draw(37, 90), draw(90, 150), np.clip(draw(150), -1, 1)
    product = node_of("MatMul", [x, w], constants=[1])
    y = np.empty((37, 150), np.float32)
    add = node_of("Add", [y, bias], constants=[1])
    add.inputs = (product.outputs[0], add.inputs[1])
    relu = node_of("Relu", [y])
    relu.inputs = (add.outputs[0],)
    node = fused([product, add, relu])
    a, b = rounded(x), rounded(w)
    check_rounded(node, [x, w, bias], np.maximum(a @ b + bias, 0), bound_of(a, b, 2))


def test_nan_and_infinity_pass_through_rounding():
    x, w = draw(8, 33), draw(33, 20)
    x[1, 3], x[2, 4], x[3, 5], x[4, 32] = np.nan, np.inf, -np.inf, np.finfo(np.float32).max
    x.view(np.uint32)[5, 1] = 0x7F800001  # NaN by its low bits alone
    w[6, 7], w[7, 9] = np.nan, -np.inf
    w.view(np.uint32)[8, 11] = 0xFF800001
    a, b = rounded(x), rounded(w)
    with np.errstate(invalid="ignore"):
        exact, bound = a @ b, bound_of(a, b, 1)
    assert np.isnan(exact).any() and np.isinf(exact).any()
    check_rounded(node_of("MatMul", [x, w], constants=[1]), [x, w], exact, bound)


@pytest.mark.parametrize(("image", "filters", "attrs"), CONVOLUTIONS, ids=str)
def test_convolution_of_rounded_operands_is_summed_in_float32(image, filters, attrs):
    x, w = draw(*image), draw(*filters)
    exact_node = node_of("Conv", [rounded(x), rounded(w)], **attrs)
    (exact,) = expected(exact_node, [rounded(x), rounded(w)])
    (sizes,) = expected(exact_node, [abs(rounded(x)), abs(rounded(w))])
    terms = int(np.prod(filters[1:]))
    bound = (terms + 1) * np.finfo(np.float32).eps * sizes
    check_rounded(node_of("Conv", [x, w], constants=[1], **attrs), [x, w], exact, bound)


def test_transposed_convolution_of_rounded_operands_is_summed_in_float32():
    x, w = draw(1, 32, 7, 5), draw(32, 40, 4, 3)
    exact_node = node_of("ConvTranspose", [rounded(x), rounded(w)], strides=[2, 1])
    (exact,) = expected(exact_node, [rounded(x), rounded(w)])
    (sizes,) = expected(exact_node, [abs(rounded(x)), abs(rounded(w))])
    bound = (32 * 12 + 1) * np.finfo(np.float32).eps * sizes
    node = node_of("ConvTranspose", [x, w], constants=[1], strides=[2, 1])
    check_rounded(node, [x, w], exact, bound)


def test_odd_channels_and_weights_of_runs_stay_float32():
    for channels, constants in ((33, [1]), (32, [])):
        x, w = draw(1, channels, 9, 9), draw(64, channels, 3, 3)
        for library in ROUNDING:
            kernel = kernel_of(node_of("Conv", [x, w], constants=constants), library, "bf16")
            assert kernel is not None and not kernel.operand_dtype


def test_rounded_results_do_not_depend_on_threads():
    x, w = draw(150, 700), draw(700, 300)
    check_threads(node_of("MatMul", [x, w], constants=[1]), [x, w], ROUNDING, "bf16")
    image, filters = draw(2, 64, 30, 30), draw(130, 64, 3, 3)
    node = node_of("Conv", [image, filters], constants=[1])
    check_threads(node, [image, filters], ROUNDING, "bf16")


def test_small_products_and_other_precisions_stay_float32(monkeypatch):
    x, w = draw(16, 256), draw(256, 256)
    node = node_of("MatMul", [x, w], constants=[1])
    types = [value.type for value in node.inputs]
    assert NativeBackend(ROUNDING[0], precision="float32").kernel(node, types).operand_dtype == ""
    rounding = NativeBackend(ROUNDING[0], precision="bf16")
    assert rounding.kernel(node, types).operand_dtype == "bfloat16"
    monkeypatch.setattr(backend, "WORTH_ROUNDING", 2 * 16 * 256 * 256 + 1)
    assert rounding.kernel(node, types).operand_dtype == ""
    monkeypatch.setattr(backend, "WORTH_ROUNDING", 2 * 16 * 256 * 256)
    assert rounding.kernel(node, types).operand_dtype == "bfloat16"
    monkeypatch.setattr(backend, "_LEAST_USES", 257)
    assert rounding.kernel(node, types).operand_dtype == ""


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matrix_that_bfloat16_holds_is_restored_from_its_panels(sizes, transposed):
    w = rounded(draw(*sizes[1:])).astype(np.float32)
    w = np.ascontiguousarray(w.T) if transposed else w
    value = Value("w", const=w.copy())
    weights = dense._panels(weights_of(value), transposed, True)
    value.release(weights.release())
    np.testing.assert_array_equal(value.peek, w)


@pytest.mark.parametrize("last", [1 + 2**-9, np.nan])
def test_matrix_with_an_element_that_bfloat16_lacks_is_not_restored(last):
    w = rounded(draw(90, 70)).astype(np.float32)
    w[-1, -1] = last
    assert not dense._panels(weights_of(Value("w", const=w)), False, True).restores


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_filters_that_bfloat16_holds_are_restored_from_their_panels(case, monkeypatch):
    image, filters, attrs = case
    x, w = draw(*image), rounded(draw(*filters)).astype(np.float32)
    ways = []

    def noted(name, weights, make, back, types):
        ways.append((make, back))
        return reordered(name, weights, make, back, types)

    monkeypatch.setattr(image_weights, "reordered", noted)
    for library in ROUNDING:
        assert kernel_of(node_of("Conv", [x, w], constants=[1], **attrs), library, "bf16")
    assert ways
    for make, back in ways:
        np.testing.assert_array_equal(back(*make(w)), w)
