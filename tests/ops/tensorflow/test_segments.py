"""Rows of one segment reduced to one, where the numbers of segments rise from row to row."""

from __future__ import annotations

from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.segments"
)
