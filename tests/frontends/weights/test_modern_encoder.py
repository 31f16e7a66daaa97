"""ModernBERT of weights: what its configurations may be. ``test_encoder`` compares its states."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from tests.support.weight_cases import cases

CASE = cases()["modernbert"]


def folder_of(tmp_path: Path, **settings: object) -> Path:
    folder = CASE.write(tmp_path)
    (folder / "config.json").write_text(json.dumps({**CASE.config, **settings}))
    return folder


def test_older_configurations_give_the_same_states(tmp_path: Path) -> None:
    older = {
        "layer_types": None,
        "rope_parameters": None,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
    }
    session = ps.compile(ps.load(folder_of(tmp_path, **older)))
    states = session.run(CASE.inputs)["last_hidden_state"]
    rows = CASE.inputs["attention_mask"] == 1
    np.testing.assert_allclose(states[rows], CASE.expected[rows], rtol=0, atol=1e-4)


def test_window_hides_keys_that_are_farther(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 4
    session = ps.compile(ps.load(folder_of(tmp_path, layer_types=kinds, local_attention=2)))
    ids = CASE.inputs["input_ids"][:1]
    other = ids.copy()
    other[0, 0] = 3 + (other[0, 0] - 2) % 37
    feeds = {"attention_mask": np.ones_like(ids)}
    states, others = (
        session.run({"input_ids": x, **feeds})["last_hidden_state"] for x in (ids, other)
    )
    # Four layers, each of which reads one token to either side.
    np.testing.assert_array_equal(states[0, 5:], others[0, 5:])
    assert np.abs(states[0, 4] - others[0, 4]).max() > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"layer_types": ["full_attention", "other", "full_attention", "full_attention"]},
        {"num_attention_heads": 5},
        {"local_attention": 0},
        {"norm_bias": 1},
        {"rope_parameters": {"full_attention": {"rope_theta": 0}}},
    ],
)
def test_impossible_setting_is_named(tmp_path: Path, settings: dict[str, object]) -> None:
    with pytest.raises(ps.InvalidModel, match=next(iter(settings))):
        ps.load(folder_of(tmp_path, **settings))


def test_scaled_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ps.Unsupported, match="scaled positions"):
        ps.load(folder_of(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0}))
