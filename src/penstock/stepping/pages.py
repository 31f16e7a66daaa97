"""Pages of caches: memory for some positions of all layers, shared by sequences with one prefix.

::

    pool       [pages, elements]     most of the memory has not been touched yet
    sequence   [4, 0, 7]             its pages in order; the last one may have room
    prefixes   digest of all rows up to the end of a page -> the page

A full page is not written any more. Its digest covers its rows and all rows before them, so a
sequence with the same prefix reads the same pages. Pages that no sequence holds are kept for later
sequences. If no page is free, the least recently used of them are reused.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from heapq import nsmallest

import numpy as np

from penstock.core.errors import LimitExceeded
from penstock.core.records import dataclass

_FIRST = b""


def digests(rows: Iterable[bytes], before: bytes = _FIRST) -> Iterator[bytes]:
    """Yield the digest of each full page of ``rows``, which covers all rows up to its end."""
    for content in rows:
        before = blake2b(before + content, digest_size=16).digest()
        yield before


@dataclass(eq=False)
class _Prefix:
    """A full page, the prefix ``before`` it, how many others continue it, and its last use."""

    page: int
    before: bytes
    continued: int = 0
    used: int = 0


class PagePool:
    """Pages of ``elements`` float32, as many as fit into ``most_bytes`` but at least one. Sequences
    hold pages, and so does the table of prefixes."""

    def __init__(self, elements: int, most_bytes: int) -> None:
        self.nbytes_of_page = elements * 4
        self.count = max(1, most_bytes // self.nbytes_of_page)
        # Untouched memory costs nothing: the system provides zeros when a page is first written.
        try:
            self._memory = mmap.mmap(-1, self.count * self.nbytes_of_page)
        except (OSError, OverflowError, ValueError) as error:
            text = f"caches of {self.count * self.nbytes_of_page} bytes: {error}; lower cache_bytes"
            raise LimitExceeded(text) from None
        self.array = np.frombuffer(self._memory, np.float32).reshape(self.count, elements)
        self._holders: list[int] = []  # of pages that were ever taken
        self._free: list[int] = []  # of these
        self._prefixes: dict[bytes, _Prefix] = {}
        self._clock = 0

    @property
    def free(self) -> int:
        """The number of pages that no sequence holds."""
        return len(self._free) + self.count - len(self._holders)

    @property
    def kept(self) -> int:
        """The number of pages kept for sequences with the same prefix."""
        return len(self._prefixes)

    def take(self) -> int | None:
        """Return a page to write, or None if sequences hold them all."""
        if not self.free and not self._evict():
            return None
        if self._free:
            page = self._free.pop()
            self._holders[page] = 1
            return page
        self._holders.append(1)
        return len(self._holders) - 1

    def hold(self, page: int) -> None:
        """Add a holder of a page."""
        self._holders[page] += 1

    def drop(self, page: int) -> None:
        """Remove a holder of a page; a page without holders is free."""
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether a page has several holders."""
        return self._holders[page] > 1

    def find(self, digest: bytes) -> int | None:
        """Acquire the page with a digest and return it, or None if there is none."""
        prefix = self._prefixes.get(digest)
        if prefix is None:
            return None
        self._clock += 1
        prefix.used = self._clock
        self.hold(prefix.page)
        return prefix.page

    def keep(self, page: int, digest: bytes, before: bytes) -> None:
        """Keep a full page for sequences with the same prefix, unless one is kept already."""
        if digest in self._prefixes or (before and before not in self._prefixes):
            return
        self._clock += 1
        self._prefixes[digest] = _Prefix(page, before, used=self._clock)
        if before:
            self._prefixes[before].continued += 1
        self.hold(page)

    def forget(self) -> None:
        """Stop keeping pages that no sequence holds."""
        while self._evict():
            pass

    def _evict(self) -> bool:
        """Free some of the least recently used pages that no sequence holds and no other prefix
        continues. Return whether there were any."""
        old = [
            (prefix.used, digest)
            for digest, prefix in self._prefixes.items()
            if not prefix.continued and self._holders[prefix.page] == 1
        ]
        # Several at once, since each call examines all prefixes.
        for _, digest in nsmallest(1 + len(old) // 16, old):
            prefix = self._prefixes.pop(digest)
            if prefix.before:
                self._prefixes[prefix.before].continued -= 1
            self.drop(prefix.page)
        return bool(old)
