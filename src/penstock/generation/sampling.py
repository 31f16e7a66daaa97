"""The choice of a token from the logits of a model.

The filters and their order are those of ``generate`` of Hugging Face's transformers::

    logits ─ bias ─ penalties ─ repeats ─ mask ─ temperature ─ top-k ─ top-p ─ min-p ─ draw
             └────── on a copy, if there are any ────────┘ └─── on candidates only ─┘

A vocabulary has 150,000 tokens, and filters leave a few hundred, so the tokens are never sorted as
a whole. One pass computes the maxima of many parts of the vocabulary. At least ``n`` logits are at
or above the ``n``-th largest maximum; one comparison finds them (``_Ranking``). Sorting these
candidates gives the beginning of the sorted vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import InvalidInput, RunError
from penstock.core.records import NamedTuple, cached_property

if TYPE_CHECKING:
    from penstock.generation.options import GenerationOptions
    from penstock.generation.repeats import ForbiddenRepeats

# Tokens of a part whose maximum is taken, for candidates.
_PART = 64
# Elements that fit into a cache, with their exponentials.
_BLOCK = 16_384
# The number of candidates in which the likeliest tokens up to top-p are first searched.
_FIRST_CANDIDATES = (128, 2048)
# The largest number of scores to sort instead of dividing them into bins, and the number of bins.
_SORTED = 256
_BINS = 1024


class TokenChoice(NamedTuple):
    """A token, and what its alternatives were."""

    token: int
    logprob: float
    """the model's log probability of the token, before biases, penalties, filters and temperature;
    NaN unless the options need it"""
    alternatives: list[tuple[int, float]]
    """the likeliest tokens with theirs, by falling probability"""


class TokenSampler:
    """Chooses the tokens of one text. Random draws depend only on the seed and on ``index``, the
    index of the text in its request.

    ``end_ids`` cannot be chosen before ``min_tokens`` of the options are generated, and
    ``not_first`` before any token is. ``read`` are the tokens of the prompt that the text shall not
    repeat.
    """

    def __init__(
        self,
        options: GenerationOptions,
        vocabulary_size: int,
        *,
        end_ids: Sequence[int] = (),
        not_first: Sequence[int] = (),
        read: Sequence[int] = (),
        index: int = 0,
    ) -> None:
        self.options = options
        self.size = vocabulary_size
        biases = options.logit_bias or {}
        named = [*biases, *options.stop_ids]
        if unknown := next((token for token in named if token >= vocabulary_size), None):
            raise InvalidInput(
                f"token {unknown} of logit_bias or stop_ids: the model has {vocabulary_size} tokens"
            )
        self._bias_ids = np.array([*biases], np.intp)
        self._biases = np.array([*biases.values()], np.float32)
        ends = {token for token in (*end_ids, *options.stop_ids) if token < vocabulary_size}
        self._ends = np.array(sorted(ends), np.intp)
        self._not_first = np.array([n for n in not_first if n < vocabulary_size], np.intp)
        self._penalties = _Penalties(options, vocabulary_size)
        self._repeats: ForbiddenRepeats | None = None
        if options.forbids_repeats:
            from penstock.generation.repeats import ForbiddenRepeats

            self._repeats = ForbiddenRepeats(options, read)
        forced = () if options.ignore_end else options.forced_end_ids
        self._forced = np.array([n for n in forced if n < vocabulary_size], np.intp)
        # The index of the token that these are for.
        self._last = (options.max_tokens or 0) - 1 if self._forced.size else -1
        self._entropy = None if options.seed is None else [options.seed, index]
        self._wants_logprob = (
            options.logprobs is not None or options.best_of > options.count or options.beams > 1
        )

    @cached_property
    def _rng(self) -> np.random.Generator:
        """The random numbers of this text. Importing the module takes as long as some tokens."""
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self._entropy)))

    def choose(
        self,
        logits: np.ndarray,
        tokens: Sequence[int],
        generated: int,
        mask: np.ndarray | None = None,
    ) -> TokenChoice:
        """Return the token that follows ``tokens``: those of the prompt and the text, of which the
        last ``generated`` belong to the text. From call to call, tokens are only appended.

        ``logits`` has float32 for each token of the vocabulary and is not changed. ``mask`` says
        which tokens are possible: a boolean array, or words of uint32 whose bits are the tokens,
        the lowest first; tokens beyond its end are impossible. Raises ``RunError`` if a logit is
        NaN or plus infinity, or all are minus infinity.
        """
        logits = self._checked(logits)
        if self.options.greedy and mask is None and not self._changes(generated):
            token = int(logits.argmax())
            _check_top(logits[token])
        elif self.options.greedy:
            token = self._likeliest(logits, tokens, generated, mask)
        else:
            token = self._draw(self.adjusted(logits, tokens, generated, mask))
        if not self._wants_logprob:
            return TokenChoice(token, math.nan, [])
        return choice_of(token, logits, self.options.logprobs or 0)

    def fork(self) -> TokenSampler:
        """Return a sampler for another continuation of the text."""
        other = copy(self)
        other._penalties = self._penalties.fork()
        return other

    def adjusted(
        self,
        logits: np.ndarray,
        tokens: Sequence[int],
        generated: int,
        mask: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the logits with biases, penalties, and minus infinity for impossible tokens, as
        ``choose`` uses them before the temperature: the array itself if nothing changes it."""
        logits = self._checked(logits)
        if not self._changes(generated):
            return logits if mask is None else np.where(self._allowed(mask), logits, -np.inf)
        scores = logits.copy()
        if self._bias_ids.size:
            scores[self._bias_ids] += self._biases
        if self._penalties.any:
            self._penalties.apply(scores, tokens, generated)
        if self._repeats is not None:
            repeats = self._repeats.after(tokens)
            scores[repeats[repeats < self.size]] = -np.inf
        if generated < self.options.min_tokens:
            scores[self._ends] = -np.inf
        # A grammar may not allow the text to end here.
        if generated == self._last and mask is None:
            scores[:] = -np.inf
            scores[self._forced] = 0
        if not generated:
            scores[self._not_first] = -np.inf
        if mask is not None:
            scores[~self._allowed(mask)] = -np.inf
        return scores

    def _checked(self, logits: np.ndarray) -> np.ndarray:
        if logits.shape != (self.size,):
            raise InvalidInput(
                f"logits of the shape {logits.shape}: {(self.size,)} is needed, one number for "
                "each token"
            )
        return logits if logits.dtype == np.float32 else logits.astype(np.float32)

    def _changes(self, generated: int) -> bool:
        early = generated < self.options.min_tokens and self._ends.size > 0
        early = early or (not generated and self._not_first.size > 0)
        last = generated == self._last
        always = self._bias_ids.size > 0 or self._penalties.any
        return early or last or always or self._repeats is not None

    def _allowed(self, mask: np.ndarray) -> np.ndarray:
        """Return the mask as a boolean for each token."""
        if mask.dtype != np.bool_:
            words = np.ascontiguousarray(mask, "<u4").view(np.uint8)
            mask = np.unpackbits(words, bitorder="little").view(np.bool_)
        if mask.size < self.size:
            mask = np.concatenate([mask, np.zeros(self.size - mask.size, np.bool_)])
        return mask[: self.size]

    def _likeliest(
        self, logits: np.ndarray, tokens: Sequence[int], generated: int, mask: np.ndarray | None
    ) -> int:
        if mask is not None and not self._changes(generated):
            # Models mostly follow the grammar by themselves.
            token = int(logits.argmax())
            _check_top(logits[token])
            if _permits(mask, token):
                return token
        scores = self.adjusted(logits, tokens, generated, mask)
        token = int(scores.argmax())
        _check_top(scores[token])
        return token

    def _draw(self, scores: np.ndarray) -> int:
        options = self.options
        if not options.top_k and options.top_p == 1 and options.min_p == 0:
            return self._drawn_of_all(scores)
        ids, weights = candidates(scores, options)
        return int(ids[_position(weights.cumsum(), self._rng.random())])

    def _drawn_of_all(self, scores: np.ndarray) -> int:
        """Draw from all tokens: first a block, by the sum of its weights, then a token in it."""
        temperature, top = float(self.options.temperature), float(scores.max())
        _check_top(top)
        sums = _block_sums(scores, top, temperature).cumsum()
        at = self._rng.random() * sums[-1]
        block = min(int(sums.searchsorted(at, side="right")), sums.size - 1)
        begin = block * _BLOCK
        weights = _weights(scores[begin : begin + _BLOCK], top, temperature).cumsum()
        before = sums[block - 1] if block else 0.0
        return begin + _position(weights, (at - before) / (sums[block] - before))


