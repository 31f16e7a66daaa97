"""The gradient of a convolution for its image, whose size only the run knows."""

from __future__ import annotations

from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.windows"
)
