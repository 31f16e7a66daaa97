"""System shared memory: tensors of clients on the same machine that bypass the socket.

A client creates a POSIX segment, registers a region of it under a name, and refers to offsets in
regions instead of sending or receiving bytes. Segments are never mapped: ``pread`` and ``pwrite``
copy between them and memory of the server. If the server mapped a segment, a client could truncate
it and end the server by SIGBUS, or change inputs after a kernel has checked them::

    client                         /dev/shm/KEY                    server
    writes inputs ──────────────>  [  region "a"  ]  ── pread ──>  a feed of its own
    reads outputs <──────────────  [  region "b"  ]  <── pwrite ─  an output
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from pathlib import Path
from typing import TypeGuard

import numpy as np

from penstock.core.errors import InvalidInput, PenstockError
from penstock.core.records import dataclass
from penstock.core.types import JsonObject

# The folder of POSIX shared memory on Linux.
_FOLDER = Path("/dev/shm")
# Most registered regions: each has a file descriptor.
_MOST = 256
# Larger than any memory, but within the range of the system's offsets.
_LARGEST = 1 << 60


class UnknownRegion(PenstockError):  # noqa: N818
    """A request names a region that is not registered."""


class SharedRegion:
    """The region of ``byte_size`` bytes from ``offset`` of the segment ``key``. Raises
    ``InvalidInput`` if the segment does not exist, is too small, or cannot be read and written."""

    def __init__(self, name: str, key: str, offset: int, byte_size: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        file = key.removeprefix("/")
        try:
            length = len(os.fsencode(file))
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON may hold
            length = 0
        if not 0 < length <= 255 or file in (".", "..") or {"/", "\0"} & {*file}:
            raise InvalidInput(f"shared memory key {key!r:.80} is not a valid segment name")
        # O_NOFOLLOW: a link could lead to any file. O_NONBLOCK: a pipe would wait for a writer.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self.descriptor = os.open(_FOLDER / file, flags)
        except OSError as error:
            raise InvalidInput(f"shared memory key {key!r:.80}: {error.strerror}") from error
        # Requests that have the region keep it open when it is unregistered.
        weakref.finalize(self, os.close, self.descriptor)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            raise InvalidInput(f"shared memory key {key!r:.80} is not a shared memory segment")
        self.check()

    def check(self) -> None:
        """Raise ``InvalidInput`` if the segment is now too small for the region."""
        size = os.fstat(self.descriptor).st_size
        if size < self.offset + self.byte_size:
            raise InvalidInput(
                f"shared memory region {self.name!r} ends {self.offset + self.byte_size} bytes "
                f"from the start of segment {self.key!r}, which has {size}"
            )

    def describe(self) -> JsonObject:
        return {
            "name": self.name,
            "key": self.key,
            "offset": self.offset,
            "byte_size": self.byte_size,
        }


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """The bytes of a region for one tensor."""

    region: SharedRegion
    offset: int
    size: int

    def read(self) -> memoryview:
        """Return a copy of the bytes. Raises ``InvalidInput`` if the segment has shrunk."""
        self.region.check()
        data = np.empty(self.size, np.uint8).data
        done, start = 0, self.region.offset + self.offset
        while done < self.size:
            count = os.preadv(self.region.descriptor, [data[done:]], start + done)
            if not count:
                self.region.check()  # it has shrunk meanwhile
                raise InvalidInput(f"shared memory region {self.region.name!r} has changed")
            done += count
        return data

    def write(self, data: bytes | memoryview) -> int:
        """Write ``data`` from the first byte on, and return its number of bytes. Raises
        ``InvalidInput`` if they are too many, or if the segment has shrunk."""
        if len(data) > self.size:
            raise InvalidInput(
                f"an output of {len(data)} bytes exceeds the {self.size} bytes reserved for it "
                f"in shared memory region {self.region.name!r}"
            )
        self.region.check()
        done, start = 0, self.region.offset + self.offset
        while done < len(data):
            done += os.pwrite(self.region.descriptor, memoryview(data)[done:], start + done)
        return done

    def parameters(self, size: int) -> JsonObject:
        """Return the parameters of an output of ``size`` bytes in a response."""
        return {
            "shared_memory_region": self.region.name,
            "shared_memory_byte_size": size,
            "shared_memory_offset": self.offset,
        }


class SharedMemory:
    """Registered regions, by name. ``max_bytes``: the maximum of a request's inputs in them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._regions: dict[str, SharedRegion] = {}

    def register(self, name: str, document: JsonObject) -> None:
        """Register a region by ``key``, ``offset`` and ``byte_size``. Raises ``InvalidInput``."""
        key, offset, size = map(document.get, ("key", "offset", "byte_size"))
        if not isinstance(key, str):
            raise InvalidInput(f"shared memory region {name!r} has no key")
        offset = 0 if offset is None else offset
        if not is_size(offset) or not is_size(size) or not size:
            raise InvalidInput(
                f"shared memory region {name!r} has offset {offset!r:.40} and byte_size "
                f"{size!r:.40}, which must be numbers of bytes"
            )
        region = SharedRegion(name, key, offset, size)
        with self._lock:
            if name in self._regions:
                raise InvalidInput(
                    f"shared memory region {name!r} is already registered; unregister it first"
                )
            if len(self._regions) >= _MOST:
                raise InvalidInput(f"{_MOST} shared memory regions are registered; unregister some")
            self._regions[name] = region

    def unregister(self, name: str | None) -> None:
        """Unregister a region, or all. An unknown name is ignored, as in Triton."""
        with self._lock:
            if name is None:
                self._regions.clear()
            else:
                self._regions.pop(name, None)

    def describe(self, name: str | None) -> list[JsonObject]:
        """Return the description of a region, or of all. Raises ``UnknownRegion``."""
        if name is not None:
            return [self._find(name).describe()]
        return [region.describe() for region in list(self._regions.values())]

    def place(self, parameters: JsonObject) -> SharedPlace:
        """Return the place that an input's or output's parameters name. Raises ``InvalidInput``."""
        name = parameters["shared_memory_region"]
        if not isinstance(name, str):
            raise InvalidInput(f"shared memory region {name!r:.40} must be named by a string")
        try:
            region = self._find(name)
        except UnknownRegion as error:
            raise InvalidInput(str(error)) from error
        size, offset = parameters.get("shared_memory_byte_size"), 0
        if parameters.get("shared_memory_offset") is not None:
            offset = parameters["shared_memory_offset"]
        if not is_size(size) or not is_size(offset) or offset + size > region.byte_size:
            raise InvalidInput(
                f"shared memory region {name!r} has {region.byte_size} bytes, not {size!r:.40} "
                f"at offset {offset!r:.40}"
            )
        return SharedPlace(region, offset, size)

    def _find(self, name: str) -> SharedRegion:
        region = self._regions.get(name)
        if region is None:
            raise UnknownRegion(f"shared memory region {name!r:.80} is not registered")
        return region


def is_size(value: object) -> TypeGuard[int]:
    """Whether a value from JSON is a number of bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST
