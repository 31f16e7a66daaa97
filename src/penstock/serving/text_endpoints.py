"""The responses of the endpoints of OpenAI's API: complete texts, streams, and embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from penstock.core.types import JsonObject
from penstock.serving.embeddings import EmbeddingModel
from penstock.serving.long_json import loads
from penstock.serving.replicas import Replicas
from penstock.serving.text_answers import DONE, TextAnswer, embeddings_answer, event, usage
from penstock.serving.text_models import TextModel
from penstock.serving.text_protocol import (
    EmbeddingsAsked,
    TextAsked,
    decode_embeddings_request,
    decode_text_request,
)

MOST_BYTES = 8 << 20
"""maximum bytes of a text request, which is parsed in one call: a million token ids"""
_SHORT = 1 << 14


async def read_text_request(body: bytes, is_chat: bool) -> TextAsked:
    """Parse the body of a request, on another thread if it is long."""

    def read() -> TextAsked:
        return decode_text_request(loads(body), is_chat)

    return read() if len(body) <= _SHORT else await asyncio.to_thread(read)


async def read_embeddings_request(body: bytes) -> EmbeddingsAsked:
    """Parse the body of an embeddings request."""

    def read() -> EmbeddingsAsked:
        return decode_embeddings_request(loads(body))

    return read() if len(body) <= _SHORT else await asyncio.to_thread(read)


def _answer_of(model: TextModel, asked: TextAsked) -> TextAnswer:
    logprobs = asked.options.logprobs is not None
    return TextAnswer(model.name, model.generator.tokenizer, asked.is_chat, logprobs)


async def texts_document(
    model: TextModel, asked: TextAsked, timeout: float, priority: int
) -> JsonObject:
    """Return the response to a request without streaming."""
    async with model.run(asked, timeout, priority) as run:
        async for _ in run.pieces():
            pass
        counts = usage(run.prompt_tokens, run.generated_tokens)
        return _answer_of(model, asked).whole(run.texts, counts)


async def texts_events(
    model: TextModel,
    asked: TextAsked,
    timeout: float,
    priority: int,
    describe: Callable[[Exception], JsonObject],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; raises errors before the first. Closing it ends the texts."""
    began: set[int] = set()
    answer = _answer_of(model, asked)
    try:
        async with model.run(asked, timeout, priority) as run:
            pieces = run.pieces()
            try:
                async for index, piece in pieces:
                    first = answer.first(index) if index not in began else None
                    chunks = [] if first is None else [first]
                    began.add(index)
                    for chunk in [*chunks, *answer.piece(index, piece)]:
                        yield event(chunk)
            finally:
                await pieces.aclose()
            # Only now all tokens are counted, including those of texts that are not returned.
            if asked.with_usage:
                counts = usage(run.prompt_tokens, run.generated_tokens)
                yield event(answer.last(counts))
            yield DONE
    except Exception as error:
        if not began:
            raise
        # The status was sent long ago: clients look for an error among the events.
        yield event(describe(error))


async def embeddings_document(
    model: EmbeddingModel,
    replicas: Replicas,
    asked: EmbeddingsAsked,
    timeout: float,
    priority: int | None,
) -> JsonObject:
    """Return the response to an embeddings request."""
    vectors, tokens = await model.vectors(asked, replicas, timeout, priority)

    # Two thousand vectors are a million numbers.
    def encode() -> JsonObject:
        return embeddings_answer(model.name, vectors, tokens, base64_coded=asked.base64)

    return await asyncio.to_thread(encode)
