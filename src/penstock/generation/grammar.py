"""Masks of the tokens that keep a text within a grammar, a JSON schema or a regular expression, as
computed by llguidance."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import MAX_SENTENCE, InvalidInput, RunError, shortened
from penstock.generation.options import CONSTRAINTS
from penstock.generation.packages import extra_needed

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from penstock.generation.tokenizer import TextTokenizer

# Grammars that are kept compiled: a large schema takes a second.
_KEPT = 32
_NO_TOKEN = "NoExtension"  # what llguidance says where letters of a grammar are in no token


class GrammarVocabulary:
    """The tokens of a tokenizer as grammars need them, for all requests; this takes up to a second
    to compute for 150,000 tokens. Threads may share it.

    ``size`` is the number of logits of the model, if that is more than the tokenizer has tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, size: int | None = None) -> None:
        with extra_needed("a grammar needs llguidance"):
            from llguidance import LLTokenizer
        count = max(tokenizer.size, size or 0)
        ends = [*tokenizer.end_ids] or None
        try:
            self._tokenizer = LLTokenizer(tokenizer.tokenizer.to_str(), count, ends)
        except ValueError as error:
            raise InvalidInput(f"the tokenizer is not fit for grammars: {error}") from error
        self.words = -(-count // 32)
        """the number of words of a mask"""
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, form: str, text: str) -> LLMatcher:
        """A matcher at the beginning of a text. Raises ``InvalidInput`` for a wrong grammar."""
        with self._lock:
            compiled = self._compiled.get((form, text))
        if compiled is None:
            compiled = self._compile(form, text)
            with self._lock:
                self._compiled[form, text] = compiled
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        else:
            with self._lock:
                if (form, text) in self._compiled:
                    self._compiled.move_to_end((form, text))
        return compiled.deep_copy()

    def _compile(self, form: str, text: str) -> LLMatcher:
        from llguidance import LLMatcher

        if form not in CONSTRAINTS:
            raise InvalidInput(f"{form!r} is no form of a text: one of {', '.join(CONSTRAINTS)} is")
        if form == "json_schema":
            try:
                json.loads(text)  # llguidance gives places in a text around it
                grammar = LLMatcher.grammar_from_json_schema(text)
            except (ValueError, RecursionError) as error:
                raise InvalidInput(f"json_schema: {error}") from error
        elif form == "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        else:
            grammar = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidInput(f"{form}: {_message(matcher)}")
        return matcher


class TokenGrammar:
    """The form of one text, which tokens are added to.

    ``form`` is "grammar" (of Lark), "json_schema" or "regex"; ``text`` is what it says.
    """

    def __init__(self, vocabulary: GrammarVocabulary, form: str, text: str) -> None:
        self._form = form
        self._words = vocabulary.words
        self._matcher = vocabulary.matcher(form, text)

    def mask(self) -> np.ndarray:
        """The tokens that may follow, as bits of words of uint32, the lowest first; those that end
        the text are among them if it is complete, and are the only ones if nothing may follow.
        Raises ``RunError`` if the grammar takes too much time or memory."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            message = _message(self._matcher)
            if _NO_TOKEN in message:
                message = "no token of the vocabulary may follow, so that no text has this form"
            raise RunError(f"{self._form}: {message}")
        words = np.zeros(self._words, np.uint32)
        given = np.frombuffer(bits, np.uint8)[: words.nbytes]
        words.view(np.uint8)[: given.size] = given
        return words

    def accept(self, token: int) -> None:
        """Add a token to the text. Raises ``InvalidInput`` if it may not follow."""
        if not self._matcher.consume_token(token):
            raise InvalidInput(
                f"{self._form}: token {token} may not follow: " + _message(self._matcher)
            )

    def accepted(self, tokens: list[int]) -> int:
        """Return how many of ``tokens`` may follow in turn. The state is unchanged."""
        return self._matcher.validate_tokens(tokens)

    def forced(self) -> list[int]:
        """Tokens that follow whatever the model says; none is added. There may be more."""
        return self._matcher.compute_ff_tokens()

    def take_back(self, count: int) -> None:
        """Take back the last tokens that were added."""
        if count and not self._matcher.rollback(count):
            raise InvalidInput(f"{count} tokens cannot be taken back: {_message(self._matcher)}")

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting() or self.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow but a token that ends the text."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def copy(self) -> TokenGrammar:
        """Another one at the same place, for a text that goes on otherwise."""
        copy = object.__new__(type(self))
        copy._form, copy._words = self._form, self._words
        copy._matcher = self._matcher.deep_copy()
        return copy


def _message(matcher: LLMatcher) -> str:
    """Return llguidance's error message, shortened, without the state of its parser."""
    return shortened(matcher.get_error().partition("\n<state>")[0].strip(), MAX_SENTENCE)
