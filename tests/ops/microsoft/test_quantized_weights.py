"""MatMulNBits and GatherBlockQuantized."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import ShapeError, TensorType
from penstock.ops import find
from penstock.ops.microsoft import quantized_weights
from tests.ops.harness import check_node

F32, U8 = np.dtype(np.float32), np.dtype(np.uint8)
MS: dict[str, Any] = {"domain": "com.microsoft", "opset": 1}
rng = np.random.default_rng(13)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis in bytes, the first in the lowest bits; padded with zeros."""
    per = 8 // bits
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per)]
    groups = np.pad(codes, padding).reshape(*codes.shape[:-1], -1, per)
    return (groups << np.arange(0, 8, bits)).sum(-1).astype(np.uint8)


def weights(bits: int, n: int, k: int, block: int) -> tuple[dict[str, int], list[np.ndarray]]:
    """Attributes, and codes, scales and zero points by block."""
    blocks = -(-k // block)
    codes = rng.integers(0, 1 << bits, (n, blocks, block))
    scales = rng.uniform(0.1, 1, (n, blocks)).astype(np.float32)
    zeros = rng.integers(0, 1 << bits, (n, blocks))
    return {"N": n, "K": k, "bits": bits, "block_size": block}, [codes, scales, zeros]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("k, block", [(64, 32), (70, 16), (16, 16), (200, 128)])
@pytest.mark.parametrize("constants", [(), (1, 2, 3)])
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_matmul_nbits_like_onnx_runtime(
    bits: int, k: int, block: int, constants: Sequence[int], shape: tuple[int, ...]
) -> None:
    attrs, (codes, scales, zeros) = weights(bits, 5, k, block)
    a = rng.normal(size=(*shape, k)).astype(np.float32)
    b = packed(codes, bits)
    options: dict[str, Any] = {**MS, "expected": "ort", "rtol": 1e-4, "atol": 1e-4}
    check_node("MatMulNBits", [a, b, scales], attrs, **options, constants=constants[:2])
    inputs = [a, b, scales, packed(zeros, bits)]
    check_node("MatMulNBits", inputs, attrs, **options, constants=constants)
    bias = rng.normal(size=5).astype(np.float32)
    check_node("MatMulNBits", [*inputs, None, bias], attrs, **options, constants=constants)


def test_float_zero_points_groups_and_other_types() -> None:
    attrs, (codes, scales, _) = weights(4, 6, 48, 16)
    a, b = rng.normal(size=(2, 48)).astype(np.float32), packed(codes, 4)
    zeros = rng.uniform(0, 15, (6, 3)).astype(np.float32)

    def expect(groups: np.ndarray) -> np.ndarray:
        real = (codes.reshape(6, 48) - zeros[:, groups]) * scales[:, groups]
        return a @ real.T.astype(np.float32)

    in_order = np.repeat(np.arange(3), 16)
    options = {**MS, "rtol": 1e-4, "atol": 1e-4}
    want = expect(in_order)
    check_node("MatMulNBits", [a, b, scales, zeros], attrs, **options, expected=[want])
    shuffled = rng.permutation(in_order).astype(np.int32)
    inputs = [a, b, scales, zeros, shuffled]
    for constants in ((), (1, 2, 3, 4)):
        check_node(
            "MatMulNBits",
            inputs,
            attrs,
            **options,
            expected=[expect(shuffled)],
            constants=constants,
        )
    for dtype in (np.float16, ml_dtypes.bfloat16):
        low = [x.astype(dtype) if x.dtype == F32 else x for x in (a, b, scales, zeros)]
        check_node(
            "MatMulNBits", low, attrs, **MS, expected=[want.astype(dtype)], rtol=0.05, atol=0.2
        )


def test_flat_inputs_of_older_exporters() -> None:
    attrs, (codes, scales, zeros) = weights(4, 6, 48, 16)
    a = rng.normal(size=(2, 48)).astype(np.float32)
    inputs = [a, packed(codes, 4), scales, packed(zeros, 4)]
    (y,) = check_node("MatMulNBits", inputs, attrs, **MS, expected="ort", rtol=1e-4, atol=1e-4)
    inputs[2], inputs[3] = inputs[2].reshape(-1), inputs[3].reshape(-1)
    check_node("MatMulNBits", inputs, attrs, **MS, expected=[y])


def test_large_weights_go_panel_by_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weights, "FIXED_BYTES", 0)
    monkeypatch.setattr(quantized_weights, "PANEL", 200)
    attrs, (codes, scales, zeros) = weights(4, 11, 64, 32)
    inputs = [rng.normal(size=(2, 64)).astype(np.float32), packed(codes, 4), scales]
    inputs.append(packed(zeros, 4))
    options: dict[str, Any] = {**MS, "expected": "ort", "rtol": 1e-4, "atol": 1e-4}
    check_node("MatMulNBits", inputs, attrs, **options, constants=[1, 2, 3])


