"""What a search has measured: kept, so that a search that was stopped can go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import InvalidInput
from penstock.core.records import dataclass, field
from penstock.host.replace_file import replacing
from penstock.quantizing.layers import Choice, LayerType

_FORMAT = "penstock quantize 1"


@dataclass(frozen=True)
class Point:
    """A choice that was tried: the time of a run and the bytes of its weights, as shares of the
    original's, and the errors on the samples to choose by and on those held out."""

    choice: Choice
    time: float
    error: float
    held_out: float
    size: float
    note: str

    @property
    def largest(self) -> float:
        """The error on all samples."""
        return max(self.error, self.held_out)


FLOAT = Point({}, 1.0, 0.0, 0.0, 1.0, "float32")
"""the original"""


@dataclass(eq=False)
class Record:
    """What was measured so far. ``errors``: squared errors of the outputs by layer and type;
    ``biases``: corrections of biases; ``clippings``: errors by the way to clip; ``changed`` is
    called when there is more."""

    key: str = ""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    clipping: str = ""
    clippings: dict[str, float] = field(default_factory=dict)
    errors: dict[str, dict[LayerType, float]] = field(default_factory=dict)
    biases: dict[str, np.ndarray] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    changed: Callable[[], None] = lambda: None
