"""Samples: what a model is fed while it is quantized.

They are read one at a time, as often as they are needed, so that no more than one is in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from penstock.core.errors import InvalidInput, wrong_type
from penstock.core.records import dataclass
from penstock.core.types import NamedValues

Sample: TypeAlias = NamedValues
Source: TypeAlias = "str | os.PathLike[str] | Iterable[Any] | Callable[[], Iterable[Any]] | Samples"
"""a folder or file of arrays, samples, or a function that returns an iterator of them"""

_SUFFIXES = (".npz", ".npy")
_HELD_OUT = 4  # every fourth sample is held out
_ERRORS = (OSError, ValueError, EOFError)


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples for inputs of these names. ``read(i)`` returns the one of an index."""

    names: Sequence[str]
    read: Callable[[int], Sample]
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sample]:
        return map(self.read, range(self.count))

    def subset(self, indices: Sequence[int]) -> Samples:
        """The samples of some indices."""
        return Samples(self.names, lambda i: self.read(indices[i]), len(indices))

    def spread_out(self, count: int) -> Samples:
        """At most ``count`` of the samples, from the first on at equal distances."""
        return self.subset(spread(len(self), count))

    def divided(self) -> tuple[Samples, Samples]:
        """The samples to choose by, and those held out: every fourth, at least one. A single sample
        is both."""
        every = range(self.count)
        held = [i for i in every if i % _HELD_OUT == _HELD_OUT - 1] or [self.count - 1]
        others = [i for i in every if i not in held] or held
        return self.subset(others), self.subset(held)


def spread(size: int, count: int) -> list[int]:
    """At most ``count`` of ``size`` indices, from 0 on at equal distances."""
    count = min(count, size)
    return [size * i // count for i in range(count)]


def samples_of(source: Source, names: Sequence[str]) -> Samples:
    """The samples of a source, for inputs of these names. Raises ``InvalidInput``.

    Args:
        source: The path of a folder, in which each ``.npz`` file is a sample with its arrays by
            name, and each ``.npy`` file one of a model with one input; or of one such file, whose
            arrays have the samples along an axis in front, of one more than the model takes; or an
            iterable of mappings, or of arrays for a model with one input; or a function that
            returns such an iterator, anew each time.
        names: Of the model's inputs.
    """
    if isinstance(source, Samples):
        return source
    if isinstance(source, str | os.PathLike):
        return _of_path(Path(source), names)
    items: Any = source() if callable(source) else source
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise wrong_type("data", source, "a path, samples, or a function that returns them")
    # An iterator can be read once, and samples are read for each candidate.
    held = [_sample(item, names, f"sample {i}") for i, item in enumerate(items)]
    return _checked(Samples(names, held.__getitem__, len(held)), "data")


def _of_path(path: Path, names: Sequence[str]) -> Samples:
    if path.is_dir():
        # By name, so that the same ones are held out each time.
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)

        def read(i: int) -> Sample:
            return _sample(_arrays(files[i]), names, str(files[i]))

        return _checked(Samples(names, read, len(files)), f"the folder {path}")
    if path.suffix not in _SUFFIXES:
        raise InvalidInput(f"{path}: samples are a folder of .npz or .npy files, or one such file")
    loaded = _arrays(path)
    arrays = {names[0]: loaded} if isinstance(loaded, np.ndarray) else loaded
    whole = _sample(arrays, names, str(path))
    # The axis in front is that of samples: what is left is what the model takes.
    counts = {len(array) if array.ndim else 0 for array in whole.values()}
    if len(counts) != 1:
        raise InvalidInput(
            f"{path}: its arrays must have the samples along an axis in front, but have "
            f"{', '.join(f'{name} {list(np.shape(a))}' for name, a in whole.items())}"
        )
    stacked = Samples(names, lambda i: {n: a[i] for n, a in whole.items()}, counts.pop())
    return _checked(stacked, str(path))


def _arrays(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    try:
        # A pickle could run anything.
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return dict(loaded)
    except _ERRORS as error:
        raise InvalidInput(f"{path} cannot be read as arrays of NumPy: {error}") from error


def _sample(item: object, names: Sequence[str], where: str) -> Sample:
    """One sample: arrays by the names of inputs."""
    if not isinstance(item, Mapping):
        if len(names) != 1:
            raise InvalidInput(
                f"{where} is no mapping, and the model has inputs {', '.join(names)}"
            )
        return {names[0]: np.asarray(item)}
    missing = [name for name in names if name not in item]
    if missing:
        raise InvalidInput(
            f"{where} lacks {', '.join(map(repr, missing))}; it has {', '.join(map(repr, item))}"
        )
    return {name: np.asarray(item[name]) for name in names}


def _checked(samples: Samples, where: str) -> Samples:
    if not samples.count:
        raise InvalidInput(f"{where} has no samples; give one at least, and better a hundred")
    return samples
