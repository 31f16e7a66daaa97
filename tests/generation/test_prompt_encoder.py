"""Texts of encoder-decoders, compared with those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.core.types import FLOAT32, INT64, TensorType
from penstock.generation.generator import Generator
from penstock.generation.options import GenerationOptions
from penstock.generation.prompt_encoder import PromptEncoder
from tests.support.encoder_decoders import NAMES, cases_of, folders, generator_of, tokens_of

__all__ = ["folders"]


@pytest.fixture(scope="module", params=NAMES)
def generator(folders: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Generator]]:
    with generator_of(folders / request.param) as made:
        yield request.param, made


@pytest.mark.costly
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


@pytest.mark.costly
def test_prompt_lookup_changes_no_token(folders: Path) -> None:
    for prompt, beams, wanted in cases_of(folders, "marian"):
        if beams == 1:
            with generator_of(folders / "marian", draft="prompt") as generator:
                assert tokens_of(generator, prompt) == wanted


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
        pytest.raises(ps.InvalidInput, match="reads text, not sound"),
    ):
        generator.generate(np.zeros(400, np.float32))


def test_prompt_that_the_encoder_has_no_positions_for_is_refused(folders: Path) -> None:
    with generator_of(folders / "bart") as generator:
        match = r"41 tokens .* encoder reads at most 40, as max_position_embeddings in .*config"
        with pytest.raises(ps.InvalidInput, match=match):
            generator.generate([3] * 41)
        generator.generate([3] * 40, max_tokens=2)


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


def test_encoder_of_features_with_a_mask_is_refused() -> None:
    """How its decoder divides the mask, as that of Speech2Text does, is not known."""
    features = TensorType(FLOAT32, (1, "frames", 8))
    fixed = {"features": features, "attention_mask": TensorType(INT64, (1, "frames"))}
    with pytest.raises(ps.InvalidInput, match="more than the features of sound"):
        PromptEncoder(None, fixed, {}, None)


def test_deadline_holds_for_the_encoder(folders: Path) -> None:
    with generator_of(folders / "t5") as generator, pytest.raises(ps.DeadlineExceeded):
        generator.generate([5, 6, 7], timeout=1e-9)
