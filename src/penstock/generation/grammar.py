"""Masks of the tokens that keep a text within a grammar, a JSON schema or a regular expression, as
computed by llguidance."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import MAX_SENTENCE, InvalidInput, RunError, extra_needed, shortened
from penstock.generation.options import CONSTRAINTS
from penstock.generation.tokenizer import is_of_rust

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from penstock.generation.tokenizer import TextTokenizer

# The number of compiled grammars to cache: a large schema takes a second to compile.
_KEPT = 32
# Letters of a grammar, and the stack for compiling it: at most 600 bytes a letter were measured,
# for arrays of arrays in JSON schemas whose definitions refer to one another in a chain.
_MOST_LETTERS, _STACK = 1 << 18, 1 << 28
_STARTING = threading.Lock()  # the size of stacks is one number for all threads
_LEAST, _ROUNDED = -(1 << 63), 1 << 10  # the least integer, and how far float64 rounds beside it
_LARGEST_ID = 1 << 22  # llguidance allocates memory for all tokens up to the largest
_NO_TOKEN = "NoExtension"  # llguidance's code if no token has the letters that a grammar requires


class GrammarVocabulary:
    """The tokens of a tokenizer in the form that grammars need, for all requests. Computing it
    takes up to a second for 150,000 tokens. Threads may share it.

    ``size`` is the number of logits of the model, if the tokenizer has fewer tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, size: int | None = None) -> None:
        with extra_needed("a grammar needs llguidance", "generate"):
            from llguidance import LLTokenizer
        count = max(tokenizer.size, size or 0)
        ends = [*tokenizer.end_ids] or None
        if tokenizer.size > _LARGEST_ID + 1:
            raise InvalidInput(
                f"the tokenizer is not fit for grammars: token {tokenizer.size - 1} is beyond "
                f"{_LARGEST_ID}"
            )
        try:
            self._tokenizer = LLTokenizer(tokenizer.tokenizer.to_str(), count, ends)
        except BaseException as error:
            if not is_of_rust(error):
                raise
            raise InvalidInput(f"the tokenizer is not fit for grammars: {error}") from error
        self.words = -(-count // 32)
        """the number of words of a mask"""
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, form: str, text: str) -> LLMatcher:
        """Return a matcher at the beginning of a text. ``InvalidInput``: a wrong grammar."""
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
        if len(text) > _MOST_LETTERS:
            raise InvalidInput(f"{form}: it has {len(text):,} letters, more than {_MOST_LETTERS:,}")
        try:
            if form == "json_schema":
                _check_numbers(json.loads(text))
                grammar = LLMatcher.grammar_from_json_schema(text)
            elif form == "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            else:
                grammar = LLMatcher.grammar_from_lark(text)
        except (ValueError, RecursionError) as error:  # such as half of a surrogate pair
            raise InvalidInput(f"{form}: {error}") from error
        matcher = _on_large_stack(lambda: LLMatcher(self._tokenizer, grammar, log_level=0))
        if matcher.is_error():
            raise InvalidInput(f"{form}: {_message(matcher)}")
        return matcher


class TokenGrammar:
    """The constraint on the form of one text, to which tokens are added.

    ``form`` is "grammar" (of Lark), "json_schema" or "regex"; ``text`` is its definition.
    """

    def __init__(self, vocabulary: GrammarVocabulary, form: str, text: str) -> None:
        self._form = form
        self._words = vocabulary.words
        self._matcher = vocabulary.matcher(form, text)

    def mask(self) -> np.ndarray:
        """Return the tokens that may follow, as bits of uint32 words, lowest first. Tokens that end
        the text are included if it is complete, and are the only ones if nothing may follow. Raises
        ``RunError`` if the grammar takes too much time or memory."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            message = _message(self._matcher)
            if _NO_TOKEN in message:
                message = "no token of the vocabulary may follow, so that no text has this form"
            error = RunError(f"{self._form}: {message}")
            error.by_feeds = True
            raise error
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
        """Return tokens that must follow, without adding them. The list may be incomplete."""
        return self._matcher.compute_ff_tokens()

    def take_back(self, count: int) -> None:
        """Remove the last ``count`` tokens."""
        if count and not self._matcher.rollback(count):
            raise InvalidInput(f"{count} tokens cannot be taken back: {_message(self._matcher)}")

    @property
    def is_finished(self) -> bool:
        """Whether only a token that ends the text may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def copy(self) -> TokenGrammar:
        """Return a copy in the same state, for another continuation of the text."""
        copy = object.__new__(type(self))
        copy._form, copy._words = self._form, self._words
        copy._matcher = self._matcher.deep_copy()
        return copy


def _check_numbers(schema: object) -> None:
    """Raise ``ValueError`` for integers of which llguidance would end the process."""
    inner: list[object] = [schema]
    while inner:
        value = inner.pop()
        if isinstance(value, int) and _LEAST <= value < _LEAST + _ROUNDED:
            raise ValueError(f"{value} is too near to the least integer of 64 bits")
        inner += value.values() if isinstance(value, dict) else ()
        inner += value if isinstance(value, list) else ()


def _on_large_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    """Call a function on a thread that has room for rules, or references, in a chain as long as the
    text of a grammar may have: llguidance calls itself for each, and ends the process without it.
    """
    result: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            result.set_result(make())
        except BaseException as error:
            result.set_exception(error)

    with _STARTING:
        before = threading.stack_size(_STACK)
        try:
            threading.Thread(target=run, name="penstock-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return result.result()


def _message(matcher: LLMatcher) -> str:
    """Return llguidance's error message, shortened, without the state of its parser."""
    return shortened(matcher.get_error().partition("\n<state>")[0].strip(), MAX_SENTENCE)
