"""The packages of the extra ``generate``, which are imported where they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.core.errors import PenstockError


@contextmanager
def extra_needed(purpose: str) -> Iterator[None]:
    """Say in place of an ``ImportError`` which extra to install for what ``purpose`` names."""
    try:
        yield
    except ImportError as error:
        raise PenstockError(
            f"{purpose} ({error}): pip install 'penstock-runtime[generate]'"
        ) from error
