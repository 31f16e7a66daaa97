"""Configuration of the whole suite: a cache folder of its own, and the profiles of Hypothesis.

Choose a profile with ``--hypothesis-profile=NAME``:

- ``default``: no deadlines, because the machines that run the suite are shared, and a blob with
  each failure, with which ``@reproduce_failure`` repeats it elsewhere;
- ``ci``: the same without the database of examples, so that each run draws anew;
- ``full``: sixteen times as many examples, for ``make test-full``.

A property that is worth more or fewer examples than others has them by ``examples`` of
``tests/support/sweeps.py``, as a multiple of those of the profile.

Where ``CI`` is set, Hypothesis begins with a profile of its own that repeats the same examples in
every run and suppresses a health check: both are set here again.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import sys
import tempfile
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import settings

# Measured costs would otherwise be read from the user's own folder, and kept in it. Set before
# anything is imported, and inherited by the processes that tests start.
CACHE = Path(tempfile.gettempdir(), f"penstock-tests-{os.getpid()}")
os.environ["PENSTOCK_CACHE"] = str(CACHE)
# A file in the place of the folder of sessions: none is kept unless a test asks for it.
CACHE.mkdir(exist_ok=True)
(CACHE / "sessions").touch()
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

# Threads change places ten times as often as by default: tests of concurrent runs see more orders, and
# a thread that starts beside busy ones waits less for Python's lock.
sys.setswitchinterval(0.0005)

# The day whose samples of long sweeps are run (tests/support/sweeps.py): all workers inherit it.
DAY = "PENSTOCK_TESTS_DAY"
os.environ.setdefault(DAY, datetime.now(UTC).date().isoformat())

# Failing assertions of these show their operands, as those of test modules do.
pytest.register_assert_rewrite("tests.support", "tests.executors.conformance")

settings.register_profile(
    "default",
    max_examples=25,
    deadline=None,
    print_blob=True,
    derandomize=False,
    suppress_health_check=(),
)
settings.register_profile("ci", settings.get_profile("default"), database=None)
settings.register_profile("full", settings.get_profile("ci"), max_examples=400)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_sessionstart() -> None:
    """Check all plans that are compiled in this process."""
    from penstock.compiler import stages

    stages.ALWAYS_CHECKED = True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the generators of the test's module to a state that comes of the test's name: what a test
    draws does not depend on the tests before it, which another run may have in another process."""
    for value in vars(getattr(item, "module", None) or object).values():
        if isinstance(value, np.random.Generator):
            seed = zlib.crc32(item.nodeid.encode())
            value.bit_generator.state = np.random.default_rng(seed).bit_generator.state


def pytest_report_header() -> str:
    return f"samples: {DAY}={os.environ[DAY]}"


@pytest.fixture(scope="session")
def most_bytes() -> Callable[[Callable[[], object]], int]:
    """Function that calls a job and returns the bytes that it held at most, beyond those held
    before, in objects of Python and arrays of NumPy.

    Tracing never stops: before Python 3.12.9, a thread that begins or ends while
    ``tracemalloc.stop`` runs can crash the process (python/cpython#128679).
    """
    gc.collect()
    gc.freeze()  # what tests before these have left need not be walked for each measurement
    tracemalloc.start()

    def most(job: Callable[[], object]) -> int:
        gc.collect()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        job()
        return tracemalloc.get_traced_memory()[1] - before

    return most


TESTS = Path(__file__).parent
LONG = 10
"""cases of a sweep of which a SHARE is drawn"""
SHARE, COSTLY_SHARE = 1 / 8, 1 / 3
SWEPT = {
    *("algorithms", "backends", "executors", "frontends", "ops", "passes", "plan", "session"),
    "stepping",
}
"""folders whose long sweeps are of many cases that are alike"""


def _is_left_out(node: pytest.Item | pytest.Function, name: str, cases: int) -> bool:
    """Whether a test, or case ``name`` of the ``cases`` of it, is left to ``make test-full`` today."""
    around = getattr(node, "cls", None), getattr(node, "module", None)
    alike = any(getattr(part, "sampled", False) for part in around)
    long = cases >= LONG and node.path.relative_to(TESTS).parts[0] in SWEPT
    costly = node.get_closest_marker("costly")
    if not alike and not costly and (not long or node.get_closest_marker("whole")):
        return False
    share = SHARE if alike or long or costly is None else costly.kwargs.get("share", COSTLY_SHARE)
    return random.Random(f"{os.environ[DAY]} {name}").random() >= share


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Make no tests of the cases that will not be chosen: two thirds of all, and a third of the time that
    collecting takes. ``metafunc._calls`` are the cases; the first is kept where none is chosen, since a
    test without cases would be one without parameters."""
    yield
    node, calls = metafunc.definition, metafunc._calls
    if metafunc.config.option.markexpr != "not full" or not calls:
        return
    run = [call for call in calls if not any(mark.name == "full" for mark in call.marks)]
    names = [f"{node.nodeid}[{call.id}]" for call in run]
    chosen = [
        call
        for call, name in zip(run, names, strict=True)
        if not _is_left_out(node, name, len(run))
    ]
    metafunc._calls = chosen or [replace(calls[0], marks=[pytest.mark.full.mark])]


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of long sweeps, most tests of sampled classes and modules, and most costly tests, to
    ``make test-full``, by the day (tests/support/sweeps.py). Run costly tests first, which would else let
    workers wait for one at the end, and tests that trace allocations last, since tracing slows all that
    come after."""
    run = [item for item in items if not item.get_closest_marker("full")]
    cases = Counter(item.nodeid.partition("[")[0] for item in run)
    for item in run:
        if _is_left_out(item, item.nodeid, cases[item.nodeid.partition("[")[0]]):
            item.add_marker(pytest.mark.full)

    def place(item: pytest.Item) -> tuple[bool, bool]:
        traces = "most_bytes" in getattr(item, "fixturenames", ())
        return traces, item.get_closest_marker("costly") is None

    items.sort(key=place)


def pytest_collection(session: pytest.Session) -> None:
    """Collect no garbage while tests are collected: nearly all that is created then is kept."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what has been imported and collected out of garbage collection: a test that collects
    garbage would walk the tests of the whole suite for a second."""
    gc.freeze()
    gc.enable()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Tell of a test once from a worker of pytest-xdist, and of its beginning, setup, teardown and end
    only where they fail: five messages for each of forty thousand tests are a tenth of all work."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True
