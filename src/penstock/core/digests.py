"""Digests of names and of files.

``hashlib`` loads OpenSSL, 3 MB of memory, which the function of CPython's own does without.
"""

from __future__ import annotations

try:
    from _blake2 import blake2b
except ImportError:  # of another implementation of Python
    from hashlib import blake2b

__all__ = ["blake2b", "digest"]


def digest(data: bytes, size: int = 16) -> str:
    """``size`` bytes of the BLAKE2b of ``data``, in hexadecimal."""
    text: str = blake2b(data, digest_size=size).hexdigest()
    return text
