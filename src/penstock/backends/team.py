"""The threads of the native kernels, for other libraries whose kernels run beside them."""

from __future__ import annotations

from penstock.host.native import library
from penstock.host.openmp import is_tuned


def adopt(address: int) -> bool:
    """Let the library that has a function at ``address`` use the team (``native/c/team.c``) in
    place of its OpenMP runtime; whether it does. It does not where users have tuned that."""
    native = library()
    return native is not None and not is_tuned() and bool(native.functions.adopt(address))
