"""Texts of encoder-decoders that optimum has exported, compared with those of transformers.

``tests/models/encoder_decoders.zip`` has the folders, and the tokens that transformers generates.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.generation.generator import Generator
from penstock.generation.options import GenerationOptions
from penstock.generation.sources import numbers_tokenizer
from tests.support.word_texts import generator_of as word_generator

ARCHIVE = Path(__file__).parents[1] / "models" / "encoder_decoders.zip"
NAMES = "t5", "bart", "marian", "whisper"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module", params=NAMES)
def generator(folders: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Generator]]:
    with Generator(folders / request.param, numbers_tokenizer()) as made:
        yield request.param, made


def cases_of(folders: Path, name: str) -> Iterator[tuple[list[int] | np.ndarray, int, list[int]]]:
    """Prompts, numbers of beams, and the tokens that follow."""
    for case in json.loads((folders / name / "cases.json").read_text())["cases"]:
        prompt = case["prompt"]
        if isinstance(prompt, str):
            prompt = np.fromfile(folders / prompt, np.float16).astype(np.float32)
        yield prompt, case["beams"], case["tokens"]


def generator_of(folder: Path, **options: object) -> Generator:
    return Generator(folder, numbers_tokenizer(), **options)  # type: ignore[arg-type]


def tokens_of(generator: Generator, prompt: list[int] | np.ndarray, **options: object) -> list[int]:
    (text,) = generator.generate(prompt, **{"max_tokens": 20, **options}).texts
    return [*text.tokens]


def test_texts_are_those_of_transformers(folders: Path, generator: tuple[str, Generator]) -> None:
    name, own = generator
    for prompt, beams, wanted in cases_of(folders, name):
        assert tokens_of(own, prompt, beams=beams) == wanted


def test_texts_of_many_requests_are_those_of_each_alone(
    folders: Path, generator: tuple[str, Generator]
) -> None:
    name, own = generator
    cases = [(prompt, wanted) for prompt, beams, wanted in cases_of(folders, name) if beams == 1]
    options = GenerationOptions(max_tokens=20)
    jobs = [own.begin(_begun(own, prompt), options) for prompt, _ in cases * 2]
    own.stepper._drive(lambda: all(job.done for job in jobs))
    for job, (_, wanted) in zip(jobs, cases * 2, strict=True):
        assert job.result is not None
        assert [*job.result.texts[0].tokens] == wanted


def _begun(generator: Generator, prompt: list[int] | np.ndarray) -> list[int] | np.ndarray:
    return generator._encoded(prompt, None)


def test_several_texts_share_an_encoder_run(folders: Path) -> None:
    prompt, _, wanted = next(cases_of(folders, "t5"))
    with generator_of(folders / "t5") as generator:
        texts = generator.generate(prompt, max_tokens=20, temperature=1e-3, count=3, seed=1).texts
        assert [[*text.tokens] for text in texts] == [wanted] * 3


def test_prompt_lookup_changes_no_token(folders: Path) -> None:
    for prompt, beams, wanted in cases_of(folders, "marian"):
        if beams == 1:
            with generator_of(folders / "marian", draft="prompt") as generator:
                assert tokens_of(generator, prompt) == wanted


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


def test_prompts_of_the_other_kind_are_refused(folders: Path) -> None:
    with generator_of(folders / "whisper") as generator:
        with pytest.raises(ps.InvalidInput, match="prompt of this model is sound"):
            generator.generate([1, 2])
        with pytest.raises(ps.InvalidInput, match=r"above 0 to 1 s.*in pieces"):
            generator.generate(np.zeros(40_000, np.float32))
        with pytest.raises(ps.InvalidInput, match="not finite"):
            generator.generate(np.full(400, np.nan, np.float32))
    with (
        generator_of(folders / "t5") as generator,
        pytest.raises(ps.InvalidInput, match="reads text, no sound"),
    ):
        generator.generate(np.zeros(400, np.float32))


def test_features_are_taken_as_they_are(folders: Path) -> None:
    for number, (_, beams, wanted) in enumerate(cases_of(folders, "whisper")):
        if beams == 1:
            file = folders / "whisper" / f"features{number // 2}.f4"
            features = np.fromfile(file, np.float32).reshape(8, -1)
            with generator_of(folders / "whisper") as generator:
                assert tokens_of(generator, features) == wanted


def test_draft_model_is_refused(folders: Path) -> None:
    with pytest.raises(ps.InvalidInput, match="reads no prompt of an encoder"):
        generator_of(folders / "t5", draft=folders / "t5" / "encoder_model.onnx")


def test_decoder_prompt_of_a_decoder_alone_is_refused() -> None:
    with word_generator() as generator, pytest.raises(ps.InvalidInput, match="no encoder"):
        generator.generate([1, 2], decoder_prompt=[1])


def test_deadline_holds_for_the_encoder(folders: Path) -> None:
    with generator_of(folders / "t5") as generator, pytest.raises(ps.DeadlineExceeded):
        generator.generate([5, 6, 7], timeout=1e-9)
