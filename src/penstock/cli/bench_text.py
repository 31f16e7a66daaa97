"""``penstock bench --generate``: how fast a decoder writes texts, for some clients at once."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click
import numpy as np

from penstock.cli.base import CompileArguments, show_table
from penstock.cli.generators import refuse_given
from penstock.core.errors import InvalidInput
from penstock.core.records import dataclass
from penstock.core.types import JsonObject
from penstock.frontends.load import load
from penstock.ir.graph import Model

if TYPE_CHECKING:
    from penstock.generation.generator import Generator

_PROMPT = 128
_WARM_UP_TOKENS = 4

_COLUMNS = (
    ("threads", "threads", ""),
    ("clients", "clients", ""),
    ("first token", "first_token_ms", ".1f"),
    ("between tokens", "between_tokens_ms", ".2f"),
    ("tokens/s each", "tokens_per_s_each", ".1f"),
    ("tokens/s", "tokens_per_s", ".1f"),
    ("steps", "steps", ""),
)  # title, key and format


@dataclass(frozen=True)
class TextTrial:
    """Texts of ``generate`` tokens, behind prompts of ``prompt`` random ones."""

    generate: int | None
    prompt: int | None

    def check(self) -> None:
        """Refuse options that would do nothing."""
        if self.generate is None:
            refuse_given("prompt", "for --generate")
        else:
            others = "inputs shapes signature executors seconds against turns"
            refuse_given(others, "not for --generate")

    def measured(
        self, path: str, seed: int, cases: Iterable[tuple[int, int]], options: CompileArguments
    ) -> JsonObject:
        """The times of texts, for some numbers of threads and of clients."""
        begin = time.perf_counter()
        model = load(path, limits=options.get("limits"), map_weights=True)
        load_ms = 1e3 * (time.perf_counter() - begin)
        rng = np.random.default_rng(seed)
        count, length = self.generate or 1, self.prompt or _PROMPT
        rows = []
        for threads, clients in cases:
            with _generator_of(model, path, {**options, "threads": threads}) as generator:
                size = _tokens_of(generator)
                # Not counted: plans are made meanwhile. Prompts are others than those that are
                # timed, whose pages would else be found.
                _written(generator, rng.integers(0, size, (clients, length)), _WARM_UP_TOKENS)
                before = generator.stepper.stats.steps
                prompts = rng.integers(0, size, (clients, length))
                row = _described(_written(generator, prompts, count), count)
                steps = generator.stepper.stats.steps - before
            rows.append({"threads": threads, "clients": clients, **row, "steps": steps})
        about = {"model": path, "load_ms": load_ms, "prompt": length, "generate": count}
        return {**about, "rows": rows}


def show_text_bench(result: JsonObject) -> None:
    """Print what ``TextTrial.measured`` returns."""
    click.echo(f"{result['model']}: loaded in {result['load_ms']:.1f} ms")
    titles = [title for title, _, _ in _COLUMNS]
    rows = [[format(row[key], form) for _, key, form in _COLUMNS] for row in result["rows"]]
    show_table(titles, rows)
    click.echo(
        f"texts of {result['generate']} tokens behind {result['prompt']} random ones; times in ms, "
        "medians of all clients"
    )


def _generator_of(model: Model, path: str, options: CompileArguments) -> Generator:
    from penstock.generation.generator import Generator
    from penstock.generation.sources import numbers_tokenizer, tokenizer_of

    try:
        tokenizer = tokenizer_of(None, path, model.metadata)
    except InvalidInput:
        tokenizer = numbers_tokenizer()  # exported decoders are often files alone
    return Generator(model, tokenizer, **options)


def _tokens_of(generator: Generator) -> int:
    """Return the size of the vocabulary from which to draw prompts."""
    known = generator.tokenizer.size
    outputs = {value.name: value.type for value in generator.stepper.model.graph.outputs}
    shape = getattr(outputs.get("logits"), "shape", None) or (None,)
    return shape[-1] if isinstance(shape[-1], int) else max(known, 1)


def _written(generator: Generator, prompts: np.ndarray, count: int) -> list[list[float]]:
    """The seconds from the beginning to each token of the text behind each prompt, of which a
    thread each reads one."""
    times: list[list[float]] = [[] for _ in prompts]
    errors: list[BaseException] = []
    begin = time.perf_counter()

    def read(client: int) -> None:
        try:
            prompt = prompts[client].tolist()
            # The likeliest tokens, so that no time is that of random numbers or of a search.
            for piece in generator.stream(
                prompt, max_tokens=count, ignore_end=True, temperature=0, beams=1
            ):
                times[client] += [time.perf_counter() - begin] * len(piece.tokens)
        except BaseException as error:
            errors.append(error)

    # One of them runs the steps of all: the others wait for their tokens.
    threads = [threading.Thread(target=read, args=(client,)) for client in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return times


def _described(times: Sequence[Sequence[float]], count: int) -> JsonObject:
    # Of each text its mean gap: single ones are those of steps that others' prompts take part in.
    gaps = [(own[-1] - own[0]) / max(len(own) - 1, 1) for own in times]
    between = statistics.median(gaps)
    return {
        "first_token_ms": 1e3 * statistics.median([own[0] for own in times]),
        "between_tokens_ms": 1e3 * between,
        "tokens_per_s_each": 1 / between if between else 0.0,
        "tokens_per_s": count * len(times) / max(own[-1] for own in times),
    }
