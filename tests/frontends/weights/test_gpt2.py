from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.frontends.weights.gpt2 import gpt2_configuration
from penstock.frontends.weights.settings import Settings
from tests.frontends.weights.test_decoder import CASES

SIZES = {"n_layer": 2, "n_embd": 24, "n_head": 4}


def test_configuration_has_the_defaults_of_gpt2() -> None:
    config = gpt2_configuration(Settings("config.json", SIZES))
    assert (config.inner, config.epsilon, config.activation) == (96, 1e-5, "gelu_tanh")
    assert config.scale == pytest.approx(6**-0.5)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"n_head": 5}, "a divisor of n_embd = 24"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_other_variants_are_refused(more: dict[str, object], reason: str) -> None:
    with pytest.raises(ps.InvalidModel, match=reason):
        gpt2_configuration(Settings("config.json", SIZES | more))


def test_graph_has_a_past(tmp_path: Path) -> None:
    graph = ps.load(CASES["gpt2"].write(tmp_path)).graph
    assert [value.name for value in graph.inputs][:3] == [
        *("input_ids", "position_ids", "past_key_values.0.key")
    ]
    assert graph.inputs[2].shape == ("batch", 4, "past", 6)
