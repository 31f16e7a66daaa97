"""Cuts of a sequence into the stages of a pipeline, of which the slowest is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pipeline_cuts(cost: Sequence[float], crossing: Sequence[float], stages: int) -> list[int]:
    """The cuts of a sequence of n nodes into at most ``stages`` stages: the first node of each
    stage but the first.

    Node i takes ``cost[i]``. A cut before node i costs ``crossing[i]`` in both of the stages that
    it parts (``crossing[0]`` is not used). The largest sum of a stage is the least that there is;
    of several such solutions one with the fewest stages is chosen. Dynamic programming over the
    ends of stages (as for the linear partitioning problem), in time n² · stages.

        >>> pipeline_cuts([1, 1, 1, 3], [0, 0, 0, 0], 2)
        [3]
        >>> pipeline_cuts([1, 1, 1, 3], [0, 0, 9, 9], 2)
        [1]
        >>> pipeline_cuts([1, 1], [0, 5], 2)
        []
    """
    n = len(cost)
    until = np.concatenate([[0.0], np.cumsum(np.asarray(cost, np.float64))])
    cut = np.array([0.0, *crossing[1:], 0.0]) if n else np.zeros(1)
    # best[j]: the slowest of the stages in front of node j; each round allows one stage more.
    best = until + cut
    best[0] = 0.0
    chosen: list[np.ndarray] = [np.zeros(n + 1, np.int64)]
    for _ in range(1, min(stages, n)):
        following = best.copy()
        begins = np.arange(n + 1)  # as many stages as before
        for j in range(1, n + 1):
            last = until[j] - until[:j] + cut[:j] + cut[j]
            slowest = np.maximum(best[:j], last)
            i = int(slowest.argmin())
            # A stage more must gain more than a rounding error.
            if slowest[i] < following[j] * (1 - 1e-12):
                following[j], begins[j] = slowest[i], i
        chosen.append(begins)
        if (following == best).all():
            break
        best = following
    cuts: list[int] = []
    j = n
    for begins in reversed(chosen[1:]):
        i = int(begins[j])
        if i != j:
            cuts.append(i)
            j = i
    return [i for i in reversed(cuts) if i]
