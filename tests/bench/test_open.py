"""Where loading, compiling and the first run spend their time."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.open import HERE, STAGES


def test_every_stage_of_opening_a_model_is_timed():
    command = [sys.executable, "-m", "bench.open", "--one", "torch-modules/RMSNorm_dynamo"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE.parent)
    assert json.loads(done.stdout).keys() == {*STAGES}
