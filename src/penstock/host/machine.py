"""The machine to which measurements belong, and the user's cache folder in which they are kept."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache

import numpy as np

from penstock.core import VERSION
from penstock.host.threads import core_budget


def cache_folder() -> str:
    """Return the folder for measurements and sessions, or "" if nothing is to be kept."""
    named = os.environ.get("PENSTOCK_CACHE")
    if named:
        return "" if named == "off" else named
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
        return os.path.join(os.path.normpath(local), "penstock", "Cache")
    # The base directories of freedesktop.org, which programs follow on macOS too if they are set.
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):
        of_system = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
        caches = os.path.expanduser(of_system)
    return os.path.join(caches, "penstock")


@cache
def machine_name() -> str:
    """Describe the machine as costs depend on it: processor, cores, and versions of libraries."""
    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    python = sys.version.partition(" ")[0]
    return (
        f"{_processor()}, {core_budget()} cores, Python {python}, NumPy {np.__version__}, "
        f"{blas.get('name')} {blas.get('version')}, Penstock {VERSION}"
    )


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", errors="replace") as file:
        for line in file:
            if line.startswith("model name") and (name := line.partition(":")[2].strip()):
                return name
    import platform  # imported late, since it starts a process

    return platform.processor() or platform.machine()