class _Penalties:
    """Penalties of tokens that occurred, which are counted incrementally."""

    def __init__(self, options: GenerationOptions, size: int) -> None:
        self._repetition = float(options.repetition_penalty)
        self._presence = float(options.presence_penalty)
        self._frequency = float(options.frequency_penalty)
        self.any = self._repetition != 1 or self._presence != 0 or self._frequency != 0
        self._size = size
        self._clear()

    def _clear(self) -> None:
        self._read = 0  # tokens that are counted
        self._place: dict[int, int] = {}
        self._ids = np.empty(64, np.intp)
        self._counts = np.zeros(64, np.float32)  # in the text, that is, without the prompt

    def fork(self) -> _Penalties:
        """Return a copy with the same counts, for another text."""
        other = copy(self)
        other._place = {**self._place}
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    def apply(self, scores: np.ndarray, tokens: Sequence[int], generated: int) -> None:
        """Change the scores of the tokens that occurred, in place."""
        if len(tokens) < self._read:  # tokens were taken back
            self._clear()
        for position in range(self._read, len(tokens)):
            self._count(int(tokens[position]), position >= len(tokens) - generated)
        self._read = len(tokens)
        seen = len(self._place)
        ids, counts = self._ids[:seen], self._counts[:seen]
        values = scores[ids]
        if self._repetition != 1:
            penalty = np.float32(self._repetition)
            values = np.where(values < 0, values * penalty, values / penalty)
        if self._presence or self._frequency:
            values -= np.float32(self._frequency) * counts
            values -= np.float32(self._presence) * (counts > 0)
        scores[ids] = values

    def _count(self, token: int, of_text: bool) -> None:
        if not 0 <= token < self._size:
            return  # such as a token of an image in the prompt
        place = self._place.setdefault(token, len(self._place))
        if place == self._ids.size:
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += of_text


