"""The vocabulary of all folders: types, errors, limits, records, checkpoints, capabilities,
and objects that are closed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Self, TypeVar

VERSION = "0.1.0"
"""the version of Penstock, as in its package metadata, which would take longer to read"""

C = TypeVar("C")


def capability(owner: object, protocol: type[C]) -> C | None:
    """Query an object, such as a backend, for optional members. Return ``owner`` if it has all
    methods and properties that the body of ``protocol`` declares, none of them None; else return
    None. Called while a session is compiled, never during a run."""
    members: tuple[str, ...] = _members(protocol)  # type: ignore[arg-type]
    for name in members:  # a loop, since this is called often, for each backend
        if getattr(owner, name, None) is None:
            return None
    return owner  # type: ignore[return-value]


@cache
def _members(protocol: type) -> tuple[str, ...]:
    return tuple([name for name in vars(protocol) if not name.startswith("_")])


class Closeable:
    """A context manager that closes itself."""

    close: Callable[..., None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
