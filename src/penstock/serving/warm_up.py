"""Runs before the first request, on values that are made up: no request waits for a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.core.errors import RunError
from penstock.serving.batching import made_up, shapes_of
from penstock.session.session import Session


def warm_up(sessions: Sequence[Session], max_batch: int) -> None:
    """Run the shapes that sessions of one model were compiled for, and those of batches of such
    requests. Raises ``InvalidInput`` if dims of inputs are open and ``shapes=`` does not say them,
    ``ValueError`` if the model does not run on values that were made up."""
    rng = np.random.default_rng(0)
    for shapes in _shapes(sessions[0], max_batch):
        feeds = {name: made_up(x.shape, x.dtype, rng) for name, x in shapes.items()}
        # Replicas of a process share a session, and those of a cluster have one each.
        for session in sessions:
            try:
                session.run(feeds)
            except RunError as error:
                raise ValueError(
                    f"the model does not run on values that were made up, to warm it up: {error}"
                ) from error


def _shapes(session: Session, max_batch: int) -> Iterator[dict[str, np.ndarray]]:
    """Arrays of each shape, without memory of their own."""
    for one in shapes_of(session) or [{}]:
        values = session._values_of(one)
        yield values
        rows = {len(value) if value.ndim else 0 for value in values.values()}
        step = min(rows, default=0)
        # Requests of one shape are joined whole, so that batches have multiples of its rows.
        for together in range(2 * step, max_batch + 1, step) if len(rows) == 1 and step else ():
            yield {
                name: np.broadcast_to(value[:1], (together, *value.shape[1:]))
                for name, value in values.items()
            }
