"""Sound in files."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_operations import CASES, operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.sound"
)


def test_contents_that_are_no_wav_file_are_refused() -> None:
    session = ps.compile(CASES.graph("DecodeWav_1_50_-1"))
    (name,) = CASES.part("DecodeWav_1_50_-1", "in")
    with pytest.raises(ps.RunError, match="are no WAV file of 16-bit samples"):
        session.run({name: np.array("RIFF", object)})
