"""The steps of token searches: the loop bodies of GreedySearch, Sampling and BeamSearch.

A decoder computes the logits of the next token of every sequence. ``SEARCH_START`` returns the
initial state, ``SEARCH_STEP`` scores and selects the next tokens, ``SEARCH_END`` returns the best
sequences. The state has one row for each beam of each sample:

    ids, positions     the tokens that the decoder has not seen yet, and their positions
    mask               whether each token so far counts, or is padding
    sequences          the tokens so far
    scores             the sum of the logarithms of the probabilities of these tokens
    ended, ended_scores, done
                       for each sample its best sequences that have ended, [sample, beam, length],
                       their scores, and whether no better one can come
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import BOOL, FLOAT32, INT64, Dim, RunValue, ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.op import Attrs, Consts, Op, Types
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.shape_rules import dim_product, dim_sum, given, tensor
from penstock.ops.registry import ATTRS, OUTPUT_COUNT, array_kernel

_ROWS = TensorType(INT32, (None, None))
STATE_TYPES: Sequence[TensorType] = (
    *(_ROWS, _ROWS, _ROWS, _ROWS, TensorType(FLOAT32, (None,))),
    *(TensorType(INT32, (None, None, None)), TensorType(FLOAT32, (None, None))),
    TensorType(BOOL, (None,)),
)
"""of the state, whose dims are unknown"""
STATE = len(STATE_TYPES)
_LOWEST = np.finfo(np.float32).min


def _scalar(value: np.ndarray | None, default: float) -> Any:
    whole = isinstance(default, int)
    if value is not None and (value.size != 1 or (whole and value.dtype.kind not in "iu")):
        needed = f"one {type(default).__name__}"
        raise ShapeError(f"an input of the search must be {needed}, not {value.dtype}{value.shape}")
    return default if value is None else value.reshape(-1)[0].item()


# SearchStart(input_ids, max_length, num_beams?, attention_mask?)
#     -> number of tokens behind the first one, the sample of each row, *state


def _state_types(rows: Dim, *lengths: Dim) -> list[Type]:
    """Return the types of the state for this number of rows, and ``lengths`` of ids, mask and
    sequences. The rest, which only searches read, is without dims: it is passed on from step to
    step, while arrays of known shapes would be copied into planned memory."""
    ids, mask, tokens = (TensorType(INT32, (rows, length)) for length in lengths)
    return [ids, ids, mask, tokens, *STATE_TYPES[4:]]


def _infer_start(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    batch, length = tensor(types, 0).shape or (None, None)
    beams = consts[2] if given(types, 2) else None
    count: Dim = None if beams is None and given(types, 2) else int(_scalar(beams, 1))
    rows = dim_product((batch, count))
    state = _state_types(rows, length, length, length)
    return [TensorType(INT64, (1,)), TensorType(INT64, (rows,)), *state]


def _start(
    ids: np.ndarray,
    max_length: np.ndarray,
    num_beams: np.ndarray | None,
    mask: np.ndarray | None,
    *,
    pad_token_id: int,
) -> tuple[RunValue, ...]:
    beams, length = _scalar(num_beams, 1), _scalar(max_length, 0)
    if ids.ndim != 2 or not ids.shape[1] or beams < 1 or length <= ids.shape[1]:
        raise ShapeError(
            f"num_beams {beams} must be positive, and max_length {length} exceed the length of "
            f"input_ids {ids.shape}"
        )
    batch = len(ids)
    reserve(2 * 4 * batch * beams * length)
    counts = ids != pad_token_id
    positions = np.where(counts, np.cumsum(counts, axis=1) - 1, 0)
    if mask is not None and mask.shape != ids.shape:
        raise ShapeError(
            f"attention_mask must have shape {ids.shape}, as input_ids, not {mask.shape}"
        )
    rows = (ids, positions, counts if mask is None else mask, ids)
    scores = np.zeros((batch, beams), np.float32)
    scores[:, 1:] = -1e9  # so that the beams of a sample start with different tokens
    return (
        np.array([length - ids.shape[1] - 1]),
        np.repeat(np.arange(batch), beams),
        *[np.repeat(x.astype(np.int32), beams, axis=0) for x in rows],
        scores.reshape(-1),
        np.full((batch, beams, length), pad_token_id, np.int32),
        np.full((batch, beams), -np.inf, np.float32),
        np.zeros(batch, np.bool_),
    )


# SearchStep(logits, *state, input_ids, min_length?, length_penalty?, repetition_penalty?,
#            vocab_mask?, prefix_vocab_mask?, temperature?, presence_mask?, seed?,
#            logits_processor?)
#     -> whether to go on, beams, step scores, *state


def _infer_step(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    (*_, words), (rows, length) = (tensor(types, i).shape or (None, None) for i in (0, 4))
    mask = dim_sum(((tensor(types, 3).shape or (None, None))[1], 1))
    state = _state_types(rows, 1, mask, dim_sum((length, 1)))
    scores = TensorType(FLOAT32, (None, None, words))
    return [TensorType(BOOL, (1,)), TensorType(INT64, (rows,)), scores, *state]


class _Limits(NamedTuple):
    """The inputs of a step that modify the scores of tokens."""

    min_length: int
    repetition_penalty: float
    vocab_mask: np.ndarray | None
    prefix_vocab_mask: np.ndarray | None  # of the first token
    temperature: np.ndarray | None


def _penalize(
    scores: np.ndarray, sequences: np.ndarray, attrs: Attrs, first: bool, limits: _Limits
) -> None:
    """Penalize or exclude tokens: modify scores [row, token] in place."""
    min_length, repetition_penalty, vocab_mask, prefix_vocab_mask, temperature = limits
    if repetition_penalty != 1:
        seen = np.zeros(scores.shape, np.bool_)
        np.put_along_axis(seen, sequences, True, axis=1)
        # The penalty multiplies negative scores, and divides positive ones.
        penalized = np.where(scores < 0, scores * repetition_penalty, scores / repetition_penalty)
        np.copyto(scores, penalized, where=seen)
    size = attrs["no_repeat_ngram_size"]
    if 0 < size <= sequences.shape[1]:
        windows = np.lib.stride_tricks.sliding_window_view(sequences, size, axis=1)
        last = sequences[:, None, sequences.shape[1] - size + 1 :]
        rows, places = np.nonzero((windows[..., :-1] == last).all(axis=-1))
        scores[rows, windows[rows, places, -1]] = _LOWEST
    if vocab_mask is not None:
        scores[:, vocab_mask == 0] = _LOWEST
    if prefix_vocab_mask is not None and first:
        hidden = prefix_vocab_mask == 0
        scores[np.repeat(hidden, len(scores) // len(hidden), axis=0)] = _LOWEST
    if sequences.shape[1] < min_length:
        scores[:, attrs["eos_token_id"]] = _LOWEST
    degrees = attrs.get("temperature", _scalar(temperature, 1.0))
    if degrees > 0:
        scores /= np.float32(degrees)


def _sample(
    scores: np.ndarray, attrs: Attrs, step: int, presence_mask: np.ndarray | None, seed: int
) -> np.ndarray:
    """Draw a token for each row [row, token], from the smallest set with probability ``top_p``."""
    if presence_mask is not None:
        scores -= presence_mask * np.float32(attrs["presence_penalty"])
    custom, least = attrs["custom"], attrs["min_tokens_to_keep"]
    order = np.argsort(-scores if custom else scores, axis=1, kind="stable")
    ranked = np.take_along_axis(scores, order, 1)
    probabilities = np.exp(ranked - ranked.max(axis=1, keepdims=True))
    total = np.cumsum(probabilities / probabilities.sum(axis=1, keepdims=True), axis=1)
    if custom:  # from the most probable one
        # The token with which the sum exceeds the bound is included.
        hidden = np.pad(total[:, :-1] > attrs["top_p"], ((0, 0), (1, 0)))
    else:  # from the least probable one
        hidden = total <= 1 - np.float32(attrs["top_p"])
        hidden[:, max(scores.shape[1] - least, 1) :] = False
    rows, ranks = np.nonzero(hidden)
    scores[rows, order[rows, ranks]] = attrs["filter_value"]
    weights = np.cumsum(np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True)), 1)
    places = [
        # Side "right", so that a token of probability 0 is never drawn.
        np.searchsorted(row, _uniform(seed, step * len(scores) + i) * row[-1], side="right")
        for i, row in enumerate(weights)
    ]
    return np.minimum(places, scores.shape[1] - 1).astype(np.int32)  # beyond the end for NaN


def _uniform(seed: int, count: int) -> float:
    """Number ``count`` between 0 and 1 of C++'s default generator, a linear congruential one of 31
    bits, as ONNX Runtime uses it: of two of its numbers each."""
    if seed < 0:
        raise ShapeError(f"the seed must not be negative, but is {seed}")
    modulus = 2**31 - 1
    start = seed % modulus or 1
    low, high = (start * pow(16807, 2 * count + i, modulus) % modulus - 1 for i in (1, 2))
    return (low + high * (modulus - 1)) / (modulus - 1) ** 2


def _keep_timestamps(scores: np.ndarray, sequences: np.ndarray, attrs: Attrs) -> None:
    """Apply Whisper's timestamp rules to scores [row, token]: timestamps come in pairs, do not
    decrease, and start within the first second; text is excluded where timestamps are likelier."""
    first = attrs["beginning_timestamp_token_id"]
    never = [attrs["no_timestamps_token_id"], attrs["start_of_lm_token_id"]]
    later = [attrs[f"{name}_token_id"] for name in ("decoder_start", "translate", "transcribe")]
    for row, tokens in zip(scores, sequences, strict=True):
        times = tokens >= first
        begin = int(times.argmax()) + 1 if times.any() else len(tokens)
        row[[token for token in never if 0 <= token < len(row)]] = _LOWEST
        if len(tokens) > begin:
            row[[token for token in later if 0 <= token < len(row)]] = _LOWEST
        last, before = bool(times[-1]), len(tokens) <= begin or bool(times[-2])
        if last and before:
            row[first:] = _LOWEST
        elif last:
            row[: attrs["eos_token_id"]] = _LOWEST
        if times.any():
            row[first : int(tokens[times][-1]) + (0 if last and not before else 1)] = _LOWEST
        if len(tokens) == begin:
            # Timestamps are multiples of 0.02 s: 51 of them from 0 to 1 s.
            row[first + 51 :] = _LOWEST
        allowed = row[first:][row[first:] > _LOWEST]
        if allowed.size and np.logaddexp.reduce(allowed) > row[:first].max():
            row[:first] = _LOWEST


class _Beams:
    """The state of a beam search, and one step of it."""

    def __init__(
        self,
        attrs: Attrs,
        scores: np.ndarray,
        ended: np.ndarray,
        ended_scores: np.ndarray,
        done: np.ndarray,
    ) -> None:
        self.attrs = attrs
        self.batch, self.beams, _ = ended.shape
        self.scores = scores.reshape(self.batch, self.beams)
        # Other nodes may still read the previous state.
        self.ended, self.ended_scores, self.done = ended.copy(), ended_scores.copy(), done.copy()

    def add(self, sample: int, tokens: np.ndarray, score: float) -> None:
        """Keep an ended sequence if it is among the best of its sample."""
        worst = int(self.ended_scores[sample].argmin())
        if score > self.ended_scores[sample, worst]:
            self.ended[sample, worst] = self.attrs["pad_token_id"]
            self.ended[sample, worst, : len(tokens)] = tokens
            self.ended_scores[sample, worst] = score

    def step(
        self, totals: np.ndarray, sequences: np.ndarray, length_penalty: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Select the next tokens and the beams that they extend, by the scores [row, token] of the
        extended sequences."""
        words, length = totals.shape[1], sequences.shape[1]
        flat = totals.reshape(self.batch, -1)
        # Each beam may end with one token: twice the beams leaves enough candidates to continue.
        best = np.argsort(-flat, axis=1, kind="stable")[:, : 2 * self.beams]
        tokens = np.full((self.batch, self.beams), self.attrs["pad_token_id"], np.int32)
        sources = np.arange(self.batch * self.beams).reshape(self.batch, self.beams)
        scores, sources = np.zeros_like(self.scores), sources.copy()
        for sample in np.flatnonzero(~self.done).tolist():
            taken = 0
            for rank, place in enumerate(best[sample].tolist()):
                beam, token = divmod(place, words)
                source, score = sample * self.beams + beam, flat[sample, place]
                if token == self.attrs["eos_token_id"]:
                    # As in Hugging Face's search, an ended sequence that is not among the best
                    # ``beams`` is dropped.
                    if rank < self.beams:
                        self.add(sample, sequences[source], score / length**length_penalty)
                    continue
                tokens[sample, taken], sources[sample, taken] = token, source
                scores[sample, taken] = score
                taken += 1
                if taken == self.beams:
                    break
            worst, first = self.ended_scores[sample].min(), flat[sample, best[sample, 0]]
            early = self.attrs["early_stopping"] or worst >= first / length**length_penalty
            # Until as many sequences as beams have ended, any ended one is kept.
            self.done[sample] = worst > -np.inf and early
        self.scores = scores
        return tokens.reshape(-1), sources.reshape(-1)


