"""Samples: feeds of a model for its quantization.

They are read one at a time, as often as they are needed, so that no more than one is in memory:
sources that can be read only once, or only from the beginning, go to a temporary file first.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar
from zipfile import BadZipFile, ZipFile

import numpy as np

from penstock.core.errors import InvalidInput, wrong_type
from penstock.core.records import NamedTuple, dataclass
from penstock.core.types import NamedValues
from penstock.quantizing.array_store import ArrayStore

Sample: TypeAlias = NamedValues
T = TypeVar("T")
Source: TypeAlias = "str | os.PathLike[str] | Iterable[Any] | Callable[[], Iterable[Any]] | Samples"
"""a folder or file of arrays, samples, or a function that returns an iterator of them"""

_SUFFIXES = (".npz", ".npy")
_HELD_OUT = 4  # every fourth sample is held out
_ERRORS = (OSError, ValueError, EOFError, BadZipFile, zlib.error)
_STACKED = " stacked"  # the name of the array in an .npy file


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples for inputs of these names. ``read(i)`` returns the sample with index i, ``where(i)``
    its name in messages."""

    names: Sequence[str]
    read: Callable[[int], Sample]
    count: int
    where: Callable[[int], str] = "sample {}".format

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sample]:
        return map(self.read, range(self.count))

    def subset(self, indices: Sequence[int]) -> Samples:
        """The samples of some indices."""
        return Samples(
            self.names,
            lambda i: self.read(indices[i]),
            len(indices),
            lambda i: self.where(indices[i]),
        )


def held_out_apart(count: int) -> tuple[list[int], list[int]]:
    """The indices of the samples to choose by, and of those held out: every fourth, at least one. A
    single sample is both."""
    held = [*range(_HELD_OUT - 1, count, _HELD_OUT)] or [count - 1]
    return [i for i in range(count) if i not in held] or held, held


def spread(size: int, count: int) -> list[int]:
    """At most ``count`` of ``size`` indices, from 0 on at equal distances."""
    count = min(count, size)
    return [size * i // count for i in range(count)]


def samples_of(source: Source, names: Sequence[str]) -> Samples:
    """The samples of a source, for inputs of these names. Raises ``InvalidInput``.

    Args:
        source: The path of a folder, in which each ``.npz`` file is a sample with its arrays by
            name, and each ``.npy`` file a sample for a model with one input; or the path of one
            such file, whose arrays have an additional leading axis of samples; or an iterable of
            mappings, or of arrays for a model with one input; or a function that returns a new
            iterator of these at each call.
        names: The names of the model's inputs.
    """
    if isinstance(source, Samples):
        return source
    if isinstance(source, str | os.PathLike):
        return _of_path(Path(source), names)
    items: Any = source() if callable(source) else source
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise wrong_type("data", source, "a path, samples, or a function that returns them")
    own = (_sample(item, names, f"sample {i}") for i, item in enumerate(items))
    # A sequence is in the user's memory anyway. An iterator can be read once, and samples are read
    # for each candidate: store them.
    held = list(own) if isinstance(items, Sequence | np.ndarray) else ArrayStore(own)
    return _checked(Samples(names, held.__getitem__, len(held)), "data")


def _of_path(path: Path, names: Sequence[str]) -> Samples:
    if path.is_dir():
        # By name, so that the same ones are held out each time.
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)

        def read(i: int) -> Sample:
            return _sample(_arrays(files[i]), names, str(files[i]))

        samples = Samples(names, read, len(files), lambda i: str(files[i]))
        return _checked(samples, f"the folder {path}")
    if path.suffix not in _SUFFIXES:
        raise InvalidInput(f"{path}: samples are a folder of .npz or .npy files, or one such file")
    try:
        with ExitStack() as stack:
            held = ArrayStore(_rows(_arrays_of(path, stack), names, path))
    except _ERRORS as error:
        raise InvalidInput(f"{path} cannot be read as arrays of NumPy: {error}") from error
    samples = Samples(names, held.__getitem__, len(held), lambda i: f"{path}, sample {i}")
    return _checked(samples, str(path))


class _ArrayFile(NamedTuple):
    """An array in a file, after its header, with contiguous rows along its first axis."""

    file: IO[bytes]
    dtype: np.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, file: IO[bytes]) -> _ArrayFile:
        """Read the header. Raises ``ValueError`` for objects, which only a pickle has."""
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise ValueError(f"it has version {version} of NumPy's format, newer than 2.0")
        shape, is_fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("it has an array of Python objects; write numbers or texts (str)")
        if is_fortran:  # rows are not contiguous
            whole = np.frombuffer(file.read(), dtype).reshape(shape, order="F")
            file = BytesIO(whole.tobytes())
        return cls(file, dtype, shape)

    def row(self) -> np.ndarray:
        """The next row. Raises ``EOFError`` if the file ends before."""
        shape = self.shape[1:]
        nbytes = math.prod(shape) * self.dtype.itemsize
        data = self.file.read(nbytes)
        if len(data) < nbytes:
            raise EOFError("it ends before its last array does")
        return np.frombuffer(data, self.dtype).reshape(shape)


def _arrays_of(path: Path, stack: ExitStack) -> dict[str, _ArrayFile]:
    """The arrays of a file by their names."""
    if path.suffix == ".npy":
        return {_STACKED: _ArrayFile.of(stack.enter_context(path.open("rb")))}
    archive = stack.enter_context(ZipFile(path))
    return {
        name.removesuffix(".npy"): _ArrayFile.of(stack.enter_context(archive.open(name)))
        for name in archive.namelist()
    }


def _rows(arrays: dict[str, _ArrayFile], names: Sequence[str], path: Path) -> Iterator[Sample]:
    """The samples that are stacked in the arrays of a file."""
    whole = _by_input(arrays.get(_STACKED, arrays), names, str(path))
    # The leading axis is the axis of samples; the others are those of the model's input.
    counts = {own.shape[0] if own.shape else 0 for own in whole.values()}
    if len(counts) != 1:
        raise InvalidInput(
            f"{path}: its arrays must have the samples along an axis in front, but have "
            f"{', '.join(f'{name} {list(own.shape)}' for name, own in whole.items())}"
        )
    for _ in range(counts.pop()):
        yield {name: own.row() for name, own in whole.items()}


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
    own: Mapping[str, object] = _by_input(item, names, where)
    return {name: _array(value, name, where) for name, value in own.items()}


def _array(value: object, name: str, where: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:  # rows of unequal lengths, for example
        raise InvalidInput(f"{where}: input {name!r} is no array: {error}") from error


def _by_input(item: T | Mapping[str, T], names: Sequence[str], where: str) -> dict[str, T]:
    """The values of a mapping, or a single value, by the names of inputs."""
    if not isinstance(item, Mapping):
        if len(names) != 1:
            raise InvalidInput(
                f"{where} is no mapping, and the model has inputs {', '.join(names)}"
            )
        return {names[0]: item}
    missing = [name for name in names if name not in item]
    if missing:
        raise InvalidInput(
            f"{where} lacks {', '.join(map(repr, missing))}; it has {', '.join(map(repr, item))}"
        )
    return {name: item[name] for name in names}


def _checked(samples: Samples, where: str) -> Samples:
    if not samples.count:
        raise InvalidInput(f"{where} has no samples; give one at least, and better a hundred")
    return samples
