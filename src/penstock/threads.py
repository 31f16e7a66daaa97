"""The one core budget of the process, and the threads that serve it."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

_LOCK = threading.Lock()
_POOL: ThreadPoolExecutor | None = None


@cache
def core_budget() -> int:
    """How many cores this process may keep busy.

    The least of its affinity, its cgroup's CPU quota and ``OMP_NUM_THREADS``.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    for limit in (_quota(), _omp()):
        if limit is not None:
            cores = min(cores, max(1, limit))
    return cores


def _quota() -> int | None:
    """Whole cores of the cgroup's quota, rounded up (cgroup v2, then v1)."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        pass
    try:
        folder = Path("/sys/fs/cgroup/cpu")
        micros = int((folder / "cpu.cfs_quota_us").read_text())
        period_us = int((folder / "cpu.cfs_period_us").read_text())
        return math.ceil(micros / period_us) if micros > 0 else None
    except (OSError, ValueError):
        return None


def _omp() -> int | None:
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def pool() -> ThreadPoolExecutor:
    """The threads that ``submit`` and ``arun`` run on; as many as the budget, for the process."""
    global _POOL
    with _LOCK:
        if _POOL is None:
            _POOL = ThreadPoolExecutor(core_budget(), thread_name_prefix="penstock")
        return _POOL


def _forget() -> None:
    """After a fork the child has none of its parent's threads."""
    global _POOL, _LOCK
    _LOCK = threading.Lock()
    _POOL = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
