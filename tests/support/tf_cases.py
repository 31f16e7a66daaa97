"""The corpus of TensorFlow's control flow: cases, their runs, and what these must give."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.types import dtypes
from penstock.frontends.tensorflow.file import read_graph

FOLDER = Path(__file__).parents[1] / "models" / "tf"
PRIMITIVES = frozenset(
    {"Switch", "Merge", "Enter", "Exit", "NextIteration", "_SwitchN", "LoopCond", "ControlTrigger"}
)


@dataclass(frozen=True)
class Case:
    """A graph, and the runs to make of it in one session."""

    name: str
    tolerance: dict[str, float]
    ops: dict[str, int]
    runs: list[dict[str, Any]]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.pb"

    @property
    def structured(self) -> bool:
        """Whether every node runs once or not at all, without frames or dead values."""
        return PRIMITIVES.isdisjoint(self.ops)


def cases() -> Iterator[Case]:
    for path in sorted(FOLDER.glob("*.json")):
        data = json.loads(path.read_text())
        yield Case(path.stem, data["tolerance"], data["ops"], data["runs"])


def array(tensor: dict[str, Any]) -> np.ndarray:
    """A tensor as the corpus has it; NaN and infinities are strings there."""
    values = [float(each) if isinstance(each, str) else each for each in tensor["values"]]
    return np.array(values, dtypes()[tensor["dtype"]]).reshape(tensor["shape"])


def feeds(run: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: array(tensor) for name, tensor in run["feeds"].items()}


def check(case: Case, run: dict[str, Any], outputs: dict[str, Any]) -> None:
    """That a run gave what it must."""
    for name, tensor in zip(run["fetches"], run["expect"]["outputs"], strict=True):
        want, got = array(tensor), outputs[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        if want.dtype.kind == "f":
            np.testing.assert_allclose(got, want, **case.tolerance)
        else:
            np.testing.assert_array_equal(got, want)


# Following a case.

SOON_S = 20  # what a run may take that is to end
_ERRORS: dict[str, tuple[type[Exception], ...]] = {
    "DeadTensor": (ps.DeadTensor,),
    "DeadlineExceeded": (ps.DeadlineExceeded,),
}
_OTHERS = (ps.InvalidModel, ps.InvalidInput, ps.RunError)


@cache
def _own_nodes(path: Path) -> frozenset[str]:
    """The nodes of a graph's own list: what else runs is not counted."""
    return frozenset(node.name for node in read_graph(path).node)


def follow(
    case: Case, compile: Callable[[], ps.Session], *, counted: bool = True, traced: bool = True
) -> ps.Session | None:
    """Make the runs of a case in one session, and see that they give what they must; with
    ``counted``, that each node ran as often as it did in TensorFlow."""
    session = None
    for run in case.runs:
        expected, trace = run["expect"], ps.Trace()
        timeout = run.get("timeout_ms", 1000 * SOON_S) / 1000

        def made(run=run, trace=trace, timeout=timeout):
            nonlocal session
            session = session or compile()
            observing = {"trace": trace} if traced else {}
            return session.run(
                feeds(run), run["fetches"], run["targets"], timeout=timeout, **observing
            )

        if "error" in expected:
            with pytest.raises(_ERRORS.get(expected["error"], _OTHERS)) as caught:
                made()
            if expected["error"] != "DeadlineExceeded":
                assert not isinstance(caught.value, ps.DeadlineExceeded)
        else:
            check(case, run, made())
        if counted and "live_exec" in expected:
            counts = {n: k for n, k in trace.counts.items() if n in _own_nodes(case.path)}
            assert counts == {n: k for n, k in expected["live_exec"].items() if k}
    return session
