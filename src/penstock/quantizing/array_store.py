"""Arrays of many samples, in a temporary file: one sample's at a time are in memory."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast, overload

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import NamedValues, RunValue


class _Place(NamedTuple):
    """Where an array begins in the file."""

    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]


class ArrayStore(Sequence[NamedValues]):
    """Mappings of names to arrays, which are read from a file on each access.

    Arrays of objects, such as texts, and values that are not arrays stay in memory. The file is
    deleted with the store; writing it raises ``OSError`` if the disk is full.
    """

    def __init__(self, items: Iterable[NamedValues] = (), owner: ArrayStore | None = None) -> None:
        self._owner = owner  # of the file, which it closes
        if owner is None:
            self._file: Any = tempfile.TemporaryFile()  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        else:
            self._file = owner._file
        self._items: list[dict[str, object]] = []
        for item in items:
            self.append(item)

    def append(self, item: NamedValues) -> None:
        """Write the arrays of one more mapping."""
        self._items.append({name: self._written(value) for name, value in item.items()})

    def subset(self, indices: Iterable[int]) -> ArrayStore:
        """The mappings of some indices, in the same file."""
        own = ArrayStore(owner=self)
        own._items = [self._items[i] for i in indices]
        return own

    def _written(self, value: object) -> object:
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            return value
        place = _Place(self._file.seek(0, 2), value.dtype, value.shape)
        self._file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return place

    def _read(self, value: object) -> RunValue:
        if not isinstance(value, _Place):
            return cast(RunValue, value)
        array = np.empty(value.shape, value.dtype)
        self._file.seek(value.offset)
        self._file.readinto(array.reshape(-1).view(np.uint8))
        return array

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> NamedValues: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[NamedValues]: ...

    def __getitem__(self, index: int | slice) -> NamedValues | Sequence[NamedValues]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return {name: self._read(value) for name, value in self._items[index].items()}
