"""Texts follow the settings of ``generation_config.json``, as those of ``transformers`` do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import InvalidModel
from penstock.generation.generator import Generator
from penstock.generation.model_defaults import default_options
from penstock.generation.options import request_options
from penstock.generation.sources import numbers_tokenizer
from tests.support.encoder_decoders import folders
from tests.support.sweeps import drawn
from tests.support.weight_cases import cases

__all__ = ["folders"]

RECORDED = Path(__file__).parents[1] / "models" / "generation_cases.json"
CASES: list[dict[str, Any]] = json.loads(RECORDED.read_text())


def folder_of(case: dict[str, Any], folders: Path, tmp_path: Path) -> Path:
    """A model's files, with the settings of a case."""
    if case["model"] == "llama":
        cases()["llama"].write(tmp_path)
    else:
        for path in (folders / case["model"]).iterdir():
            (tmp_path / path.name).symlink_to(path)
        (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps(case["settings"]))
    return tmp_path


@pytest.mark.parametrize("number", drawn(range(len(CASES)), 12))
def test_texts_by_settings_of_files_are_those_of_transformers(
    number: int, folders: Path, tmp_path: Path
) -> None:
    case = CASES[number]
    folder = folder_of(case, folders, tmp_path)
    with Generator(folder, numbers_tokenizer(), threads=1) as generator:
        options = request_options(case["request"], generator.defaults)
        jobs = [generator.begin(case["prompt"], options) for _ in range(3)]
        generator.stepper._drive(lambda: all(job.done for job in jobs))
    assert [job.error for job in jobs] == [None] * 3
    assert [job.result and job.result.tokens for job in jobs] == [case["tokens"]] * 3


def written(folder: Path, name: str = "generation_config.json", **settings: object) -> list[Path]:
    """The folders of files, of which one has some settings."""
    (folder / name).write_text(json.dumps(settings))
    return [folder]


def test_settings_of_sampling_are_defaults(tmp_path: Path) -> None:
    own = default_options(written(tmp_path, do_sample=True, temperature=0.6, top_p=0.9), [2], None)
    assert own == {"temperature": 0.6, "top_p": 0.9, "top_k": 50}
    assert request_options({"temperature": 0}, own).greedy
    assert request_options({"top_k": 0}, own).top_k == 0
    assert request_options({}, own).temperature == 0.6


def test_likeliest_tokens_are_the_default_without_do_sample(tmp_path: Path) -> None:
    own = default_options(written(tmp_path, temperature=0.6, top_k=20), [2], None)
    assert request_options({}, own).greedy
    assert request_options({"temperature": 1.0}, own).top_k == 20


def test_requests_that_draw_have_no_beams_of_files(tmp_path: Path) -> None:
    own = default_options(written(tmp_path, num_beams=4), [2], None)
    assert request_options({}, own).beams == 4
    assert request_options({"count": 3}, own).beams == 4
    assert request_options({"temperature": 0.5, "count": 8}, own).beams == 1
    assert request_options({"temperature": 0.5, "best_of": 8}, own).beams == 1


def test_lengths_of_requests_replace_those_of_files(tmp_path: Path) -> None:
    own = default_options(written(tmp_path, max_length=30, min_length=20), [2], None)
    options = request_options({}, own).behind(4)
    assert (options.max_tokens, options.min_tokens) == (26, 16)
    options = request_options({"max_tokens": 40, "min_tokens": 3}, own).behind(4)
    assert (options.max_tokens, options.min_tokens) == (40, 3)
    # A shorter maximum than the least length is not an error of the request.
    own = default_options(written(tmp_path, min_new_tokens=20, min_length=50), [2], None)
    assert request_options({"max_tokens": 16}, own).behind(4).min_tokens == 16
    with pytest.raises(ps.InvalidInput, match="max_length=30; give max_tokens"):
        request_options({"max_length": 30}, {}).behind(30)


def test_settings_are_those_of_the_first_file(tmp_path: Path) -> None:
    written(tmp_path, "config.json", num_beams=5)
    assert default_options([tmp_path], [], None) == {"beams": 5, "temperature": 0.0}
    written(tmp_path, "genai_config.json", search={"num_beams": 3, "max_length": 9}, model={})
    own = {"beams": 3, "temperature": 0.0, "max_length": 9}
    assert default_options([tmp_path], [], None) == own
    written(tmp_path, eos_token_id=2)
    assert default_options([tmp_path], [], None) == {}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"typical_p": 0.9, "do_sample": True}, "typical_p=0.9"),
        ({"num_beams": 2, "do_sample": True}, "do_sample=True"),
        ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0}, "diversity_penalty=1.0"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"sequence_bias": [[[1], 2.0]]}, "sequence_bias"),
        ({"forced_bos_token_id": 3}, "forced_bos_token_id=3"),
    ],
)
def test_settings_that_are_not_followed_are_named(
    settings: dict[str, object], named: str, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=named):
        default_options(written(tmp_path, **settings), [2], None)


def test_neutral_settings_are_not_named(tmp_path: Path) -> None:
    neutral = {"typical_p": 0.9, "guidance_scale": 1.0, "num_beam_groups": 1, "sequence_bias": None}
    more = {"diversity_penalty": 0.0, "renormalize_logits": False, "penalty_alpha": 0}
    assert default_options(written(tmp_path, **neutral, **more), [2], None) == {}


def test_impossible_settings_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"generation_config.json: beams=0"):
        default_options(written(tmp_path, num_beams=0), [], None)
    with pytest.raises(InvalidModel, match=r"generation_config.json: bad_words_ids"):
        default_options(written(tmp_path, bad_words_ids=5), [], None)


def test_bad_words_do_not_forbid_the_end(tmp_path: Path) -> None:
    own = default_options(written(tmp_path, bad_words_ids=[[2], [3], [2, 4]]), [2], None)
    assert own == {"bad_words_ids": [[3], [2, 4]]}
