"""Configuration of the whole suite: a cache folder of its own, and the profiles of Hypothesis.

Choose a profile with ``--hypothesis-profile=NAME``:

- ``default``: no deadlines, because the machines that run the suite are shared, and a blob with
  each failure, with which ``@reproduce_failure`` repeats it elsewhere;
- ``ci``: the same without the database of examples, so that each run draws anew.

Where ``CI`` is set, Hypothesis begins with a profile of its own that repeats the same examples in
every run and suppresses a health check: both are set here again.
"""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# Measured costs would otherwise be read from the user's own folder, and kept in it. Set before
# anything is imported, and inherited by the processes that tests start.
os.environ["PENSTOCK_CACHE"] = str(Path(tempfile.gettempdir(), f"penstock-tests-{os.getpid()}"))

# Failing assertions of these show their operands, as those of test modules do.
pytest.register_assert_rewrite("tests.support", "tests.executors.conformance")

settings.register_profile(
    "default", deadline=None, print_blob=True, derandomize=False, suppress_health_check=()
)
settings.register_profile("ci", settings.get_profile("default"), database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what has been imported and collected out of garbage collection: a test that collects
    garbage would walk the fifty thousand tests of the suite for a second."""
    gc.collect()
    gc.freeze()
