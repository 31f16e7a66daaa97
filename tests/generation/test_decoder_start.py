"""What texts of encoder-decoders begin with, and never have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import penstock as ps
from tests.support.encoder_decoders import cases_of, folders, generator_of, tokens_of
from tests.support.word_texts import generator_of as word_generator

__all__ = ["folders"]


def test_text_begins_with_the_decoder_prompt(folders: Path) -> None:
    prompt, _, wanted = next(cases_of(folders, "t5"))
    with generator_of(folders / "t5") as generator:
        begun = tokens_of(generator, prompt, decoder_prompt=[0, *wanted[:3]], max_tokens=17)
        assert begun == wanted[3:]


def test_text_without_a_known_beginning_needs_a_decoder_prompt(
    folders: Path, tmp_path: Path
) -> None:
    for name in ("encoder_model.onnx", "decoder_model_merged.onnx"):
        shutil.copy(folders / "t5" / name, tmp_path / name)
    prompt, _, wanted = next(cases_of(folders, "t5"))
    with generator_of(tmp_path) as generator:
        with pytest.raises(ps.InvalidInput, match="give decoder_prompt"):
            generator.generate(prompt)
        assert tokens_of(generator, prompt, decoder_prompt=[0]) == wanted


def test_suppressed_tokens_never_come(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "t5", tmp_path, dirs_exist_ok=True)
    prompt, _, wanted = next(cases_of(folders, "t5"))
    path = tmp_path / "generation_config.json"
    settings = json.loads(path.read_text())
    settings |= {"suppress_tokens": [wanted[1]], "begin_suppress_tokens": [wanted[0]]}
    path.write_text(json.dumps(settings))
    with generator_of(tmp_path) as generator:
        tokens = tokens_of(generator, prompt)
        assert wanted[1] not in tokens
        assert tokens[0] != wanted[0]
        beams = tokens_of(generator, prompt, beams=2)
        assert wanted[1] not in beams
        assert beams[0] != wanted[0]


@pytest.mark.costly
def test_likeliest_language_is_chosen_unless_it_is_given(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "t5", tmp_path, dirs_exist_ok=True)
    prompt, _, wanted = next(cases_of(folders, "t5"))
    path = tmp_path / "generation_config.json"
    settings = json.loads(path.read_text())
    # Which the likeliest first token is among, behind which the text goes on.
    languages = {"<|a|>": 4, "<|b|>": wanted[0], "<|c|>": 7, "<|far|>": 900}
    settings |= {"lang_to_id": languages, "is_multilingual": True}
    path.write_text(json.dumps(settings))
    with generator_of(tmp_path) as generator:
        assert tokens_of(generator, prompt, max_tokens=19) == wanted[1:]
        given = tokens_of(generator, prompt, decoder_prompt=[0, 7])
    with generator_of(folders / "t5") as plain:
        assert given == tokens_of(plain, prompt, decoder_prompt=[0, 7])


def test_decoder_prompt_of_a_decoder_alone_is_refused() -> None:
    with word_generator() as generator, pytest.raises(ps.InvalidInput, match="no encoder"):
        generator.generate([1, 2], decoder_prompt=[1])


@pytest.mark.costly
def test_texts_of_models_without_positions_are_bounded(folders: Path, tmp_path: Path) -> None:
    prompt, _, _ = next(cases_of(folders, "t5"))
    with generator_of(folders / "t5") as generator:
        text = generator.generate(prompt, ignore_end=True).texts[0]
    assert (len(text.tokens), text.finish) == (511, "length")
    shutil.copytree(folders / "t5", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_length": 9}))
    with generator_of(tmp_path) as generator:
        assert len(generator.generate(prompt, ignore_end=True).tokens) == 8
    with generator_of(tmp_path, context=30) as generator:
        assert len(generator.generate(prompt, ignore_end=True).tokens) == 29
