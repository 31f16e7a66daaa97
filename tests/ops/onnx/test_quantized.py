"""Matrix products of 8-bit integers."""

from typing import Any

import numpy as np
import pytest

from penstock.core.types import ShapeError, TensorType
from penstock.ops import find
from penstock.ops.onnx.quantized import EXACT, pieces
from tests.ops.harness import check_node, node_model, run_reference

F32, I8, U8 = np.dtype(np.float32), np.dtype(np.int8), np.dtype(np.uint8)
MS = {"domain": "com.microsoft", "opset": 1, "expected": "ort"}
rng = np.random.default_rng(3)


def whole(dtype: np.dtype, *shape: int) -> np.ndarray:
    """Every value that the type has."""
    info = np.iinfo(dtype)
    return np.asarray(rng.integers(info.min, info.max, shape, endpoint=True), dtype)


def near_zero(dtype: np.dtype, *shape: int) -> np.ndarray:
    middle = 0 if dtype == I8 else 128
    return np.asarray(rng.integers(middle - 20, middle + 20, shape), dtype)


def scales(*shape: int, low: float = 0.01) -> np.ndarray:
    return np.asarray(rng.uniform(low, 10 * low, shape), np.float32)


def exactly(a: np.ndarray, b: np.ndarray, a_zero: Any = 0, b_zero: Any = 0) -> np.ndarray:
    """The product in integers of 64 bits, cut down to 32."""
    wide = np.asarray(a, np.int64) - np.asarray(a_zero, np.int64)
    return np.matmul(wide, np.asarray(b, np.int64) - np.asarray(b_zero, np.int64)).astype(np.int32)


# Pieces


def test_pieces_cover_all_terms_once_within_exact_range() -> None:
    for length in (0, 1, 257, 258, 259, 1000, 5000):
        for b in (None, np.full((length, 3), 255.0, np.float32), whole(I8, length, 3) * 1.0):
            spans = pieces(length, 255, 255, None if b is None else np.asarray(b, np.float32))
            covered = [k for span in spans for k in range(length)[span]]
            assert covered == list(range(length))
            for span in spans:
                reached = 255 * len(range(length)[span]) if b is None else np.abs(b[span]).sum(0)
                assert np.max(reached, initial=0) * 255 <= EXACT


def test_quantized_product_of_small_constant_weights_is_one_piece() -> None:
    weights = near_zero(I8, 1000, 5).astype(np.float32)
    assert len(pieces(1000, 255, 128, weights)) == 1
    assert len(pieces(1000, 255, 128, None)) == 2


# MatMulInteger


@pytest.mark.parametrize("a_dtype", [I8, U8])
@pytest.mark.parametrize("b_dtype", [I8, U8])
@pytest.mark.parametrize("length", [1, 5, 258, 259, 1300])
def test_matmul_integer_is_exact(a_dtype: np.dtype, b_dtype: np.dtype, length: int) -> None:
    a, b = whole(a_dtype, 3, length), whole(b_dtype, length, 4)
    a[0], b[:, 0] = np.iinfo(a_dtype).max, np.iinfo(b_dtype).max
    zeros = [np.array(np.iinfo(d).min, d) for d in (a_dtype, b_dtype)]
    check_node("MatMulInteger", [a, b], expected=[exactly(a, b)])
    want = exactly(a, b, *zeros)
    check_node("MatMulInteger", [a, b, *zeros], expected=[want])
    check_node("MatMulInteger", [a, b, *zeros], expected=[want], constants=[1, 3])
    check_node("MatMulInteger", [a, b, *zeros], expected=[want], constants=[1, 2, 3])
    check_node("MatMulInteger", [a, b, None, zeros[1]], expected=[exactly(a, b, 0, zeros[1])])


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 0), (0, 3, 2), (0, 0, 0)])
def test_matmul_integer_of_nothing_is_zero(shape: tuple[int, ...]) -> None:
    a, b = np.ones(shape, np.uint8), np.ones((shape[-1], 5), np.int8)
    check_node("MatMulInteger", [a, b], expected=[np.zeros((*shape[:-1], 5), np.int32)])


def test_quantized_product_wraps_in_32_bits() -> None:
    a, b = np.full((1, 40000), 255, np.uint8), np.full((40000, 1), 255, np.uint8)
    check_node("MatMulInteger", [a, b], expected=[exactly(a, b)])
    assert exactly(a, b) < 0


