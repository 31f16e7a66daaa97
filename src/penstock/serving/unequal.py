"""Batching of requests of unequal lengths: padded to the longest, without computing padding.

An input has a row for each token, [requests, length, ...], and a mask marks padding rows::

    ids  [1, 5]  mask [1, 5]        ids  [2, 16]    a b c d e . . . . . . . . . . .
    ids  [1, 9]  mask [1, 9]                        f g h i j k l m n . . . . . . .

The plan does not compute masked rows (``compiler.padding``), so the cost of a batch depends only on
its tokens. Numbers of requests and lengths are rounded up, so that few plans serve all batches. The
graph of each plan is proven not to let padding change results. A trial checks that the graph does
not depend on lengths otherwise: two requests of different lengths must have the same results
together as alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from penstock.core.errors import Cancelled, InvalidInput, PenstockError, RunError
from penstock.core.types import NamedValues, RunValue, TensorType
from penstock.executors.feeds import convert
from penstock.serving.batching import EqualRequests, are_close, made_up
from penstock.session.ahead import check_hidden_rows, padding_masks, run_ahead
from penstock.session.session import Session

_LENGTHS = 12, 5
_HIDDEN = 1e-5
"""tolerance for outputs with different padding, relative to the largest value"""
_STEP, _SHORT = 32, 8
"""lengths are rounded up to multiples of the first, short ones to multiples of the second"""

_Feeds = Mapping[str, np.ndarray]


class UnequalRequests(EqualRequests):
    """Batching of requests of unequal lengths. ``masks``: the inputs that mark padding rows;
    ``by_token``: outputs with a row for each token. ``rounds``: whether lengths are rounded up."""

    def __init__(self, masks: Sequence[str], by_token: frozenset[str]) -> None:
        self.masks = masks
        self.by_token = by_token
        self.rounds = True
        self._checked: dict[Hashable, str] = {}  # why batches of some shapes are refused, or ""

    def check(self, session: Session, batch: _Feeds) -> None:
        """Raise ``PenstockError`` unless a batch of these shapes is proven to change no result."""
        key = tuple([x.shape for _, x in sorted(batch.items())])
        if key not in self._checked:
            reason = ""
            try:
                check_hidden_rows(session, batch)
            except PenstockError as error:
                reason = str(error)
            self._checked[key] = reason
        if self._checked[key]:
            raise PenstockError(self._checked[key])

    def key(self, feeds: _Feeds) -> tuple[Hashable, ...] | None:
        """Return the key of requests that may be joined: the dtypes, and dims after the first two.
        None if the inputs of the request have different lengths."""
        lengths = {x.shape[1] if x.ndim > 1 else 0 for x in feeds.values()}
        if len(lengths) != 1 or 0 in lengths:
            return None
        return tuple([(name, x.dtype, x.shape[2:]) for name, x in sorted(feeds.items())])

    def tokens(self, feeds: _Feeds) -> int:
        """Return the tokens of a request, which bound a batch: rows times length."""
        rows, length = next(iter(feeds.values())).shape[:2]
        return int(rows * length)

    def joined(self, requests: Sequence[_Feeds]) -> dict[str, np.ndarray]:
        """Return the padded and concatenated feeds of several requests."""
        sizes = [next(iter(feeds.values())).shape[:2] for feeds in requests]
        rows, longest = sum(n for n, _ in sizes), max(length for _, length in sizes)
        step = (_STEP if longest > _STEP else _SHORT) if self.rounds else 1
        length, count = -(-longest // step) * step, 1 << (rows - 1).bit_length()
        batch: dict[str, np.ndarray] = {}
        for name, first in requests[0].items():
            array = batch[name] = np.zeros((count, length, *first.shape[2:]), first.dtype)
            at = 0
            for feeds, (own, tokens) in zip(requests, sizes, strict=True):
                array[at : at + own, :tokens] = feeds[name]
                at += own
            if name in self.masks:
                array[rows:, 0] = 1  # a request without tokens would attend to all padding
        return batch

    def padded_anew(self, batch: _Feeds) -> dict[str, np.ndarray]:
        """Return a batch whose padding rows have the values of its first request."""
        hidden = ~np.logical_or.reduce([batch[name] != 0 for name in self.masks])
        found = {}
        for name, x in batch.items():
            rows = x.shape[1] - int(hidden[0].sum())
            own = x[:1, np.arange(x.shape[1]) % max(rows, 1)]
            fill = hidden.reshape(*hidden.shape, *(1,) * (x.ndim - 2))
            found[name] = x if name in self.masks else np.where(fill, own, x)
        return found

    def split(
        self, outputs: NamedValues, requests: Sequence[_Feeds]
    ) -> list[dict[str, RunValue]] | None:
        """Return copies of the outputs of each request; None if the outputs have too few rows."""
        parts: list[dict[str, RunValue]] = []
        at = 0
        for feeds in requests:
            rows, length = next(iter(feeds.values())).shape[:2]
            own: dict[str, RunValue] = {}
            for name, value in outputs.items():
                by_token = name in self.by_token
                if not isinstance(value, np.ndarray) or value.ndim < 1 + by_token:
                    return None
                part = value[at : at + rows]
                if len(part) < rows:
                    return None
                own[name] = (part[:, :length] if by_token else part).copy()
            parts.append(own)
            at += rows
        return parts

    def note_failure(self, error: BaseException) -> None:
        """Round lengths no longer: the rounded one may exceed the model's limit."""
        if isinstance(error, InvalidInput | RunError) and not isinstance(error, Cancelled):
            self.rounds = False


