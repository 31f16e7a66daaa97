"""The machine that measurements are of, and the user's cache folder, where they are kept."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache

import numpy as np

from penstock.core import VERSION
from penstock.host.threads import core_budget

# Systems whose caches lie elsewhere than freedesktop.org's base directories say.
_WITH_FOLDERS_OF_THEIR_OWN = ("darwin", "win32")


def cache_folder() -> str:
    """The folder that Penstock keeps measurements in."""
    named = os.environ.get("PENSTOCK_CACHE")
    if named:
        return named
    if sys.platform not in _WITH_FOLDERS_OF_THEIR_OWN:
        # As platformdirs has it, whose import takes 9 ms, in each process that compiles.
        caches = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(caches):
            caches = os.path.expanduser("~/.cache")
        return os.path.join(caches, "penstock")
    from platformdirs import user_cache_dir

    return user_cache_dir("penstock", appauthor=False)


@cache
def machine_name() -> str:
    """What costs depend on beside the model: processor, cores, and versions of libraries."""
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
    import platform  # which starts a process

    return platform.processor() or platform.machine()
