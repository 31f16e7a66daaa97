"""Fourier transforms and windows."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from penstock.core.types import ShapeError, TensorType, constant_type
from penstock.ops import find
from tests.ops.harness import check_node

rng = np.random.default_rng(5)


def signal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.normal(size=shape).astype(dtype)


def spectrum(x: np.ndarray, n: int | None, axis: int, inverse: bool, onesided: bool) -> np.ndarray:
    """What NumPy says, for a last axis of real and imaginary parts."""
    wide = x.astype(np.float64)
    values = wide[..., 0] if x.shape[-1] == 1 else wide[..., 0] + 1j * wide[..., 1]
    if inverse and onesided:
        return np.fft.irfft(values, n, axis)[..., None].astype(x.dtype)
    result = np.fft.ifft(values, n, axis) if inverse else np.fft.fft(values, n, axis)
    if onesided:
        result = np.take(result, range(result.shape[axis] // 2 + 1), axis)
    return np.stack([result.real, result.imag], -1).astype(x.dtype)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("n", [None, 5, 7, 12])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_dft_matches_the_reference(
    parts: int, inverse: int, onesided: int, n: int | None, axis: int
) -> None:
    x = signal(4, 7, 5, parts)
    want = spectrum(x, n, axis, bool(inverse), bool(onesided))
    length = None if n is None else np.array(n, np.int64)
    attrs = {"inverse": inverse, "onesided": onesided}
    constants = [i for i, v in ((1, length), (2, axis)) if v is not None]
    inputs = [x, length, np.array(axis - 4, np.int64)]
    check_node("DFT", inputs, attrs, expected=[want], atol=1e-5, constants=constants)
    check_node("DFT", inputs, attrs, expected=[want], atol=1e-5)
    inputs = inputs[: 1 if n is None else 2]
    check_node("DFT", inputs, {**attrs, "axis": axis}, expected=[want], opset=19, atol=1e-5)


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inverse", [0, 1])
def test_dft_matches_onnx_runtime(opset: int, parts: int, inverse: int) -> None:
    check_node(
        "DFT", [signal(3, 8, parts)], {"inverse": inverse}, expected="ort", opset=opset, atol=1e-5
    )


def test_dft_default_axis_matches_the_reference() -> None:
    """The first signal axis in version 17, the last one in version 20."""
    x = signal(2, 3, 4, 1)
    check_node("DFT", [x], expected=[spectrum(x, None, 1, False, False)], opset=17, atol=1e-5)
    check_node("DFT", [x], expected=[spectrum(x, None, 2, False, False)], opset=20, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, 1e-9), (np.float16, 1e-2), (ml_dtypes.bfloat16, 1e-1)]
)
def test_dft_of_every_dtype_matches_the_definition(dtype: Any, tolerance: float) -> None:
    x = signal(2, 6, 1, dtype=dtype)
    want = spectrum(x, None, 1, False, True)
    check_node("DFT", [x], {"onesided": 1}, expected=[want], rtol=tolerance, atol=tolerance)


def test_dft_strided_input_matches_the_reference() -> None:
    x = signal(3, 8, 4)[..., ::2]
    check_node("DFT", [x], expected=[spectrum(x, None, 1, False, False)], atol=1e-5)
    x = signal(3, 8, 2).swapaxes(0, 1)
    check_node("DFT", [x], expected=[spectrum(x, None, 1, False, False)], atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "length", "axis", "opset"),
    [
        ((2, 8, 3), None, 1, 20),
        ((2, 8, 1), None, 2, 20),
        ((2, 8, 1), None, -1, 20),
        ((2, 8, 1), None, 3, 20),
        ((2, 8, 1), 0, 1, 20),
        ((2, 8, 1), -4, 1, 20),
        ((2, 0, 1), None, 1, 20),
        ((8,), None, 0, 20),
        ((2, 8, 1), None, 2, 17),
    ],
)
def test_dft_with_bad_inputs_is_refused(
    shape: tuple[int, ...], length: int | None, axis: int, opset: int
) -> None:
    inputs: list[Any] = [signal(*shape), None if length is None else np.array(length, np.int64)]
    attrs = {}
    if opset == 17:
        attrs["axis"] = axis
    else:
        inputs.append(np.array(axis, np.int64))
    with pytest.raises(ShapeError):
        check_node("DFT", inputs, attrs, expected=[None], opset=opset)


def test_dft_infers_its_types() -> None:
    op = find("DFT", version=20)
    assert op is not None
    f = np.dtype(np.float32)
    x = TensorType(f, ("b", 16, "c", 1))
    axis = np.array(1)
    types = [x, None, constant_type(axis)]
    (kind,) = op.infer(types, {"onesided": 1}, [None, None, axis])
    assert kind == TensorType(f, ("b", 9, "c", 2))
    (kind,) = op.infer(types, {"onesided": 1, "inverse": 1}, [None, None, axis])
    assert kind == TensorType(f, ("b", 30, "c", 1))
    (kind,) = op.infer([x], {}, [None])
    assert kind == TensorType(f, ("b", 16, "c", 2))
    (kind,) = op.infer([x, None, TensorType()], {}, [None] * 3)
    assert kind == TensorType(f, (None, None, None, 2))


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("step", [1, 3, 8])
@pytest.mark.parametrize("constants", [(), (1, 3)])
def test_stft_matches_the_reference(
    onesided: int, windowed: bool, given: bool, step: int, constants: tuple[int, ...]
) -> None:
    window = signal(8) if windowed else None
    length = np.array(8, np.int64) if given else None
    if not windowed and not given:
        length = np.array(5, np.int64)
    inputs = [signal(2, 30, 1), np.array(step, np.int64), window, length]
    constants = tuple(i for i in constants if inputs[i] is not None)
    check_node("STFT", inputs, {"onesided": onesided}, atol=1e-5, constants=constants)


def test_stft_matches_onnx_runtime() -> None:
    inputs = [signal(2, 64, 1), np.array(4, np.int64), signal(16), np.array(16, np.int64)]
    check_node("STFT", inputs, expected="ort", opset=17, atol=1e-5)


def test_stft_whole_signal_matches_the_reference() -> None:
    x = signal(2, 9, 1)
    want = spectrum(x, None, 1, False, True)[:, None]
    check_node("STFT", [x, np.array(4, np.int64)], expected=[want], atol=1e-5)


@pytest.mark.parametrize("onesided", [0, 1])
def test_stft_complex_matches_the_reference(onesided: int) -> None:
    inputs = [signal(2, 30, 2), np.array(5, np.int64), signal(8)]
    check_node("STFT", inputs, {"onesided": onesided}, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tol"), [(np.float64, 1e-9), (np.float16, 2e-2)])
def test_stft_of_every_dtype_matches_the_definition(dtype: Any, tol: float) -> None:
    inputs = [signal(2, 20, 1, dtype=dtype), np.array(5, np.int32), signal(8, dtype=dtype)]
    check_node("STFT", inputs, rtol=tol, atol=tol)


@pytest.mark.parametrize(
    ("shape", "step", "window", "length"),
    [
        ((30,), 2, 8, 8),
        ((2, 30, 3), 2, 8, 8),
        ((2, 30, 1), 0, 8, 8),
        ((2, 30, 1), -1, 8, 8),
        ((2, 30, 1), 2, 8, 9),
        ((2, 6, 1), 2, 8, 8),
        ((2, 6, 1), 2, None, 0),
    ],
)
def test_stft_with_bad_inputs_is_refused(
    shape: tuple[int, ...], step: int, window: int | None, length: int | None
) -> None:
    inputs = [
        signal(*shape),
        np.array(step, np.int64),
        None if window is None else signal(window),
        None if length is None else np.array(length, np.int64),
    ]
    with pytest.raises(ShapeError):
        check_node("STFT", inputs, expected=[None])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [None, 6])
def test_stft_of_a_signal_of_rank_2_warns_and_matches_onnx_runtime(dtype: Any, length: Any) -> None:
    signal = np.random.default_rng(0).standard_normal((2, 20)).astype(dtype)
    inputs = [signal, np.array(4), None if length else np.hanning(8).astype(dtype)]
    inputs += [np.array(length)] if length else []
    with pytest.warns(RuntimeWarning, match="which ONNX does not allow"):
        check_node("STFT", inputs, expected="ort", opset=17, atol=1e-5)


def test_stft_infers_its_types() -> None:
    op = find("STFT")
    assert op is not None
    f, step = np.dtype(np.float32), np.array(4)
    types = [TensorType(f, ("b", None, 1)), constant_type(step), TensorType(f, (16,))]
    (kind,) = op.infer(types, {"onesided": 1}, [None, step, None])
    assert kind == TensorType(f, ("b", None, 9, 2))
    types[0] = TensorType(f, ("b", 160, 1))
    (kind,) = op.infer(types, {"onesided": 0}, [None, step, None])
    assert kind == TensorType(f, ("b", 37, 16, 2))


WINDOWS = ["HannWindow", "HammingWindow", "BlackmanWindow"]


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("periodic", [0, 1])
@pytest.mark.parametrize("size", [0, 2, 7, 400])
def test_window_operations_match_the_reference(name: str, periodic: int, size: int) -> None:
    check_node(name, [np.array(size, np.int64)], {"periodic": periodic})
    check_node(name, [np.array(size, np.int32)], {"periodic": periodic}, constants=[0])


@pytest.mark.parametrize(
    ("name", "curve"), [("HannWindow", np.hanning), ("BlackmanWindow", np.blackman)]
)
def test_window_operations_equal_windows_of_numpy(name: str, curve: Any) -> None:
    want = curve(12).astype(np.float32)
    check_node(name, [np.array(12, np.int64)], {"periodic": 0}, expected=[want])


def test_window_has_the_bits_that_the_mathematical_library_gives() -> None:
    """NumPy's cosines differ by processor, which ``reproducible=True`` must not."""
    want = [0.5 - 0.5 * math.cos(n * (2 * np.pi / 1000)) for n in range(1000)]
    attrs = {"output_datatype": TensorProto.DOUBLE}
    (y,) = check_node("HannWindow", [np.array(1000, np.int64)], attrs, rtol=1e-12, atol=1e-12)
    assert y.tolist() == want


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize(
    "code", [TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT32]
)
def test_window_operations_give_every_dtype(name: str, code: int) -> None:
    attrs = {"output_datatype": code}
    tolerance = {TensorProto.DOUBLE: 1e-12, TensorProto.INT32: 0}.get(code, 1e-2)
    # Of a periodic window of an odd size no sample is an integer, but the first of Hann's.
    check_node(name, [np.array(9, np.int64)], attrs, rtol=tolerance, atol=max(tolerance, 1e-12))


