"""Generators of texts for commands: read as the options of the command line say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.base import CompileArguments, Decorator
from penstock.core.records import dataclass

if TYPE_CHECKING:
    from penstock.generation.generator import Generator

TOKENIZER = click.option(
    "--tokenizer",
    metavar="PATH",
    help="A tokenizer.json, or a folder with one. Default: the one beside the model, or in it.",
)
DRAFT = click.option(
    "--draft",
    metavar="MODEL",
    help="A smaller model with the same tokens, which guesses some ahead; or 'prompt': a text is "
    "guessed to go on as it did before.",
)


@dataclass(frozen=True)
class GeneratorOptions:
    """Settings of a generator beside its model: a tokenizer, a draft model, and ``steps``, options
    of its stepper."""

    tokenizer: str | None
    draft: str | None
    steps: Mapping[str, object]

    def read(self, path: str | Path, options: CompileArguments) -> Generator:
        """The generator of the model at a path, compiled with some options."""
        from penstock.generation.generator import Generator

        return Generator(path, self.tokenizer, draft=self.draft, **{**self.steps, **options})


def refuse_given(names: str, why: str) -> None:
    """Raise ``UsageError`` if the command line has one of some options, which would do nothing."""
    # Values do not tell: a default may be given as well.
    context = click.get_current_context()
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in names.split():
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{flags[name]} is {why}")


def text_options(function: Decorator) -> Decorator:
    """Give a command the options of how tokens are chosen."""
    for declare in reversed(_CHOICE):
        function = declare(function)
    return function


TEMPERATURE = 0.7
_CHOICE = (
    click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        help="What logits are divided by before a token is drawn; 0 for the likeliest one. "
        f"Default: that in the model's files, or {TEMPERATURE}.",
    ),
    click.option("--top-p", type=float, help="Draw from the likeliest tokens, of this sum."),
    click.option("--top-k", type=int, help="Draw from the N likeliest tokens."),
    click.option("--max-tokens", type=click.IntRange(min=1), help="Tokens of an answer at most."),
    click.option("--seed", type=click.IntRange(min=0), help="What random numbers begin with."),
)
