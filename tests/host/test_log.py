"""What is logged, and that logging is not imported for it."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from tests.session.test_stats import TEXT, x
from tests.support.logs import logged
from tests.support.onnx_text import compile_text


def test_log_tells_of_plans_and_their_placement():
    session = compile_text(TEXT, backends=["numpy"], executor="linear")
    with logged("penstock", logging.DEBUG) as records:
        session.run(x(3))
        session.run(x(3))
    first, *others = [record.getMessage() for record in records]
    assert first.startswith("compiled a plan of 'g' for (x: float32[3]) in ")
    assert "executor linear" in first and "backends numpy" in first
    assert others == ["Exp on numpy: 1 steps", "Neg on numpy: 1 steps"]


def test_penstock_does_not_import_logging():
    program = """
import sys
from penstock.host.log import INFO, is_logged, log
assert not is_logged(INFO)
log(INFO, "nobody reads this")
assert "logging" not in sys.modules, "imported"
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or "imported" not in done.stderr, done.stderr


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_nothing_is_logged_below_the_level(level):
    with logged("penstock", level) as records:
        compile_text(TEXT, backends=["numpy"]).run(x(2))
    assert not records