class _Ranking:
    """Finds the largest of many numbers without sorting all of them."""

    def __init__(self, scores: np.ndarray) -> None:
        self.scores = scores
        width = scores.size // _PART
        # Parts are columns, so that the maximum over rows is a maximum of vectors.
        columns = scores[: width * _PART].reshape(_PART, width).max(axis=0, initial=-np.inf)
        self._maxima = np.concatenate([columns, scores[width * _PART :]])
        self.top = float(self._maxima.max())

    def at_least(self, count: int) -> np.ndarray:
        """Return the indices, in rising order, of at least ``count`` numbers, such that no other
        number is larger than any of them. Minus infinity is left out."""
        if count >= self.scores.size:
            floor = -math.inf
        else:
            values = self._maxima if count <= self._maxima.size else self.scores
            floor = np.partition(values, values.size - count)[values.size - count]
        if floor == -math.inf:
            return (self.scores > floor).nonzero()[0]
        return (self.scores >= floor).nonzero()[0]

    def first(self, count: int) -> np.ndarray:
        """Return the indices, in rising order, of the ``count`` largest numbers and of those equal
        to the last of them."""
        ids = self.at_least(count)
        if ids.size <= count:
            return ids
        values = self.scores[ids]
        return ids[values >= np.partition(values, ids.size - count)[ids.size - count]]


def largest_first(values: np.ndarray, count: int) -> list[int]:
    """Return the indices of the ``count`` largest numbers, in falling order; stable for equals."""
    if count <= 0:
        return []
    ids = _Ranking(values).first(count)
    return [int(i) for i in ids[np.argsort(-values[ids], kind="stable")][:count]]


def log_sum_exp(logits: np.ndarray) -> float:
    """Return the logarithm of the sum of exponentials: a logit minus it is a log probability."""
    top = float(logits.max())
    _check_top(top)
    return top + math.log(float(_block_sums(logits, top, 1.0).sum()))


def choice_of(token: int, logits: np.ndarray, count: int) -> TokenChoice:
    """Return a chosen token with its log probability and those of the ``count`` likeliest."""
    total = log_sum_exp(logits)
    alternatives = [(i, float(logits[i]) - total) for i in largest_first(logits, count)]
    return TokenChoice(token, float(logits[token]) - total, alternatives)


