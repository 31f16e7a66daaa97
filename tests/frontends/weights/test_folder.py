from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.artifact.tensor_file import load_arrays, save_arrays
from tests.frontends.weights.test_decoder import CASES, logits

CASE = CASES["llama"]


def sharded(folder: Path) -> Path:
    """The model in two shards, with their index."""
    weights, texts = load_arrays(CASE.write(folder) / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_arrays(folder / file, {name: weights[name] for name in part}, texts)
    where = {name: file for file, part in shards.items() for name in part}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("map_weights", [False, True])
def test_shards_are_one_model(tmp_path: Path, map_weights: bool) -> None:
    model = ps.load(sharded(tmp_path), map_weights=map_weights)
    result = logits(ps.compile(model), CASE, [12])
    np.testing.assert_allclose(result, CASE.expected, rtol=0, atol=1e-4)


def test_mapped_weights_are_views_of_the_file(tmp_path: Path) -> None:
    graph = ps.load(CASE.write(tmp_path), map_weights=True).graph
    (gather,) = [node for node in graph.nodes if node.op.name == "Gather"]
    table = gather.const(0)
    assert table is not None
    assert not table.flags.owndata
    assert not table.flags.writeable


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-2.safetensors").unlink()
    with pytest.raises(ps.InvalidModel, match=r"no 'model-2\.safetensors'.*get all shards"):
        ps.load(tmp_path)


def test_index_names_no_files_elsewhere(tmp_path: Path) -> None:
    folder = CASE.write(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "other.safetensors")
    (folder / "a.safetensors").touch()
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ps.InvalidModel, match="no file of this folder"):
        ps.load(folder)


def test_index_that_names_a_tensor_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = CASE.write(tmp_path)
    index = {"weight_map": {"model.none.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ps.InvalidModel, match=r"'model\.none\.weight' is, but it is not there"):
        ps.load(folder)


def test_texts_beside_the_weights_are_metadata(tmp_path: Path) -> None:
    folder = CASE.write(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    model = ps.load(folder)
    assert model.path == str(folder)
    assert json.loads(model.metadata["config.json"])["model_type"] == "llama"
    assert model.metadata["generation_config.json"] == '{"eos_token_id": 2}'
    assert model.metadata["chat_template.jinja"] == "{{ messages }}"


def test_damaged_weights_are_refused_with_their_file(tmp_path: Path) -> None:
    file = CASE.write(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    for length in (0, 5, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(ps.InvalidModel, match=r"model\.safetensors cannot be loaded"):
            ps.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ("{}", "'model_type' of config.json is missing"),
        ('{"model_type": 3}', "'model_type' of config.json is 3"),
        (b"\xff", "not text in UTF-8"),
    ],
)
def test_damaged_configuration_is_refused(tmp_path: Path, text: str | bytes, reason: str) -> None:
    folder = CASE.write(tmp_path)
    (folder / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ps.InvalidModel, match=reason):
        ps.load(folder)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba'.*bert.*optimum-cli"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config.*GGUF"),
    ],
)
def test_other_models_are_unsupported(tmp_path: Path, more: dict[str, object], reason: str) -> None:
    folder = CASE.write(tmp_path)
    (folder / "config.json").write_text(json.dumps(CASE.config | more))
    with pytest.raises(ps.Unsupported, match=reason):
        ps.load(folder)


def test_decoder_of_a_model_of_images_is_read(tmp_path: Path) -> None:
    case = CASES["gemma3"]
    folder = case.write(tmp_path)
    weights, texts = load_arrays(folder / "model.safetensors")
    nested = {f"language_model.{name}": x for name, x in weights.items()}
    nested["vision_tower.patch.weight"] = np.zeros(3, np.float32)
    save_arrays(folder / "model.safetensors", nested, texts)
    config = {"model_type": "gemma3", "text_config": case.config}
    (folder / "config.json").write_text(json.dumps(config))
    result = logits(ps.compile(ps.load(folder)), case, [12])
    np.testing.assert_allclose(result, case.expected, rtol=0, atol=1e-4)


WRONG: tuple[object, ...] = (None, 0, -1, 1, 7, 1 << 40, 0.5, 1e300, 1e-300, "x", True, [], [1], {})


@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3_moe", "phi3_long", "gpt2"])
def test_changed_configuration_gives_a_model_or_a_refusal(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    folder = case.write(tmp_path)
    rng, outcomes = np.random.default_rng(2), []
    groups = [case.config, *[x for x in case.config.values() if isinstance(x, dict)]]
    for group in groups:
        for key, value in [*group.items()]:
            group[key] = WRONG[rng.integers(len(WRONG))]
            (folder / "config.json").write_text(json.dumps(case.config))
            group[key] = value
            outcomes.append(False)
            with suppress(ps.InvalidModel, ps.Unsupported):
                ps.load(folder)
                outcomes[-1] = True
    assert {*outcomes} == {False, True}
