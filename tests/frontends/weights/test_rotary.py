from __future__ import annotations

import numpy as np
import pytest

from penstock.frontends.weights.rotary import rotary_of


def test_frequencies_fall_with_the_pair() -> None:
    rotary = rotary_of({"rope_theta": 100.0}, 4, 64)
    np.testing.assert_allclose(rotary.frequencies, [1, 0.1], rtol=1e-6)
    assert (rotary.size, rotary.magnitude, rotary.long_frequencies) == (4, 1, None)


def test_linear_scaling_divides_frequencies() -> None:
    rotary = rotary_of({"rope_theta": 100.0, "rope_type": "linear", "factor": 4.0}, 4, 64)
    np.testing.assert_allclose(rotary.frequencies, [0.25, 0.025], rtol=1e-6)


def test_yarn_has_a_magnitude_of_its_own_if_it_says_so() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert rotary_of(yarn, 8, 64).magnitude == pytest.approx(1.1386294)
    assert rotary_of(yarn | {"attention_factor": 0.5}, 8, 64).magnitude == 0.5
    both = yarn | {"mscale": 2.0, "mscale_all_dim": 1.0}
    assert rotary_of(both, 8, 64).magnitude == pytest.approx(1.2772589 / 1.1386294)


@pytest.mark.parametrize(
    ("parameters", "size", "reason"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 4, "rope_type is 'dynamic'; default, linear"),
        ({"rope_type": "linear"}, 4, "factor of its rotary embedding is None"),
        ({"rope_type": "linear", "factor": -1}, 4, "not a positive number"),
        ({"rope_type": "linear", "factor": "2"}, 4, "not a positive number"),
        ({"rope_type": "longrope", "factor": 2.0}, 4, "no short_factor"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            4,
            "no 2 positive",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0, {}], "long_factor": [1.0, 2.0]},
            4,
            "no 2 positive",
        ),
        ({"rope_type": "linear", "factor": 1e-45}, 4, "frequencies that are no numbers"),
        ({}, 3, "3 features cannot turn"),
        ({"rope_theta": 1.0}, 4, "rope_theta 1.0"),
    ],
)
def test_wrong_parameters_raise(parameters: dict[str, object], size: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        rotary_of(parameters, size, 64)  # type: ignore[arg-type]
