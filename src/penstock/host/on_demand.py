"""Functions whose modules are imported when they are first called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def imported(path: str) -> Callable[..., Any]:
    """Return the function ``package.module.name``, whose module is imported by the first call."""
    module, _, name = path.rpartition(".")
    function: Callable[..., Any] | None = None

    def call(*arguments: object, **options: object) -> Any:
        nonlocal function
        # A module takes 0.35 ms to import, and most models need a part of them (decision 71).
        if function is None:
            function = getattr(import_module(module), name)
        return function(*arguments, **options)

    call.__name__ = name
    return call
