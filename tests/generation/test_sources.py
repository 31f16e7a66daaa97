"""The tokenizer, the inputs and the context of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.core.types import INT64
from penstock.generation.sources import context_of, interface_of, numbers_tokenizer
from penstock.ir.graph import Model
from tests.support.decoders import decoder_model


def model_with(**metadata: str) -> Model:
    model = ps.load(decoder_model("spelled"))
    model.metadata.update(metadata)
    return model


def test_context_is_that_of_gguf_metadata() -> None:
    names = {"general.architecture": "llama", "llama.context_length": "4096"}
    limit = context_of(model_with(**names).metadata, None)
    assert limit == (4096, "llama.context_length of the model's metadata")


@pytest.mark.parametrize(
    "settings",
    [
        {"max_position_embeddings": 512},
        {"n_positions": 512},
        {"text_config": {"max_position_embeddings": 512}},
    ],
)
def test_context_is_that_of_a_configuration(settings: dict[str, object], tmp_path: Path) -> None:
    limit = context_of(model_with(**{"config.json": json.dumps(settings)}).metadata, None)
    assert limit is not None
    assert limit.most == 512
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.onnx").touch()
    limit = context_of(model_with().metadata, tmp_path / "model.onnx")
    assert limit is not None
    assert limit.most == 512
    assert limit.where.endswith(f" in {tmp_path / 'config.json'}")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"n_positions": "many"}'])
def test_configuration_without_a_context_says_nothing(text: str) -> None:
    assert context_of(model_with(**{"config.json": text}).metadata, None) is None


def test_interface_is_the_input_of_tokens_and_the_logits() -> None:
    assert interface_of(ps.Stepper(model_with())) == ("ids", INT64, "logits")


def test_tokenizer_of_numbers_needs_no_file() -> None:
    assert numbers_tokenizer().size == 1
