"""Text responses in the format of OpenAI's API: complete responses, and chunks of streams.

::

    data: {"object": "chat.completion.chunk", "choices": [{"delta": {"role": "assistant", ...}}]}
    data: {"object": "chat.completion.chunk", "choices": [{"delta": {"content": "Hello"}}]}
    data: {"object": "chat.completion.chunk", "choices": [{"delta": {}, "finish_reason": "stop"}]}
    data: [DONE]
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from time import time
from uuid import uuid4

import numpy as np

from penstock.core.types import JsonObject
from penstock.generation.result import GeneratedText, TextPiece, TokenLogprob
from penstock.generation.tokenizer import TextTokenizer

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0
"""stands for minus infinity, which JSON cannot represent"""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def event(document: JsonObject) -> bytes:
    """Return an event of a stream."""
    return b"data: %s\n\n" % json.dumps(document, ensure_ascii=False).encode()


def usage(prompt: int, generated: int) -> JsonObject:
    """Return the numbers of tokens of a request and of its response."""
    counts = {"prompt_tokens": prompt, "completion_tokens": generated}
    return {**counts, "total_tokens": prompt + generated}


class TextAnswer:
    """Builder of the response to a request for text, or of its chunks, in order."""

    def __init__(self, model: str, tokenizer: TextTokenizer, is_chat: bool, logprobs: bool) -> None:
        self._tokenizer, self._is_chat, self._logprobs = tokenizer, is_chat, logprobs
        kind = "chat.completion" if is_chat else "text_completion"
        name = "chatcmpl" if is_chat else "cmpl"
        self._head = {"id": f"{name}-{uuid4().hex}", "object": kind, "created": int(time())}
        self._model = model
        self._offsets: dict[int, int] = {}

    def whole(self, texts: Iterable[GeneratedText], counts: JsonObject) -> JsonObject:
        """Return the response with some texts and the ``usage``."""
        choices = []
        for index, text in enumerate(texts):
            choice: JsonObject = {"index": index, "finish_reason": text.finish}
            if self._is_chat:
                choice["message"] = {"role": "assistant", "content": text.text, "refusal": None}
            else:
                choice["text"] = text.text
            choice["logprobs"] = self._logprobs_of(text.logprobs, 0)
            choices.append(choice)
        return {**self._head, "model": self._model, "choices": choices, "usage": counts}

    def first(self, index: int) -> JsonObject | None:
        """Return the chunk that precedes the text of an index, if the format has one."""
        if not self._is_chat:
            return None
        return self._chunk([self._choice(index, {"role": "assistant", "content": ""})])

    def piece(self, index: int, piece: TextPiece) -> list[JsonObject]:
        """Return the chunks of a piece: one with the text, and in a chat another one at the end."""
        # A piece may have no text, while incomplete characters and possible beginnings of stop
        # texts are held back.
        chunks = []
        finish = piece.finish or None
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(piece.text)
        logprobs = self._logprobs_of(piece.logprobs, offset) if piece.logprobs else None
        if not self._is_chat:
            if piece.text or logprobs or finish:
                own = {"index": index, "text": piece.text, "logprobs": logprobs}
                chunks.append(self._chunk([{**own, "finish_reason": finish}]))
            return chunks
        if piece.text or logprobs:
            chunks.append(self._chunk([self._choice(index, {"content": piece.text}, logprobs)]))
        # Clients expect the finish reason in a chunk without text.
        if finish:
            chunks.append(self._chunk([{**self._choice(index, {}), "finish_reason": finish}]))
        return chunks

    def last(self, counts: JsonObject) -> JsonObject:
        """Return the chunk with the ``usage``."""
        return {**self._chunk([]), "usage": counts}

    def _choice(
        self, index: int, delta: JsonObject, logprobs: JsonObject | None = None
    ) -> JsonObject:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "model": self._model, "choices": choices}

    def _logprobs_of(self, tokens: Sequence[TokenLogprob], offset: int) -> JsonObject | None:
        if not self._logprobs:
            return None
        if self._is_chat:
            content = []
            for token in tokens:
                own = self._token(token.token, token.logprob)
                own["top_logprobs"] = [self._token(*pair) for pair in token.alternatives]
                content.append(own)
            return {"content": content, "refusal": None}
        # Offsets count characters of the returned text, even while further tokens are held back.
        texts = [self._text(token.token) for token in tokens]
        offsets = [offset]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        tops = [{self._text(t): _finite(x) for t, x in one.alternatives} for one in tokens]
        values = [_finite(token.logprob) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets[:-1],
        }

    def _token(self, token: int, logprob: float) -> JsonObject:
        content = token_bytes(self._tokenizer, token)
        text = content.decode("utf-8", "replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": [*content]}

    def _text(self, token: int) -> str:
        return token_bytes(self._tokenizer, token).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(float(logprob), _LEAST_LOGPROB)


def token_bytes(tokenizer: TextTokenizer, token: int) -> bytes:
    """Return the bytes of a token within a text, or of the name of a special token."""
    content = tokenizer.bytes_of(token) if tokenizer.is_of_bytes else b""
    if content:
        return content
    # SentencePiece spells a byte by its number, and a space by a letter.
    text = tokenizer.text_of(token) or ""
    byte = _BYTE.fullmatch(text)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return text.replace("\u2581", " ").encode("utf-8", "replace")


def embeddings_answer(
    model: str, vectors: Sequence[np.ndarray], tokens: int, *, base64_coded: bool
) -> JsonObject:
    """Return the response with embeddings [width]; ``tokens``: the total tokens of the texts."""
    data = []
    for index, vector in enumerate(vectors):
        # The official client asks for bytes: numbers in JSON take four times as many.
        own: object = vector.tolist()
        if base64_coded:
            own = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": own})
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": counts}


def model_entry(name: str, created: float) -> JsonObject:
    """Return the entry of a model in the list of models."""
    return {"id": name, "object": "model", "created": int(created), "owned_by": "penstock"}


def model_list(entries: Mapping[str, float]) -> JsonObject:
    """Return the list of models, given by name the Unix time in seconds of each one's loading."""
    return {"object": "list", "data": [model_entry(*entry) for entry in entries.items()]}
