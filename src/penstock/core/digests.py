"""Digests of names and of files.

``hashlib`` loads OpenSSL, 3 MB of memory; CPython's own BLAKE2 module does not.
"""

from __future__ import annotations

try:
    from _blake2 import blake2b
except ImportError:  # another implementation of Python
    from hashlib import blake2b

__all__ = ["blake2b", "digest"]


def digest(data: bytes, size: int = 16) -> str:
    """Return the BLAKE2b digest of ``data`` of ``size`` bytes, in hexadecimal."""
    text: str = blake2b(data, digest_size=size).hexdigest()
    return text
