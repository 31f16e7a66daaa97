"""Text generators of a server, behind bounded queues, with counters.

::

    admit ──> queue by priority ──> as many texts as a step takes ──> pieces of each
       └── QueueFull                 (one generator, whose stepper has a thread)

The objects belong to one event loop; texts are tokenized, and steps run, on other threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic, time
from typing import TYPE_CHECKING, TypeVar

from penstock.core.errors import Cancelled, DeadlineExceeded, QueueFull, check_count
from penstock.core.records import dataclass, field
from penstock.generation.options import request_options
from penstock.host.stop_condition import StopCondition
from penstock.serving.histogram import Histogram
from penstock.serving.repository import UnknownModel
from penstock.serving.text_protocol import DEFAULT_TEMPERATURE, FieldError, TextAsked, check_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from penstock.generation.generator import Generator
    from penstock.generation.job import TextJob
    from penstock.generation.result import GeneratedText, TextPiece
    from penstock.serving.embeddings import EmbeddingModel

_Model = TypeVar("_Model")

_TURN = 8
"""the period, in texts, at which the oldest text leaves the queue regardless of priority"""


@dataclass(slots=True)
class TextCounts:
    """Counts of a ``TextModel``: requests ``queued`` and ``running`` now, and ``refused`` so far;
    tokens of prompts and ``generated`` tokens so far, and the tokens of running requests."""

    queued: int = 0
    running: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    tokens_in_flight: int = 0


@dataclass(slots=True)
class TextHistograms:
    """Histograms over requests: seconds in the queue, to the first token, and between the tokens of
    a text. A piece of several tokens counts as that many."""

    queue_seconds: Histogram = field(default_factory=Histogram)
    first_token_seconds: Histogram = field(default_factory=Histogram)
    between_tokens_seconds: Histogram = field(default_factory=Histogram)


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request for a number of texts in the queue."""

    texts: int
    priority: int
    entered: asyncio.Future[None]


class Admission:
    """Admits requests for at most ``most`` texts at a time; up to ``queue`` others wait."""

    def __init__(self, most: int, queue: int) -> None:
        check_count("most", most)
        check_count("queue", queue)
        self.most, self.queue = most, queue
        self.waiting: list[_Waiting] = []
        self._inside = self._turns = 0

    async def enter(self, texts: int, priority: int, timeout: float) -> int:
        """Wait until a request may run, and return the argument for ``leave``. Raises
        ``QueueFull`` and ``DeadlineExceeded``."""
        texts = min(texts, self.most)
        if not self.waiting and self._inside + texts <= self.most:
            self._inside += texts
            return texts
        if len(self.waiting) >= self.queue:
            raise QueueFull("the queue of the model is full")
        own = _Waiting(texts, priority, asyncio.get_running_loop().create_future())
        self.waiting.append(own)
        # asyncio's primitives do not support priorities.
        try:
            async with asyncio.timeout(timeout):
                await own.entered
        except TimeoutError as error:
            self._give_up(own)
            raise DeadlineExceeded(
                f"the request exceeded its timeout of {timeout} s in the queue"
            ) from error
        except asyncio.CancelledError:
            self._give_up(own)
            raise
        return texts

    def leave(self, texts: int) -> None:
        """End an admitted request, and admit others."""
        self._inside -= texts
        self._admit()

    def _give_up(self, own: _Waiting) -> None:
        if own in self.waiting:
            self.waiting.remove(own)
            self._admit()
        else:  # its turn came at the same moment
            self.leave(own.texts)

    def _admit(self) -> None:
        while self.waiting:
            is_turn = (self._turns + 1) % _TURN == 0
            following = self.waiting[0] if is_turn else max(self.waiting, key=lambda w: w.priority)
            # Smaller requests do not overtake it, or it could starve.
            if self._inside + following.texts > self.most:
                return
            self._turns += 1
            self.waiting.remove(following)
            self._inside += following.texts
            following.entered.set_result(None)


