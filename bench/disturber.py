"""A process that takes a core away: ``python -m bench.disturber SHARE``.

It keeps the last of the cores that it may use busy: all of the time with a share of 1, half of it,
in slices of 5 ms, with a share of 0.5. ``disturbed`` starts one for as long as a block lasts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SLICE = 5e-3  # seconds that the core is busy at a time


@contextmanager
def disturbed(share: float) -> Iterator[None]:
    """Have this share of a core taken away within the block; nothing is, with a share of 0."""
    if not share:
        yield
        return
    command = [sys.executable, "-m", "bench.disturber", str(share)]
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
            yield
        finally:
            process.kill()


def main() -> None:
    share = float(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    idle = SLICE / share - SLICE
    print("begun", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        end = time.perf_counter() + SLICE
        while time.perf_counter() < end:
            pass
        if idle:
            time.sleep(idle)


if __name__ == "__main__":
    main()
