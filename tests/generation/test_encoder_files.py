"""Files of encoder-decoders, as optimum lays them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import penstock as ps
from tests.support.encoder_decoders import cases_of, folders, generator_of, tokens_of

__all__ = ["folders"]


def test_decoder_file_stands_for_its_folder(folders: Path, tmp_path: Path) -> None:
    """With an end that both files have, and settings in the folder around ``onnx``."""
    (tmp_path / "onnx").mkdir()
    for file in (folders / "t5").iterdir():
        place = tmp_path
        name = file.name
        if file.suffix == ".onnx":
            place, name = tmp_path / "onnx", file.name.replace(".onnx", "_q.onnx")
        shutil.copy(file, place / name)
    prompt, _, wanted = next(cases_of(folders, "t5"))
    with generator_of(tmp_path / "onnx" / "decoder_model_merged_q.onnx") as generator:
        assert tokens_of(generator, prompt) == wanted


def test_folder_onnx_in_a_folder_is_read(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    for file in (folders / "bart").iterdir():
        shutil.copy(file, (tmp_path / "onnx" if file.suffix == ".onnx" else tmp_path) / file.name)
    prompt, _, wanted = next(cases_of(folders, "bart"))
    with generator_of(tmp_path) as generator:
        assert tokens_of(generator, prompt) == wanted


def test_further_steps_without_the_first_one_are_refused(folders: Path, tmp_path: Path) -> None:
    for name in ("encoder_model.onnx", "decoder_with_past_model.onnx"):
        shutil.copy(folders / "bart" / name, tmp_path / name)
    with pytest.raises(ps.InvalidInput, match=r"not beside it: decoder_model\.onnx"):
        generator_of(tmp_path)


def test_first_step_alone_reads_all_tokens_each_time(folders: Path, tmp_path: Path) -> None:
    for file in (folders / "bart").iterdir():
        if file.name != "decoder_with_past_model.onnx":
            shutil.copy(file, tmp_path / file.name)
    prompt, _, wanted = next(cases_of(folders, "bart"))
    with generator_of(tmp_path) as generator:
        assert tokens_of(generator, prompt) == wanted
