"""What holds while anything of a model is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import LimitExceeded
from penstock.host import gc_pause


@contextmanager
def compile_guard() -> Iterator[None]:
    """Pause garbage collection; a model too large for the machine raises ``LimitExceeded``."""
    with gc_pause.paused():
        try:
            yield
        except RecursionError as error:
            raise LimitExceeded("the model's graphs nest too deep to be compiled") from error
        except MemoryError as error:
            message = f"there is not enough memory to compile the model: {error}"
            raise LimitExceeded(message) from error