def _step(logits: np.ndarray, *arguments: RunValue, attrs: Attrs) -> tuple[RunValue, ...]:
    pad, eos, beam_search = attrs["pad_token_id"], attrs["eos_token_id"], attrs["beam_search"]
    _, positions, mask, sequences, *rest = arguments[:STATE]
    prompt, min_length, length_penalty, repetition_penalty, *masks = arguments[STATE:-3]
    presence_mask, seed, processor = arguments[-3:]
    state = _Beams(attrs, *rest)
    last = logits[:, -1].astype(np.float32)
    if len(last) != len(sequences):  # the first step may have one row per sample, not per beam
        last = np.repeat(last, state.beams, axis=0)
    if beam_search:
        # Log-softmax; subtracting the maximum avoids overflow.
        last -= last.max(axis=1, keepdims=True)
        last -= np.log(np.exp(last).sum(axis=1, keepdims=True))
    first = sequences.shape[1] == prompt.shape[1]
    limits = _Limits(_scalar(min_length, 0), _scalar(repetition_penalty, 1.0), *masks)
    _penalize(last, sequences, attrs, first, limits)
    if _scalar(processor, 0) == 1:
        _keep_timestamps(last, sequences, attrs)
    if beam_search:
        last += state.scores.reshape(-1, 1)
        tokens, sources = state.step(last, sequences, _scalar(length_penalty, 1.0))
    else:
        if attrs["kind"] == "Sampling":
            step = sequences.shape[1] - prompt.shape[1]
            tokens = _sample(last, attrs, step, presence_mask, _scalar(seed, 0))
        else:
            tokens = last.argmax(axis=1).astype(np.int32)
        state.done |= tokens == eos
        tokens[state.done] = pad
        sources = np.arange(len(tokens))
    counts = (sequences != pad).sum(axis=1) if first else positions[:, -1] + 1
    return (
        np.array([not state.done.all()]),
        sources,
        last.reshape(state.batch, state.beams, -1),
        tokens[:, None],
        counts.astype(np.int32)[:, None],
        np.concatenate((mask, np.ones_like(mask[:, :1])), axis=1),
        np.concatenate((sequences[sources], tokens[:, None]), axis=1),
        state.scores.reshape(-1),
        state.ended,
        state.ended_scores,
        state.done,
    )


