"""Waiting frames of a sequence: the inputs of one step each, for a model with a state of fixed
size. Computed frames are not kept.

::

    step({"input": [3, 512], "rate": 16000})     3 frames, which share inputs without a batch axis
    frames   {"input": [1, 512], "rate": 16000}  {"input": [1, 512], ...}  {...}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from itertools import islice

import numpy as np

from penstock.core.errors import InvalidInput
from penstock.core.records import NamedTuple
from penstock.stepping.sequence import RowHistory, Rows


class InputFrame(NamedTuple):
    """The inputs of a step of one sequence. Frames of equal ``kind`` can be computed in one run."""

    kind: Hashable
    inputs: Rows


class FrameQueue(RowHistory):
    """The frames of a sequence. ``axes``: the batch axes of those inputs that have one; without
    any, a feed is one frame. ``each``: whether runs take inputs without a batch axis from each
    sequence, or one value for all."""

    together = 1

    def __init__(self, axes: Mapping[str, int], each: bool = False) -> None:
        super().__init__()
        self._axes, self._each, self._waiting = axes, each, deque[InputFrame]()

    def size_of(self, rows: Rows) -> int:
        """Return how many frames are fed. Raises ``InvalidInput``."""
        axes = self._axes
        sizes = {x.shape[axes[n]] if x.ndim > axes[n] else 0 for n, x in rows.items() if n in axes}
        if not sizes:
            return 1
        if len(sizes) > 1 or 0 in sizes:
            shapes = {name: array.shape for name, array in rows.items()}
            raise InvalidInput(
                f"concatenate frames along the batch axes {axes}, the same number for all inputs: "
                f"{shapes}"
            )
        return sizes.pop()

    def add(self, rows: Rows) -> None:
        """Append frames to the waiting ones."""
        count = self.size_of(rows)
        # Inputs with one value per run must be equal for all of its sequences.
        kind: list[Hashable] = []
        for name, array in rows.items():
            axis = self._axes.get(name)
            if axis is None:
                kind.append((array.shape, None if self._each else array.tobytes()))
            else:
                kind.append((array.shape[:axis], array.shape[axis + 1 :]))
        for i in range(count):
            self._waiting.append(
                InputFrame((*kind,), {n: self._one(n, x, i) for n, x in rows.items()})
            )
        self.count += count

    def _one(self, name: str, array: np.ndarray, i: int) -> np.ndarray:
        axis = self._axes.get(name)
        # It keeps its batch axis, as the model requires.
        return array if axis is None else array[(slice(None),) * axis + (slice(i, i + 1),)]

    @property
    def first(self) -> InputFrame:
        """The frame that is computed next."""
        return self._waiting[0]

    def drop(self) -> None:
        """Remove the first frame, which has been computed."""
        self._waiting.popleft()

    def cut(self, count: int) -> None:
        """Remove the frames from ``count`` on."""
        # Computed frames are counted although they are no longer stored.
        while self._waiting and self.count > count:
            self._waiting.pop()
            self.count -= 1
        self.count = min(self.count, count)

    def copied(self) -> FrameQueue:
        """Return a copy with the same frames."""
        copy = FrameQueue(self._axes, self._each)
        copy.count, copy._waiting = self.count, deque(islice(self._waiting, None))
        return copy
