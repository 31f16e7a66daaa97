"""Processes of their own, and forked children, for tests of what these inherit and print."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable


def end_of(program: str, *arguments: str) -> str:
    """What a process of its own prints that runs ``program`` and ends."""
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def in_child(job: Callable[[], object]) -> bool:
    """Whether ``job`` runs in a forked child without an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads
        child = os.fork()
    if not child:
        done = 1
        try:
            job()
            done = 0
        finally:
            os._exit(done)
    return os.waitpid(child, 0)[1] == 0
