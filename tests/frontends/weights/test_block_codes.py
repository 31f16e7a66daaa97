from __future__ import annotations

import json

import numpy as np
import pytest

from penstock.frontends.weights import block_codes
from penstock.frontends.weights.block_codes import FORMATS, decode
from penstock.ops.microsoft.quantized_weights import PackedWeights
from tests.support.weight_cases import BLOCKS, decoded_array, random_blocks


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_have_the_weights_that_the_gguf_package_gives(name: str) -> None:
    expected = decoded_array(json.loads(BLOCKS.read_text())[name])
    codes = decode(name, random_blocks(name, 2, 512), 512)
    np.testing.assert_allclose(codes.dequantized(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_codes_are_those_of_matmul_nbits(name: str) -> None:
    codes = decode(name, random_blocks(name, 3, 256), 256)
    packed = PackedWeights({"N": 3, "K": 256, "bits": codes.bits, "block_size": codes.group})
    rows = packed.rows(0, 3, codes.codes, codes.scales, codes.zeros, None)
    np.testing.assert_array_equal(rows, codes.dequantized())


def test_codes_of_smaller_groups_have_the_same_weights() -> None:
    codes = decode("Q4_K", random_blocks("Q4_K", 2, 256), 256)
    smaller = codes.of_group(16)
    assert (codes.group, smaller.group) == (32, 16)
    np.testing.assert_array_equal(smaller.dequantized(), codes.dequantized())


def test_group_whose_scale_is_zero_has_its_minimum() -> None:
    block = np.zeros(1, FORMATS["Q4_K"].block)
    block["least"], block["codes"] = 0.5, 255
    block["scales"][:, 4:8] = 3  # minima of the first four groups
    codes = decode("Q4_K", block.view(np.uint8), 256)
    assert codes.dequantized().ravel().tolist() == [-1.5] * 128 + [0] * 128


def test_large_matrices_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_blocks("Q4_K", 5, 256)
    whole = decode("Q4_K", data, 256)
    monkeypatch.setattr(block_codes, "_TOGETHER", 512)
    for part, expected in zip(decode("Q4_K", data, 256), whole, strict=True):
        np.testing.assert_array_equal(part, expected)
