"""Where loading, compiling and the first run spend their time, and what they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.open import HERE
from bench.open_counts import COLUMNS
from bench.open_stages import STAGES

NETWORKS = "tests/models/tflite/net"
# Calls of Python's functions, of the first plan and of one for further shapes, with 2 to 3 % to
# spare: versions of Python and NumPy differ by a few, and processors by what they compare: those
# without VNNI take 67 more for codes.
MOST_CALLS = {
    "torch-modules/LayerNorm_dynamo": (1_210, 690),
    "scikit-learn/MLPRegressor_double": (3_150, 2_240),
    "derived/torch-modules-mlp_script__qdq_s8s8": (6_320, 4_180),
    f"{NETWORKS}/mini_lstm_fused.tflite": (5_240, 0),
    f"{NETWORKS}/mini_mobilenet_v2_int8.tflite": (13_770, 0),
    f"{NETWORKS}/mini_resnet.tflite": (7_820, 0),
}


def in_process(folder: Path, *arguments: str) -> list:
    """What ``python -m bench.open`` prints, without measured costs."""
    command = [sys.executable, "-m", "bench.open", *arguments]
    environment = {**os.environ, "PENSTOCK_CACHE": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=HERE.parent, env=environment
    )
    return json.loads(done.stdout)


def test_every_stage_of_opening_a_model_is_timed(tmp_path):
    seconds = in_process(tmp_path, "--one", "torch-modules/RMSNorm_dynamo")
    assert {*seconds} == {*STAGES}


@pytest.mark.parametrize("model", MOST_CALLS)
def test_opening_a_model_takes_at_most_its_bound_of_calls(model, tmp_path):
    figures, calls = in_process(tmp_path, "--counts", "--one", model)
    assert [*figures] == [*COLUMNS]
    assert [*calls] == [*STAGES]
    assert all(count > 0 for count in calls.values())
    most, most_further = MOST_CALLS[model]
    assert sum(calls.values()) <= most, calls
    # TFLite's files have no open dims.
    assert (figures["further"] > 0) is (most_further > 0)
    assert figures["further"] <= most_further
