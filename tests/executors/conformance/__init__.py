"""The conformance class of executors: the tests of each executor inherit it."""

from __future__ import annotations

from tests.executors.conformance.base import Recorder, assert_equal
from tests.executors.conformance.concurrency import Concurrency
from tests.executors.conformance.endings import Endings
from tests.executors.conformance.loops import Loops
from tests.executors.conformance.observers import Observers
from tests.executors.conformance.results import Results

__all__ = ["ExecutorConformance", "Recorder", "assert_equal"]


class ExecutorConformance(Results, Loops, Endings, Concurrency, Observers):
    """The behaviour that every executor must have.

    A test class sets ``executor``; ``backends`` are those that its models are compiled with.
    ``sampled``: it is another way to run what other classes do, and ``make test`` runs a third of its
    tests, drawn by the day (``tests/conftest.py``).
    """

    sampled = False
