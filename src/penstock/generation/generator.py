"""Text generation with a model, for many requests at once.

::

    generator = Generator("model.gguf")
    print(generator.generate("Once upon a time", max_tokens=50).text)
    for piece in generator.stream([{"role": "user", "content": "Hello"}], temperature=0.7):
        print(piece.text, end="")

All requests of a generator share its stepper: their tokens are computed together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.core import Closeable
from penstock.core.errors import InvalidInput, check_count, wrong_type
from penstock.generation.encoder_files import read_halves
from penstock.generation.job import SharedPrompt, TextJob
from penstock.generation.options import MOST_TOKENS, GenerationOptions, request_options
from penstock.generation.result import Generation, TextPiece
from penstock.generation.sources import (
    ContextLimit,
    context_of,
    folders_of,
    has_settings,
    interface_of,
    tokenizer_of,
    vocabulary_size_of,
)
from penstock.generation.text_request import TextRequest, TextSource, TextWriter
from penstock.generation.tokenizer import TextTokenizer
from penstock.host.stop_condition import StopCondition
from penstock.ir.graph import Model
from penstock.stepping.stepper import Stepper

if TYPE_CHECKING:
    from asyncio import Future

    from tokenizers import Tokenizer

    from penstock.executors.control import CancelToken
    from penstock.generation.chat import ChatTemplate
    from penstock.generation.decoder_start import DecoderStart
    from penstock.generation.drafts import Drafts, DraftSource
    from penstock.generation.grammar import GrammarVocabulary, TokenGrammar
    from penstock.generation.prompt_encoder import PromptEncoder

# Imported where they are needed, since most requests need none: chats, grammars, beams, drafts.

Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, object]] | np.ndarray"
"""a text, tokens, messages of a chat, or sound"""
_MOST_OF_ENCODER_DECODERS = ContextLimit(512, "the default of encoder-decoders")
"""with relative positions, a model sets no limit"""
_OF_STEPS = "state", "max_rows", "max_sequences", "cache_bytes"


class Generator(Closeable):
    """Generates text with a decoder, or with an encoder and a decoder, as for translation,
    summaries and speech. An encoder reads the prompt; the files beside the model, or the option
    ``decoder_prompt``, then say what the decoder starts with.

    Args:
        model: The path of a file or a folder that ``penstock.load`` reads, a loaded model, or a
            ``Stepper``. For an encoder-decoder, the folder of an export (``encoder_model.onnx`` and
            ``decoder_model_merged.onnx``, or ``decoder_model.onnx`` and
            ``decoder_with_past_model.onnx``, or ``encoder.onnx`` and ``decoder.onnx``), or one of
            its decoder's files.
        tokenizer: The path of a ``tokenizer.json`` or of a folder with one, a
            ``tokenizers.Tokenizer`` or a ``TextTokenizer``; by default the one beside the model, or
            in it.
        draft: For speculative decoding, a smaller model with the same tokens, which proposes
            tokens; or "prompt", which proposes the continuation of an earlier occurrence of the
            last tokens.
        context: The most tokens of a prompt and its text together; for an encoder-decoder, of the
            text alone. By default, the limit of the model and the files beside it, and for an
            encoder-decoder without one 512.
        options: Options of ``penstock.Stepper`` and ``penstock.compile``.
    """

    def __init__(
        self,
        model: str | Path | Model | Stepper,
        tokenizer: str | Path | Tokenizer | TextTokenizer | None = None,
        *,
        draft: str | Path | Model | Stepper | None = None,
        context: int | None = None,
        **options: object,
    ) -> None:
        if context is not None:
            check_count("context", context, MOST_TOKENS)
        halves = None
        if isinstance(model, str | Path):
            # Before the front ends, which do not know such a folder.
            halves = read_halves(model, options.get("limits"))  # type: ignore[arg-type]
        stepper = _stepper_of(model if halves is None else halves.step, options)
        self.stepper = stepper
        place = model if isinstance(model, str | Path) else stepper.path
        self.tokenizer = tokenizer_of(tokenizer, place, stepper.metadata)
        self._encoder: PromptEncoder | None = None
        if stepper.fixed:
            from penstock.generation.prompt_encoder import PromptEncoder

            own = {key: value for key, value in options.items() if key not in _OF_STEPS}
            self._encoder = PromptEncoder(halves, stepper.fixed, own, place)
            if draft not in (None, "prompt"):
                raise InvalidInput("a draft model reads no prompt of an encoder; give 'prompt'")
        self._drafts: DraftSource | None = None
        if draft not in (None, "prompt"):
            from penstock.generation.drafts import DraftSource

            own_place = draft if isinstance(draft, str | Path) else None
            self._drafts = DraftSource.of(_stepper_of(draft, options), own_place)
        self._lookup = draft == "prompt"
        rows, dtype, logits = interface_of(stepper)
        known = context_of(stepper.metadata, place)
        limits = [] if known is None else [known]
        self.defaults: dict[str, object] = {}
        """options of requests that do not give them, from the files beside the model"""
        start = self._read_settings(folders_of(place))
        ends = frozenset(self.tokenizer.end_ids).union(() if start is None else start.ends)
        never = ((), ()) if start is None else (start.not_first, start.suppressed)
        if self._encoder is not None and "max_length" not in self.defaults:
            limits.append(_MOST_OF_ENCODER_DECODERS)
        if context is not None:
            self.defaults.pop("max_length", None)
            limits = [ContextLimit(context, "the generator's context")]
        if stepper.max_length is not None:
            limits.append(ContextLimit(stepper.max_length, "the model's table of positions"))
        self._limit = min(limits, key=lambda limit: limit.most, default=None)
        most = None if self._limit is None else self._limit.most
        self._source = TextSource(
            rows, logits, self.tokenizer, ends, most, never[0], dtype, never[1]
        )
        self._template: dict[bool, ChatTemplate] = {}
        self._vocabulary: GrammarVocabulary | None = None

    def _read_settings(self, folders: Sequence[Path]) -> DecoderStart | None:
        """Set the ``defaults``, and return how texts begin and what they never contain; None for a
        decoder alone without files of settings."""
        encoder = self._encoder
        if encoder is None and not has_settings(folders):
            return None
        from penstock.generation.decoder_start import DecoderStart
        from penstock.generation.model_defaults import default_options

        start = DecoderStart.of(folders) if encoder is None else encoder.start
        ends = {*self.tokenizer.end_ids, *start.ends}
        self.defaults = default_options(folders, ends, None if encoder is None else start.forced)
        return start

    def encode(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return the tokens of a text or of messages.

        Args:
            prompt: A text, tokens, or messages with "role" and "content".
            tools: Tools that the chat template offers to the model.
            variables: Further variables of the chat template, such as ``enable_thinking``.
        """
        is_chat = isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)
        if (tools or variables) and not is_chat:
            raise InvalidInput("tools and variables are for the chat template: give messages")
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise wrong_type("prompt", prompt, "a text, tokens or messages")
        if is_chat:
            with_tools = bool(tools)
            if with_tools not in self._template:
                from penstock.generation.chat import ChatTemplate

                self._template[with_tools] = ChatTemplate.of(self.tokenizer, tools=with_tools)
            template = self._template[with_tools]
            text = template.render(prompt, tools=tools, variables=variables)  # type: ignore[arg-type]
            return self.tokenizer.encode(text, add_special=False)
        tokens = [token for token in prompt if isinstance(token, int | np.integer)]
        if len(tokens) < len(prompt) or any(token < 0 for token in tokens):
            raise InvalidInput("a prompt is a text, a list of tokens, or a list of messages")
        return [int(token) for token in tokens]

    def _encoded(
        self, prompt: Prompt, tools: Sequence[Mapping[str, object]] | None
    ) -> list[int] | np.ndarray:
        """Return the tokens of a prompt, or the features of sound."""
        if not isinstance(prompt, np.ndarray) or prompt.dtype.kind != "f":
            return self.encode(prompt, tools)
        if self._encoder is None:
            raise InvalidInput("the model reads text, not sound")
        return self._encoder.features_of(prompt)

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        priority: int = 0,
        tools: Sequence[Mapping[str, object]] | None = None,
        **options: object,
    ) -> Generation:
        """Generate the text that follows a prompt.

        Args:
            prompt: A text, tokens, or messages with "role" and "content"; for an encoder of sound,
                samples [n] of a float dtype, or features [bands, frames].
            timeout: Seconds after which the call ends with ``DeadlineExceeded``.
            cancel: A ``CancelToken`` that ends the call with ``Cancelled``.
            priority: Tokens of requests of higher priority are computed first.
            tools: Tools that the chat template offers to the model.
            options: Fields of ``GenerationOptions``.
        """
        settings = request_options(options, self.defaults)
        stop = StopCondition(timeout, cancel, "the request")
        job = self.begin(self._encoded(prompt, tools), settings, stop, priority)
        self.stepper._drive(lambda: job.done)
        return _result(job)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        priority: int = 0,
        tools: Sequence[Mapping[str, object]] | None = None,
        **options: object,
    ) -> Iterator[TextPiece]:
        """Generate text as ``generate`` does, with the same arguments, and yield its pieces as soon
        as they are known. Closing the iterator ends the request."""
        settings = request_options(options, self.defaults)
        stop = StopCondition(timeout, cancel, "the request")
        job = self.begin(self._encoded(prompt, tools), settings, stop, priority)
        try:
            while True:
                self.stepper._drive(lambda: job.done or bool(job.pieces))
                while job.pieces:
                    yield job.pieces.popleft()
                if job.done and not job.pieces:
                    _result(job)
                    return
        finally:
            job.fail(InvalidInput("the text is not read any more"))

    async def agenerate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        priority: int = 0,
        tools: Sequence[Mapping[str, object]] | None = None,
        **options: object,
    ) -> Generation:
        """``generate`` for asyncio, with the same arguments. Cancelling the task ends the
        request."""
        settings = request_options(options, self.defaults)
        stop = StopCondition(timeout, cancel, "the request")
        job = await self.abegin(prompt, settings, stop, priority, tools)
        async for _ in self.pieces([job]):
            pass
        return _result(job)

    async def astream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        priority: int = 0,
        tools: Sequence[Mapping[str, object]] | None = None,
        **options: object,
    ) -> AsyncIterator[TextPiece]:
        """``stream`` for asyncio, with the same arguments."""
        settings = request_options(options, self.defaults)
        stop = StopCondition(timeout, cancel, "the request")
        job = await self.abegin(prompt, settings, stop, priority, tools)
        async for _, piece in self.pieces([job]):
            yield piece

    async def abegin(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        stop: StopCondition | None = None,
        priority: int = 0,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> TextJob:
        """``begin`` for asyncio. Tokens of the prompt and a grammar are computed on a thread.

        Args:
            prompt: As ``generate`` takes it.
            options: How to generate the text.
            stop: A condition that ends the request.
            priority: Tokens of requests of higher priority are computed first.
            tools: Tools that the chat template offers to the model.
        """
        # It takes longer to import than all of this package.
        import asyncio

        def begin() -> TextJob:
            return self.begin(self._encoded(prompt, tools), options, stop, priority)

        # The thread continues if the task is cancelled, and then ends the request.
        thread = asyncio.ensure_future(asyncio.to_thread(begin))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            thread.add_done_callback(_abandon)
            raise

    async def pieces(self, jobs: Sequence[TextJob]) -> AsyncIterator[tuple[int, TextPiece]]:
        """Yield the pieces of several requests as they are generated, each with the index of its
        request; those of steps of less than 2 ms come several at a time. Closing the iterator, or
        an error of one request, ends all of them.

        Args:
            jobs: Results of ``abegin``.
        """
        import asyncio

        loop, event = asyncio.get_running_loop(), asyncio.Event()
        for job in jobs:
            job.notify = partial(self.stepper._engine.loops.soon, loop, event.set, can_wait=True)
        left = [*enumerate(jobs)]
        try:
            while left:
                self.stepper._run_apart()
                if not any(job.done or job.pieces for _, job in left):
                    await event.wait()
                event.clear()
                for number, job in left:
                    ended = job.done  # read before the pieces, since none follows the end
                    while job.pieces:
                        yield number, job.pieces.popleft()
                    if ended:
                        _result(job)
                left = [(number, job) for number, job in left if not job.done or job.pieces]
        finally:
            for job in jobs:
                job.fail(InvalidInput("the text is not read any more"))

    def begin(
        self,
        tokens: Sequence[int] | np.ndarray,
        options: GenerationOptions,
        stop: StopCondition | None = None,
        priority: int = 0,
    ) -> TextJob:
        """Begin a request. Its tokens are computed as soon as a thread runs steps.

        Args:
            tokens: The tokens of the prompt, at least one, or features of sound.
            options: How to generate the text.
            stop: A condition that ends the request.
            priority: Tokens of requests of higher priority are computed first.
        """
        if not len(tokens):
            raise InvalidInput("the prompt is empty")
        fixed: Mapping[str, np.ndarray] = {}
        begun = tokens
        if self._encoder is not None:
            fixed = self._encoder.fixed_of(tokens, stop)
            begun = self._begun(options, fixed)
        elif options.decoder_prompt is not None:
            raise InvalidInput("decoder_prompt: the model has no encoder; put it into the prompt")
        first, limit = [*begun], self._limit
        forced = 0
        if self._encoder is not None and not options.decoder_prompt:
            forced = self._encoder.start.forced
        read = first if self._encoder is None else [] if self._encoder.features else [*tokens]
        source = self._source._replace(read=read, forced=forced)
        if limit is not None and len(first) >= limit.most:
            raise InvalidInput(
                f"a prompt of {len(first)} tokens is too long: with its text it may have "
                f"{limit.most}, as {limit.where} says"
            )
        options = options.behind(len(first), None if limit is None else limit.most)
        job = TextJob(len(tokens), options)
        grammar = self._grammar(options)
        sequence = self.stepper.sequence(priority=priority, initial=fixed)
        if options.beams > 1:
            from penstock.generation.beams import BeamSearch

            search = BeamSearch(source, first, options, lambda texts, error: None)
            search.ended = lambda texts, error: job.fail(error) if error else job.end(texts)
            job.abandon = search.close
            search.begin(sequence, grammar, stop)
            return job
        request = self._request(source, first, options, 0, grammar)
        request.sequence = sequence
        job.add(request)
        for index in range(1, options.best_of):
            own = None if grammar is None else grammar.copy()
            job.add(self._request(source, first, options, index, own))
        SharedPrompt(job._requests, stop).feed()
        return job

    def _begun(self, options: GenerationOptions, fixed: Mapping[str, np.ndarray]) -> list[int]:
        """Return the tokens that the text of an encoder-decoder begins with."""
        assert self._encoder is not None
        given, start = options.decoder_prompt, self._encoder.start
        if isinstance(given, str):
            given = self.tokenizer.encode(given, add_special=False)
        if given:
            return [*given]
        if not start.tokens:
            raise InvalidInput(
                "no file beside the model has the first tokens of texts: give decoder_prompt"
            )
        if not start.languages:
            return [*start.tokens]
        # A sequence of its own, since sequences only append to the tokens that they have.
        with self.stepper.sequence(initial=fixed) as sequence:
            outputs = sequence.step({self._source.rows: [start.tokens[:1]]})
        return start.in_language(outputs[self._source.logits][0, 0])

    def _request(
        self,
        source: TextSource,
        tokens: Sequence[int],
        options: GenerationOptions,
        index: int,
        grammar: TokenGrammar | None,
    ) -> TextRequest:
        writer = TextWriter(source, tokens, options, index)
        return TextRequest(writer, tokens, grammar, self._drafts_of_text())

    def _drafts_of_text(self) -> Drafts | None:
        """Return a new drafter for one text: a model, a lookup in the prompt, or None."""
        if self._drafts is None and not self._lookup:
            return None
        from penstock.generation.drafts import DraftModel, PromptLookup

        if self._drafts is not None:
            return DraftModel(self._drafts)
        return PromptLookup()

    def _grammar(self, options: GenerationOptions) -> TokenGrammar | None:
        if (constraint := options.constraint) is None:
            return None
        from penstock.generation.grammar import GrammarVocabulary, TokenGrammar

        if self._vocabulary is None:
            count = vocabulary_size_of(self.stepper, self._source.logits)
            self._vocabulary = GrammarVocabulary(self.tokenizer, count)
        return TokenGrammar(self._vocabulary, *constraint)

    def close(self) -> None:
        """End all requests, and release the memory of caches."""
        self.stepper.close()
        if self._drafts is not None:
            self._drafts.stepper.close()


def _abandon(thread: Future[TextJob]) -> None:
    """End a request that was begun for a task that was cancelled meanwhile."""
    if not thread.cancelled() and thread.exception() is None:
        thread.result().fail(InvalidInput("the text is not read any more"))


def _result(job: TextJob) -> Generation:
    if job.error is not None:
        raise job.error
    assert job.result is not None
    return job.result


def _stepper_of(model: object, options: dict[str, object]) -> Stepper:
    if isinstance(model, Stepper):
        if options:
            raise InvalidInput(f"{[*options]} are options of the Stepper that was given")
        return model
    if not isinstance(model, str | Path | Model):
        raise wrong_type("model", model, "a path, a loaded model or a Stepper")
    return Stepper(model, **options)  # type: ignore[arg-type]
