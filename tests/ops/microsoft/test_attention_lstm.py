"""AttnLSTM, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node

T, B, H, WIDTH, DEPTH, INNER, MIXED, POSITIONS = 5, 3, 6, 4, 7, 8, 10, 9
MS: dict[str, Any] = {"domain": "com.microsoft", "opset": 1, "outputs": 3}
WEIGHTS = (1, 2, 3, 8, 9, 10)


def inputs(batch: int = B, directions: int = 1, *, mixed: bool = True) -> list[Any]:
    rng = np.random.default_rng(29)

    def real(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 2).astype(np.float32)

    attended = MIXED if mixed else DEPTH
    return [
        real(T, batch, WIDTH),
        real(directions, 4 * H, WIDTH + attended),
        real(directions, 4 * H, H),
        real(directions, 8 * H),
        *[None] * 4,
        *(real(directions, H, INNER), real(directions, DEPTH, INNER), real(directions, INNER)),
        real(batch, POSITIONS, DEPTH),
        None,
        real(directions, DEPTH + H, MIXED) if mixed else None,
    ]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_attention_lstm_matches_onnx_runtime(direction: str, batch: int, mixed: bool) -> None:
    directions = 2 if direction == "bidirectional" else 1
    values, attrs = inputs(batch, directions, mixed=mixed), {"hidden_size": H}
    attrs["direction"] = direction  # type: ignore[assignment]
    for constants in ((), (*WEIGHTS, 13) if mixed else WEIGHTS):
        check_node("AttnLSTM", values, attrs, **MS, expected="ort", constants=constants)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_attention_lstm_with_all_inputs_matches_onnx_runtime(direction: str) -> None:
    directions = 2 if direction == "bidirectional" else 1
    values, rng = inputs(B, directions), np.random.default_rng(31)
    values[4], values[12] = np.array([T, 2, 3], np.int32), np.array([4, POSITIONS, 1], np.int32)
    for i, shape in ((5, (B, H)), (6, (B, H)), (7, (3 * H,))):
        values[i] = (rng.standard_normal((directions, *shape)) / 2).astype(np.float32)
    attrs = {"hidden_size": H, "direction": direction, "clip": 0.8}
    attrs["activations"] = ["Sigmoid", "Softsign", "Relu"] * directions
    check_node("AttnLSTM", values, attrs, **MS, expected="ort")


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (1, (1, 4 * H, WIDTH), "W has shape"),
        (8, (1, H + 1, INNER), "weights of the query has a dim of 7"),
        (11, (B, POSITIONS, DEPTH + 1), "the memory has a dim of 8"),
        (13, (1, DEPTH, MIXED), "weights of the attention layer"),
    ],
)
def test_wrong_shapes_are_named(place: int, shape: tuple[int, ...], message: str) -> None:
    types = [None if x is None else TensorType(FLOAT32, x.shape) for x in inputs()]
    types[place] = TensorType(FLOAT32, shape)
    with pytest.raises(ShapeError, match=message):
        find("AttnLSTM", "com.microsoft").infer(types, {"hidden_size": H}, [None] * 14)


@pytest.mark.parametrize("length", [0, POSITIONS + 1])
def test_lengths_beyond_the_memory_are_refused(length: int) -> None:
    values = inputs()
    values[12] = np.array([1, 1, length], np.int32)
    with pytest.raises(Exception, match="lengths of the memory must lie in 1 to 9"):
        check_node("AttnLSTM", values, {"hidden_size": H}, **MS, expected=[None] * 3)
