"""Bounds on what a model may ask for, so that a file cannot exhaust the machine that reads it."""

from __future__ import annotations

import os
from contextlib import suppress

from penstock.core.records import changed_fields, dataclass, field, fields, replace

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int | None:
    """Return the bytes of memory that the process may use, or None if the system does not say: the
    machine's memory, or the limit of its cgroup (v2 or v1) if that is lower."""
    sizes = []
    with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CGROUPS:
        with suppress(OSError, ValueError), open(path) as file:  # no such file, or "max"
            sizes.append(int(file.read()))
    return min(sizes, default=None)


_UNITS = {"": 1, **{f"{c}B": 1000**i for i, c in enumerate("KMGT", 1)}}
_UNITS |= {"B": 1, **{f"{c}IB": 1024**i for i, c in enumerate("KMGT", 1)}}


def parse_bytes(text: str) -> int:
    """Return the number of bytes for a text such as "512MB" (1000**2 bytes) or "1.5GiB" (1024**3
    bytes). Raises ``ValueError`` for other texts."""
    number = text.rstrip("kKmMgGtTiIbB ")
    unit = _UNITS.get(text[len(number) :].strip().upper())
    with suppress(ValueError, OverflowError):
        if unit is not None and float(number) > 0:
            return int(float(number) * unit)
    raise ValueError(f'{text!r} is no size: write "512MB" (1000**2 bytes), "2GiB" (1024**3) or so')


FREE_NODES = 20_000
"""nodes that a model may have however small its file is"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds checked while a model is loaded, compiled and run. ``None`` means no bound. Exceeding
    one raises ``InvalidModel`` during loading, and ``LimitExceeded`` during compiling or a run."""

    max_nodes: int | None = 5_000_000
    """nodes over all graphs of a model, function bodies expanded"""
    max_nodes_per_byte: float | None = 0.25
    """nodes per byte of the file beyond the first ``FREE_NODES``: with functions that each call
    another twice, the number of nodes doubles every few bytes"""
    max_depth: int = 64
    """levels of nested graphs and functions"""
    max_dims: int = 64
    """dims of one tensor; the default is NumPy's own bound"""
    max_elements: int = 2**62
    """elements of one tensor: a product of dims beyond it would overflow byte counts"""
    max_bytes: int | None = field(default_factory=machine_bytes)
    """bytes of the arenas of one plan, on the host and on each device, and of one tensor whose
    shape is known before a run; by default the memory of the machine. A lower bound also applies to
    everything that one run allocates"""
    max_constant_bytes: int | None = None
    """bytes of all constants of a model"""
    max_iterations: int | None = None
    """iterations of one Loop, While or Scan"""
    max_calls: int = 10_000
    """depth of the stack of function calls in a run"""
    max_folded_bytes: int = 16 * 2**20
    """bytes of a folded constant, unless it is smaller than the constants it replaces, or is
    float32 that was stored in fewer bits"""
    max_plans_bytes: int | None = None
    """bytes of the plans that a session keeps: arenas, programs and kernels created by runs; the
    least recently used are dropped. ``None``: the bytes of the constants, but at least 64 MiB"""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value, unbounded = getattr(self, limit.name), "None" in str(limit.type)
            if value is None and unbounded:
                continue
            kinds = (int, float) if "float" in str(limit.type) else int
            kind = "number" if "float" in str(limit.type) else "whole number"
            needed = f"Limits.{limit.name} = {value!r}: a {kind} of at least 0 is needed"
            needed += ", or None for no bound" if unbounded else ""
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise TypeError(needed)
            if not value >= 0:
                raise ValueError(needed)

    def __repr__(self) -> str:
        return changed_fields(self, DEFAULT_LIMITS)

    def beyond(self, name: str, amount: int) -> str:
        """Return the end of a sentence about an ``amount`` above a limit, or "" if it is within."""
        most = getattr(self, name)
        if most is None or amount <= most:
            return ""
        return f"than Limits.{name} = {most}; raise the limit if you trust the model"

    def within(self, memory: int) -> Limits:
        """Return these limits for runs that allocate at most ``memory`` bytes, and count them."""
        machine = DEFAULT_LIMITS.max_bytes
        most = [n for n in (self.max_bytes, memory, machine and machine - 1) if n is not None]
        return replace(self, max_bytes=max(min(most), 0))

    @property
    def count_runs(self) -> bool:
        """Whether runs count allocations whose size depends on data. By default they leave it to
        the system to refuse memory beyond what it has."""
        most, machine = self.max_bytes, DEFAULT_LIMITS.max_bytes
        less = most is not None and (machine is None or most < machine)
        return less or self.max_dims < DEFAULT_LIMITS.max_dims


DEFAULT_LIMITS = Limits()
