"""Elements moved between batch, channels and places in images, in blocks; mirrored borders; means and variances of batches."""

from __future__ import annotations

from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.blocks"
)
