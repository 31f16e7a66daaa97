"""``penstock chat``: talk with a language model in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

import click

from penstock.cli.base import MODEL, CompileArguments, command, showing_progress
from penstock.cli.generators import DRAFT, TEMPERATURE, TOKENIZER, GeneratorOptions, text_options
from penstock.cli.options import compile_options, gathered
from penstock.core.errors import Cancelled, InvalidInput
from penstock.core.types import JsonObject
from penstock.executors.control import CancelToken
from penstock.generation.options import GenerationOptions

if TYPE_CHECKING:
    from penstock.generation.generator import Generator


def _choice(
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    max_tokens: int | None,
    seed: int | None,
) -> dict[str, object]:
    """The options of generation that the command line has."""
    names = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    return {n: v for n, v in {**names, "max_tokens": max_tokens}.items() if v is not None}


# Caches of one text need the least memory, and its pages stay for the next answer.
def _of_one(tokenizer: str | None, draft: str | None) -> GeneratorOptions:
    return GeneratorOptions(tokenizer, draft, {"max_sequences": 1})


class Conversation:
    """Messages so far, or the text so far of a model without a template for chats."""

    def __init__(self, generator: Generator, system: str | None) -> None:
        self.has_template = generator.tokenizer.chat_template is not None
        if system is not None and not self.has_template:
            raise InvalidInput("--system is for a model with a chat template, which this one lacks")
        self._generator = generator
        self.messages: list[dict[str, object]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.text = ""

    def answer(
        self, said: str, options: Mapping[str, object], cancel: CancelToken
    ) -> Iterator[str]:
        """The pieces of the answer to a message. The message and its answer are remembered, also
        if that is stopped on the way."""
        # The whole conversation each time: of what was said before, pages are found.
        self.messages.append({"role": "user", "content": said})
        before, self.text = self.text, self.text + said
        prompt = self.messages if self.has_template else self.text
        pieces: list[str] = []
        pairs = self._generator.stream(prompt, cancel=cancel, **options)  # type: ignore[arg-type]
        try:
            with closing(pairs):  # type: ignore[type-var]
                for piece in pairs:
                    pieces.append(piece.text)
                    yield piece.text
        except Cancelled:
            pass
        except Exception:
            self.messages.pop()
            self.text = before
            raise
        answer = "".join(pieces)
        self.messages.append({"role": "assistant", "content": answer})
        self.text += answer


@contextmanager
def interrupting() -> Iterator[CancelToken]:
    """A token that Ctrl-C cancels within the block; a second one interrupts the program."""
    token = CancelToken()

    def cancel(number: int, frame: object) -> None:
        if token.cancelled:
            raise KeyboardInterrupt
        token.cancel()

    # The token is looked at between two steps. An exception out of the handler would leave a step
    # half done, and the pages that it writes.
    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield token
    finally:
        signal.signal(signal.SIGINT, before)


def _said(asks: bool) -> Iterator[str]:
    """Yield the lines that are typed, or those of a pipe, until the input ends."""
    if not asks:
        for line in sys.stdin:
            if line.strip():
                yield line.rstrip("\n")
        return
    # It lets lines be edited and remembers them, where Python has it.
    with suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\nCtrl-D leaves")
            continue
        if line.strip():
            yield line


@command(lambda result: None, progress=False)
@MODEL
@click.option("--system", metavar="TEXT", help="What the model is told before all messages.")
@text_options
@TOKENIZER
@DRAFT
@compile_options("timeout")
@gathered("choice", _choice)
@gathered("made", _of_one)
def chat(
    model: str,
    system: str | None,
    choice: Mapping[str, object],
    made: GeneratorOptions,
    options: CompileArguments,
) -> JsonObject:
    """Talk with a language model. The answer is shown as it is made.

    A MODEL is a GGUF file, a folder with config.json, *.safetensors and tokenizer.json, or a
    decoder in any format with a tokenizer.json beside it. Ctrl-C stops an answer, Ctrl-D leaves.
    From a pipe, each line is one message. A model without a chat template continues the text.
    Needs penstock-runtime[generate].
    """
    GenerationOptions(**choice)  # type: ignore[arg-type]  # here, before the model is read
    # A chat takes any time: show a bar only while the model is read.
    as_json = bool(click.get_current_context().params.get("as_json"))
    with showing_progress("chat", quiet=as_json):
        generator = made.read(model, options)
    asks = sys.stdin.isatty() and not as_json
    if not {"temperature", "beams"} & {*generator.defaults}:
        choice = {"temperature": TEMPERATURE, **choice}
    with generator:
        conversation = Conversation(generator, system)
        for said in _said(asks):
            try:
                with interrupting() as token:
                    for piece in conversation.answer(said, choice, token):
                        if not as_json:
                            click.echo(piece, nl=False)
            except InvalidInput as error:
                # The text has become too long, say: what was said before stays.
                if not asks:
                    raise
                click.echo(str(error), nl=False, err=True)
            if not as_json:
                click.echo()
        stats = generator.stepper.stats
    result: JsonObject = {"model": model, "messages": conversation.messages}
    return {**result, "rows": stats.rows, "prefixes": stats.prefixes}
