"""Operations of com.microsoft on arrays: unfolding, cropping, inverses, n-grams and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass
from penstock.core.types import FLOAT32, INT64, RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.crops import CropSampling, resized_crops
from penstock.ops.common.dtypes import INT32, is_half
from penstock.ops.common.windows import windows
from penstock.ops.registry import MICROSOFT, array_operator, operator, standard

# Matrices and windows.


def _infer_inverse(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    if x.shape is not None and len(x.shape) < 2:
        raise ShapeError(f"the input must have rank 2 or more, but has shape {x.shape}")
    if x.shape is not None:
        rules.same_dim(
            x.shape[-2], x.shape[-1], "the last two dims, which must be those of square matrices,"
        )
    return (x.without_data(),)


@array_operator("Inverse", domain=MICROSOFT, arity=(1, 1), infer=_infer_inverse)
def inverse(x: np.ndarray) -> np.ndarray:
    """Invert matrices; singular ones yield NaN."""
    wide = x.astype(np.float32) if is_half(x.dtype) else x
    try:
        result = np.linalg.inv(wide)
    except np.linalg.LinAlgError:
        if x.ndim == 2:
            return np.full_like(x, np.nan)
        # NumPy rejects a whole stack if one of its matrices is singular.
        result = np.stack([inverse(part) for part in wide])
    return result.astype(x.dtype)


def _infer_unfold(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, size, step = rules.tensor(types, 0), attrs["size"], attrs.get("step", 1)
    if size < 1 or step < 1:
        raise ShapeError(f"size {size} and step {step} must be positive")
    if x.shape is None:
        return (TensorType(x.dtype),)
    axis = rules.normalize_axis(attrs.get("dim", -1), len(x.shape))
    dims, length = list(x.shape), x.shape[axis]
    if isinstance(length, int) and length < size:
        raise ShapeError(f"size {size} exceeds the dim of axis {axis}, {length}")
    dims[axis] = (length - size) // step + 1 if isinstance(length, int) else None
    return (TensorType(x.dtype, (*dims, size)),)


@array_operator(
    "UnfoldTensor", domain=MICROSOFT, arity=(1, 1), infer=_infer_unfold, copied=True, strings=True
)
def unfold_tensor(x: np.ndarray, *, size: int, step: int = 1, dim: int = -1) -> np.ndarray:
    _infer_unfold((TensorType(x.dtype, x.shape),), {"size": size, "step": step, "dim": dim}, ())
    slices = sliding_window_view(x, size, axis=dim)
    place = [slice(None)] * slices.ndim
    place[rules.normalize_axis(dim, x.ndim)] = slice(None, None, step)
    return np.array(slices[tuple(place)])


def _infer_masked_pool(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, mask = rules.tensor(types, 0).shape, rules.tensor(types, 1).shape
    if x is not None and mask is not None and len(mask) == len(x):
        # The mask broadcasts over images and channels.
        x = (*[None if own == 1 else dim for own, dim in zip(mask[:2], x[:2], strict=True)], *x[2:])
    rules.check_shape("mask", mask, x)
    return standard("MaxPool").infer(types[:1], attrs, consts[:1])[:1]


@array_operator("MaxpoolWithMask", domain=MICROSOFT, arity=(2, 1), infer=_infer_masked_pool)
def maxpool_with_mask(
    x: np.ndarray,
    mask: np.ndarray,
    *,
    kernel_shape: Sequence[int] = (),
    strides: Sequence[int] = (),
    pads: Sequence[int] = (),
    auto_pad: str = "NOTSET",
) -> np.ndarray:
    """Maxima of windows, in which each row ends before the first masked element."""
    attrs = {"strides": strides, "pads": pads, "auto_pad": auto_pad}
    axes = windows(attrs, kernel_shape, x.shape[2:])
    lowest, shown = np.finfo(x.dtype).min, mask != 0
    if len(axes) > 1:
        shown[(..., *(0 for _ in axes))] = (
            True  # ONNX Runtime never masks the first element of a window
        )
    for at in reversed(range(2, x.ndim)):
        axis, before = axes[at - 2], (slice(None),) * at
        result = np.full((*x.shape[:at], axis.count, *x.shape[at + 1 :]), lowest, x.dtype)
        seen = np.ones((*mask.shape[:at], axis.count), bool)
        for _, some, elements in axis.taps():
            part, tap = result[(*before, some)], x[(*before, elements)]
            if at == mask.ndim - 1:
                seen[..., some] &= shown[..., elements]
                tap = np.where(seen[..., some], tap, lowest)
            np.maximum(part, tap, out=part)
        x = result
    return x


def _infer_crop(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rules.choice(attrs, "mode", "bilinear", ("bilinear", "nearest"))
    image, boxes = rules.tensor(types, 0).shape, rules.tensor(types, 1).shape
    size = rules.ints(types, consts, 3) or (None, None)
    dtype = rules.same_dtype(types, (0, 1))
    return (TensorType(dtype, (boxes and boxes[0], image and image[1], *size)),)  # type: ignore[arg-type]


@array_operator("CropAndResize", domain=MICROSOFT, arity=(4, 1), infer=_infer_crop)
def crop_and_resize_channels_first(
    image: np.ndarray,
    boxes: np.ndarray,
    which: np.ndarray,
    size: np.ndarray,
    *,
    mode: str = "bilinear",
    extrapolation_value: float = 0.0,
) -> np.ndarray:
    last = np.moveaxis(image, 1, -1).astype(FLOAT32, copy=False)
    sampling = CropSampling(mode == "nearest", extrapolation_value, exact_ends=True)
    crops = resized_crops(last, boxes.astype(FLOAT32, copy=False), which, size, sampling)
    return np.moveaxis(crops, -1, 1).astype(image.dtype, copy=False)


# Sequences.


def _infer_path(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rules.check_shape("the costs", rules.tensor(types, 0).shape, (None, None), (1, None, None))
    return (TensorType(INT32, (2, None)),)


@array_operator("DynamicTimeWarping", domain=MICROSOFT, arity=(1, 1), infer=_infer_path)
def dynamic_time_warping(costs: np.ndarray) -> np.ndarray:
    """The indices [2, steps] of the cheapest path from the first to the last corner of a matrix.
    Costs accumulate along antidiagonals, the rows of ``total``, each of which depends on the two
    previous ones. The cheapest predecessor is taken, and the left one in case of ties.
    """
    rows, columns = costs.shape[-2:]
    costs, is_tall = costs.reshape(rows, columns), rows > columns
    # Sums are NaN where a cost is NaN, or where infinities of both signs meet.
    width, may_be_nan = min(rows, columns) + 1, not costs.min(initial=0) > -np.inf
    total = np.full((rows + columns + 1, width), np.inf, np.float32)
    total[0, 0], (down, along) = 0, total.strides
    skewed = as_strided(total[2:, 1:], (width - 1, max(rows, columns)), (down + along, down))
    np.copyto(skewed, costs.T if is_tall else costs)
    near = (total[1:-1, :-1], total[1:-1, 1:])[:: -1 if is_tall else 1]
    best, is_equal = np.empty(width - 1, np.float32), np.empty(width - 1, bool)
    diagonals = zip(total[:-2, :-1], *near, total[2:, 1:], strict=True)
    for both, above, left, here in with_checkpoints(diagonals):
        np.minimum(both, above, out=best)
        np.equal(both, above, out=is_equal)
        if may_be_nan:
            is_equal |= np.isnan(best)
        np.minimum(best, left, out=best)
        np.copyto(best, left, where=is_equal)
        np.add(here, best, out=here)
    path, i, j, totals = [], rows, columns, total.reshape(-1).data
    to_row, to_column = (width, width + 1) if is_tall else (width + 1, width)
    while i and j:
        path.append((i - 1, j - 1))
        at = (i + j) * width + (j if is_tall else i)
        a, b, c = totals[at - 2 * width - 1], totals[at - to_row], totals[at - to_column]
        is_both, is_above = a < b and a < c, b < a and b < c
        i, j = i - (is_both or is_above), j - (not is_above)
    return np.array(path[::-1], np.int32).reshape(-1, 2).T


def _infer_ngram_block(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    ids, scores = rules.tensor(types, 0).shape, rules.tensor(types, 1)
    if attrs["ngram_size"] < 1:
        raise ShapeError(f"ngram_size must be positive, not {attrs['ngram_size']}")
    rules.check_shape("input_ids", ids, (scores.shape and scores.shape[0], None))  # type: ignore[arg-type]
    rules.check_shape("scores", scores.shape, (None, None))
    return (scores.without_data(),)


@array_operator(
    "NGramRepeatBlock", domain=MICROSOFT, arity=(2, 1), infer=_infer_ngram_block, fills=True
)
def ngram_repeat_block(
    ids: np.ndarray, scores: np.ndarray, out: np.ndarray | None = None, *, ngram_size: int
) -> np.ndarray:
    """Set the scores of tokens that would repeat an n-gram of their row to -inf."""
    result, count = np.empty_like(scores) if out is None else out, ids.shape[1] - ngram_size + 1
    np.copyto(result, scores)
    if count < 1:
        return result
    is_same = np.ones(ids.shape, bool)
    if ngram_size > 1:
        is_same = ids[:, :count] == ids[:, count, np.newaxis]
    # Few candidates are left after comparing the first token.
    rows, places = np.divmod(np.flatnonzero(is_same), count)
    for i in range(1, ngram_size - 1):
        left = ids[rows, places + i] == ids[rows, count + i]
        rows, places = rows[left], places[left]
    tokens = ids[rows, places + ngram_size - 1]
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < scores.shape[1]:
        raise ShapeError(f"input_ids must be in [0, {scores.shape[1]}), the vocabulary of scores")
    result[rows, tokens] = -np.inf
    return result


def _infer_bifurcation(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    least, most = attrs.get("min_ngram_size", 1), attrs.get("max_ngram_size", 3)
    if not 0 < least <= most:
        raise ShapeError(f"min_ngram_size {least} must be from 1 to max_ngram_size {most}")
    for i, name in enumerate(("src_tokens", "cur_tokens")):
        rules.check_shape(name, rules.tensor(types, i).shape, (None,))
    dtype = rules.same_dtype(types, range(len(types)))
    return TensorType(dtype, (None,)), TensorType(INT64, rules.tensor(types, 2).shape)


def _leading(node: Node, function: Callable[..., tuple[Any, ...]], most: int = 2) -> Kernel:
    """A kernel of at most ``most`` outputs, of which a node may omit trailing ones."""
    count = len(node.outputs)
    if count > most:
        raise ShapeError(f"{node.op.name} has at most {most} outputs, not {count}")
    return Kernel(lambda *inputs: function(*inputs)[:count] if count > 1 else function(*inputs)[0])


@operator("BifurcationDetector", domain=MICROSOFT, infer=_infer_bifurcation)
def bifurcation_detector(node: Node, types: Types) -> Kernel:
    """Return the current tokens, extended by the predicted ones up to and including the first that
    differs from the source after ``start``; and the end of the match of the last n-gram in the
    source, if there is exactly one."""
    least, most = (node.attrs.get(f"{key}_ngram_size", n) for key, n in (("min", 1), ("max", 3)))

    def run(
        source: np.ndarray,
        current: np.ndarray,
        start: np.ndarray,
        predicted: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens = current.copy()
        if predicted is not None:
            first = int(rules.one_element(start, "prev_suffix_match_idx"))
            rest = source[first:]
            if not 0 <= first <= len(source) or predicted.shape != (len(rest) + 1,):
                raise ShapeError(
                    f"pred_tokens has shape {predicted.shape}, but must have one entry more than "
                    f"the {source.shape} "
                    f"src_tokens have from prev_suffix_match_idx {first} on"
                )
            # The appended True marks the end of the source, for predictions that match all of it.
            differs = np.flatnonzero(np.append(predicted[:-1] != rest, True))[0]
            tokens = np.concatenate([current, predicted[: differs + 1]])
        end = -1
        for size in range(least, min(most, len(tokens), len(source)) + 1):
            grams = sliding_window_view(source, size)
            places = np.flatnonzero((grams == tokens[-size:]).all(1))
            if not len(places):
                break
            end = int(places[0]) + size
            if end >= len(source):
                break
            if len(places) > 1:
                end = -1
        return tokens, np.full(start.shape, end, np.int64)

    return _leading(node, run)


def _infer_hashes(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    ids, dims, heads = rules.tensor(types, 0), (None, None), _check_hashes(types, attrs, 3)
    rules.check_shape("input_ids", ids.shape, dims)
    batch, length = ids.shape or dims
    before = (batch, attrs["max_ngram_size"] - 1)
    rules.check_shape("past_ids", rules.tensor(types, 3).shape, before)
    rules.check_shape("segment_ids", rules.tensor(types, 6).shape, (batch, length))
    dtype = rules.same_dtype(types, range(min(len(types), 6)))
    return TensorType(dtype, (batch, length, heads)), TensorType(dtype, before)


def _check_hashes(types: Types, attrs: Attrs, past: int) -> int:
    """Check the inputs, and return the number of hashes per token; ``past`` is the input index of
    past_ids."""
    most = attrs["max_ngram_size"]
    if most < 2 or attrs["n_head_per_ngram"] < 1:
        raise ShapeError(
            f"max_ngram_size {most} must be at least 2, and n_head_per_ngram "
            f"{attrs['n_head_per_ngram']} at least 1"
        )
    hashes: int = (most - 1) * attrs["n_head_per_ngram"]
    rules.check_shape("multipliers", rules.tensor(types, 1).shape, (None,))
    for i, name in ((2, "vocab_sizes"), (past + 1, "head_offsets")):
        rules.check_shape(name, rules.tensor(types, i).shape, (hashes,))
    return hashes


@dataclass(frozen=True, slots=True)
class _NGramHash:
    """Hashes of n-grams: for each token and n, the xor of the products of the last n tokens and the
    multipliers, modulo vocabulary sizes. Tokens before the start of a segment are ``filler``."""

    attrs: Attrs
    factors: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray | None
    eos: np.ndarray | None

    @property
    def before(self) -> int:
        """The number of previous tokens on which the hashes of a token depend."""
        before: int = self.attrs["max_ngram_size"] - 1
        fit = len(self.sizes) == before * self.attrs["n_head_per_ngram"]
        if len(self.factors) <= before or not fit or (self.sizes <= 0).any():
            raise ShapeError(
                f"{len(self.factors)} multipliers or vocab_sizes {self.sizes.tolist()} do not "
                "match max_ngram_size and n_head_per_ngram"
            )
        return before

    @property
    def filler(self) -> int:
        eos, pad = self.eos, int(self.attrs["pad_id"])
        return pad if eos is None else int(rules.one_element(eos, "eos_token_id"))

    def hashes(self, tokens: np.ndarray, segments: np.ndarray | None) -> np.ndarray:
        """The hashes of all tokens after the first ``before``; ``segments`` are their segment
        ids.
        """
        before, filler, heads = self.before, self.filler, self.attrs["n_head_per_ngram"]
        starts = []
        if self.attrs.get("reset_on_eos", 0) and self.eos is not None:
            starts.append(tokens[:, :-1] == filler)
        if segments is not None:
            starts.append(segments[:, 1:] != segments[:, :-1])
        places = np.arange(tokens.shape[1])
        firsts = [np.maximum.accumulate(np.where(at, places[1:], 0), axis=1) for at in starts]
        mixed = tokens[:, before:] * self.factors[0]
        result = np.empty((*mixed.shape, before * heads), tokens.dtype)
        for n in range(1, before + 1):
            shifted = tokens[:, before - n : -n]
            for first in firsts:
                is_own = places[before - n : -n] >= first[:, before - 1 :]
                shifted = np.where(is_own, shifted, filler)
            mixed ^= shifted * self.factors[n]
            for i in range((n - 1) * heads, n * heads):
                # For a scalar divisor, NumPy replaces the division by multiplications.
                multiple = mixed // self.sizes[i] * self.sizes[i]
                np.subtract(mixed, multiple, result[..., i])
        return result if self.offsets is None else np.add(result, self.offsets, result)


@operator("NGramHashMapping", domain=MICROSOFT, infer=_infer_hashes)
def ngram_hash_mapping(node: Node, types: Types) -> Kernel:
    """Return the hashes of n-grams, and the last tokens."""

    def run(
        ids: np.ndarray, factors: np.ndarray, sizes: np.ndarray, *rest: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        past, offsets, eos, segments = rules.pad_with_none(rest, 4)
        mapping = _NGramHash(node.attrs, factors, sizes, offsets, eos)
        if past is None:
            past = np.full((len(ids), mapping.before), mapping.filler, ids.dtype)
        tokens = np.concatenate([past, ids], axis=1)
        if segments is not None:  # the segments start with the ids
            mode: Any = "edge" if segments.size else "constant"
            segments = np.pad(segments, ((0, 0), (mapping.before, 0)), mode)
        return mapping.hashes(tokens, segments), tokens[:, ids.shape[1] :].copy()

    return _leading(node, run)


def _infer_packed_hashes(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    ids, bounds = (rules.tensor(types, i) for i in (0, 3))
    heads = _check_hashes(types, attrs, 4)
    rules.check_shape("input_ids", ids.shape, (None,))
    rules.check_shape("cumulative_sequence_length", bounds.shape, (None,))
    count = bounds.shape[0] if bounds.shape else None
    batch = count - 1 if isinstance(count, int) else None
    before, capacity = (batch, attrs["max_ngram_size"] - 1), attrs.get("state_update_capacity", 0)
    for i, name in ((4, "past_ids"), (8, "past_segment_ids")):
        rules.check_shape(name, rules.tensor(types, i).shape, before)
    rules.check_shape("segment_ids", rules.tensor(types, 7).shape, ids.shape or (None,))
    rules.check_shape("capture_count", rules.tensor(types, 9).shape, (batch,))
    if not 0 <= capacity <= 8 or rules.given(types, 9) != (capacity > 0):
        raise ShapeError(
            f"state_update_capacity {capacity} must be in [0, 8], and capture_count be given if "
            "it is not 0"
        )
    if rules.given(types, 8) and not rules.given(types, 7):
        raise ShapeError("past_segment_ids requires segment_ids")
    dtype = rules.same_dtype(types, (0, 1, 2, 4, 5, 6))
    return (
        TensorType(dtype, (*(ids.shape or (None,)), heads)),
        TensorType(dtype, before),
        TensorType(INT32, before),
        TensorType(dtype, (batch, capacity, before[1])),
    )


@operator("VarlenNGramHashMapping", domain=MICROSOFT, infer=_infer_packed_hashes)
def packed_ngram_hash_mapping(node: Node, types: Types) -> Kernel:
    """NGramHashMapping for concatenated texts: return the hashes, the last tokens and segments of
    each text, and the last tokens after each of its first tokens.
    """
    capacity = node.attrs.get("state_update_capacity", 0)
    if any(node.outputs[2:3]) and not rules.given(types, 7):
        raise ShapeError("output present_segment_ids requires the input segment_ids")

    def run(
        ids: np.ndarray, factors: np.ndarray, sizes: np.ndarray, bounds: np.ndarray, *rest: Any
    ) -> tuple[RunValue, ...]:
        past, offsets, eos, segments, past_segments, counts = rules.pad_with_none(rest, 6)
        mapping = _NGramHash(node.attrs, factors, sizes, offsets, eos)
        before, count = mapping.before, len(bounds) - 1
        if count < 1 or bounds[0] != 0 or bounds[-1] != len(ids) or (np.diff(bounds) < 1).any():
            raise ShapeError(
                f"cu_seqlens {bounds.tolist()} must be ascending offsets from 0 to {len(ids)}, "
                "the number of tokens"
            )
        # Each text is preceded by room for its past tokens, so that texts are independent.
        lengths, window = np.diff(bounds), np.arange(before)
        room = before * np.arange(1, count + 1)
        places = np.arange(len(ids)) + np.repeat(room, lengths)
        begins, ends = ((b + room - before)[:, np.newaxis] for b in (bounds[:-1], bounds[1:]))

        def spaced(values: np.ndarray, earlier: np.ndarray | int) -> np.ndarray:
            result = np.empty(len(ids) + room[-1], values.dtype)
            result[places], result[begins + window] = values, earlier
            return result

        seen = present_segments = None
        tokens = spaced(ids, mapping.filler if past is None else past)
        if segments is not None:
            firsts = segments[bounds[:-1], np.newaxis]
            seen = spaced(segments, firsts if past_segments is None else past_segments)[np.newaxis]
            present_segments = seen[0, ends + window]
        hashes = mapping.hashes(tokens[np.newaxis], seen)[0].take(places - before, 0)
        states = np.full((count, capacity, before), node.attrs["pad_id"], ids.dtype)
        if counts is not None:
            rows, at = np.nonzero(np.arange(capacity) < np.minimum(counts, lengths)[:, np.newaxis])
            states[rows, at] = tokens[begins[rows] + at[:, np.newaxis] + 1 + window]
        return hashes, tokens[ends + window], present_segments, states

    return _leading(node, run, 4)


def _infer_words(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    words, weights, bias, table = (rules.tensor(types, i).shape for i in range(4))
    rules.check_shape("Sequence", words, (None, None))
    rules.check_shape("C", table, (None, attrs.get("char_embedding_size")))
    filters, window = attrs.get("embedding_size"), attrs.get("conv_window_size")
    rules.check_shape("W", weights, (filters, 1, window, table and table[1]))  # type: ignore[arg-type]
    rules.check_shape("B", bias, (weights and weights[0],))  # type: ignore[arg-type]
    rules.same_dtype(types, range(1, 4))
    return (TensorType(FLOAT32, (words and words[0], weights and weights[0])),)  # type: ignore[arg-type]


@array_operator("WordConvEmbedding", domain=MICROSOFT, arity=(4, 1), infer=_infer_words)
def word_conv_embedding(
    words: np.ndarray, weights: np.ndarray, bias: np.ndarray, table: np.ndarray
) -> np.ndarray:
    """The maximum over windows of tanh of a convolution over the embedded characters of each word.
    Character 0 is padding; at least one window is used, and empty words yield 0."""
    window, places = weights.shape[2], words.shape[1] - weights.shape[2] + 1
    if window > words.shape[1]:
        raise ShapeError(
            f"the convolution window of {window} exceeds the {words.shape[1]} characters of a word"
        )
    if words.size and not 0 <= words.min() <= words.max() < len(table):
        raise ShapeError(f"characters must be in [0, {len(table)}), the rows of the embeddings")
    lengths = np.where(words[:, 0] > 0, (words > 0).sum(1), 0)
    if len(table) > words.size:
        table, words = table[words.reshape(-1)], np.arange(words.size).reshape(words.shape)
    # The contribution of each character to a window, by its position in the window.
    products, chars = table @ weights[:, 0].transpose(1, 2, 0), words.T
    values = np.take(products[0], chars[:places], 0)
    for i in range(1, window):
        values += np.take(products[i], chars[i : i + places], 0)
    values[np.arange(places)[:, np.newaxis] > np.maximum(lengths - window, 0)] = -np.inf
    # Bias and tanh are monotonic, and are applied to the maximum only.
    largest = np.tanh(values.max(0, initial=-np.inf) + bias)
    return np.where(lengths[:, np.newaxis] > 0, largest, np.float32(0))
