"""Optional members of an object, such as a backend, asked for as one documented protocol."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

C = TypeVar("C")


def capability(owner: object, protocol: type[C]) -> C | None:
    """``owner``, if it has all methods and properties that the body of ``protocol`` declares, and
    none of them is None; else None. Asked while a session is compiled, never during a run."""
    members: tuple[str, ...] = _members(protocol)  # type: ignore[arg-type]
    if any(getattr(owner, name, None) is None for name in members):
        return None
    return owner  # type: ignore[return-value]


@cache
def _members(protocol: type) -> tuple[str, ...]:
    return tuple([name for name in vars(protocol) if not name.startswith("_")])
