"""What executors take beside kernels, and from which time on a kernel is long."""

from __future__ import annotations

from penstock.core.records import NamedTuple


class Overheads(NamedTuple):
    """Seconds that executors take beside kernels; measured with threads of CPython 3.12."""

    dispatch_s: float
    """the overhead of the task loop for each task"""
    hand_over_s: float
    """the time to hand a task to another worker and to see its result"""
    python_s: float
    """the part of a step's time in which it holds Python's lock"""
    worth_s: float
    """a second worker pays only for plans that take longer than this"""
    long_s: float
    """a kernel that takes longer is worth a thread of its own, and that iterations of a loop
    overlap in it"""


OVERHEADS = Overheads(2.5e-6, 30e-6, 2e-6, 4 * 30e-6, 200e-6)
