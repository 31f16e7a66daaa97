"""Drafts of the next tokens, which one step verifies together without changing the text.

::

    text so far     the cat sat on the mat and the cat
    draft                                             sat on the    as after "the cat" before
    one step        gives logits behind each of these
    chosen                                            sat on a      "sat on" is kept, "a" follows

A step of a few rows takes hardly more time than one of a single row, which reads all weights, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.core.records import NamedTuple
from penstock.generation.sources import context_of, interface_of, vocabulary_size_of

if TYPE_CHECKING:
    from penstock.stepping.stepper import Stepper, StepSequence

LONGEST_DRAFT = 10
_LONGEST_MATCH = 3


class Drafts(Protocol):
    """Guesses the tokens that follow a text, to which each call adds some."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]: ...
    def close(self) -> None: ...


class PromptLookup:
    """Guesses that what the text ends with goes on as it did before, in the prompt or the text
    (https://github.com/apoorvumang/prompt-lookup-decoding). ``ends`` are where sequences of tokens
    ended last."""

    def __init__(self, longest: int = LONGEST_DRAFT) -> None:
        self._longest = longest
        self._known = 0
        self._ends: dict[tuple[int, ...], int] = {}

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """The tokens behind the last place of the longest ending that occurred before."""
        count = len(tokens)
        for end in range(self._known + 1, count):
            for n in range(1, min(_LONGEST_MATCH, end) + 1):
                self._ends[tuple(tokens[end - n : end])] = end
        self._known = max(self._known, count - 1)
        found = None
        for n in range(min(_LONGEST_MATCH, count - 1), 0, -1):
            found = self._ends.get(tuple(tokens[count - n :]))
            if found is not None:
                break
        if found is None:
            return []
        return [*tokens[found : found + min(self._longest, most)]]

    def close(self) -> None:
        """There is nothing to give back."""


class DraftSource(NamedTuple):
    """A smaller model that guesses, by its ``stepper``: the names of the input that has ``rows`` of
    tokens and of the output that has ``logits``; how many tokens its vocabulary has (``size``), and
    a text at most (``context``), None if that is not known."""

    stepper: Stepper
    rows: str
    logits: str
    size: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, stepper: Stepper, place: str | Path | None) -> DraftSource:
        """Return the source for the model of ``stepper``, which has its files in ``place``."""
        rows, _, logits = interface_of(stepper)
        size = vocabulary_size_of(stepper, logits)
        known = context_of(stepper.metadata, place or stepper.path)
        limits = (None if known is None else known.most), stepper.max_length
        context = min([n for n in limits if n is not None], default=None)
        return cls(stepper, rows, logits, size, context)


class DraftModel:
    """Lets a smaller model guess, whose tokens are the same: the likeliest ones, by a sequence of
    its own. Behind tokens that the model does not have, and texts that are too long for it, there
    are no guesses."""

    def __init__(self, source: DraftSource, longest: int = LONGEST_DRAFT) -> None:
        self._source, self._longest = source, longest
        self._sequence: StepSequence = source.stepper.sequence()
        self._read: list[int] = []

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """The likeliest tokens behind a text, one by one."""
        source = self._source
        same = 0
        for a, b in zip(self._read, tokens, strict=False):
            if a != b:
                break
            same += 1
        same = min(same, len(tokens) - 1)
        new, draft = [*tokens[same:]], list[int]()
        most = min(self._longest, most)
        if source.context is not None:
            most = min(most, source.context + 1 - len(tokens))  # the last one is not read
        if most < 1 or (source.size is not None and max(new) >= source.size):
            return []
        self._sequence.cut(same)
        self._read = [*tokens]
        for _ in range(most):
            logits = self._sequence.step({source.rows: [new]})[source.logits]
            new = [int(logits[0, -1].argmax())]
            draft += new
        self._read += draft[:-1]
        return draft

    def close(self) -> None:
        """Give the state of the sequence back."""
        self._sequence.close()
