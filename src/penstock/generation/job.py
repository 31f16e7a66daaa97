"""The texts of one request, and their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING

import numpy as np

from penstock.generation.options import GenerationOptions
from penstock.generation.result import GeneratedText, Generation, TextPiece
from penstock.generation.text_request import TextRequest

if TYPE_CHECKING:
    from penstock.host.stop_condition import StopCondition


class TextJob:
    """The texts of one request, created by a generator. Pieces can be taken as they come;
    ``result`` is available once all texts are complete."""

    def __init__(self, prompt_tokens: int, options: GenerationOptions) -> None:
        self.prompt_tokens, self.options = prompt_tokens, options
        self.pieces: deque[TextPiece] = deque()
        self.result: Generation | None = None
        self.error: BaseException | None = None
        self.notify: Callable[[], object] = lambda: None
        self.abandon: Callable[[], object] = lambda: None
        """releases the state of a search, if texts are found by one"""
        self._requests: list[TextRequest] = []
        self._ended = 0

    @property
    def done(self) -> bool:
        """Whether all texts are complete, or the request failed."""
        return self.result is not None or self.error is not None

    def emit(self, piece: TextPiece) -> None:
        """Take a piece. If texts are compared, only pieces of the best are passed on, later."""
        if self.options.best_of == self.options.count:
            self.pieces.append(piece)
            self.notify()

    def add(self, request: TextRequest) -> None:
        """Add a request to the texts that the job waits for."""
        request.emit, request.ended = self.emit, self._end_one
        self._requests.append(request)

    def _end_one(self, request: TextRequest, error: BaseException | None) -> None:
        self._ended += 1
        if error is not None:
            self.fail(error)
        elif self._ended == self.options.best_of and not self.done:
            self.end([ended.writer.result for ended in self._requests])

    def fail(self, error: BaseException) -> None:
        """End all texts with an error."""
        if self.done:
            return
        self.error = error
        for request in self._requests:
            request.close()
        self.abandon()
        self.notify()

    def end(self, texts: Sequence[GeneratedText]) -> None:
        """Set the result to these texts, or to the likeliest if there are more than requested."""
        generated = sum(len(text.tokens) for text in texts)
        count = self.options.count
        if len(texts) > count:
            texts = sorted(texts, key=_mean_logprob, reverse=True)[:count]
        if self.options.best_of > count or self.options.beams > 1:
            for index, text in enumerate(texts):
                piece = TextPiece(text.text, text.tokens, index, text.finish, text.logprobs)
                self.pieces.append(piece)
        self.result = Generation(texts, self.prompt_tokens, generated)
        self.notify()


def _mean_logprob(text: GeneratedText) -> float:
    mean = text.score / max(len(text.tokens), 1)
    return float("-inf") if isnan(mean) else mean


class SharedPrompt:
    """The prompt of several texts, computed once: the others fork the sequence of the first."""

    def __init__(self, requests: Sequence[TextRequest], stop: StopCondition | None) -> None:
        self._requests, self._stop = requests, stop

    def feed(self) -> None:
        first = self._requests[0]
        assert first.sequence is not None
        rows = first.writer.source.rows_of(first.tokens)
        first.sequence.feed(rows, 1, self._done, self._stop)

    def _done(self, outputs: Mapping[str, np.ndarray] | None, error: BaseException | None) -> None:
        first, *others = self._requests
        if outputs is not None:
            assert first.sequence is not None
            for request in others:
                request.sequence, request.stop = first.sequence.fork(), self._stop
        for request in self._requests:
            request.stepped(outputs, error)