def candidates(scores: np.ndarray, options: GenerationOptions) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens, in rising order, that remain after temperature, top-k, top-p and min-p of
    the options, and their weights. Tokens that equal the last of top-k are included."""
    ranking = _Ranking(scores)
    _check_top(ranking.top)
    temperature = float(options.temperature)
    # Probabilities are compared by their logits: those of the likeliest token bound the others.
    floor = -math.inf if options.min_p == 0 else math.log(options.min_p)
    floor = ranking.top + temperature * floor
    if options.top_k and options.top_k < scores.size:
        ids = ranking.first(options.top_k)
        weights = _weights(scores[ids], ranking.top, temperature)
        needed = options.top_p * float(weights.sum())
    elif options.top_p < 1:
        needed = options.top_p * float(_block_sums(scores, ranking.top, temperature).sum())
        ids, weights = _beginning(ranking, temperature, needed)
    else:
        ids = ((scores >= floor) & (scores > -math.inf)).nonzero()[0]
        weights = _weights(scores[ids], ranking.top, temperature)
    if options.top_p < 1:
        kept = nucleus(scores[ids], weights, needed)
        ids, weights = ids[kept], weights[kept]
    if options.min_p > 0:
        likely = scores[ids] >= floor
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def _beginning(
    ranking: _Ranking, temperature: float, needed: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and weights of largest scores whose weights sum to at least ``needed``."""
    for count in (*_FIRST_CANDIDATES, ranking.scores.size):
        ids = ranking.at_least(count)
        weights = _weights(ranking.scores[ids], ranking.top, temperature)
        if weights.sum() >= needed:
            break
    return ids, weights


def nucleus(scores: np.ndarray, weights: np.ndarray, needed: float) -> np.ndarray:
    """Return the indices, in rising order, of the fewest largest scores whose weights sum to
    ``needed``; among equal scores the last. All scores are finite."""
    last = _last_of_nucleus(scores, weights, needed)
    above = float(weights[scores > last].sum())
    ties = (scores == last).nonzero()[0]
    weight = float(weights[ties[0]])
    count = math.ceil((needed - above) / weight) if weight > 0 else ties.size
    kept = scores >= last
    kept[ties[: max(ties.size - max(count, 1), 0)]] = False
    return kept.nonzero()[0]


def _last_of_nucleus(scores: np.ndarray, weights: np.ndarray, needed: float) -> float:
    """Return the smallest of the largest scores whose weights sum to ``needed``.

    A histogram gives the bin that contains it, and the bin is divided again until it can be sorted:
    the time is proportional to the number of scores.
    """
    above = 0.0  # the sum of the weights of larger scores
    while scores.size > _SORTED:
        top, bottom = float(scores.max()), float(scores.min())
        if top == bottom:
            return top
        scale = (_BINS - 1) / (top - bottom)
        bins = ((top - scores.astype(np.float64)) * scale).astype(np.intp)
        sums = above + np.bincount(bins, weights, _BINS).cumsum()
        chosen = min(int(sums.searchsorted(needed)), int(bins.max()))
        above = float(sums[chosen - 1]) if chosen else above
        scores, weights = scores[bins == chosen], weights[bins == chosen]
    order = np.argsort(-scores)
    sums = above + weights[order].cumsum()
    return float(scores[order[min(int(sums.searchsorted(needed)), scores.size - 1)]])


def _weights(scores: np.ndarray, top: float, temperature: float) -> np.ndarray:
    """Return exponentials as float64, scaled so that the largest is 1."""
    return np.exp((scores.astype(np.float64) - top) / temperature)


def _block_sums(scores: np.ndarray, top: float, temperature: float) -> np.ndarray:
    """Return the sums of the exponentials of blocks, as float64."""
    sums = np.empty(-(-scores.size // _BLOCK))
    buffer = np.empty(min(_BLOCK, scores.size), np.float32)
    for i in range(sums.size):
        block = scores[i * _BLOCK : (i + 1) * _BLOCK]
        part = np.subtract(block, np.float32(top), out=buffer[: block.size])
        if temperature != 1:
            np.multiply(part, np.float32(1 / temperature), out=part)
        sums[i] = np.exp(part, out=part).sum()
    return sums


def _position(cumulated: np.ndarray, fraction: float) -> int:
    """Return the first index at which cumulated weights exceed a fraction of their sum."""
    at = fraction * cumulated[-1]
    last = int(cumulated.searchsorted(cumulated[-1]))  # weights after it are 0
    return min(int(cumulated.searchsorted(at, side="right")), last)


def _permits(mask: np.ndarray, token: int) -> bool:
    if mask.dtype == np.bool_:
        return token < mask.size and bool(mask[token])
    return token // 32 < mask.size and bool(int(mask[token // 32]) >> (token % 32) & 1)


def _check_top(top: float) -> None:
    if math.isfinite(top):
        return
    if top == -math.inf:
        raise RunError("all logits are minus infinity: no token is possible")
    value = "NaN" if math.isnan(top) else "plus infinity"
    raise RunError(
        f"a logit is {value}: the model has weights or inputs that are not finite, or its numbers "
        "left the range of its precision"
    )
