"""One text that is generated: a sequence of a stepper, whose next rows are the chosen tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from penstock.core.errors import InvalidInput
from penstock.core.records import NamedTuple, replace
from penstock.core.types import INT64
from penstock.generation.result import GeneratedText, TextPiece, TokenLogprob
from penstock.generation.sampling import TokenChoice, TokenSampler
from penstock.generation.tokenizer import StopTexts, TextStream

if TYPE_CHECKING:
    from penstock.generation.drafts import Drafts
    from penstock.generation.grammar import TokenGrammar
    from penstock.generation.options import GenerationOptions
    from penstock.generation.tokenizer import TextTokenizer
    from penstock.host.stop_condition import StopCondition
    from penstock.stepping.sequence import Rows
    from penstock.stepping.stepper import StepSequence

Emit: TypeAlias = "Callable[[TextPiece], object]"
Ended: TypeAlias = "Callable[[TextRequest, BaseException | None], object]"

_BEFORE = 8
"""tokens of a prompt that decide whether the text begins with a space"""


class TextSource(NamedTuple):
    """A model's settings for text: the names of the input of tokens and of the output of logits,
    the tokenizer, the tokens that end a text, and the most tokens of a text with its prompt (None
    if unknown); the tokens that may not come first, the dtype of tokens, and the tokens that are
    never chosen unless a request has a bias for them. Of one request: the tokens of its prompt,
    ``read``, and the number of tokens at the end of the decoder's first ones that count as tokens
    of the text, ``forced``.
    """

    rows: str
    logits: str
    tokenizer: TextTokenizer
    end_ids: frozenset[int]
    context: int | None
    not_first: Sequence[int] = ()
    dtype: np.dtype = INT64
    suppressed: Sequence[int] = ()
    read: Sequence[int] = ()
    forced: int = 0

    def rows_of(self, tokens: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the feeds of some tokens."""
        return {self.rows: np.array([tokens], self.dtype)}

    def ends_of(self, options: GenerationOptions) -> frozenset[int]:
        """Return the tokens that end a text of a request."""
        return frozenset([*(() if options.ignore_end else self.end_ids), *options.stop_ids])

    def sampler(self, options: GenerationOptions, size: int, index: int = 0) -> TokenSampler:
        """Return the sampler of tokens for ``size`` logits."""
        ends = sorted(self.end_ids)
        # Files may list more tokens than the model has.
        never = {token: -inf for token in self.suppressed if token < size}
        if never:
            options = replace(options, logit_bias={**never, **(options.logit_bias or {})})
        return TokenSampler(
            options, size, end_ids=ends, not_first=self.not_first, read=self.read, index=index
        )


