"""Tokens that may not follow a text: what would repeat a part of it, or complete a bad word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from penstock.generation.options import GenerationOptions


class ForbiddenRepeats:
    """Finds the tokens that ``no_repeat_ngram_size``, ``encoder_no_repeat_ngram_size`` and
    ``bad_words_ids`` of some options forbid. ``read`` are the tokens of the prompt."""

    def __init__(self, options: GenerationOptions, read: Sequence[int] = ()) -> None:
        self._own, self._other = options.no_repeat_ngram_size, options.encoder_no_repeat_ngram_size
        self._read = np.array(read, np.int64)
        self._words = options.bad_words_ids

    def after(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the tokens that may not follow some tokens, perhaps repeatedly."""
        parts = [np.array([word[-1] for word in self._words if _ends_with(tokens, word[:-1])], int)]
        # Parts are searched for anew at each token: a text has some hundreds, and a table of all
        # parts would have to be copied for each beam.
        for size, text in ((self._own, tokens), (self._other, self._read)):
            if 0 < size <= len(tokens) + 1:
                parts.append(_followers(np.asarray(text), tokens[len(tokens) + 1 - size :]))
        return np.concatenate(parts)


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return not end or [*tokens[-len(end) :]] == [*end]


def _followers(text: np.ndarray, part: Sequence[int]) -> np.ndarray:
    """Return the tokens that follow each occurrence of a part in a text."""
    count = max(text.size - len(part), 0)
    follows = np.ones(count, np.bool_)
    for i, token in enumerate(part):
        follows &= text[i : i + count] == token
    return text[len(part) :][follows].astype(np.intp)
