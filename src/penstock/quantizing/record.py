"""Record of a search's measurements, from which a search that was stopped resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from penstock.core.errors import InvalidInput
from penstock.core.records import NamedTuple, dataclass, field
from penstock.core.types import JsonObject
from penstock.host.replace_file import replacing
from penstock.quantizing.layers import Choice, LayerType

_FORMAT = "penstock quantize 2"
_FIELDS = (
    *("ranges", "sizes", "clipping", "clippings", "biases", "smoothing", "seconds"),
    *("conversion_scale", "errors", "points", "learned", "learning_seconds"),
)

Errors: TypeAlias = dict[str, dict[LayerType, float]]
"""squared errors of the outputs by layer and type"""


@dataclass(frozen=True)
class Point:
    """A choice that was tried: the time of a run and the bytes of its weights, as shares of the
    original's, the errors on the samples to choose by and on those held out, and the ``limit`` that
    a further sample's will hardly exceed. Each of these is at most the last, which is bounded."""

    choice: Choice
    time: float
    error: float
    held_out: float
    limit: float
    size: float
    note: str


FLOAT = Point({}, 1.0, 0.0, 0.0, 0.0, 1.0, "float32")
"""the original"""


class ChosenRanges(NamedTuple):
    """Ranges of values and related measurements, as stored in a record."""

    ranges: dict[str, tuple[float, float]]
    sizes: dict[str, int]
    clipping: str
    biases: dict[str, list[float]]


@dataclass(eq=False)
class Record:
    """The measurements so far.

    These are the ``ranges`` of values that codes cover, the ``sizes`` of these values, the way to
    clip them (``clipping``), chosen by the errors of each way (``clippings``), the corrections of
    ``biases`` by the names of layers, the factors of ``smoothing`` by the names of values, the
    ``seconds`` of nodes by type, how many times as long conversions take as they were guessed, the
    ``errors`` of layers, the ``points`` that were tried, and which layers as which types have
    roundings that were ``learned``, in how many seconds. ``key`` identifies the model, the samples
    and the options; with a ``path`` the record is also written to a file.
    """

    key: str = ""
    path: Path | None = None
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    clipping: str = ""
    clippings: dict[str, float] = field(default_factory=dict)
    biases: dict[str, list[float]] = field(default_factory=dict)
    smoothing: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[LayerType, tuple[Mapping[str, float], ...]] = field(default_factory=dict)
    conversion_scale: float = 1.0
    errors: Errors = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    learned: list[tuple[str, LayerType]] = field(default_factory=list)
    learning_seconds: float = 0.0

    @classmethod
    def at(cls, path: Path, key: str) -> Record:
        """The record in a file, or a new one that goes there. Raises ``InvalidInput`` for a file
        of another model, of other samples, or of other options."""
        record = cls(key, path)
        # The command line opens the file before, to see that it can be written.
        if not path.exists() or not path.stat().st_size:
            return record
        try:
            content = json.loads(path.read_bytes())
            written = content["format"], content["key"]
            values = {name: content[name] for name in _FIELDS}
            points = [Point(**point) for point in values.pop("points")]
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidInput(
                f"{path} holds no measurements of penstock quantize: name another file, or remove "
                "it"
            ) from error
        if written != (_FORMAT, key):
            raise InvalidInput(
                f"{path} holds measurements of another model, of other samples, on another "
                "machine, or with other options: name another file, or remove it"
            )
        for name, value in values.items():
            setattr(record, name, value)
        record.points = points
        record.learned = [(name, type_) for name, type_ in record.learned]  # tuples again
        return record

    def take(self, chosen: ChosenRanges) -> None:
        """Have these ranges."""
        self.ranges, self.sizes, self.clipping, self.biases = chosen

    def changed(self) -> None:
        """Write the file, if any."""
        if self.path is None:
            return
        content: JsonObject = {"format": _FORMAT, "key": self.key}
        content |= {name: getattr(self, name) for name in _FIELDS}
        content["points"] = [asdict(point) for point in self.points]
        # Whole or not at all: a search may be stopped at any moment.
        with replacing(self.path) as file:
            file.write(json.dumps(content, indent=1).encode())
