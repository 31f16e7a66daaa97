"""Inputs of types that compiled kernels do not read, which models may have before they are checked."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.types import ShapeError
from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401


def zeros(*dims: int) -> np.ndarray:
    return np.zeros(dims, np.float32)


LAYER = [zeros(3, 2, 4), zeros(1, 12, 4), zeros(1, 12, 3), zeros(1, 24)]
STATE, PEEPHOLES = zeros(1, 2, 3), zeros(1, 9)
LENGTHS = np.zeros(2, np.int32)
QUANTIZED_KINDS = np.zeros((4, 32), np.uint8)
BLOCKS = [zeros(2, 32), np.zeros((4, 1, 16), np.uint8), zeros(4, 1)]
N_BITS = {"K": 32, "N": 4, "bits": 4, "block_size": 32}
CASES = [
    (
        "LSTM",
        [*LAYER, LENGTHS, STATE, STATE, PEEPHOLES],
        [1, 2, 3, 7],
        {"hidden_size": 3},
        range(4, 8),
    ),
    ("Pad", [zeros(3), np.array([1, 1]), zeros(1)], [1, 2], {}, [2]),
    ("InstanceNormalization", [zeros(1, 5, 9), zeros(5), zeros(5)], [], {}, [1, 2]),
    ("MatMulNBits", [*BLOCKS, None, None, zeros(4)], [1, 2], N_BITS, [5]),
]


@pytest.mark.parametrize("case", CASES, ids=[name for name, *_ in CASES])
def test_input_of_another_type_is_left_to_numpy(case):
    name, inputs, constants, attrs, places = case
    domain = "com.microsoft" if name == "MatMulNBits" else ""
    version = 1 if domain else 26
    node = node_of(name, inputs, constants, 1, domain, version, **attrs)
    assert kernel_of(node, LIBRARIES[0]) is not None
    for i in places:
        others = [x.astype(np.int8) if j == i else x for j, x in enumerate(inputs)]
        node = node_of(name, others, constants, 1, domain, version, **attrs)
        assert kernel_of(node, LIBRARIES[0]) is None, i


def test_product_of_codes_with_an_empty_scale_is_left_to_numpy():
    codes, scale, zero = np.zeros((2, 4), np.uint8), np.float32([1]), np.uint8([0])
    inputs = [codes, scale, zero, QUANTIZED_KINDS, scale, zero, scale, zero]
    constants = range(1, 8)
    assert kernel_of(node_of("QLinearMatMul", inputs, constants), LIBRARIES[0]) is not None
    inputs[6] = scale[:0]
    assert kernel_of(node_of("QLinearMatMul", inputs, constants), LIBRARIES[0]) is None


def test_pad_of_a_scalar_keeps_it():
    x = np.float32(3)
    inputs = [np.asarray(x), np.zeros(0, np.int64)]
    check(node_of("Pad", inputs, [1]), inputs)


def test_rotary_embedding_refuses_positions_of_rank_zero():
    cache = zeros(3, 2)
    with pytest.raises(ShapeError, match="position_ids"):
        node_of("RotaryEmbedding", [zeros(1, 2, 3, 4), cache, cache, np.array(1)])
