"""DynamicQuantizeLSTM, against ONNX Runtime."""

from typing import Any

import numpy as np
import pytest

from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node, unsaturated

T, B, H, WIDTH = 5, 3, 6, 4
MS: dict[str, Any] = {"domain": "com.microsoft", "opset": 1}
# One code more or less where a value lies between two of them.
LOOSE = {"rtol": 0.02, "atol": 0.01}
rng = np.random.default_rng(23)


def inputs(
    dtype: type = np.uint8, batch: int = B, directions: int = 1, channels: bool = False
) -> list[Any]:
    def codes(*shape: int) -> np.ndarray:
        info = np.iinfo(dtype)
        return unsaturated(rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype))

    shape = (directions, 4 * H) if channels else (directions,)
    # Zero points in the middle, or weights would all be of one sign.
    middle = 128 if dtype == np.uint8 else 0
    zeros = np.full(shape, middle, dtype)
    scales = [rng.uniform(0.002, 0.006, shape).astype(np.float32) for _ in range(2)]
    return [
        rng.normal(size=(T, batch, WIDTH)).astype(np.float32),
        *(codes(directions, WIDTH, 4 * H), codes(directions, H, 4 * H)),
        (rng.normal(size=(directions, 8 * H)) / 4).astype(np.float32),
        *[None] * 4,
        *(scales[0], zeros, scales[1], zeros),
    ]


def real_lstm(values: list[Any]) -> list[Any]:
    """The inputs of the LSTM with the same weights as real numbers."""
    found = list(values[:8])
    for i, at in ((1, 8), (2, 10)):
        scale, zero = (
            v.astype(np.float32).reshape(len(v), 1, -1) for v in (values[at], values[at + 1])
        )
        found[i] = ((values[i].astype(np.float32) - zero) * scale).transpose(0, 2, 1)
    return found


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_dynamic_quantize_lstm_matches_onnx_runtime(
    dtype: type, channels: bool, batch: int, direction: str
) -> None:
    directions = 2 if direction == "bidirectional" else 1
    values = inputs(dtype, batch, directions, channels)
    attrs = {"hidden_size": H, "direction": direction}
    options = {**MS, "outputs": 3, "expected": "ort", **LOOSE}
    for constants in ((), (1, 2, 3, 8, 9, 10, 11)):
        check_node("DynamicQuantizeLSTM", values, attrs, **options, constants=constants)


@pytest.mark.parametrize("batch", [1, B])
def test_close_to_the_lstm_of_real_numbers(batch: int) -> None:
    values = inputs(batch=batch)
    values[5], values[6] = (rng.normal(size=(1, batch, H)).astype(np.float32) for _ in range(2))
    attrs = {"hidden_size": H}
    wanted = check_node("LSTM", real_lstm(values), attrs, outputs=3, opset=21, expected="ort")
    options: dict[str, Any] = {**MS, "rtol": 0.1, "atol": 0.05}
    check_node("DynamicQuantizeLSTM", values, attrs, outputs=3, expected=wanted, **options)
    # Lengths, peepholes and a clip as well.
    values[4] = np.array([T, 2, 3], np.int32)[:batch]
    values[7] = (rng.normal(size=(1, 3 * H)) / 4).astype(np.float32)
    attrs["clip"] = 2.0  # type: ignore[assignment]
    wanted = check_node("LSTM", real_lstm(values), attrs, outputs=3, opset=21, expected="ort")
    check_node("DynamicQuantizeLSTM", values, attrs, outputs=3, expected=wanted, **options)


def test_infer_and_what_does_not_fit() -> None:
    op = find("DynamicQuantizeLSTM", "com.microsoft")
    assert op is not None
    types: list[Any] = [TensorType()] * 12
    types[0] = TensorType(FLOAT32, ("t", "b", WIDTH))
    types[2] = TensorType(np.dtype(np.uint8), (1, H, 4 * H))
    y, y_h, y_c = op.infer(types, {}, [None] * 12)
    assert y == TensorType(FLOAT32, ("t", 1, "b", H))
    assert y_h == y_c == TensorType(FLOAT32, (1, "b", H))
    for i, shape in ((1, (1, 5, 4 * H)), (8, (2,)), (9, (1, H)), (3, (1, 7))):
        values = inputs()
        values[i] = np.zeros(shape, values[i].dtype)
        with pytest.raises(ShapeError):
            check_node("DynamicQuantizeLSTM", values, outputs=3, expected=[None] * 3, **MS)
