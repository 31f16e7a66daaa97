"""Encoders of weights give what ``transformers`` gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from tests.support.weight_cases import cases

ENCODERS = ("bert", "roberta", "distilbert")
CASES = {name: case for name, case in cases().items() if name in ENCODERS}


def feeds_of(name: str) -> dict[str, np.ndarray]:
    feeds = dict(CASES[name].inputs)
    if name == "roberta":
        feeds["token_type_ids"] = np.zeros_like(feeds["input_ids"])
    return feeds


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_of_a_folder_gives_the_states_of_transformers(tmp_path: Path, name: str) -> None:
    session = ps.compile(ps.load(CASES[name].write(tmp_path)))
    feeds = feeds_of(name)
    states = session.run(feeds)["last_hidden_state"]
    rows = feeds["attention_mask"] == 1
    np.testing.assert_allclose(states[rows], CASES[name].expected[rows], rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["xlm-roberta", "camembert"])
def test_roberta_of_other_tokens_gives_the_states_of_transformers(
    tmp_path: Path, model_type: str
) -> None:
    folder = CASES["roberta"].write(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": model_type}))
    feeds = feeds_of("roberta")
    states = ps.compile(ps.load(folder)).run(feeds)["last_hidden_state"]
    rows = feeds["attention_mask"] == 1
    np.testing.assert_allclose(states[rows], CASES["roberta"].expected[rows], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_rows_that_the_mask_hides_can_be_left_out(tmp_path: Path, name: str) -> None:
    session = ps.compile(ps.load(CASES[name].write(tmp_path)), dead_rows="any")
    session.run(feeds_of(name))
    assert "rows that 'attention_mask' hides are left out" in session.explain(reasons=True)


def test_decoder_of_berts_kind_is_refused(tmp_path: Path) -> None:
    CASES["bert"].config["is_decoder"] = True
    try:
        folder = CASES["bert"].write(tmp_path)
    finally:
        del CASES["bert"].config["is_decoder"]
    with pytest.raises(ps.Unsupported, match=r"is_decoder.*optimum-cli"):
        ps.load(folder)


def test_norms_of_old_checkpoints_are_gamma_and_beta(tmp_path: Path) -> None:
    from penstock.artifact.tensor_file import load_arrays, save_arrays

    file = CASES["bert"].write(tmp_path) / "model.safetensors"
    weights, texts = load_arrays(file)
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): x
        for name, x in weights.items()
    }
    save_arrays(file, renamed, texts)
    states = ps.compile(ps.load(tmp_path)).run(feeds_of("bert"))["last_hidden_state"]
    rows = CASES["bert"].inputs["attention_mask"] == 1
    np.testing.assert_allclose(states[rows], CASES["bert"].expected[rows], rtol=0, atol=1e-4)