@pytest.mark.parametrize(
    "a, b",
    [
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((1, 3, 4), (2, 4, 5)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((2, 1, 3, 4), (3, 4, 2)),
        ((0, 4), (4, 2)),
        ((3, 0), (0, 2)),
    ],
)
def test_quantized_products_of_all_ranks_match_the_definition(
    a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    inputs = [whole(U8, *a), whole(I8, *b), np.array(7, np.uint8), np.array(-3, np.int8)]
    want = [exactly(*inputs)]
    check_node("MatMulInteger", inputs, expected=want)
    check_node("MatMulInteger", inputs, expected=want, constants=[1, 3])


def test_quantized_product_zero_points_by_row_and_column() -> None:
    a, b = whole(U8, 3, 4), whole(I8, 4, 5)
    rows, columns = whole(U8, 3), whole(I8, 5)
    want = [exactly(a, b, rows[:, None], columns)]
    check_node("MatMulInteger", [a, b, rows, columns], expected=want)
    check_node("MatMulInteger", [a, b, rows, columns], expected=want, constants=[1, 2, 3])
    a, b = whole(U8, 2, 3, 4), whole(I8, 2, 4, 5)
    rows, columns = whole(U8, 2, 3, 1), whole(I8, 2, 1, 5)
    check_node("MatMulInteger", [a, b, rows, columns], expected=[exactly(a, b, rows, columns)])


def test_quantized_products_of_wrong_shapes_are_refused() -> None:
    for a, b in (((2, 3), (4, 5)), ((2, 2, 3), (3, 3, 5)), ((), (3,))):
        with pytest.raises(ShapeError):
            check_node("MatMulInteger", [whole(U8, *a), whole(U8, *b)], expected=[None])
    inputs = [whole(U8, 2, 3), whole(U8, 3, 5), whole(U8, 4)]
    with pytest.raises(ShapeError, match="zero point of a"):
        check_node("MatMulInteger", inputs, expected=[None])


# QLinearMatMul


def quantized_matmul(a: np.ndarray, b: np.ndarray, y_dtype: np.dtype) -> list[np.ndarray]:
    return [
        *(a, scales(), near_zero(a.dtype)),
        *(b, scales(), near_zero(b.dtype)),
        *(scales(low=0.1), near_zero(y_dtype)),
    ]


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("constants", [(), (3, 5)])
def test_qgemm_matches_the_reference(
    trans_a: int, trans_b: int, constants: tuple[int, ...]
) -> None:
    a = near_zero(U8, *((400, 3) if trans_a else (3, 400)))
    b = near_zero(I8, *((4, 400) if trans_b else (400, 4)))
    attrs = {"transA": trans_a, "transB": trans_b, "alpha": 0.75}
    c = np.asarray(rng.integers(-1000, 1000, (1, 4)), np.int32)
    head = [a, scales(), near_zero(U8), b, scales(4), near_zero(I8, 4)]
    tail = [scales(low=0.2), near_zero(U8)]
    for inputs in ([*head], [*head, c], [*head, None, *tail], [*head, c, *tail]):
        check_node("QGemm", inputs, attrs, **MS, constants=constants)


def test_quantized_product_infer_keeps_symbolic_dims() -> None:
    op = find("MatMulInteger")
    assert op is not None
    types = [TensorType(U8, ("n", 3, "k")), TensorType(U8, (None, 7))]
    assert op.infer(types, {}, [None, None]) == (TensorType(np.dtype(np.int32), ("n", 3, 7)),)
    types = [TensorType(U8, ("n", 3, 4)), TensorType(U8, (2, 4, 7))]
    assert op.infer(types, {}, [None, None])[0].shape == (2, 3, 7)
    with pytest.raises(ShapeError, match="differ: 4 and 5"):
        op.infer([types[0], TensorType(U8, (5, 7))], {}, [None, None])
    gemm = find("QGemm", "com.microsoft")
    assert gemm is not None
    nine = [TensorType(U8, ("k", "m")), None, None, TensorType(U8, ("n", "k"))]
    (kind,) = gemm.infer(nine, {"transA": 1, "transB": 1}, [None] * 4)
    assert kind == TensorType(F32, ("m", "n"))


def test_the_reference_agrees_on_rounding() -> None:
    inputs = quantized_matmul(whole(U8, 4, 6), whole(U8, 6, 5), U8)
    model = node_model("QLinearMatMul", inputs)
    check_node("QLinearMatMul", inputs, expected=run_reference(model, inputs))