def tried_lengths(session: Session, sample: NamedValues | None) -> UnequalRequests:
    """Return how to batch requests of ``session``. A trial uses two requests made from the first
    row of ``sample``, or generated ones. Raises ``ValueError`` if their results together and alone
    differ, or if equality is not proven for all requests."""
    masks = padding_masks(session)
    if not masks:
        raise ValueError("no input is a mask that marks the padding of a request")
    requests = [_request(session, masks, sample, length) for length in _LENGTHS]
    try:
        alone = [run_ahead(session, feeds) for feeds in requests]
        lengths = [next(iter(feeds.values())).shape[1] for feeds in requests]
        of_outputs = {
            name: [np.shape(outputs[name])[1:2] for outputs in alone] for name in alone[0]
        }
        wanted = [(length,) for length in lengths]
        by_token = frozenset([name for name, found in of_outputs.items() if found == wanted])
        unequal = UnequalRequests(masks, by_token)
        batch = unequal.joined(requests)
        together = unequal.split(run_ahead(session, batch), requests)
        # A mask of, say, -10 hides rows only approximately.
        others = unequal.split(run_ahead(session, unequal.padded_anew(batch)), requests)
    except PenstockError as error:
        hint = "" if sample is not None else "; give an example request as sample="
        message = f"the model fails on generated requests of two lengths{hint}"
        raise ValueError(message) from error
    none: list[dict[str, RunValue]] = [{}] * len(alone)
    for one, joined, other in zip(alone, together or none, others or none, strict=True):
        for name, value in one.items():
            same = name in joined and are_close(value, joined[name])
            if not same or not are_close(joined[name], other[name], _HIDDEN):
                raise ValueError(f"output {name!r} of a request changes if the request is padded")
    try:
        unequal.check(session, batch)
    except PenstockError as reason:
        raise ValueError(
            f"requests cannot be batched by tokens, since {reason}. Omit max_batch_tokens=: "
            "max_batch= batches requests of equal shapes"
        ) from None
    return unequal


def _request(
    session: Session, masks: Sequence[str], sample: NamedValues | None, length: int
) -> dict[str, np.ndarray]:
    """Return a request of one row and at most this length, without padding."""
    rng = np.random.default_rng(length)
    feeds: dict[str, np.ndarray] = {}
    for port in session.inputs:
        type_ = port.type
        dims = type_.shape if isinstance(type_, TensorType) else None
        if not isinstance(type_, TensorType) or dims is None or any(map(_is_fixed, dims[:2])):
            raise ValueError(
                f"the first two dims of input {port}, rows and tokens, must be dynamic"
            )
        if sample is not None:
            feeds[port.name] = convert(port.name, sample[port.name], type_)[:1, :length]
        elif len(dims) < 2 or not all(map(_is_fixed, dims[2:])):
            raise ValueError(f"input {port} has other dynamic dims: give a sample=")
        else:
            shape = (1, length, *[dim for dim in dims[2:] if isinstance(dim, int)])
            feeds[port.name] = made_up(shape, type_.dtype or np.dtype(np.float32), rng)
    return {name: np.ones_like(x) if name in masks else x for name, x in feeds.items()}


def _is_fixed(dim: object) -> bool:
    return isinstance(dim, int)
