"""Encoder-decoders that optimum has exported, and the tokens that transformers generates with them.

``tests/models/encoder_decoders.zip`` has both.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.generation.generator import Generator
from penstock.generation.sources import numbers_tokenizer

ARCHIVE = Path(__file__).parents[1] / "models" / "encoder_decoders.zip"
NAMES = "t5", "bart", "marian", "whisper"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    return folder


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
