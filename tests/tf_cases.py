"""The corpus of TensorFlow's control flow: cases, their runs, and what these must give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.types import dtypes

FOLDER = Path(__file__).parent / "models" / "tf"
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
