"""Processes of their own, and forked children, for tests of what these inherit and print."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from tests.support.timing import wait_until


def end_of(program: str, *arguments: str) -> str:
    """What a process of its own prints that runs ``program`` and ends."""
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


LOAD = """
import sys, penstock as ps

def resident(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

try:
    ps.load(sys.argv[2])  # what a load imports
except ps.PenstockError:
    pass
before, text = resident("VmRSS"), "loaded"
try:
    model = ps.load(sys.argv[1])
except ps.PenstockError as error:
    text = f"{type(error).__name__}: {error}"
print(resident("VmHWM") - before, text)
"""


def load_in_child(path: Path, similar: Path) -> tuple[int, str]:
    """The most bytes that a process of its own holds more while it loads a model, and the text of
    the error, or "loaded". ``similar`` is a small model, which is loaded first."""
    size, _, text = end_of(LOAD, str(path), str(similar)).rstrip("\n").partition(" ")
    return int(size), text


def stop(process: int) -> None:
    """Let a process stand still, and return when all of its threads do: until the kernel comes to
    them they may answer what is asked afterwards."""
    os.kill(process, signal.SIGSTOP)
    wait_until(lambda: set(_states(process)) <= {"T"})


def _states(process: int) -> list[str]:
    """A letter for each thread of a process; none where there is no /proc."""
    states = []
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        try:
            stat = path.read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        states.append(stat.rpartition(")")[2].split()[0])
    return states


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
