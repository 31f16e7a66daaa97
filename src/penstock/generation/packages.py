"""The packages of the extra ``generate``, which are imported where they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core.errors import PenstockError


@contextmanager
def extra_needed(purpose: str) -> Iterator[None]:
    """Replace an ``ImportError`` by an error that names the extra to install for ``purpose``."""
    try:
        yield
    except ImportError as error:
        raise PenstockError(
            f"{purpose} ({error}): pip install 'penstock-runtime[generate]'"
        ) from error