def test_matmul_nbits_of_what_does_not_fit() -> None:
    attrs, (codes, scales, zeros) = weights(4, 6, 48, 16)
    a, b = rng.normal(size=(2, 48)).astype(np.float32), packed(codes, 4)
    zero = packed(zeros, 4)
    groups = np.full(48, 3, np.int32)
    for inputs in (
        [a[:, :40], b, scales],
        [a, b[:5], scales],
        [a, b, scales[:, :2]],
        [a, b, scales, zero[:, :1]],
        [a, b, scales, zero, groups],
        [a, b, scales, zero, None, a[0]],
    ):
        with pytest.raises(ShapeError):
            check_node("MatMulNBits", inputs, attrs, **MS, expected=[None])
    with pytest.raises(ShapeError, match="are supported"):
        check_node("MatMulNBits", [a, b, scales], {**attrs, "bits": 3}, **MS, expected=[None])


def test_infer_of_matmul_nbits() -> None:
    op = find("MatMulNBits", "com.microsoft")
    assert op is not None
    attrs = {"N": 6, "K": 48, "bits": 4, "block_size": 16}
    types = [TensorType(F32, ("b", "s", 48)), TensorType(U8, (6, 3, 8))]
    assert op.infer(types, attrs, []) == (TensorType(F32, ("b", "s", 6)),)
    types = [TensorType(F32, ("b", "k")), TensorType()]
    assert op.infer(types, attrs, []) == (TensorType(F32, ("b", 6)),)


# GatherBlockQuantized


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize("index_shape", [(), (3,), (2, 2)])
def test_gather_of_bytes_matches_the_reference(
    bits: int, with_zeros: bool, index_shape: tuple[int, ...]
) -> None:
    rows, columns, block = 7, 48, 16
    codes = rng.integers(0, 1 << bits, (rows, columns))
    scales = rng.uniform(0.1, 1, (rows, columns // block)).astype(np.float32)
    zeros = rng.integers(0, 1 << bits, (rows, columns // block))
    indices = np.asarray(rng.integers(-rows, rows, index_shape), np.int64)
    real = codes - (np.repeat(zeros, block, 1) if with_zeros else 1 << (bits - 1))
    real = (real * np.repeat(scales, block, 1)).astype(np.float32)
    inputs = [packed(codes, bits), indices, scales]
    if with_zeros:
        inputs.append(packed(zeros, bits))
    attrs = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    check_node("GatherBlockQuantized", inputs, attrs, **MS, expected=[real[indices]])
    check_node("GatherBlockQuantized", inputs, attrs, **MS, expected="ort")


@pytest.mark.parametrize("gather_axis, quantize_axis", [(0, 1), (1, 0), (2, -1), (0, 2), (1, 1)])
@pytest.mark.parametrize("name", ["int4", "uint4", "float8_e4m3fn", "float4_e2m1fn"])
def test_gather_along_any_axes(gather_axis: int, quantize_axis: int, name: str) -> None:
    shape, block = (6, 5, 40), 16
    dtype = np.dtype(getattr(ml_dtypes, name))
    data = rng.integers(-4, 4, shape).clip(0 if name == "uint4" else -8).astype(np.float32)
    data = data.astype(np.int8).astype(dtype) if "int" in name else data.astype(dtype)
    blocked = list(shape)
    blocked[quantize_axis] = -(-shape[quantize_axis] // block)
    scales = rng.uniform(0.1, 1, blocked).astype(np.float16)
    wide = np.repeat(scales, block, quantize_axis)
    wide = np.take(wide, np.arange(shape[quantize_axis]), quantize_axis)
    real = (data.astype(np.float32) * wide.astype(np.float32)).astype(np.float16)
    indices = np.array([[0, -1], [2, 1]], np.int32)
    want = np.take(real, indices, gather_axis)
    attrs = {"block_size": block, "gather_axis": gather_axis, "quantize_axis": quantize_axis}
    check_node("GatherBlockQuantized", [data, indices, scales], attrs, **MS, expected=[want])


def test_gather_outside_gives_zeros_and_misfits_are_with_bad_inputs_is_refused() -> None:
    data = np.full((3, 16), 9, np.uint8)
    indices, scales = np.array([0, 3, -4, -3]), np.ones((3, 1), np.float32)
    attrs = {"bits": 8, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    want = np.full((4, 16), 9 - 128, np.float32)
    want[1:3] = 0
    check_node("GatherBlockQuantized", [data, indices, scales], attrs, **MS, expected=[want])
    for bad in (np.ones((2, 1), np.float32), np.ones((3,), np.float32)):
        with pytest.raises(ShapeError):
            check_node("GatherBlockQuantized", [data, indices, bad], attrs, **MS, expected=[want])
    attrs["gather_axis"], attrs["bits"] = 1, 4
    with pytest.raises(ShapeError, match="gather_axis must not be the last"):
        check_node("GatherBlockQuantized", [data, indices, scales], attrs, **MS, expected=[want])
