"""The corpus of TFLite and Circle models: cases, their runs, and what these must give."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps

FOLDER = Path(__file__).parents[1] / "models" / "tflite"


@dataclass(frozen=True)
class Case:
    """A model, and the runs to make of it in one session; none if it must be refused."""

    file: Path

    @property
    def name(self) -> str:
        return self.file.stem

    @cached_property
    def data(self) -> dict[str, Any]:
        return json.loads(self.file.read_text())

    @property
    def path(self) -> Path:
        return self.file.parent / self.data["model"]

    @cached_property
    def arrays(self) -> Mapping[str, np.ndarray]:
        path = self.file.with_suffix(".npz")
        return dict(np.load(path)) if path.exists() else {}

    def array(self, tensor: dict[str, Any]) -> np.ndarray:
        data = tensor["data"]
        if isinstance(data, str):
            return self.arrays[data.removeprefix("npz:")]
        return np.array(data, np.dtype(tensor["dtype"])).reshape(tensor["shape"])

    def feeds(self, run: dict[str, Any]) -> dict[str, np.ndarray]:
        return {name: self.array(tensor) for name, tensor in run["inputs"].items()}


def cases(*categories: str) -> Iterator[Case]:
    for category in categories:
        for path in sorted((FOLDER / category).glob("*.json")):
            yield Case(path)


def follow(case: Case, compile: Callable[[Path], ps.Session]) -> ps.Session:
    """Make the runs of a case in one session, and see that they give what they must."""
    session = compile(case.path)
    for run in case.data["runs"]:
        outputs = session.run(case.feeds(run))
        assert list(outputs) == list(run["outputs"])
        for name, tensor in run["outputs"].items():
            check(outputs[name], case.array(tensor), run["atol"], run["rtol"])
    return session


def check(got: np.ndarray, want: np.ndarray, atol: float, rtol: float) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if want.dtype.kind in "iu":
        got, want = got.astype(np.int64), want.astype(np.int64)
    if want.dtype.kind == "b":
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)
