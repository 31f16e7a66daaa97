"""``penstock bench --generate``: rows for clients and threads, and what is refused beside it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.support.command_line import as_json, call
from tests.support.decoders import decoder_model
from tests.support.word_texts import word_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(decoder_model("spelled"), path)
    return str(path)


@pytest.mark.parametrize("tokenizer", [False, True])
def test_texts_are_timed_for_each_number_of_clients(model, tokenizer):
    if tokenizer:
        word_tokenizer().tokenizer.save(str(Path(model).parent / "tokenizer.json"))
    result = as_json(
        "bench", model, "--generate", "5", "--prompt", "20", *["-t", "1", "-c", "1", "-c", "3"]
    )
    assert (result["generate"], result["prompt"]) == (5, 20)
    assert [(row["threads"], row["clients"]) for row in result["rows"]] == [(1, 1), (1, 3)]
    for row in result["rows"]:
        assert row["steps"] >= 5
        assert row["first_token_ms"] > 0 and row["tokens_per_s"] > 0


def test_table_has_the_times(model):
    text = call("bench", model, "--generate", "2", "-t", "1").output
    assert "first token" in text and "tokens/s each" in text
    assert "texts of 2 tokens behind 128 random ones" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", "5"), "--prompt is for --generate"),
        (("--generate", "5", "--input", "x=zeros"), "--input is not for --generate"),
        (("--generate", "5", "--shape", "x=1"), "--shape is not for --generate"),
        (("--generate", "5", "--executor", "linear"), "--executor is not for --generate"),
        (("--generate", "5", "--seconds", "2"), "--seconds is not for --generate"),
        (("--generate", "5", "--against", "onnxruntime"), "--against is not for --generate"),
    ],
)
def test_options_that_do_nothing_are_refused(model, options, message):
    result = call("bench", model, *options)
    assert result.exit_code == 2
    assert message in result.output
