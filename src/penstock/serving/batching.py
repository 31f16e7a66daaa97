"""Batching: similar requests are joined to one run, and its outputs are split by request.

A model supports batches if the first dim of its inputs is dynamic, its outputs have as many rows,
and rows are independent. Shapes do not imply independence, so a trial checks it: three rows
together must have the same results as one by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from penstock.compiler.options import InputShapes
from penstock.core.errors import PenstockError, RunError
from penstock.core.types import STRING, NamedValues, RunValue, TensorType
from penstock.executors.feeds import convert
from penstock.session.ahead import run_ahead, values_of
from penstock.session.session import Session

_ROWS = 3
# Tolerance: batches change the summation order.
_TOLERANCE = 1e-2


def check_rows(session: Session, sample: NamedValues | None) -> None:
    """Raise ``ValueError`` unless ``session`` computes several rows independently. The trial uses
    the first row of ``sample``, or generated values of the compiled shapes or input types."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, np.ndarray]] = [{} for _ in range(_ROWS)]
    first = next((values_of(session, shapes) for shapes in shapes_of(session)), {})
    for port in session.inputs:
        type_ = port.type
        if not isinstance(type_, TensorType) or type_.shape == () or _is_fixed(type_):
            raise ValueError(f"the first dim of input {port} must be dynamic, to batch along it")
        if sample is not None:
            given = convert(port.name, sample[port.name], type_)[:1]
            dims, dtype = given.shape[1:], given.dtype
        elif first:
            given, dims, dtype = None, first[port.name].shape[1:], first[port.name].dtype
        elif type_.shape is None or not all(isinstance(d, int) for d in type_.shape[1:]):
            raise ValueError(
                f"input {port} has dynamic dims: fix them with shapes=, or give an example "
                "request as sample="
            )
        else:
            given, dims, dtype = None, type_.shape[1:], type_.dtype or np.dtype(np.float32)
        for row in rows:
            shape = (1, *dims)
            row[port.name] = (
                made_up(shape, dtype, rng)
                if given is None
                # Values of the sample: synthetic ones may be invalid indices for the model.
                else rng.permuted(given.reshape(1, -1), axis=1).reshape(given.shape)
            )
    batching = EqualRequests()
    try:
        alone = [run_ahead(session, row) for row in rows]
        together = batching.split(run_ahead(session, batching.joined(rows)), rows)
    except PenstockError as error:
        hint = "" if sample is not None else "; give an example request as sample="
        raise ValueError(f"the model fails on batches of generated inputs{hint}") from error
    for one, other in zip(alone, together or [{}] * _ROWS, strict=True):
        for name, value in one.items():
            if name not in other or not are_close(value, other[name]):
                raise ValueError(
                    f"requests cannot be batched: output {name!r} of a row depends on other rows "
                    "of its batch"
                )


def _is_fixed(type_: TensorType) -> bool:
    return type_.shape is not None and isinstance(type_.shape[0], int)


def shapes_of(session: Session) -> list[InputShapes]:
    """Return the shapes that a session was compiled for."""
    shapes = session.options.shapes
    return [shapes] if isinstance(shapes, Mapping) else [*(shapes or ())]


def made_up(dims: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Return random values of an input. Integers are 0 and 1, which are valid in most tables."""
    if dtype == STRING:
        return rng.choice(np.array(["a", "b"], object), dims)
    if dtype.kind in "iub":
        return rng.integers(0, 2, dims).astype(dtype)
    return rng.standard_normal(dims).astype(dtype)


def are_close(value: RunValue, other: RunValue, tolerance: float = _TOLERANCE) -> bool:
    """Whether two results differ at most by the order of summation; for 16-bit types, by 1 %."""
    if not isinstance(value, np.ndarray) or value.shape != other.shape:
        return False
    if value.dtype.kind not in "fcV":
        return bool((value == other).all())
    tolerance = _TOLERANCE if value.dtype.itemsize < 4 else tolerance
    wide = np.complex128 if value.dtype.kind == "c" else np.float64
    # Differences of 16-bit floats would themselves be rounded.
    value, other = value.astype(wide), other.astype(wide)
    largest = np.abs(value[np.isfinite(value)]).max(initial=0.0)
    return np.allclose(value, other, tolerance, tolerance * largest, equal_nan=True)


class EqualRequests:
    """Batching of requests of equal shapes, but for the number of rows. Its methods are all that
    ``Replicas`` know of batches: ``UnequalRequests`` have others."""

    def key(self, feeds: Mapping[str, np.ndarray]) -> tuple[Hashable, ...] | None:
        """Return the key of requests that may be joined: the dtypes and all dims but the first."""
        return tuple([(name, x.dtype, x.shape[1:]) for name, x in sorted(feeds.items())])

    def tokens(self, feeds: Mapping[str, np.ndarray]) -> int:
        """Return the tokens of a request, which bound a batch; none are counted here."""
        return 0

    def joined(self, requests: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the concatenated feeds of several requests."""
        first = requests[0]
        return {name: np.concatenate([feeds[name] for feeds in requests]) for name in first}

    def check(self, session: Session, batch: Mapping[str, np.ndarray]) -> None:
        """Raise ``PenstockError`` if requests of this batch affect one another; ``check_rows`` has
        tried that."""

    def split(
        self, outputs: NamedValues, requests: Sequence[Mapping[str, np.ndarray]]
    ) -> list[dict[str, RunValue]] | None:
        """Return copies of the outputs of each request; None if the numbers of rows differ."""
        rows = [len(next(iter(feeds.values()))) for feeds in requests]
        total, ends = sum(rows), np.cumsum(rows)[:-1]
        for value in outputs.values():
            if not isinstance(value, np.ndarray) or not value.ndim or len(value) != total:
                return None
        parts = {name: np.split(value, ends) for name, value in outputs.items()}
        return [{name: parts[name][i].copy() for name in parts} for i in range(len(rows))]

    def note_failure(self, error: BaseException) -> None:
        """Take the error of a batch, of which each request runs alone afterwards."""


# Warm-up on synthetic values before the first request, so that no request waits for a plan.


def warm_up(sessions: Sequence[Session], max_batch: int) -> None:
    """Run the shapes that sessions of one model were compiled for, and batches of these. Raises
    ``InvalidInput`` if inputs have dynamic dims that ``shapes=`` does not give, ``ValueError`` if
    the model fails on generated values."""
    rng = np.random.default_rng(0)
    for shapes in _shapes(sessions[0], max_batch):
        feeds = {name: made_up(x.shape, x.dtype, rng) for name, x in shapes.items()}
        # Replicas of a process share a session; each replica of a cluster has its own.
        for session in sessions:
            try:
                run_ahead(session, feeds)
            except RunError as error:
                raise ValueError(
                    f"the model cannot be warmed up, as it fails on generated inputs: {error}"
                ) from error


def _shapes(session: Session, max_batch: int) -> Iterator[dict[str, np.ndarray]]:
    """Return arrays of each shape, without allocating their elements."""
    for one in shapes_of(session) or [{}]:
        values = values_of(session, one)
        yield values
        rows = {len(value) if value.ndim else 0 for value in values.values()}
        step = min(rows, default=0)
        # Requests of one shape are batched whole, so batch sizes are multiples of its rows.
        for together in range(2 * step, max_batch + 1, step) if len(rows) == 1 and step else ():
            yield {
                name: np.broadcast_to(value[:1], (together, *value.shape[1:]))
                for name, value in values.items()
            }
