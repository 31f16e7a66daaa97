"""Digests of names and of files."""

from __future__ import annotations

import hashlib

from penstock.core.digests import digest
from tests.support.processes import end_of


def test_digest_is_blake2b():
    assert digest(b"name", 8) == hashlib.blake2b(b"name", digest_size=8).hexdigest()


def test_digest_loads_no_openssl():
    program = "import sys; from penstock.core.digests import digest; digest(b'x')"
    assert end_of(f"{program}; print('_hashlib' in sys.modules)") == "False\n"
