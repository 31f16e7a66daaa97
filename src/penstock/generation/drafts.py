"""Drafts of the next tokens, which one step verifies together without changing the text.

::

    text so far     the cat sat on the mat and the cat
    draft                                             sat on the    as after "the cat" before
    one step        gives logits behind each of these
    chosen                                            sat on a      "sat on" is kept, "a" follows

A step of a few rows takes hardly more time than a step of one row, which also reads all weights.
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
    """Proposes the tokens that follow a text. Each call has the text of the last, and more."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]: ...
    def close(self) -> None: ...


class PromptLookup:
    """Proposes the tokens that followed the last tokens of the text where they occurred before, in
    the prompt or the text (https://github.com/apoorvumang/prompt-lookup-decoding). ``ends`` maps
    sequences of tokens to the place where they ended last."""

    def __init__(self, longest: int = LONGEST_DRAFT) -> None:
        self._longest = longest
        self._known = 0
        self._ends: dict[tuple[int, ...], int] = {}

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the tokens after the last occurrence of the longest ending that recurs."""
        count = len(tokens)
        for end in range(self._known + 1, count):
            for n in range(1, min(_LONGEST_MATCH, end) + 1):
                self._ends[tuple(tokens[end - n : end])] = end
        self._known = max(self._known, count - 1)
        place = None
        for n in range(min(_LONGEST_MATCH, count - 1), 0, -1):
            place = self._ends.get(tuple(tokens[count - n :]))
            if place is not None:
                break
        if place is None:
            return []
        return [*tokens[place : place + min(self._longest, most)]]

    def close(self) -> None:
        """Do nothing, since there is no state."""


class DraftSource(NamedTuple):
    """A smaller model that proposes tokens, by its ``stepper``: the name of its input for ``rows``
    of tokens and of its output of ``logits``; the number of tokens in its vocabulary (``size``),
    and the most tokens of a text (``context``), None if that is not known."""

    stepper: Stepper
    rows: str
    logits: str
    size: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, stepper: Stepper, place: str | Path | None) -> DraftSource:
        """Return the source for the model of ``stepper``, whose files are in ``place``."""
        rows, _, logits = interface_of(stepper)
        size = vocabulary_size_of(stepper, logits)
        known = context_of(stepper.metadata, place or stepper.path)
        limits = (None if known is None else known.most), stepper.max_length
        context = min([n for n in limits if n is not None], default=None)
        return cls(stepper, rows, logits, size, context)


class DraftModel:
    """Proposes the likeliest tokens by a smaller model with the same vocabulary, in a sequence of
    its own. After tokens that the model does not have, and for texts that are too long for it, it
    proposes none."""

    def __init__(self, source: DraftSource, longest: int = LONGEST_DRAFT) -> None:
        self._source, self._longest = source, longest
        self._sequence: StepSequence = source.stepper.sequence()
        self._read: list[int] = []

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the likeliest tokens after a text, one by one."""
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
            most = min(most, source.context + 1 - len(tokens))  # the last proposal is not read
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
        """Release the state of the sequence."""
        self._sequence.close()