class TextWriter:
    """Converts tokens to pieces of text as they come."""

    def __init__(
        self, source: TextSource, prompt: Sequence[int], options: GenerationOptions, index: int
    ) -> None:
        self.source, self.options, self.index = source, options, index
        self.result = GeneratedText()
        self._stream = TextStream(source.tokenizer, [*prompt[-_BEFORE:]])
        self._stops = StopTexts(options.stop)
        self._ends = source.ends_of(options)
        room = None if source.context is None else source.context - len(prompt)
        limits = [n for n in (options.max_tokens, room) if n is not None]
        self._most = min(limits) if limits else None

    @property
    def left(self) -> int | None:
        """The number of tokens that the text may still have, or None without a limit."""
        return None if self._most is None else self._most - len(self.result.tokens)

    def take(self, choice: TokenChoice, complete: bool = False) -> TextPiece:
        """Return the piece of text of a token; it is the last one if the text ends. ``complete``:
        the grammar of the text allows nothing after the token."""
        result, token = self.result, choice.token
        if token in self._ends:
            # The maximum may have forced it.
            cut = self.left == 1 and token in self.options.forced_end_ids
            return self._finished("length" if cut else "stop", "", ())
        result.tokens.append(token)
        logprobs: list[TokenLogprob] = []
        if self.options.logprobs is not None:
            logprobs = [TokenLogprob(token, choice.logprob, choice.alternatives)]
            result.logprobs += logprobs
        text = self._stops.push(self._stream.push(token))
        if self._stops.found is not None:
            result.stop = self._stops.found
            return self._finished("stop", text, [token], logprobs)
        if complete:
            return self._finished("stop", text, [token], logprobs)
        if self._most is not None and len(result.tokens) >= self._most:
            return self._finished("length", text, [token], logprobs)
        result.text += text
        return TextPiece(text, [token], self.index, "", logprobs)

    def finished(self, finish: str) -> GeneratedText:
        """Return the complete text. ``finish`` is the reason if it has not ended by itself."""
        if not self.result.finish:
            self._finished(finish, "", ())
        return self.result

    def _finished(
        self, finish: str, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> TextPiece:
        if self.result.stop is None:
            text += self._stops.push(self._stream.finish())
            text += self._stops.finish()
            self.result.stop = self._stops.found
        self.result.text += text
        self.result.finish = finish if self.result.stop is None else "stop"
        return TextPiece(text, tokens, self.index, self.result.finish, logprobs)


class TextRequest:
    """Generates a text after a prompt, in the steps of a ``sequence`` that contains the prompt. It
    drives itself: the outputs of each step determine its next rows."""

    def __init__(
        self,
        writer: TextWriter,
        prompt: Sequence[int],
        grammar: TokenGrammar | None,
        drafts: Drafts | None,
    ) -> None:
        self.writer, self.grammar, self.drafts = writer, grammar, drafts
        self.tokens = [*prompt]
        self.sequence: StepSequence | None = None
        self.stop: StopCondition | None = None
        """ends the text once it holds, if the sequence does not check it yet"""
        self._sampler: TokenSampler | None = None
        self._draft: list[int] = []
        self._sum = 0.0
        self.emit: Emit = lambda piece: None
        self.ended: Ended = lambda request, error: None

    def advance(self, outputs: Rows) -> None:
        """Choose tokens by the logits after the last rows, and feed them, or end the text."""
        logits = outputs[self.writer.source.logits][0]
        for row, numbers in enumerate(logits):
            token = self._chosen(numbers)
            if self.writer.result.finish:
                self.end(None)
                return
            if row == len(self._draft) or self._draft[row] != token:
                break
        self._feed()

    def _chosen(self, logits: np.ndarray) -> int:
        """Choose the next token and add it to the text."""
        if self._sampler is None:
            options, index = self.writer.options, self.writer.index
            self._sampler = self.writer.source.sampler(options, logits.shape[-1], index)
        mask = None if self.grammar is None else self.grammar.mask()
        generated = len(self.writer.result.tokens)
        choice = self._sampler.choose(logits, self.tokens, generated, mask)
        if self.grammar is not None:
            self.grammar.accept(choice.token)
        self._sum += choice.logprob
        self.writer.result.score = self._sum
        complete = self.grammar is not None and self.grammar.is_finished
        self.tokens.append(choice.token)
        self.emit(self.writer.take(choice, complete))
        return choice.token

    def _feed(self) -> None:
        """Feed the last token, followed by a draft of the next ones."""
        sequence = self.sequence
        assert sequence is not None
        sequence.cut(len(self.tokens) - 1)
        self._draft = []
        left = self.writer.left
        if self.drafts is not None and (left is None or left > 1):
            most = len(self.tokens) if left is None else left - 1
            draft = self.drafts.propose(self.tokens, most)
            # The vocabulary of a draft model may be larger.
            assert self._sampler is not None
            self._draft = [*takewhile(self._sampler.size.__gt__, draft)]
        tokens = [self.tokens[-1], *self._draft]
        # Rows of chosen tokens have the input's type.
        sequence._check_length(len(tokens))
        sequence._feed(self.writer.source.rows_of(tokens), len(tokens), self.stepped, self.stop)

    def stepped(self, outputs: Rows | None, error: BaseException | None) -> None:
        """Continue with the outputs of the last rows, or end with an error."""
        if error is None and outputs is not None:
            try:
                self.advance(outputs)
                return
            except Exception as own:
                error = own
        self.end(error or InvalidInput("the text was ended"))

    def end(self, error: BaseException | None) -> None:
        """Report that the text is complete, or its error."""
        self.close()
        self.ended(self, error)

    def close(self) -> None:
        """Release the state of the sequence."""
        if self.sequence is not None:
            self.sequence.close()
        if self.drafts is not None:
            self.drafts.close()
