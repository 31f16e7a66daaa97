"""Files with weights: ranges of their bytes, read into memory or mapped on demand."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import BinaryIO
from weakref import ref

import numpy as np

from penstock.core.limits import Limits
from penstock.core.origins import Origin, note_origin
from penstock.core.records import dataclass, field
from penstock.frontends.common.diagnostics import TensorError
from penstock.frontends.common.model_files import HEAD_BYTES, is_pointer
from penstock.host.malloc import new_bytes

MAX_OVERLAP = 16
_SMALL = 2**18  # bytes of a file that is read at once


class WeightFile:
    """The bytes of ``source``, or of the file that ``source`` opens each time it is read. Raises
    ``ValueError`` with a reason, also if the file has changed since it was first opened.

    A small file is read at once. From others, a range that is in use is not read again, however
    many tensors name it. Once ranges overlap so much that they would take more memory than the
    file, they are views of the whole file. Readers may have to copy them, for example if they are
    not aligned, so different ranges may together have at most ``MAX_OVERLAP`` times the bytes of
    the file: memory is linear in the file's size.

    ``mapped``: ranges are views of a mapping. Pages are read when they are used, and other
    processes share them, but a file cut short kills the process when a missing page is used
    (SIGBUS), and writing to the file changes the weights.
    """

    def __init__(
        self, source: bytes | Callable[[], AbstractContextManager[BinaryIO]], mapped: bool = False
    ) -> None:
        self._ranges: dict[tuple[int, int], ref[np.ndarray]] = {}
        self._taken = 0
        self._whole: np.ndarray | None = None
        self._held: BinaryIO | None = None
        if isinstance(source, bytes):
            self._whole, self.size = np.frombuffer(source, np.uint8), len(source)
            return
        self._open = source
        with self._open() as file:
            self._path = os.path.abspath(file.name)
            self._identity = _identity(file)
            self.size = os.fstat(file.fileno()).st_size
            head = file.read(HEAD_BYTES)
            if is_pointer(head):
                from penstock.frontends.common.other_formats import LFS_POINTER

                raise ValueError(LFS_POINTER)
            if mapped and self.size:
                mapping = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
                self._whole = np.frombuffer(mapping, np.uint8)
                note_origin(self._whole, Origin(self._path, 0))
            elif self.size <= _SMALL:
                self._whole = self._read(0, self.size)

    def hold(self, opened: ExitStack) -> None:
        """Read from one open file until ``opened`` is closed; each range opens it otherwise. What
        ``opened`` held before is closed first, since a model may have thousands of files."""
        if self._whole is None:
            opened.close()
            self._held = opened.enter_context(self._open())
            opened.callback(setattr, self, "_held", None)

    @property
    def whole(self) -> memoryview | None:
        """All bytes, if they are held or mapped, else None."""
        return None if self._whole is None else self._whole.data

    def read(self, offset: int, size: int) -> np.ndarray:
        """Return ``size`` bytes from ``offset``, which lie within the file; read-only."""
        known = self._ranges.get((offset, size))
        data = None if known is None else known()
        if data is None:
            self._taken += size if known is None else 0
            if self._taken > MAX_OVERLAP * self.size:
                raise ValueError(
                    f"the ranges that tensors name in it overlap: they have more than "
                    f"{MAX_OVERLAP} times its {self.size} bytes; store each tensor once"
                )
            if self._whole is None and self._taken > self.size:
                self._whole = self._read(0, self.size)
            whole = self._whole
            data = self._read(offset, size) if whole is None else whole[offset : offset + size]
            self._ranges[offset, size] = ref(data)
        return data

    def _read(self, offset: int, size: int) -> np.ndarray:
        data = new_bytes(size)
        with self._open() if self._held is None else nullcontext(self._held) as file:
            file.seek(offset)
            count = file.readinto(data)  # type: ignore[attr-defined]
            # Otherwise weights of two files would be mixed.
            if count != size or _identity(file) != self._identity:
                raise ValueError("it was changed while it was read; load it again")
        data.flags.writeable = False
        note_origin(data, Origin(self._path, offset))
        return data


def _identity(file: BinaryIO) -> tuple[int, ...]:
    """Return the properties that differ if a file was replaced or written since."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


# The bound on the bytes of one model's constants.


@dataclass(eq=False)
class ConstantBudget:
    """Counts the bytes of a model's constants against the limit."""

    limits: Limits
    total: int = field(default=0, init=False)

    def count(self, dims: tuple[int, ...], dtype: np.dtype) -> int:
        """Return the number of elements. Raises ``TensorError`` for dims that NumPy rejects."""
        limits = self.limits
        if len(dims) > limits.max_dims:
            raise TensorError(f"it has {len(dims)} dims, more than {limits.max_dims}")
        if dims and min(dims) < 0:
            raise TensorError(f"it has a negative dim in {list(dims)}")
        count = math.prod(dims)
        # Dims of 0 count as 1: strides are products of the other dims.
        extent = count or math.prod([dim or 1 for dim in dims])
        if extent > limits.max_elements or extent * dtype.itemsize >= 2**63:
            raise TensorError(f"its dims {list(dims)} multiply to more than memory can hold")
        return count

    def spend(self, nbytes: int) -> None:
        """Count bytes of constants. Raises ``TensorError`` beyond ``Limits.max_constant_bytes``."""
        self.total += nbytes
        most = self.limits.max_constant_bytes
        if most is None or self.total <= most:  # the fast path, taken for each constant
            return
        if excess := self.limits.beyond("max_constant_bytes", self.total):
            raise TensorError(f"with it, the constants take {self.total} bytes, more {excess}")
