"""``penstock chat``: conversations from pipes and terminals, and what stops an answer."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner, Result

import penstock as ps
from penstock.cli import chat, main
from penstock.cli.chat import Conversation, interrupting
from penstock.executors.control import CancelToken
from penstock.generation.generator import Generator
from tests.cli.test_documented_options import flags_of, shared_flags
from tests.support.decoders import decoder_model
from tests.support.word_texts import likeliest, word_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}w2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    onnx.save(decoder_model("spelled"), folder / "model.onnx")
    word_tokenizer().tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def talker(folder, tmp_path_factory) -> Path:
    """A folder whose tokenizer has a template."""
    other = tmp_path_factory.mktemp("tokenizer")
    (other / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (other / "chat_template.jinja").write_text(TEMPLATE)
    return other


def call(folder: Path, *options: str, said: str = "") -> Result:
    arguments = ["chat", str(folder / "model.onnx"), "--temperature", "0", *options]
    return CliRunner().invoke(main, arguments, input=said, catch_exceptions=False)


def words(tokens: list[int]) -> str:
    return "".join(f" w{token}" for token in tokens)


def test_lines_of_a_pipe_are_messages_of_one_conversation(folder, talker):
    tokenizer = ("--tokenizer", str(talker), "--system", "w7")
    result = call(folder, *tokenizer, "--max-tokens", "4", said="w5 w3\n\nw9\n")
    first = likeliest([7, 5, 3, 2], 4)
    second = likeliest([7, 5, 3, *first, 9, 2], 4)
    assert result.exit_code == 0
    assert result.stdout == f"{words(first)}\n{words(second)}\n"


def test_model_without_a_template_goes_on_with_the_text(folder):
    result = call(folder, "--max-tokens", "3", "--draft", "prompt", said="w5 w3\n w9")
    first = likeliest([5, 3], 3)
    second = likeliest([5, 3, *first, 9], 3)
    assert result.stdout == f"{words(first)}\n{words(second)}\n"


def test_conversation_is_one_object_of_json(folder, talker):
    result = call(
        folder, "--tokenizer", str(talker), "--max-tokens", "2", "--json", said="w5\nw3\n"
    )
    document = json.loads(result.stdout)
    roles = [message["role"] for message in document["messages"]]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert document["rows"] > 0


@pytest.mark.parametrize(
    ("settings", "given", "temperature"),
    [
        ({}, (), 0.7),
        ({"do_sample": True, "temperature": 0.3}, (), None),
        ({"num_beams": 2}, (), None),
        ({"do_sample": True, "temperature": 0.3}, ("--temperature", "0.5"), 0.5),
    ],
)
def test_temperature_is_the_given_one_or_that_of_files_or_the_default(
    folder, tmp_path, monkeypatch, settings, given, temperature
):
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    met: list[Any] = []

    def stream(self, prompt, **options):
        met.append(options.get("temperature"))
        yield from ()

    monkeypatch.setattr(Generator, "stream", stream)
    arguments = ["chat", str(tmp_path / "model.onnx"), *given]
    assert CliRunner().invoke(main, arguments, input="w5\n", catch_exceptions=False).exit_code == 0
    # The generator itself takes that of files.
    assert met == [temperature]


def test_options_reach_the_generator(folder, talker, monkeypatch):
    met: dict[str, Any] = {}

    def init(self, model, tokenizer, **options) -> None:
        met.update(options)
        raise ps.PenstockError("met")

    monkeypatch.setattr(Generator, "__init__", init)
    result = call(folder, "--threads", "1", "--precision", "strict", "--draft", "prompt")
    assert result.exit_code == 1
    assert met == {"draft": "prompt", "max_sequences": 1, "threads": 1, "precision": "strict"}
    command = main.get_command(None, "chat")
    assert shared_flags() - {"--timeout"} <= flags_of(command)


@pytest.mark.parametrize(
    ("options", "said", "message"),
    [
        (("--system", "w1"), "w1", "--system is for a model with a chat template"),
        (("--top-p", "3"), "w1", "top_p=3"),
        ((), "w1 " * 500, "a prompt of 500 tokens is too long"),
    ],
)
def test_what_cannot_be_is_refused(folder, options, said, message):
    result = call(folder, *options, said=said)
    assert result.exit_code == 1
    assert message in result.output


class Terminal:
    """What somebody types: texts, and keys that are errors."""

    def __init__(self, *typed: str | type[BaseException]) -> None:
        self._typed = [*typed, EOFError]

    def __call__(self, prompt: str) -> str:
        assert prompt == "> "
        value = self._typed.pop(0)
        if isinstance(value, str):
            return value
        raise value


def test_terminal_is_asked_until_it_ends(monkeypatch):
    monkeypatch.setattr("builtins.input", Terminal("one", KeyboardInterrupt, " ", "two"))
    assert [*chat._said(True)] == ["one", "two"]


def test_key_stops_the_answer_and_the_next_one_the_program():
    before = signal.getsignal(
        signal.SIGINT
    )  # which may be to ignore it, of a process behind another
    with interrupting() as token:
        os.kill(os.getpid(), signal.SIGINT)
        assert token.cancelled
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_answer_that_is_stopped_stays_in_the_conversation(folder):
    with Generator(folder / "model.onnx") as generator:
        conversation, token = Conversation(generator, None), CancelToken()
        pieces = []
        for piece in conversation.answer("w5", {"max_tokens": 300}, token):
            pieces.append(piece)
            if len(pieces) == 3:
                token.cancel()
        assert conversation.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
        assert conversation.text == "w5" + "".join(pieces)
        assert 3 <= len(pieces) < 300


def test_message_that_is_refused_is_forgotten(folder):
    with Generator(folder / "model.onnx", context=8) as generator:
        conversation = Conversation(generator, None)
        with pytest.raises(ps.InvalidInput, match="9 tokens"):
            [*conversation.answer("w5 " * 9, {}, CancelToken())]
        assert conversation.messages == [] and conversation.text == ""