@pytest.mark.parametrize("name", WINDOWS)
def test_window_of_one_sample(name: str) -> None:
    (y,) = check_node(
        name, [np.array(1, np.int64)], {"periodic": 0}, expected=[_first(name)], atol=1e-6
    )
    assert np.isfinite(y).all()


def _first(name: str) -> np.ndarray:
    first = {"HannWindow": 0, "HammingWindow": 4 / 46, "BlackmanWindow": 0}[name]
    return np.array([first], np.float32)


def test_window_operations_with_bad_sizes_are_refused() -> None:
    with pytest.raises(ShapeError):
        check_node("HannWindow", [np.array(-1, np.int64)], expected=[None])
    with pytest.raises(ShapeError):
        check_node("HannWindow", [np.array([1, 2], np.int64)], expected=[None])


@pytest.mark.parametrize(
    ("bands", "length", "rate", "low", "high"),
    [(8, 16, 8192, 0, 4096), (40, 512, 16000, 20, 7600), (3, 9, 100, 5, 45), (0, 8, 100, 0, 50)],
)
def test_mel_weight_matrix_matches_the_reference(
    bands: int, length: int, rate: int, low: float, high: float
) -> None:
    ints = [np.array(x, np.int64) for x in (bands, length, rate)]
    floats = [np.array(x, np.float64) for x in (low, high)]
    check_node("MelWeightMatrix", [*ints, *floats])
    check_node("MelWeightMatrix", [*ints, *floats], constants=[0, 1])
    check_node(
        "MelWeightMatrix", [*ints, *floats], {"output_datatype": TensorProto.DOUBLE}, rtol=1e-12
    )


def test_mel_with_bad_inputs_is_refused() -> None:
    inputs = [np.array(x, np.int64) for x in (4, 16, 0)] + [np.array(x, np.float32) for x in (0, 9)]
    with pytest.raises(ShapeError):
        check_node("MelWeightMatrix", inputs, expected=[None])
    inputs[2], inputs[0] = np.array(8000), np.array(-1)
    with pytest.raises(ShapeError):
        check_node("MelWeightMatrix", inputs, expected=[None])
