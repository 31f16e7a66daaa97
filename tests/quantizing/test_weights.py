"""Weights as codes."""

import numpy as np
import pytest

from penstock.quantizing.weights import (
    CodeStore,
    StoredCodes,
    bias_correction,
    block_codes,
    channel_codes,
)

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("axis", [0, 1])
def test_channel_codes_are_within_half_a_step_of_the_largest_scale(axis):
    weights = RNG.standard_normal((6, 50)).astype(np.float32)
    weights[2] *= 100
    codes, scales, _ = channel_codes(weights, axis)
    by_channel = scales.reshape((-1, 1) if axis == 0 else (1, -1))
    error = np.abs(codes * by_channel - weights)
    assert codes.dtype == np.int8 and codes.min() >= -127
    # Largest weights may be clipped where that makes the sum of squares less.
    assert np.square(error).mean() <= np.square(by_channel).mean() / 12 * 1.2


@pytest.mark.parametrize("shifted", [False, True])
def test_scales_are_tried_for_a_part_of_large_weights_at_a_time(shifted, monkeypatch):
    weights = RNG.standard_normal((70, 50)).astype(np.float32)
    whole, blocks = channel_codes(weights, 0, shifted), block_codes(weights[:, :32], 4)
    monkeypatch.setattr("penstock.quantizing.weights._AT_ONCE", 333)
    again = (*channel_codes(weights, 0, shifted), *block_codes(weights[:, :32], 4))
    for one, other in zip((*whole, *blocks), again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_channels_of_zeros_have_a_scale():
    codes, scales, _ = channel_codes(np.zeros((2, 4), np.float32), 0)
    assert not codes.any() and (scales > 0).all()


def test_weights_as_large_as_float32_has():
    weights = np.float32([[0, -3.4e38, 1], [1, 2, 3]])
    codes, scales, _ = channel_codes(weights, 0)
    np.testing.assert_allclose(codes[0] * scales[0], weights[0], rtol=0.01, atol=2)


def test_shifted_codes_have_half_the_steps_where_weights_have_one_sign():
    weights = np.abs(RNG.standard_normal((6, 50))) * np.array([[1], [-1]] * 3)
    weights = np.concatenate([weights, np.zeros((1, 50))]).astype(np.float32)
    errors = []
    for shifted in (False, True):
        codes, scales, zeros = channel_codes(weights, 0, shifted)
        first = np.zeros(7) if zeros is None else zeros.astype(np.float64)
        assert codes.dtype == np.int8 and (zeros is None) != shifted
        real = (codes - first[:, None]) * scales[:, None]
        errors.append(np.sqrt(np.square(real - weights).mean(axis=1)))
        assert not real[6].any()
        assert (real * weights >= 0).all()  # signs stay
    assert (errors[1][:6] < 0.6 * errors[0][:6]).all()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (4, 0.35)])
def test_block_codes_give_weights_back(bits, most):
    rows = RNG.standard_normal((3, 64)).astype(np.float32)
    packed, scales, _ = block_codes(rows, bits)
    codes = packed
    if bits == 4:
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(3, 2, 32)
    real = (codes.astype(np.float32) - (1 << (bits - 1))) * scales[..., None]
    assert packed.dtype == np.uint8
    assert np.abs(real.reshape(3, 64) - rows).max() < most


@pytest.mark.parametrize("groups", [1, 4])
def test_bias_correction_is_the_mean_change_of_results(groups):
    weights = RNG.standard_normal((8, 8 // groups, 3, 3)).astype(np.float32)
    codes, scales, _ = channel_codes(weights, 0)
    errors = weights - codes * scales.reshape(-1, 1, 1, 1)
    means = RNG.standard_normal(8).astype(np.float32)
    wanted = [
        (errors[o] * means.reshape(groups, -1)[o * groups // 8].reshape(-1, 1, 1)).sum()
        for o in range(8)
    ]
    np.testing.assert_allclose(bias_correction(weights, 0, groups, means), wanted, rtol=1e-4)
    assert bias_correction(weights, 0, groups, means[:-1]) is None


def test_store_returns_the_codes_of_a_key():
    store = CodeStore()
    codes = StoredCodes(np.arange(6, dtype=np.int8).reshape(2, 3), np.ones(2, np.float32))
    shifted = codes._replace(zeros=np.array([-3, 4], np.int8))
    store["plain"], store["shifted"] = codes, shifted
    store["plain"] = codes._replace(scales=np.zeros(2, np.float32))
    assert "plain" in store and "other" not in store
    assert store["plain"].zeros is None and not store["plain"].scales.any()
    for own, given in zip(store["shifted"], shifted, strict=True):
        np.testing.assert_array_equal(own, given)
