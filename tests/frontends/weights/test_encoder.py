"""Encoders of weights give what ``transformers`` gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from tests.support.weight_cases import cases

CASES = {name: case for name, case in cases().items() if case.is_encoder}
ENCODERS = sorted(CASES)


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
def test_padding_of_other_texts_does_not_change_a_text(tmp_path: Path, name: str) -> None:
    session = ps.compile(ps.load(CASES[name].write(tmp_path)), dead_rows="any")
    feeds = feeds_of(name)
    alone = session.run({key: x[1:, :7] for key, x in feeds.items()})["last_hidden_state"]
    together = session.run(feeds)["last_hidden_state"][1:, :7]
    np.testing.assert_allclose(alone, together, rtol=0, atol=1e-5)
    np.testing.assert_allclose(alone, CASES[name].expected[1:, :7], rtol=0, atol=1e-4)


def test_layers_that_share_weights_have_one_constant_of_each(tmp_path: Path) -> None:
    model = ps.load(CASES["albert"].write(tmp_path))
    constants = [x.const for node in model.graph.nodes for x in node.inputs if x is not None]
    shared = [x for x in constants if x is not None and x.shape == (24, 40)]
    assert len(shared) == 3
    assert len({id(x) for x in shared}) == 1


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("albert", {"inner_group_num": 2}, "inner_group_num"),
        ("deberta", {"conv_kernel_size": 3}, "convolution"),
        ("deberta", {"relative_attention": False}, "without relative positions"),
        ("deberta", {"pos_att_type": ["p2p"]}, "without relative positions"),
    ],
)
def test_variant_that_is_not_built_is_refused(
    tmp_path: Path, name: str, settings: dict[str, object], message: str
) -> None:
    folder = CASES[name].write(tmp_path)
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | settings))
    with pytest.raises(ps.Unsupported, match=message):
        ps.load(folder)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deberta", {"position_buckets": 2}),
        ("deberta", {"position_buckets": 64}),
        ("albert", {"embedding_size": "16"}),
    ],
)
def test_impossible_setting_is_named(
    tmp_path: Path, name: str, settings: dict[str, object]
) -> None:
    folder = CASES[name].write(tmp_path)
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | settings))
    with pytest.raises(ps.InvalidModel, match=next(iter(settings))):
        ps.load(folder)


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