class TextRun:
    """An admitted request for texts, with a job for each prompt."""

    def __init__(self, model: TextModel, asked: TextAsked, jobs: Sequence[TextJob]) -> None:
        self._model, self._jobs, self._asked = model, jobs, asked
        self.begin = self._last = monotonic()
        self.prompt_tokens = sum(job.prompt_tokens for job in jobs)
        self._seen = 0
        counts = model.counts
        counts.running += 1
        counts.prompt_tokens += self.prompt_tokens
        counts.tokens_in_flight += self.prompt_tokens

    @property
    def generated_tokens(self) -> int:
        """Return the number of tokens of all texts, including texts that are not returned."""
        results = [job.result for job in self._jobs]
        return sum(result.generated_tokens for result in results if result is not None)

    @property
    def texts(self) -> list[GeneratedText]:
        """Wait for all texts and return them, those of the first prompt first."""
        results = [job.result for job in self._jobs]
        return [text for result in results if result is not None for text in result.texts]

    async def pieces(self) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """Yield pieces of text as they are generated, each with the index of its text."""
        last: dict[int, float] = {}
        count, counts = self._asked.options.count, self._model.counts
        histograms = self._model.histograms
        pieces = self._model.generator.pieces(self._jobs)
        try:
            async for number, piece in pieces:
                now, index = monotonic(), number * count + piece.index
                tokens = len(piece.tokens)
                if tokens:  # the last piece may have none
                    if not last:
                        histograms.first_token_seconds.add(now - self.begin)
                    if index in last:
                        gap = (now - last[index]) / tokens
                        histograms.between_tokens_seconds.add(gap, tokens)
                    last[index] = now
                    self._seen += tokens
                    counts.generated_tokens += tokens
                    counts.tokens_in_flight += tokens
                yield index, piece
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    def end(self) -> None:
        """Stop counting the request as running."""
        counts = self._model.counts
        counts.running -= 1
        counts.tokens_in_flight -= self.prompt_tokens + self._seen
        # Tokens of texts that are not returned were not counted on the way.
        counts.generated_tokens += max(0, self.generated_tokens - self._seen)


class TextModel:
    """A generator that a server has under a name. At most ``running`` texts run at a time, and up
    to ``queue`` requests wait; a further one raises ``QueueFull``."""

    def __init__(
        self, name: str, generator: Generator, *, running: int = 64, queue: int = 128
    ) -> None:
        self.name, self.generator = name, generator
        self.version = "1"
        self.created = time()
        self.admission = Admission(running, queue)
        self.counts, self.histograms = TextCounts(), TextHistograms()

    @asynccontextmanager
    async def run(self, asked: TextAsked, timeout: float, priority: int) -> AsyncIterator[TextRun]:
        """Yield a running request for texts. Leaving the context ends its texts."""
        # Before the queue, so that an invalid prompt is refused at once, and a long one is
        # tokenized while others run.
        begin, stop = monotonic(), StopCondition(timeout, None, "the request")
        defaults = {"temperature": DEFAULT_TEMPERATURE, **self.generator.defaults}
        options = request_options(asked.given, defaults)
        prompts = await self._tokens(asked)
        self.counts.queued += 1
        left = max(stop.seconds_left or 0.0, 0.0)
        try:
            inside = await self.admission.enter(
                len(prompts) * options.best_of * options.beams, priority, left
            )
        except QueueFull:
            self.counts.refused += 1
            raise
        finally:
            self.counts.queued -= 1
        self.histograms.queue_seconds.add(monotonic() - begin)
        jobs: list[TextJob] = []
        try:
            for tokens in prompts:
                # One by one: if one is rejected or too late, those already started are ended.
                stop.check()
                jobs.append(await self.generator.abegin(tokens, options, stop, priority))
            run = TextRun(self, asked, jobs)
            run.begin = begin
            try:
                yield run
            finally:
                run.end()
        finally:
            for job in jobs:
                job.fail(Cancelled("the request has ended"))
            self.admission.leave(inside)

    async def _tokens(self, asked: TextAsked) -> list[list[int]]:
        """Return the tokens of the prompts, computed on another thread."""

        def encode() -> list[list[int]]:
            encode, size = self.generator.encode, self.generator.tokenizer.size
            tokens = [encode(prompt, asked.tools, asked.variables) for prompt in asked.prompts]
            for own in tokens:
                check_tokens("prompt", own, size)
            return tokens

        return await asyncio.to_thread(encode)

    def close(self) -> None:
        """End all requests."""
        self.generator.close()


class TextModels:
    """The text models of a server, by name: generators, and embedders of the repository."""

    def __init__(
        self,
        generators: Mapping[str, TextModel] | None = None,
        embedders: Mapping[str, EmbeddingModel] | None = None,
    ) -> None:
        self.generators = dict(generators or {})
        self.embedders = dict(embedders or {})

    def __bool__(self) -> bool:
        return bool(self.generators or self.embedders)

    @property
    def entries(self) -> dict[str, float]:
        """Return the names of all models, with the Unix time in seconds of each one's loading."""
        generators = {name: model.created for name, model in self.generators.items()}
        return generators | {name: model.created for name, model in self.embedders.items()}

    def generator(self, name: str | None) -> TextModel:
        """Return the generator of this name. Raises ``FieldError`` and ``UnknownModel``."""
        return _found(self.generators, name)

    def embedder(self, name: str | None) -> EmbeddingModel:
        """Return the embedding model of this name. Raises ``FieldError`` and ``UnknownModel``."""
        return _found(self.embedders, name)

    def close(self) -> None:
        """End all text requests."""
        for model in self.generators.values():
            model.close()


def _found(models: Mapping[str, _Model], name: str | None) -> _Model:
    """Return the model of this name; without a name, the only one."""
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    if name is None:
        raise FieldError("model", "the field model is required, the name of a model")
    if name not in models:
        have = ", ".join(map(repr, models)) or "none"
        raise UnknownModel(f"unknown model {name!r:.80} for this endpoint; it has {have}")
    return models[name]