# SearchEnd(sequences, scores, ended, ended_scores, done, length_penalty?, num_return_sequences?,
#           scores of the first step, those of the others?, input_ids)
#     -> sequences, their scores, step scores of the full length


def _infer_end(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rank = 3 if attrs["beam_search"] else 2
    sequences = TensorType(INT32, (None,) * rank)
    return (sequences, TensorType(FLOAT32, (None, None)), TensorType(FLOAT32, (None,) * 4))


def _end(sequences: np.ndarray, *arguments: RunValue, attrs: Attrs, count: int) -> RunValue:
    scores, *rest, length_penalty, returned, first, steps, prompt = arguments
    state, length = _Beams(attrs, scores, *rest), sequences.shape[1]
    if not attrs["beam_search"]:
        result = state.ended[:, 0]
        result[:, :length] = sequences
        return (result, state.ended_scores, first) if count > 1 else result
    number = _scalar(returned, 1)
    if not 1 <= number <= state.beams:
        raise ShapeError(f"num_return_sequences {number} must be 1 to num_beams, {state.beams}")
    for row, total in enumerate(scores.tolist()):
        sample = row // state.beams
        if not state.done[sample]:
            state.add(sample, sequences[row], total / length ** _scalar(length_penalty, 1.0))
    order = np.argsort(-state.ended_scores, axis=1, kind="stable")[:, :number]
    best = np.take_along_axis(state.ended_scores, order, 1)
    tokens = np.take_along_axis(state.ended, order[..., None], 1)
    if count < 3:
        return (tokens, best) if count > 1 else tokens
    full = np.zeros((state.ended.shape[2] - prompt.shape[1], *first.shape), np.float32)
    full[0] = first
    if len(steps):  # without steps, the scan output of Loop has no known shape
        full[1 : 1 + len(steps)] = steps
    return tokens, best, full


SEARCH_START = Op("SearchStart", "penstock", 1, 1, _infer_start, array_kernel(_start))
SEARCH_STEP = Op("SearchStep", "penstock", 1, 1, _infer_step, array_kernel(_step, ATTRS))
SEARCH_END = Op(
    "SearchEnd", "penstock", 1, 1, _infer_end, array_kernel(_end, {**ATTRS, **OUTPUT_COUNT})
)
